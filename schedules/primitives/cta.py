"""A cooperative thread array as its primitives see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_attn.schedules.primitives.fragments import HALVES, LEFT, Lane, accumulator
from tvm_attn.schedules.primitives.shapes import COLUMNS, ROWS
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.scales import Scales
from tvm_attn.variant import Expr


@dataclass(frozen=True)
class Cta:
    """A cooperative thread array: what it is made for, where this thread is, what it works with.

    Parameters
    ----------
    spec, hooks, scales
        What is computed.
    tile : CudaTile or HopperTile
        What a CTA is made of; `shared` and `registers` are of the same kind.
    thread, warp : Expr
        This thread among those that do the same, and its warp.
    lane : Lane
        This thread in its warp.
    """

    spec: AttentionSpec
    hooks: Hooks
    tile: Any
    scales: Scales
    thread: Expr
    warp: Expr
    lane: Lane
    shared: Any
    registers: Any

    @property
    def dtype(self) -> str:
        """Of the operands."""
        return str(self.spec.q_dtype)

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 query rows that a warp has."""
        return int(self.tile.row_tiles)

    @property
    def rows(self) -> int:
        """Rows that a lane holds."""
        return HALVES * self.row_tiles

    @property
    def key_tiles(self) -> int:
        """Tiles of 8 keys in a block."""
        return int(self.tile.block) // COLUMNS

    @property
    def value_tiles(self) -> int:
        """Tiles of 8 elements in an output row."""
        return self.spec.dim_vo // COLUMNS

    @property
    def first_place(self) -> Expr:
        """Place in the tile of the warp's first row."""
        return self.warp * (self.row_tiles * ROWS)

    def place(self, i: Expr) -> Expr:
        """Place in the tile of the lane's row `i`: half ``i % 2`` of a row tile ``i // 2``."""
        return self.first_place + (i // HALVES) * ROWS + self.lane.row(i % HALVES)

    def score(self, m: Expr, n: Expr, half: Expr = 0, e: Expr = 0) -> Expr:
        """Index of a score among the lane's."""
        return accumulator(m, n, self.key_tiles, half, e)

    def query(self, d: Expr, m: Expr) -> Expr:
        """Index of the first register of the queries of step `d` and row tile `m`."""
        return (d % self.tile.query_steps(self.spec) * self.row_tiles + m) * LEFT

    def out(self, m: Expr, n: Expr, half: Expr = 0, e: Expr = 0) -> Expr:
        """Index of an output element among the lane's."""
        return accumulator(m, n, self.value_tiles, half, e)
