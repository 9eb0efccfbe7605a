"""What happens to scores between the two multiplications, on fragments: hooks, mask, softmax.

References of the softmax move only when a score has outgrown them: the result is the same, and what
was accumulated is seldom rescaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.bitmaps import BlockBits, load_bits
from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import ACCUMULATORS, HALVES, any_lane, over_row
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.schedules.primitives.task import LaneRows, at_hand
from tvm_attn.tir.states import f32
from tvm_attn.tir.visibility import ALL, Range
from tvm_attn.variant import Expr

SLACK = {"bfloat16": 64.0, "float16": 15.0}
"""How far (as a power of 2) a score may pass the peak before rows are rescaled: weights of the
operands' dtype can hold it, and rows of long requests are then seldom touched."""


@T.inline
def init_state(cta):
    """Start every row as the empty state."""
    r = T.meta_var(cta.registers)
    for i in T.unroll(cta.rows):
        r.reference[i] = f32(cta.hooks.accumulation.lowest)
        r.total[i] = f32(0.0)
    for i in T.unroll(cta.row_tiles * cta.value_tiles * ACCUMULATORS):
        r.out[i] = f32(0.0)


@T.inline
def logits(cta, task, kv0):
    """Turn products into scores, where a hook does that."""
    if cta.hooks.variant.logits_transform is not None:
        c = T.meta_var(cta.registers.score)
        rows = T.meta_var(at_hand(cta, task))
        for n in T.unroll(cta.key_tiles):
            for e in T.unroll(2):
                for i in T.unroll(cta.rows):
                    at = T.meta_var(cta.score(i // HALVES, n, i % HALVES, e))
                    token = T.meta_var(kv0 + n * COLUMNS + cta.lane.column(e))
                    pair = T.meta_var(rows.pair(i, T.max(T.min(token, rows.end_key - 1), 0)))
                    c[at] = cta.scales.score(pair, c[at] * rows.factor)


def bound_rows(cta: Cta, rows: LaneRows, ranges: Sequence[Range], kv0: Expr) -> Any:
    """Return registers with the first and the last column of each row's keys, from the lane's."""
    bounds = T.alloc_local((2 * cta.rows,), "int32")
    origin = kv0 + cta.lane.column(0)
    for i, (first, last) in enumerate(ranges):
        T.buffer_store(bounds, tirx.max(first, rows.first_key) - origin, [2 * i])
        T.buffer_store(bounds, tirx.min(last, rows.end_key - 1) - origin, [2 * i + 1])
    return bounds


def begins_inside(cta: Cta, ranges: Sequence[Range]) -> bool:
    """Whether the first keys of a row may be inside of a block."""
    return cta.tile.begins_early or any(first is not ALL.first for first, _ in ranges)


@T.inline
def hide_outside(cta, rows, ranges, kv0):
    """Hide the keys that are not in the range of a row."""
    c = T.meta_var(cta.registers.score)
    bounds = T.meta_var(bound_rows(cta, rows, ranges, kv0))
    has_first = T.meta_var(begins_inside(cta, ranges))
    for i in T.unroll(cta.rows):
        for n in T.unroll(cta.key_tiles):
            for e in T.unroll(2):
                at = T.meta_var(cta.score(i // HALVES, n, i % HALVES, e))
                ends = T.meta_var(n * COLUMNS + e <= bounds[2 * i + 1])
                begins = T.meta_var(bounds[2 * i] <= n * COLUMNS + e)
                c[at] = T.Select(
                    T.And(begins, ends) if has_first else ends,
                    c[at],
                    f32(cta.hooks.accumulation.hidden),
                )


@T.inline
def hide_by_mask(cta, rows, kv0):
    """Hide the keys that the mask hides, asked of each."""
    c = T.meta_var(cta.registers.score)
    bits = T.meta_var(BlockBits.allocate(cta))
    if len(bits.words) > 0:
        if rows.first_key < rows.end_key:  # else the bitmap may be empty
            load_bits(cta, rows, bits, kv0)
    for i in T.unroll(cta.rows):
        for n in T.unroll(cta.key_tiles):
            for e in T.unroll(2):
                at = T.meta_var(cta.score(i // HALVES, n, i % HALVES, e))
                token = T.meta_var(kv0 + n * COLUMNS + cta.lane.column(e))
                key = T.meta_var(T.max(T.min(token, rows.end_key - 1), 0))
                pair = T.meta_var(bits.rows(rows, i, n, e).pair(i, key))
                inside = T.meta_var(T.And(rows.first_key <= token, token < rows.end_key))
                c[at] = T.Select(
                    cta.hooks.visible(pair, inside), c[at], f32(cta.hooks.accumulation.hidden)
                )


@T.inline
def hide(cta, task, kv0):
    """Hide the keys of a block that rows do not see."""
    rows = T.meta_var(at_hand(cta, task))
    ranges = T.meta_var([rows.seen_by_row(i) for i in range(cta.rows)])
    if None in ranges:
        hide_by_mask(cta, rows, kv0)
    else:
        hide_outside(cta, rows, ranges, kv0)


@T.inline
def mask(cta, task, kv0):
    """Hide keys, in a block where some may be hidden."""
    if T.Not(task.sees_all(kv0, kv0 + cta.tile.block - 1)):
        hide(cta, task, kv0)


def any_outgrown(cta: Cta) -> Expr:
    """Whether a score has outgrown the reference of one of the lane's rows."""
    r, slack = cta.registers, SLACK[cta.dtype]
    outgrown = cta.hooks.accumulation.outgrown
    return reduce(tirx.Or, [outgrown(r.reference[i], r.best[i], slack) for i in range(cta.rows)])


@T.inline
def softmax(cta, factor):
    """Move the references that scores have outgrown, and what was accumulated with them."""
    r, state = T.meta_var((cta.registers, cta.hooks.accumulation))
    for i in T.unroll(cta.rows):
        r.best[i] = f32(state.hidden)
        for n in T.unroll(cta.key_tiles):
            for e in T.unroll(2):
                at = T.meta_var(cta.score(i // HALVES, n, i % HALVES, e))
                r.best[i] = state.peak(r.best[i], r.score[at])
        r.best[i] = r.best[i] * factor
    if any_lane(any_outgrown(cta)):
        for i in T.unroll(cta.rows):
            r.best[i] = state.peak(r.best[i], over_row(r.best[i], 1))
            r.best[i] = state.peak(r.best[i], over_row(r.best[i], 2))
            r.best[i] = state.peak(r.reference[i], r.best[i])
            r.scale[i] = state.rescale(r.reference[i], r.best[i])
            r.reference[i] = r.best[i]
            r.total[i] = r.total[i] * r.scale[i]
            for n in T.unroll(cta.value_tiles):
                for e in T.unroll(2):
                    at = T.meta_var(cta.out(i // HALVES, n, i % HALVES, e))
                    r.out[at] = r.out[at] * r.scale[i]
