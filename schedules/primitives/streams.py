"""A CTA whose warps stream keys each for itself: what it has in shared memory, what is whose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import ACCUMULATORS, HALVES
from tvm_attn.schedules.primitives.hopper.barriers import Barriers
from tvm_attn.schedules.primitives.places import lowest_bit
from tvm_attn.schedules.primitives.registers import held
from tvm_attn.schedules.primitives.shapes import (
    COLUMNS,
    ROWS,
    TASK_WORDS,
    TASKS,
    WARP,
    WORD_BYTES,
)
from tvm_attn.schedules.primitives.staging import SharedTile, SwizzledTile, shared_address
from tvm_attn.schedules.tiles_decode import DecodeTile, state_pitch
from tvm_attn.spec import FP8_DTYPES, AttentionSpec
from tvm_attn.variant import Expr


@dataclass(frozen=True)
class StreamTiles:
    """Shared memory of a CTA, most of which belongs to one warp each.

    ``q`` has the rows of two items, as they are stored. ``k`` and ``v`` are the warps' rings of
    blocks; ``tasks`` are words of `task.Task`, the warp's own. ``state`` (rows of outputs),
    ``peaks`` and ``totals`` are where warps put their states to be joined, ``received`` and
    ``bounds`` where the CTAs of a cluster do; ``parts`` are the rings and ``state`` once more.
    ``sent`` completes a phase, whose parity is kept, when all of the cluster's CTAs have put
    theirs. ``verdict`` are two words.
    """

    q: SharedTile
    k: SharedTile
    v: SharedTile
    tasks: Any
    state: Any
    peaks: Any
    totals: Any
    parts: Any
    received: Any
    bounds: Any
    verdict: Any
    sent: Barriers
    parity: Any
    origins: tuple[Expr, ...]
    state_pitch: int

    @staticmethod
    def allocate(spec: AttentionSpec, tile: DecodeTile, warp: Expr) -> StreamTiles:
        """Allocate, and view what belongs to a warp."""
        pool = T.SMEMPool()
        q_dtype, kv_dtype = str(spec.q_dtype), str(spec.kv_dtype)
        stages, columns = tile.warps * tile.stages, state_pitch(tile.part(spec.dim_vo))
        q = SharedTile.allocate(pool, tile.rows, spec.head_dim_qk, q_dtype, 2)
        k, v = (
            SwizzledTile.allocate(pool, tile.block, dim, kv_dtype, stages)
            for dim in (spec.head_dim_qk, spec.dim_vo)
        )
        rings_end = pool.offset
        state = pool.alloc((tile.state_words(spec.dim_vo),), "float32", align=16)
        peaks, totals = (pool.alloc((tile.state_rows,), "float32", align=16) for _ in range(2))
        shares = (tile.received_words(spec.dim_vo), tile.bound_words) if tile.clusters else ()
        of_peers = [pool.alloc((size,), "float32", align=16) for size in shares]
        tasks = pool.alloc((tile.warps * TASKS * TASK_WORDS,), "int32", align=16)
        words = pool.alloc((1,), "uint64", align=8) if tile.clusters else None
        verdict = pool.alloc((2,), "int32", align=4)
        end = pool.offset
        pool.move_base_to(rings_end - tile.ring_words(spec) * WORD_BYTES)
        parts = pool.alloc((tile.part_words(spec),), "float32", align=16)
        pool.move_base_to(end)
        pool.commit()
        sent = Barriers(words, first=0, count=1, arrivals=1)
        own_tasks = _part(tasks, TASKS * TASK_WORDS, warp)
        origins = tuple(shared_address(buffer) for buffer in (state, *of_peers))
        received, bounds = of_peers or (None, None)
        fields = (q, k, v, own_tasks, state, peaks, totals, parts, received, bounds, verdict)
        return StreamTiles(*fields, sent, T.alloc_local((1,), "int32"), origins, columns)

    def row_index(self, warp: Expr, place: Expr) -> Expr:
        """Index of a warp's row in `peaks` and `totals`."""
        return warp * self.q.rows + place

    def state_index(self, warp: Expr, place: Expr, column: Expr) -> Expr:
        """Index of an element of a warp's row in `state`."""
        return self.row_index(warp, place) * self.state_pitch + column

    def state_address(self, warp: Expr, place: Expr, column: Expr) -> Expr:
        """Address of an element of a warp's row in shared memory."""
        return shared_word(self.origins[0], self.state_index(warp, place, column))

    @property
    def received_address(self) -> Expr:
        """Address of what was received in shared memory."""
        return self.origins[1]

    @property
    def bounds_address(self) -> Expr:
        """Address of the bounds that were received in shared memory."""
        return self.origins[2]

    @property
    def sent_address(self) -> Expr:
        """Address of the barrier in shared memory."""
        return T.cuda.cvta_generic_to_shared(self.sent.pointer())


