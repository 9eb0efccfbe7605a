"""Joining the states of a cluster's warps: every CTA joins its share of the columns.

The columns of a part of the outputs are dealt to the CTAs in turns, 16 at a time. Each warp
writes what it has of a share to the CTA whose it is, and peaks and totals to all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.clusters import (
    address_in,
    join_cluster,
    store_peer,
    store_peer_run,
)
from tvm_attn.schedules.primitives.finish import QUAD, empty, store_quad
from tvm_attn.schedules.primitives.hopper.barriers import begin_barriers
from tvm_attn.schedules.primitives.shapes import WORD_BYTES
from tvm_attn.schedules.primitives.streams import StreamingCta, shared_word
from tvm_attn.schedules.tiles_decode import SHARED_COLUMNS, share_columns
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr

LANES_OF_ROW = 4
"""Lanes that have elements of the same row, and the same peak and total."""


@dataclass(frozen=True)
class Shares:
    """Which columns a CTA of a cluster has, of a part of so many: `width`, or fewer.

    `bits` is the logarithm of the cluster's size.
    """

    cta: StreamingCta
    columns: int
    width: Expr
    bits: Expr

    @staticmethod
    def of(cta: StreamingCta) -> Shares:
        """Return the shares of a part of the outputs, with what is the same for all held."""
        columns = cta.tile.part(cta.spec.dim_vo)
        larger = (tirx.Cast("int32", cta.cluster >= size) for size in cta.tile.clusters)
        bits = T.Bind(sum(larger, tirx.const(0, "int32")))
        return Shares(cta, columns, T.Bind(share_columns(columns, cta.cluster)), bits)

    def owner(self, column: Expr) -> Expr:
        """CTA that has a column."""
        return tirx.bitwise_and(tirx.floordiv(column, SHARED_COLUMNS), self.cta.cluster - 1)

    def place(self, column: Expr) -> Expr:
        """Place of a column in its owner's share."""
        turn = tirx.shift_right(tirx.floordiv(column, SHARED_COLUMNS), self.bits)
        return turn * SHARED_COLUMNS + tirx.floormod(column, SHARED_COLUMNS)

    def column(self, place: Expr) -> Expr:
        """Column at a place in the CTA's own share; there may be none."""
        turn = tirx.shift_left(tirx.floordiv(place, SHARED_COLUMNS), self.bits)
        return (turn + self.cta.rank) * SHARED_COLUMNS + tirx.floormod(place, SHARED_COLUMNS)

    def bytes(self, rows: Expr, turn: Expr) -> Expr:
        """Bytes that the cluster's warps write to this CTA of so many rows."""
        tiles = self.columns // SHARED_COLUMNS + self.cta.cluster - 1 - self.cta.rank
        words = tirx.shift_right(tiles, self.bits) * SHARED_COLUMNS
        words = words + tirx.Select(turn == 0, tirx.const(2, "int32"), tirx.const(0, "int32"))
        warps = self.cta.cluster * self.cta.tile.warps
        return tirx.Cast("uint32", rows * words * warps * WORD_BYTES)

    def index(self, warp: Expr, row: Expr, place: Expr) -> Expr:
        """Index in the state of a share of a row of one of the cluster's warps."""
        return self.cta.shared.row_index(warp, row) * self.width + place

    def address(self, row: Expr, place: Expr) -> Expr:
        """Address in shared memory of what the warp has of a row of a share."""
        warp = self.cta.rank * self.cta.tile.warps + self.cta.warp
        return shared_word(self.cta.shared.origins[0], self.index(warp, row, place))


