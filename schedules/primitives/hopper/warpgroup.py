"""What a warpgroup keeps in registers, and how they take turns at the tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import ACCUMULATORS, HALVES
from tvm_attn.schedules.primitives.hopper.barriers import Cursor
from tvm_attn.schedules.primitives.hopper.shared import HopperShared
from tvm_attn.schedules.primitives.hopper.wgmma import Operand, keys_operand, values_operand
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.schedules.tiles_sm90 import WARPGROUP_ROWS, WARPGROUP_THREADS, HopperTile
from tvm_attn.spec import AttentionSpec
from tvm_attn.variant import Expr

TURN = 1
"""The first of the named barriers: one for the turns of each warpgroup, then that of all."""
TWO = 2 * WARPGROUP_THREADS
"""Threads of the warpgroup that waits for its turn, and of the one that passes it."""


@dataclass(frozen=True)
class WarpgroupRegisters:
    """Registers of a lane, which has two rows: one of each half of its warp's 16.

    ``score`` are products, then scores relative to the reference, then weights; ``weight`` the same
    weights, packed as a left operand; ``query`` the queries as one. ``out`` is what accumulates.
    Scores are relative to ``reference``: ``peak``, but 0 where that is -inf, in an empty row.
    ``total, top, scale`` belong to the softmax. ``best, closing`` and ``last`` are the LSE, the
    total and the peak of rows that are being closed, while those of the next item are open.
    """

    score: Any
    weight: Any
    query: Any
    out: Any
    right: Any
    peak: Any
    reference: Any
    total: Any
    top: Any
    bits: Any
    scale: Any
    best: Any
    closing: Any
    last: Any

    @staticmethod
    def allocate(tile: HopperTile, spec: AttentionSpec) -> WarpgroupRegisters:
        """Allocate the registers of a lane."""
        scores, outs = (n // COLUMNS * ACCUMULATORS for n in (tile.block, spec.dim_vo))
        rows = ("peak", "reference", "total", "top", "scale", "best", "closing", "last")
        return WarpgroupRegisters(
            score=T.alloc_local((scores,), "float32"),
            weight=T.alloc_local((scores // 2,), "uint32"),
            query=T.alloc_local((spec.head_dim_qk // 4 if tile.holds_queries else 1,), "uint32"),
            out=T.alloc_local((outs,), "float32"),
            right=T.alloc_local((outs // 2,), "uint32"),
            bits=T.alloc_local((HALVES,), "int32"),
            **{name: T.alloc_local((HALVES,), "float32") for name in rows},
        )


@dataclass(frozen=True)
class Flags:
    """int32 registers that all lanes of a warp agree on.

    ``outgrown``: a score has outgrown its reference. ``has_empty``: a row has seen no key.
    ``moved``: references have moved since the weights that are being multiplied were made.
    ``adds``: the product with values adds to ``out``, which is not new.
    """

    words: Any

    @staticmethod
    def allocate() -> Flags:
        """Allocate them, all 0."""
        words = T.alloc_local((4,), "int32")
        for i in range(4):
            T.buffer_store(words, T.int32(0), [i])
        return Flags(words)

    @property
    def outgrown(self) -> Expr:
        """Whether a score has outgrown its reference."""
        return tirx.Not(self.words[0] == 0)

    @property
    def has_empty(self) -> Expr:
        """Whether a row has seen no key."""
        return tirx.Not(self.words[1] == 0)

    @property
    def moved(self) -> Expr:
        """Whether references have moved."""
        return tirx.Not(self.words[2] == 0)

    @property
    def adds(self) -> Expr:
        """Whether a product adds."""
        return tirx.Not(self.words[3] == 0)

    def set(self, name: str, value: Expr) -> None:
        """Set a flag."""
        place = ("outgrown", "has_empty", "moved", "adds").index(name)
        T.buffer_store(self.words, tirx.Cast("int32", value), [place])


@dataclass(frozen=True)
class Warpgroup:
    """A warpgroup that multiplies: which, its operands, and where it is in the rings.

    Parameters
    ----------
    index, count : Expr, int
        Which, of how many.
    k, v, q : Operand
        Keys, values, and the warpgroup's own queries, in shared memory.
    k_at, v_at : Cursor
        Stages of keys and values that come next.
    flags : Flags
        What its warps agree on, each for itself.
    place, left : Buffer
        int32 registers: the first key of the block whose scores are at hand, and how many blocks of
        the item come after it.
    """

    index: Expr
    count: int
    k: Operand
    v: Operand
    q: Operand
    k_at: Cursor
    v_at: Cursor
    flags: Flags
    place: Any
    left: Any

    @staticmethod
    def begin(index: Expr, tile: HopperTile, shared: HopperShared) -> Warpgroup:
        """Begin at the first stages."""
        return Warpgroup(
            index,
            tile.multipliers,
            keys_operand(shared.k, tile.block, shared.dim_qk),
            values_operand(shared.v, tile.block, shared.dim_vo),
            keys_operand(shared.q, WARPGROUP_ROWS, shared.dim_slot),
            Cursor.begin(shared.keys, fills=False),
            Cursor.begin(shared.values, fills=False),
            Flags.allocate(),
            T.alloc_local((1,), "int32"),
            T.alloc_local((1,), "int32"),
        )

    @property
    def kv0(self) -> Expr:
        """First key of the block whose scores are at hand: items go from the last to the first."""
        return self.place[0]

    def take_turn(self) -> Expr:
        """Wait for the warpgroup before this one to have begun its multiplications."""
        return T.ptx.bar.sync(T.uint32(TURN) + tirx.Cast("uint32", self.index), TWO)

    def pass_turn(self) -> Expr:
        """Let the next warpgroup begin its multiplications."""
        index = tirx.Cast("uint32", self.index)
        if self.count == 2:
            return T.ptx.bar.arrive(T.uint32(TURN + 1) - index, TWO)
        is_last = index == T.uint32(self.count - 1)
        return T.ptx.bar.arrive(tirx.Select(is_last, T.uint32(TURN), index + (TURN + 1)), TWO)


def begin_turns() -> Expr:
    """Let the first warpgroup have the first turn; it says so itself."""
    return T.ptx.bar.arrive(T.uint32(TURN), TWO)


def meet(tile: HopperTile) -> Expr:
    """Wait for all warpgroups that multiply."""
    threads = tile.multipliers * WARPGROUP_THREADS
    return T.ptx.bar.sync(T.uint32(TURN + tile.multipliers), threads)
