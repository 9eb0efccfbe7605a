"""What happens to scores between the two multiplications, on fragments: hooks, mask, softmax.

References of the softmax move only when a score has outgrown them: the result is the same, and what
was accumulated is seldom rescaled.
"""

from __future__ import annotations

from functools import reduce

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.bitmaps import BlockBits, load_bits
from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import ACCUMULATORS, HALVES, any_lane, over_row
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.schedules.primitives.task import at_hand
from tvm_attn.tir.states import f32
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
        r.limit[i] = tirx.min_value("int32")
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


@T.inline
def mask(cta, task, kv0):
    """Hide keys, in a block where some may be hidden."""
    c = T.meta_var(cta.registers.score)
    if T.Not(task.sees_all(kv0, kv0 + cta.tile.block - 1)):
        rows = T.meta_var(at_hand(cta, task))
        bits = T.meta_var(BlockBits.allocate(cta))
        load_bits(cta, rows, bits, kv0)
        for i in T.unroll(cta.rows):
            for n in T.unroll(cta.key_tiles):
                for e in T.unroll(2):
                    at = T.meta_var(cta.score(i // HALVES, n, i % HALVES, e))
                    token = T.meta_var(kv0 + n * COLUMNS + cta.lane.column(e))
                    key = T.meta_var(T.max(T.min(token, rows.end_key - 1), 0))
                    pair = T.meta_var(bits.rows(rows, i, n, e).pair(i, key))
                    c[at] = T.Select(
                        cta.hooks.visible(pair, token < rows.end_key),
                        c[at],
                        f32(cta.hooks.accumulation.hidden),
                    )


def outgrown(cta: Cta, i: Expr) -> Expr:
    """Return an integer: 0 unless a score of row `i` has outgrown its reference, or may have.

    Bits of floats are ordered as the floats are, but for negative ones: integers take three
    operands at a time, and a row whose limit is negative is always looked at.
    """
    r = cta.registers
    peak = r.limit[i]
    for n in range(cta.key_tiles):
        for e in range(2):
            at = cta.score(i // HALVES, n, i % HALVES, e)
            peak = tirx.max(peak, tirx.reinterpret("int32", r.score[at]))
    return tirx.bitwise_xor(peak, r.limit[i])


def limit(cta: Cta, reference: Expr, factor: Expr) -> Expr:
    """Bits of the product up to which a row's scores are close enough to its reference."""
    product = (reference + f32(SLACK[cta.dtype])) / factor
    bits = tirx.reinterpret("int32", product)
    return tirx.Select(product >= f32(0.0), bits, tirx.min_value("int32"))


@T.inline
def softmax(cta, factor):
    """Move the references that scores have outgrown, and what was accumulated with them."""
    r, state = T.meta_var((cta.registers, cta.hooks.accumulation))
    if cta.hooks.variant.use_softmax:
        if any_lane(reduce(tirx.bitwise_or, [outgrown(cta, i) for i in range(cta.rows)]) != 0):
            for i in T.unroll(cta.rows):
                r.best[i] = f32(state.hidden)
                for n in T.unroll(cta.key_tiles):
                    for e in T.unroll(2):
                        at = T.meta_var(cta.score(i // HALVES, n, i % HALVES, e))
                        r.best[i] = state.peak(r.best[i], r.score[at])
                r.best[i] = state.peak(r.best[i], over_row(r.best[i], 1))
                r.best[i] = state.peak(r.best[i], over_row(r.best[i], 2))
                r.best[i] = state.peak(r.reference[i], r.best[i] * factor)
                r.scale[i] = state.rescale(r.reference[i], r.best[i])
                r.reference[i] = r.best[i]
                r.limit[i] = limit(cta, r.reference[i], factor)
                r.total[i] = r.total[i] * r.scale[i]
                for n in T.unroll(cta.value_tiles):
                    for e in T.unroll(2):
                        at = T.meta_var(cta.out(i // HALVES, n, i % HALVES, e))
                        r.out[at] = r.out[at] * r.scale[i]