@T.inline
def send_bounds(cta, place, i, at):
    """Write the peak and the total of a row to all CTAs: each lane of the row to some."""
    r, tiles = T.meta_var((cta.registers, cta.shared))
    warp = T.meta_var(cta.rank * cta.tile.warps + cta.warp)
    for n in T.unroll(-(-max(cta.tile.clusters) // LANES_OF_ROW)):
        peer = T.meta_var(n * LANES_OF_ROW + cta.lane.index % LANES_OF_ROW)
        if peer < cta.cluster:
            address_in(at[0], cta.shared.sent_address, peer)
            address_in(at[1], tiles.peak_address(warp, place), peer)
            store_peer(at[1], at[0], r.reference[i])
            address_in(at[1], tiles.total_address(warp, place), peer)
            store_peer(at[1], at[0], r.total[i])


@T.inline
def send_state(cta, task, shares, turn):
    """Write a part of the columns of the warp's state to the CTAs whose share they are."""
    r, columns = T.meta_var((cta.registers, shares.columns))
    at = T.alloc_local((2,), "uint32")
    if cta.thread == 0:
        T.evaluate(cta.shared.sent.expect(shares.bytes(task.row_end - task.row0, turn)))
    for i in T.unroll(cta.rows):
        place = T.meta_var(cta.place(i))
        if task.row0 + place < task.row_end:
            if turn == 0:
                send_bounds(cta, place, i, at)
            runs = T.meta_var(columns // (LANES_OF_ROW * cta.run_length))
            for n in T.unroll(runs):
                run = T.meta_var(cta.run(turn * runs + n, i))
                column = T.meta_var(run[1] - turn * columns)
                address = T.meta_var(shares.address(place, shares.place(column)))
                address_in(at[0], cta.shared.sent_address, shares.owner(column))
                address_in(at[1], address, shares.owner(column))
                store_peer_run(at[1], at[0], [r.out[index] for index in run[0]])


@T.inline
def receive_state(cta):
    """Wait until all of the cluster's warps have written what they have of the CTA's share."""
    parity = T.meta_var(cta.shared.parity)
    T.evaluate(cta.shared.sent.wait(parity[0]))
    parity[0] = 1 - parity[0]


@T.inline
def open_shares(cta):
    """Begin to run in a cluster: its CTAs may write here once they have all begun."""
    cta.shared.parity[0] = 0
    if cta.thread == 0:
        cta.shared.sent.initialise()
        T.evaluate(begin_barriers())
    join_cluster()


@T.inline
def join_share(cta, joined, shares, row, place):
    """Join the states of a cluster's warps of four neighbouring elements, in the CTAs' order.

    All is loaded before any is used; of a small cluster, the last CTA's more than once.
    """
    state, tiles, warps = T.meta_var((cta.hooks.accumulation, cta.shared, cta.tile.warps))
    count = T.meta_var(max(cta.tile.clusters) * warps)
    last = T.meta_var((cta.cluster - 1) * warps)
    empty(cta, joined)
    for w in T.unroll(count):
        source = T.meta_var(T.min(w, last + w % warps))
        joined.peak[0] = state.peak(joined.peak[0], tiles.peaks[tiles.row_index(source, row)])
    for w in T.unroll(count):
        source = T.meta_var(T.min(w, last + w % warps))
        weight = T.meta_var(
            state.rescale(tiles.peaks[tiles.row_index(source, row)], joined.peak[0])
        )
        scale: T.let[T.float32] = T.Select(w < cta.cluster * warps, weight, f32(0.0))
        joined.total[0] = joined.total[0] + tiles.totals[tiles.row_index(source, row)] * scale
        for e in T.unroll(QUAD):
            at = T.meta_var(shares.index(source, row, place + e))
            joined.out[e] = joined.out[e] + tiles.state[at] * scale


@T.inline
def store_share(cta, task, outputs, joined, shares, turn):
    """Join and store the CTA's share of a part: all threads take turns with four elements each."""
    quads: T.let[T.int32] = shares.width // QUAD
    i: T.int32 = cta.thread
    while i < (task.row_end - task.row0) * quads:
        row: T.let[T.int32] = i // quads
        place: T.let[T.int32] = i % quads * QUAD
        column: T.let[T.int32] = shares.column(place)
        if column < shares.columns:
            join_share(cta, joined, shares, row, place)
            store_quad(cta, task, outputs, joined, row, turn * shares.columns + column)
        i = i + cta.tile.threads
