"""Joining the states of warps that had different keys of the same rows, through shared memory."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.clusters import (
    arrive_at_cluster,
    shares_item,
    wait_for_cluster,
)
from tvm_attn.schedules.primitives.finish import QUAD, Joined, empty, store_quad
from tvm_attn.schedules.primitives.fragments import over_row, store_shared_pair
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.schedules.primitives.shares import Shares, receive_state, send_quad, store_share


@T.inline
def share_state(cta, task, turn):
    """Put a part of the columns of the warp's state where all warps see it."""
    r, tiles = T.meta_var((cta.registers, cta.shared))
    columns = T.meta_var(cta.tile.part(cta.spec.dim_vo))
    for i in T.unroll(cta.rows):
        place = T.meta_var(cta.place(i))
        if task.row0 + place < task.row_end:
            if T.And(turn == 0, cta.lane.column(0) == 0):
                tiles.peaks[tiles.row_index(cta.warp, place)] = r.reference[i]
                tiles.totals[tiles.row_index(cta.warp, place)] = r.total[i]
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
    empty(cta, joined)
    for w in T.unroll(cta.tile.warps):
        joined.peak[0] = state.peak(joined.peak[0], tiles.peaks[tiles.row_index(w, place)])
    for w in T.unroll(cta.tile.warps):
        scale: T.let[T.float32] = state.rescale(
            tiles.peaks[tiles.row_index(w, place)], joined.peak[0]
        )
        joined.total[0] = joined.total[0] + tiles.totals[tiles.row_index(w, place)] * scale
        for e in T.unroll(QUAD):
            at = T.meta_var(tiles.state_index(w, place, column + e))
            joined.out[e] = joined.out[e] + tiles.state[at] * scale


@T.inline
def store_joined(cta, task, outputs, joined, turn):
    """Join and store a part of the columns: all threads take turns with four elements each."""
    columns = T.meta_var(cta.tile.part(cta.spec.dim_vo))
    quads = T.meta_var(columns // QUAD)
    i: T.int32 = cta.thread
    while i < (task.row_end - task.row0) * quads:
        place: T.let[T.int32] = i // quads
        column: T.let[T.int32] = i % quads * QUAD
        join(cta, joined, place, column)
        store_quad(cta, task, outputs, joined, place, turn * columns + column)
        i = i + cta.tile.threads


@T.inline
def send_joined(cta, joined, shares, first, rows):
    """Join the warps' states of some rows, and write each quad to the CTA whose share it is."""
    quads = T.meta_var(shares.columns // QUAD)
    if cta.thread == 0:
        T.evaluate(cta.shared.sent.expect(shares.bytes(rows)))
    i: T.int32 = cta.thread
    while i < rows * quads:
        row: T.let[T.int32] = i // quads
        column: T.let[T.int32] = i % quads * QUAD
        join(cta, joined, first + row, column)
        send_quad(cta, shares, joined, row, column)
        i = i + cta.tile.threads


@T.inline
def store_shared(cta, task, outputs, joined, turn):
    """Join a part of the columns with the cluster's other CTAs, and store the CTA's share."""
    shares, at_once = T.meta_var((Shares.of(cta), cta.tile.received_rows))
    for n in T.unroll(cta.tile.rows // at_once):
        first = T.meta_var(n * at_once)
        rows: T.let[T.int32] = T.min(task.row_end - task.row0 - first, at_once)
        if rows > 0:
            if n > 0:
                arrive_at_cluster()
            wait_for_cluster()  # the peers have read what was sent before
            send_joined(cta, joined, shares, first, rows)
            receive_state(cta)
            store_share(cta, task, outputs, joined, shares, turn, first, rows)
    if turn + 1 < cta.tile.passes:
        arrive_at_cluster()


@T.inline
def store_state(cta, task, outputs):
    """Close the rows and store them: results of a whole unit, a partial state of a piece."""
    r = T.meta_var(cta.registers)
    joined = T.meta_var(Joined.allocate())
    for i in T.unroll(cta.rows):
        r.total[i] = r.total[i] + over_row(r.total[i], 1)
        r.total[i] = r.total[i] + over_row(r.total[i], 2)
    for turn in T.serial(cta.tile.passes):
        T.cuda.cta_sync()  # the warps have read what was shared before
        for each in T.unroll(cta.tile.passes):  # registers have no index
            if turn == each:
                share_state(cta, task, each)
        T.cuda.cta_sync()
        if shares_item(cta):
            store_shared(cta, task, outputs, joined, turn)
        else:
            store_joined(cta, task, outputs, joined, turn)