def run_bits(spec: AttentionSpec, tile: DecodeTile, page_size: Expr) -> Expr:
    """Return the logarithm of the longest runs of tokens that blocks and pages are made of."""
    if not spec.is_paged:
        return tirx.const(tile.block.bit_length() - 1, "int32")
    size = tirx.Cast("int64", tirx.bitwise_or(page_size, tile.block))
    return tirx.Cast("int32", held(tirx.Cast("uint32", lowest_bit(size))))


def shared_word(origin: Expr, index: Expr) -> Expr:
    """Address of a word in shared memory."""
    return origin + tirx.Cast("uint32", index * WORD_BYTES)


def _part(buffer: Any, size: int, warp: Expr) -> Any:
    """View a warp's part of a buffer."""
    first = T.Bind(T.address_of(buffer[warp * size]))
    return T.decl_buffer((size,), str(buffer.dtype), data=first, scope="shared.dyn")


@dataclass(frozen=True)
class StreamingCta(Cta):
    """A CTA whose warps have the same query rows, in registers, and keys of their own.

    The tokens of an item are dealt to the warps in turns, a block at a time. Blocks are looked up
    in runs of ``2**run_bits`` tokens, none of which are in more than one page.
    """

    tile: DecodeTile
    shared: Any
    page_size: Expr
    page_reciprocal: Expr
    run_bits: Expr
    cluster: Expr
    rank: Expr
    follows: Expr

    @property
    def is_widened(self) -> bool:
        """Whether keys and values are float8, which become float16 in registers."""
        return self.spec.kv_dtype in FP8_DTYPES

    @property
    def scores(self) -> int:
        """Scores of a block that a lane has."""
        return self.row_tiles * self.key_tiles * ACCUMULATORS

    @property
    def dtype(self) -> str:
        """Of the operands."""
        return "float16" if self.is_widened else str(self.spec.q_dtype)

    @property
    def first_place(self) -> Expr:
        """Place in the tile of the warp's first row: all warps have all rows."""
        return tirx.const(0, "int32")

    @property
    def own(self) -> StreamingCta:
        """The warp as if it were alone: for what every warp does for itself."""
        return replace(self, thread=self.lane.index)

    @property
    def alone(self) -> StreamingCta:
        """The CTA as if it shared its items with none, for what it does without its peers."""
        return replace(self, cluster=1, rank=0)

    @property
    def turn(self) -> Expr:
        """Tokens from one block of a warp to its next."""
        return self.cluster * (self.tile.warps * self.tile.block)

    def first_key(self, task: Any) -> Expr:
        """First key of a task that is this warp's: the item's first run is a whole one."""
        first = tirx.shift_left(tirx.shift_right(task.first_key, self.run_bits), self.run_bits)
        return first + (self.rank * self.tile.warps + self.warp) * self.tile.block

    @property
    def lanes_of_block(self) -> Expr:
        """Lanes that know where a block's tokens are: one for each run."""
        return tirx.shift_right(tirx.const(self.tile.block, "int32"), self.run_bits)

    @property
    def tokens_of_lanes(self) -> Expr:
        """Tokens from the first block that lanes look up together to the first one after them."""
        return tirx.shift_left(self.turn * (WARP // self.tile.block), self.run_bits)

    @property
    def token_of_lane(self) -> Expr:
        """Token that the lane looks up, counted from the first of all lanes."""
        first = tirx.shift_left(self.lane.index, self.run_bits)
        block = tirx.floordiv(first, self.tile.block)
        return block * self.turn + tirx.floormod(first, self.tile.block)

    def token_step(self, places: Any) -> Expr:
        """Units from one token of a run to the next."""
        return places.slot if self.spec.is_paged else places.page

    def stage(self, s: Expr) -> Expr:
        """Where in the rings the block at position `s` of the warp's stream is."""
        return self.warp * self.tile.stages + s % self.tile.stages

    def pair(self, p: Expr, i: Expr) -> tuple[Expr, Expr, Expr]:
        """Return neighbouring accumulators of the lane's row `i`, and the first one's column.

        Of widened values, the even elements of 16 are one tile and the odd ones another.
        """
        m, half = i // HALVES, i % HALVES
        if not self.is_widened:
            return self.out(m, p, half), self.out(m, p, half, 1), p * COLUMNS + self.lane.column(0)
        group, e = p // 2, p % 2
        column = group * ROWS + 2 * (self.lane.column(0) + e)
        return self.out(m, 2 * group, half, e), self.out(m, 2 * group + 1, half, e), column
