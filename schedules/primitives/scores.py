"""What happens to scores between the two multiplications, on fragments: hooks, mask, softmax.

References of the softmax move only when a score has outgrown them: the result is the same, and what
was accumulated is seldom rescaled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.bitmaps import keep_range, load_bits
from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import ACCUMULATORS, HALVES, any_lane, over_row
from tvm_attn.schedules.primitives.pairs import on_key
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.schedules.primitives.task import LaneRows, at_hand
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.states import f32
from tvm_attn.tir.tanh import NEAR_ZERO, tanh_arguments, with_tanh_near_zero
from tvm_attn.tir.visibility import ALL, Range, clear_bits_hide
from tvm_attn.variant import Expr

Weigh = Callable[[int, Expr], Expr]
"""From a lane's row and what there is of a score to the weight."""
SLACK = {"bfloat16": 64.0, "float16": 15.0}
"""How far (as a power of 2) a score may pass the peak before rows are rescaled: weights of the
operands' dtype can hold it, and rows of long requests are then seldom touched."""
HOOKED_SLACK = 32.0
"""The same where a hook makes logits: scores that far from their reference are rounded to a part of
it, and with a hook they are sums of numbers of that size."""
LOW = -16.0
"""A reference that scores near 0 are close enough to: relative to lower ones they lose digits."""


TILES_AT_ONCE = 4
"""Tiles of keys whose logits are made together."""


@T.inline
def init_state(cta):
    """Start every row as the empty state."""
    r = T.meta_var(cta.registers)
    for i in T.unroll(cta.rows):
        r.reference[i] = f32(cta.hooks.accumulation.lowest)
        r.total[i] = f32(0.0)
    for i in T.unroll(cta.row_tiles * cta.value_tiles * ACCUMULATORS):
        r.out[i] = f32(0.0)


