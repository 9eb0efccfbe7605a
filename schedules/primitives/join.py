"""Joining the states of warps that had different keys of the same rows, through shared memory.

The CTAs of a cluster that share an item join the states of their warps first, and then, a part of
the elements each, those of one another.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.clusters import (
    address_in,
    arrive_at_cluster,
    load_peer,
    load_peer_quad,
    shares_item,
    wait_for_cluster,
)
from tvm_attn.schedules.primitives.finish import QUAD, Joined, store_quad
from tvm_attn.schedules.primitives.fragments import HALVES, over_row, store_shared_pair
from tvm_attn.schedules.primitives.shapes import COLUMNS, ROWS
from tvm_attn.tir.states import f32


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
def empty(cta, joined):
    """Begin with the empty state."""
    joined.peak[0] = f32(cta.hooks.accumulation.lowest)
    joined.total[0] = f32(0.0)
    for e in T.unroll(QUAD):
        joined.out[e] = f32(0.0)


@T.inline
def join(cta, joined, place, column):
    """Join the warps' states of four neighbouring elements of a row, in the warps' order."""
    state, tiles = T.meta_var((cta.hooks.accumulation, cta.shared))
    empty(cta, joined)
    for w in T.unroll(cta.tile.warps):
        joined.peak[0] = state.peak(joined.peak[0], tiles.peaks[w * ROWS + place])
    for w in T.unroll(cta.tile.warps):
        scale: T.let[T.float32] = state.rescale(tiles.peaks[w * ROWS + place], joined.peak[0])
        joined.total[0] = joined.total[0] + tiles.totals[w * ROWS + place] * scale
        for e in T.unroll(QUAD):
            at = T.meta_var(tiles.state_index(w, place, column + e))
            joined.out[e] = joined.out[e] + tiles.state[at] * scale


@T.inline
def join_own(cta, task, joined):
    """Join the states of the CTA's warps, and put it in the place of the first one's for the peers.

    Peaks and totals, which all threads read, have places of their own.
    """
    tiles, last = T.meta_var((cta.shared, cta.tile.warps * ROWS))
    quads = T.meta_var(cta.tile.part(cta.spec.dim_vo) // QUAD)
    i: T.int32 = cta.thread
    while i < (task.row_end - task.row0) * quads:
        place: T.let[T.int32] = i // quads
        column: T.let[T.int32] = i % quads * QUAD
        join(cta, joined, place, column)
        for e in T.unroll(QUAD):
            tiles.state[tiles.state_index(0, place, column + e)] = joined.out[e]
        if column == 0:
            tiles.peaks[last + place] = joined.peak[0]
            tiles.totals[last + place] = joined.total[0]
        i = i + cta.tile.threads


@T.inline
def join_peers(cta, joined, place, column):
    """Join the states of a cluster's CTAs of four neighbouring elements, in the CTAs' order.

    All is loaded before any is used; of a small cluster, the last CTA's more than once.
    """
    state, tiles, last = T.meta_var((cta.hooks.accumulation, cta.shared, cta.tile.warps))
    size = T.meta_var(max(cta.tile.clusters))
    at = T.alloc_local((1,), "uint32")
    peaks, totals, parts = T.meta_var(
        [T.alloc_local((n,), "float32") for n in (size, size, QUAD * size)]
    )
    empty(cta, joined)
    for r in T.unroll(size):
        peer = T.meta_var(T.min(T.int32(0) + r, cta.cluster - 1))
        address_in(at[0], tiles.peak_address(last, place), peer)
        load_peer(peaks[r], at[0])
        address_in(at[0], tiles.total_address(last, place), peer)
        load_peer(totals[r], at[0])
        address_in(at[0], tiles.state_address(0, place, column), peer)
        load_peer_quad([parts[QUAD * r + e] for e in range(QUAD)], at[0])
    for r in T.unroll(size):
        joined.peak[0] = state.peak(joined.peak[0], peaks[r])
    for r in T.unroll(size):
        weight = T.meta_var(state.rescale(peaks[r], joined.peak[0]))
        scale: T.let[T.float32] = T.Select(r < cta.cluster, weight, f32(0.0))
        joined.total[0] = joined.total[0] + totals[r] * scale
        for e in T.unroll(QUAD):
            joined.out[e] = joined.out[e] + parts[QUAD * r + e] * scale


@T.inline
def store_joined(cta, task, outputs, joined, turn):
    """Join and store a part of the columns: all threads take turns with four elements each."""
    columns = T.meta_var(cta.tile.part(cta.spec.dim_vo))
    quads = T.meta_var(columns // QUAD)
    i: T.int32 = cta.rank * cta.tile.threads + cta.thread
    while i < (task.row_end - task.row0) * quads:
        place: T.let[T.int32] = i // quads
        column: T.let[T.int32] = i % quads * QUAD
        if shares_item(cta):
            join_peers(cta, joined, place, column)
        else:
            join(cta, joined, place, column)
        store_quad(cta, task, outputs, joined, place, turn * columns + column)
        i = i + cta.cluster * cta.tile.threads


@T.inline
def store_state(cta, task, outputs):
    """Close the rows and store them: results of a whole unit, a partial state of a piece."""
    r = T.meta_var(cta.registers)
    joined = T.meta_var(Joined.allocate())
    for i in T.unroll(HALVES):
        r.total[i] = r.total[i] + over_row(r.total[i], 1)
        r.total[i] = r.total[i] + over_row(r.total[i], 2)
    for turn in T.unroll(cta.tile.passes):
        if shares_item(cta):
            wait_for_cluster()  # the peers have read what was shared before
        else:
            T.cuda.cta_sync()  # the warps have
        share_state(cta, task, turn)
        T.cuda.cta_sync()
        if shares_item(cta):
            join_own(cta, task, joined)
            arrive_at_cluster()
            wait_for_cluster()
        store_joined(cta, task, outputs, joined, turn)
        if shares_item(cta):
            arrive_at_cluster()
