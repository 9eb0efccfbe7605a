"""From a joined row to global memory: four neighbouring elements of a thread at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import pack, store_pair, store_relaxed, store_run
from tvm_attn.schedules.tiles_decode import SHARED_COLUMNS
from tvm_attn.tir.states import f32
from tvm_attn.worklist import NO_SLOT

QUAD = 4
"""Neighbouring elements of a row that a thread joins."""


@dataclass(frozen=True)
class Joined:
    """A thread's part of a joined row, in registers: `QUAD` elements, peak, total."""

    out: Any
    peak: Any
    total: Any

    @staticmethod
    def allocate() -> Joined:
        """Allocate the registers."""
        return Joined(*(T.alloc_local((size,), "float32") for size in (QUAD, 1, 1)))


@T.inline
def empty(cta, joined):
    """Begin with the empty state."""
    joined.peak[0] = f32(cta.hooks.accumulation.lowest)
    joined.total[0] = f32(0.0)
    for e in T.unroll(QUAD):
        joined.out[e] = f32(0.0)


@T.inline
def store_row(cta, task, outputs, joined, place, column, lse):
    """Store four elements of a finished row, and its LSE with the first ones."""
    state, hooks = T.meta_var((cta.hooks.accumulation, cta.hooks))
    at = T.meta_var(task.index(task.row0 + place))
    row = T.meta_var(task.query(task.row0 + place))
    factor = T.meta_var(outputs.scales.value_factor(task.kv_head))
    scale: T.let[T.float32] = hooks.share(row, lse) * state.inverse(joined.total[0]) * factor
    whole: T.let[T.float32] = hooks.seeded(row, lse)
    for e in T.unroll(QUAD):
        joined.out[e] = hooks.output(row, joined.out[e] * scale, whole)
    dtype = T.meta_var(str(outputs.out.dtype))
    for e in T.unroll(QUAD // 2):
        place_of_pair = T.meta_var([*at, column + 2 * e])
        if dtype == "float32":
            outputs.out[at[0], at[1], column + 2 * e] = joined.out[2 * e]
            outputs.out[at[0], at[1], column + 2 * e + 1] = joined.out[2 * e + 1]
        else:
            pack(dtype, cta.registers.right[e], joined.out[2 * e], joined.out[2 * e + 1])
            store_pair(outputs.out.ptr_to(place_of_pair), cta.registers.right[e])
    if column == 0:
        outputs.lse[at[0], at[1]] = whole * outputs.lse_scale


@T.inline
def store_part(cta, task, outputs, joined, place, column, lse):
    """Store four elements of a row's partial state, and its LSE with the CTA's first ones.

    All CTAs of a cluster store the same LSE, each for that one which merges its share.
    """
    inverse: T.let[T.float32] = cta.hooks.accumulation.inverse(joined.total[0])
    for e in T.unroll(QUAD):
        joined.out[e] = joined.out[e] * inverse
    store_run(outputs.partial_o.ptr_to([task.slot, place, column]), joined.out)
    if column == cta.rank * SHARED_COLUMNS:
        store_relaxed(outputs.partial_lse.ptr_to([task.slot, place]), lse)


@T.inline
def store_quad(cta, task, outputs, joined, place, column):
    """Store four elements of a row: of a result, or of a partial state."""
    state = T.meta_var(cta.hooks.accumulation)
    lse: T.let[T.float32] = state.lse(joined.peak[0], joined.total[0])
    if task.slot == NO_SLOT:
        store_row(cta, task, outputs, joined, place, column, lse)
    else:
        store_part(cta, task, outputs, joined, place, column, lse)
