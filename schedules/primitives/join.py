"""Joining the states of warps that had different keys of the same rows, through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import (
    HALVES,
    over_row,
    pack,
    store_pair,
    store_shared_pair,
)
from tvm_attn.schedules.primitives.shapes import COLUMNS, ROWS
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
def share_state(cta, task, turn):
    """Put a part of the columns of the warp's state where all warps see it."""
    r, tiles = T.meta_var((cta.registers, cta.shared))
    columns = T.meta_var(cta.tile.part(cta.spec.dim_vo))
    for i in T.unroll(HALVES):
        place = T.meta_var(cta.lane.row(i))
        if task.row0 + place < task.row_end:
            if T.And(turn == 0, cta.lane.column(0) == 0):
                tiles.peaks[cta.warp * ROWS + place] = r.reference[i]
                tiles.totals[cta.warp * ROWS + place] = r.total[i]
            for p in T.unroll(columns // COLUMNS):
                at = T.meta_var(cta.pair(turn * (columns // COLUMNS) + p, i))
                column = T.meta_var(at[2] - turn * columns)
                address = T.meta_var(tiles.state_address(cta.warp, place, column))
                store_shared_pair(
                    address,
                    T.reinterpret("uint32", r.out[at[0]]),
                    T.reinterpret("uint32", r.out[at[1]]),
                )


@T.inline
def join(cta, joined, place, column):
    """Join the warps' states of four neighbouring elements of a row, in the warps' order."""
    state, tiles = T.meta_var((cta.hooks.accumulation, cta.shared))
    joined.peak[0] = f32(state.lowest)
    joined.total[0] = f32(0.0)
    for e in T.unroll(QUAD):
        joined.out[e] = f32(0.0)
    for w in T.unroll(cta.tile.warps):
        joined.peak[0] = state.peak(joined.peak[0], tiles.peaks[w * ROWS + place])
    for w in T.unroll(cta.tile.warps):
        scale: T.let[T.float32] = state.rescale(tiles.peaks[w * ROWS + place], joined.peak[0])
        joined.total[0] = joined.total[0] + tiles.totals[w * ROWS + place] * scale
        for e in T.unroll(QUAD):
            at = T.meta_var(tiles.state_index(w, place, column + e))
            joined.out[e] = joined.out[e] + tiles.state[at] * scale


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
    """Store four elements of a row's partial state, and its LSE with the first ones."""
    inverse: T.let[T.float32] = cta.hooks.accumulation.inverse(joined.total[0])
    for e in T.unroll(QUAD):
        outputs.partial_o[task.slot, place, column + e] = joined.out[e] * inverse
    if column == 0:
        outputs.partial_lse[task.slot, place] = lse


@T.inline
def store_joined(cta, task, outputs, turn):
    """Join and store a part of the columns: all threads take turns with four elements each."""
    state = T.meta_var(cta.hooks.accumulation)
    columns = T.meta_var(cta.tile.part(cta.spec.dim_vo))
    joined = T.meta_var(Joined.allocate())
    quads = T.meta_var(columns // QUAD)
    i: T.int32 = cta.thread
    while i < (task.row_end - task.row0) * quads:
        place: T.let[T.int32] = i // quads
        column: T.let[T.int32] = i % quads * QUAD
        join(cta, joined, place, column)
        lse: T.let[T.float32] = state.lse(joined.peak[0], joined.total[0])
        if task.slot == NO_SLOT:
            store_row(cta, task, outputs, joined, place, turn * columns + column, lse)
        else:
            store_part(cta, task, outputs, joined, place, turn * columns + column, lse)
        i = i + cta.tile.threads


@T.inline
def store_state(cta, task, outputs):
    """Close the rows and store them: results of a whole unit, a partial state of a piece."""
    r = T.meta_var(cta.registers)
    for i in T.unroll(HALVES):
        r.total[i] = r.total[i] + over_row(r.total[i], 1)
        r.total[i] = r.total[i] + over_row(r.total[i], 2)
    for turn in T.unroll(cta.tile.passes):
        T.cuda.cta_sync()  # the warps have read what was shared before
        share_state(cta, task, turn)
        T.cuda.cta_sync()
        store_joined(cta, task, outputs, turn)
