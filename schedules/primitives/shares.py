"""Joining the states of a cluster's CTAs: each joins its share of the columns of all.

The columns of a part of the outputs are dealt to the CTAs in turns, 16 at a time. What the warps of
a CTA have of a share is joined and written to the CTA whose it is, with the rows' peaks and totals:
as many rows at a time as there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.clusters import (
    address_in,
    bits_of_size,
    join_cluster,
    store_peer_pair,
    store_peer_quad,
)
from tvm_attn.schedules.primitives.finish import QUAD, empty, store_quad
from tvm_attn.schedules.primitives.hopper.barriers import begin_barriers
from tvm_attn.schedules.primitives.shapes import WORD_BYTES
from tvm_attn.schedules.primitives.streams import StreamingCta, shared_word
from tvm_attn.schedules.tiles_decode import SHARED_COLUMNS, share_columns
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr

BOUNDS = 2
"""Of a row: its peak and its total."""


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
        bits = T.Bind(bits_of_size(cta.tile, cta.cluster))
        return Shares(cta, columns, T.Bind(share_columns(columns, cta.cluster, bits)), bits)

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

    def bytes(self, rows: Expr) -> Expr:
        """Bytes that the cluster's CTAs write to this one of so many rows."""
        tiles = self.columns // SHARED_COLUMNS + self.cta.cluster - 1 - self.cta.rank
        words = tirx.shift_right(tiles, self.bits) * SHARED_COLUMNS
        words = words + tirx.Select(words > 0, tirx.const(BOUNDS, "int32"), tirx.const(0, "int32"))
        return tirx.Cast("uint32", rows * words * self.cta.cluster * WORD_BYTES)

    def index(self, source: Expr, row: Expr, place: Expr) -> Expr:
        """Index of what a CTA of the cluster has of a row of a share."""
        return (source * self.cta.tile.received_rows + row) * self.width + place

    def address(self, row: Expr, place: Expr) -> Expr:
        """Address in shared memory of what this CTA has of a row of a share."""
        index = self.index(self.cta.rank, row, place)
        return shared_word(self.cta.shared.received_address, index)

    def bound(self, source: Expr, row: Expr) -> Expr:
        """Index of the peak of a row of a CTA of the cluster; its total is the next."""
        return (source * self.cta.tile.received_rows + row) * BOUNDS

    def bound_address(self, row: Expr) -> Expr:
        """Address in shared memory of the peak of a row of this CTA."""
        return shared_word(self.cta.shared.bounds_address, self.bound(self.cta.rank, row))


@T.inline
def send_quad(cta, shares, joined, row, column):
    """Write four elements of a row to the CTA whose share they are; with its first, the bounds."""
    at = T.alloc_local((2,), "uint32")
    owner: T.let[T.int32] = shares.owner(column)
    place: T.let[T.int32] = shares.place(column)
    address_in(at[0], cta.shared.sent_address, owner)
    address_in(at[1], shares.address(row, place), owner)
    store_peer_quad(at[1], at[0], joined.out)
    if place == 0:
        address_in(at[1], shares.bound_address(row), owner)
        store_peer_pair(at[1], at[0], joined.peak[0], joined.total[0])


@T.inline
def receive_state(cta):
    """Wait until the cluster's CTAs have written what they have of this one's share."""
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
    """Join the states of a cluster's CTAs of four neighbouring elements, in their order.

    All is loaded before any is used; of a small cluster, the last CTA's more than once.
    """
    state, tiles = T.meta_var((cta.hooks.accumulation, cta.shared))
    empty(cta, joined)
    for c in T.unroll(max(cta.tile.clusters)):
        bound = T.meta_var(shares.bound(T.min(c, cta.cluster - 1), row))
        joined.peak[0] = state.peak(joined.peak[0], tiles.bounds[bound])
    for c in T.unroll(max(cta.tile.clusters)):
        source = T.meta_var(T.min(c, cta.cluster - 1))
        bound = T.meta_var(shares.bound(source, row))
        weight = T.meta_var(state.rescale(tiles.bounds[bound], joined.peak[0]))
        scale: T.let[T.float32] = T.Select(c < cta.cluster, weight, f32(0.0))
        joined.total[0] = joined.total[0] + tiles.bounds[bound + 1] * scale
        for e in T.unroll(QUAD):
            at = T.meta_var(shares.index(source, row, place + e))
            joined.out[e] = joined.out[e] + tiles.received[at] * scale


@T.inline
def store_share(cta, task, outputs, joined, shares, turn, first, rows):
    """Join and store the CTA's share of a part of some rows: threads take turns with quads."""
    quads: T.let[T.int32] = shares.width // QUAD
    i: T.int32 = cta.thread
    while i < rows * quads:
        row: T.let[T.int32] = i // quads
        place: T.let[T.int32] = i % quads * QUAD
        column: T.let[T.int32] = shares.column(place)
        if column < shares.columns:
            join_share(cta, joined, shares, row, place)
            store_quad(cta, task, outputs, joined, first + row, turn * shares.columns + column)
        i = i + cta.tile.threads