def logit(cta: Cta, rows: LaneRows, kv0: Expr, i: Expr, n: Expr, e: Expr) -> Expr:
    """Logit of the lane's row `i` and element `e` of key tile `n`."""
    product = cta.registers.score[cta.score(i // HALVES, n, i % HALVES, e)] * rows.factor
    return on_key(
        lambda key: cta.hooks.logit(rows.pair(i, key), product),
        kv0 + cta.lane.column(0),
        n * COLUMNS + e,
        rows.end_key,
    )


@T.inline
def transform(cta, rows, kv0, finish, holds):
    """Turn all products into what `finish` makes of their logits, a few tiles at a time."""
    for step in T.unroll(-(-cta.key_tiles // TILES_AT_ONCE)):
        if holds:
            for n in T.unroll(TILES_AT_ONCE):
                for e in T.unroll(2):
                    for i in T.unroll(cta.rows):
                        tile = T.meta_var(step * TILES_AT_ONCE + n)
                        if tile < cta.key_tiles:
                            at = T.meta_var(cta.score(i // HALVES, tile, i % HALVES, e))
                            cta.registers.score[at] = finish(logit(cta, rows, kv0, i, tile, e))


def largest_argument(cta: Cta, rows: LaneRows, kv0: Expr) -> Expr:
    """Largest argument of ``tanh`` in the lane's logits, in absolute terms."""
    indices = itertools.product(range(cta.rows), range(cta.key_tiles), range(2))
    logits_ = (logit(cta, rows, kv0, i, n, e) for i, n, e in indices)
    return reduce(tirx.max, (tirx.abs(x) for one in logits_ for x in tanh_arguments(one)))


def calls_tanh(cta: Cta, rows: LaneRows) -> bool:
    """Whether the hook calls ``tanh``."""
    return bool(tanh_arguments(logit(cta, rows, 0, 0, 0, 0)))


@T.inline
def logits(cta, task, kv0, holds):
    """Turn products into logits, where a hook does that.

    Some tiles are transformed only if `holds`, which it always does: where the compiler does not
    know that, it does not begin with all of them at once and run out of registers.
    """
    if cta.hooks.variant.logits_transform is not None:
        rows = T.meta_var(at_hand(cta, task))
        if calls_tanh(cta, rows):
            largest: T.float32 = largest_argument(cta, rows, kv0)
            if any_lane(T.Not(largest <= f32(NEAR_ZERO))):
                transform(cta, rows, kv0, lambda x: x, T.bool(True))
            else:
                transform(cta, rows, kv0, with_tanh_near_zero, T.bool(True))
        else:
            transform(cta, rows, kv0, lambda x: x, holds)


def score_factor(cta: Cta, task: Any) -> Expr:
    """Return the factor from what `logits` leaves to scores: of logits, the unit of scores."""
    if cta.hooks.variant.logits_transform is None:
        return task.factor
    return f32(cta.hooks.accumulation.unit)


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


def hide_by_mask(cta: Cta, rows: LaneRows, kv0: Expr) -> None:
    """Hide the keys that the mask hides, asked of each."""
    first = kv0 + cta.lane.column(0)
    for i in range(cta.rows):
        bits = load_bits(cta, rows, i, kv0)
        for n, e in itertools.product(range(cta.key_tiles), range(2)):
            token = first + n * COLUMNS + e
            inside = tirx.And(rows.first_key <= token, token < rows.end_key)
            sees = partial(is_visible, cta, bits.read_by(rows, n, e), i)
            shown = on_key(sees, first, n * COLUMNS + e, rows.end_key)
            hide_unless(cta, tirx.And(inside, shown), i, n, e)


def is_visible(cta: Cta, rows: LaneRows, i: int, key: Expr) -> Expr:
    """Whether the mask shows a key to the lane's row `i`."""
    return cta.hooks.visible(rows.pair(i, key), T.bool(True))


def hide_unless(cta: Cta, shown: Expr, i: int, n: int, e: int) -> None:
    """Hide a key from the lane's row `i` unless it is shown."""
    c, at = cta.registers.score, cta.score(i // HALVES, n, i % HALVES, e)
    T.buffer_store(c, tirx.Select(shown, c[at], f32(cta.hooks.accumulation.hidden)), [at])


def bitmaps_hide(hooks: Hooks) -> bool:
    """Whether the clear bits of all bitmaps hide keys."""
    return all(clear_bits_hide(hooks, name) for name in hooks.bitmaps())


def hide_by_bits(cta: Cta, rows: LaneRows, ranges: Sequence[Range], kv0: Expr) -> None:
    """Hide the keys whose bits are clear, or that are not in the range of a row."""
    bounds = bound_rows(cta, rows, ranges, kv0)
    has_first = begins_inside(cta, ranges)
    for i in range(cta.rows):
        bits = load_bits(cta, rows, i, kv0)
        keep_range(cta, bits, bounds[2 * i] if has_first else None, bounds[2 * i + 1])
        for n, e in itertools.product(range(cta.key_tiles), range(2)):
            hide_unless(cta, bits.all_are_set(n, e), i, n, e)


@T.inline
def hide(cta, task, kv0):
    """Hide the keys of a block that rows do not see."""
    rows = T.meta_var(at_hand(cta, task))
    ranges = T.meta_var([rows.seen_by_row(i) for i in range(cta.rows)])
    if None in ranges or not bitmaps_hide(cta.hooks):
        hide_by_mask(cta, rows, kv0)
    elif len(cta.hooks.bitmaps()) > 0:
        hide_by_bits(cta, rows, ranges, kv0)
    else:
        hide_outside(cta, rows, ranges, kv0)


def may_hide(cta: Cta, task: Any, kv0: Expr) -> Expr:
    """Return 1 if some row of an item may not see some key of a block, 0 if all see all."""
    return tirx.Cast("int32", tirx.Not(task.sees_all(kv0, kv0 + cta.tile.block - 1)))


@T.inline
def mask(cta, task, kv0):
    """Hide keys, in a block where some may be hidden."""
    if may_hide(cta, task, kv0) != 0:
        hide(cta, task, kv0)


def excess(cta: Cta, i: Expr, factor: Expr) -> Expr:
    """Return how far the lane's largest score of row `i`, or 0, is above its reference.

    Bits of floats are ordered as the floats are, but for negative ones: integers take three
    operands at a time, and nothing is found above 0 is all that is said of negative scores.
    """
    r = cta.registers
    peak: Expr = T.int32(0)
    for n in range(cta.key_tiles):
        for e in range(2):
            at = cta.score(i // HALVES, n, i % HALVES, e)
            peak = tirx.max(peak, tirx.reinterpret("int32", r.score[at]))
    return tirx.reinterpret("float32", peak) * factor - r.reference[i]


def outgrown(cta: Cta, factor: Expr) -> Expr:
    """Whether a score of the warp has outgrown its reference, or may have."""
    excesses = [excess(cta, i, factor) for i in range(cta.rows)]
    return any_lane(reduce(tirx.max, excesses) > f32(slack(cta)))


def slack(cta: Cta) -> float:
    """Return how far (as a power of 2) a score may pass its reference."""
    is_hooked = cta.hooks.variant.logits_transform is not None
    return min(SLACK[cta.dtype], HOOKED_SLACK) if is_hooked else SLACK[cta.dtype]


def has_below(cta: Cta, low: float) -> Expr:
    """Whether one of the lane's rows has a reference of at most `low`."""
    some = (cta.registers.reference[i] <= f32(low) for i in range(cta.rows))
    return reduce(tirx.Or, some)


@T.inline
def rescale_row(cta, i):
    """Carry what row `i` has accumulated over to a reference that has moved."""
    r = T.meta_var(cta.registers)
    r.total[i] = r.total[i] * r.scale[i]
    for n in T.unroll(cta.value_tiles):
        for e in T.unroll(2):
            at = T.meta_var(cta.out(i // HALVES, n, i % HALVES, e))
            r.out[at] = r.out[at] * r.scale[i]


@T.inline
def move_references(cta, score_of):
    """Move the references to the largest scores, ``score_of(i, x)`` of what is there for row `i`.

    What was accumulated follows.
    """
    r, state = T.meta_var((cta.registers, cta.hooks.accumulation))
    for i in T.unroll(cta.rows):
        r.best[i] = f32(state.hidden)
        for n in T.unroll(cta.key_tiles):
            for e in T.unroll(2):
                at = T.meta_var(cta.score(i // HALVES, n, i % HALVES, e))
                r.best[i] = state.peak(r.best[i], r.score[at])
        r.best[i] = state.peak(r.best[i], over_row(r.best[i], 1))
        r.best[i] = state.peak(r.best[i], over_row(r.best[i], 2))
        r.best[i] = state.peak(r.reference[i], score_of(i, r.best[i]))
        r.scale[i] = state.rescale(r.reference[i], r.best[i])
        r.reference[i] = r.best[i]
        rescale_row(cta, i)


@T.inline
def softmax(cta, factor):
    """Move the references that scores have outgrown."""
    if cta.hooks.variant.use_softmax:
        if outgrown(cta, factor):
            move_references(cta, lambda i, score: score * factor)


def weigher(cta: Cta, factor: Expr) -> Weigh:
    """Return what turns a score of row `i` before its factor into a weight."""
    return lambda i, score: cta.hooks.accumulation.weight(
        score * factor, cta.registers.reference[i]
    )
