"""Blocks of K and V row by row, by the lanes of a warp: of pages that no box fits.

Rows go to where the copy engine would put them. What an item does not have becomes zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import of_lane
from tvm_attn.schedules.primitives.places import NO_PLACE, Places
from tvm_attn.schedules.primitives.registers import held
from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES, LINE_CHUNKS, WARP
from tvm_attn.schedules.primitives.staging import copy_chunk, shared_address
from tvm_attn.schedules.tiles_sm90 import COLUMN_GROUP
from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr

ROWS_OF_TURN = WARP // LINE_CHUNKS
"""Rows that a warp copies 128 bytes of at a time."""
NOWHERE = -1
"""Page of a token that an item does not have."""
ROW_BYTES = LINE_CHUNKS * CHUNK_BYTES
TURNS = 4
"""Turns whose rows a lane asks for together."""
BYTES_AFTER = r"""
__device__ __forceinline__ void* bytes_after(void* base, int bytes) { return (char*)base + bytes; }
"""


def swizzled(lane: Expr) -> Expr:
    """Offset of the chunk that a lane copies, from the first of the first 4 rows: in bytes."""
    row, chunk = tirx.floordiv(lane, LINE_CHUNKS), tirx.floormod(lane, LINE_CHUNKS)
    return row * ROW_BYTES + tirx.bitwise_xor(chunk, row) * CHUNK_BYTES


def page_and_slot(token: Expr, page_size: int) -> tuple[Expr, Expr]:
    """Return which of a request's pages a token is in, and its slot there: uint32."""
    unsigned, size = tirx.Cast("uint32", token), T.uint32(page_size)
    return tirx.truncdiv(unsigned, size), tirx.truncmod(unsigned, size)


@T.inline
def look_up_rows(feed, task, access, head, kv0, places):
    """Look up where a lane's rows of a block are, every 32nd: all are asked for together."""
    tile, where = T.meta_var((feed.cta.tile, feed.source.places))
    count = T.meta_var(-(-tile.block // WARP))
    pages = T.alloc_local((count,), "int32")
    begin: T.let[T.int32] = access.begin(task.request)
    end: T.let[T.int32] = T.min(task.end_key, kv0 + tile.block)
    first: T.let[T.int32] = kv0 + feed.cta.lane.index
    for i in T.unroll(count):
        pages[i] = NOWHERE
        if first + i * WARP < end:
            index = T.meta_var(page_and_slot(first + i * WARP, tile.page)[0])
            pages[i] = access.indices[begin + T.Cast("int32", index)]
    for i in T.unroll(count):
        slot = T.meta_var(page_and_slot(first + i * WARP, tile.page)[1])
        place: T.let[T.uint32] = where.of(pages[i], slot, head)
        places[i] = held(T.Select(pages[i] == NOWHERE, T.uint32(NO_PLACE), place))


@T.inline
def copy_turns(feed, places, origin, first, count):
    """Begin to copy some turns of rows; eight neighbouring lanes copy 128 bytes of a row."""
    source = T.meta_var(feed.source)
    rows = T.alloc_local((count,), "uint32")
    for i in T.unroll(count):
        row = T.meta_var((first + i) * ROWS_OF_TURN)
        rows[i] = of_lane(places[row // WARP], row % WARP + feed.cta.lane.index // LINE_CHUNKS)
    for i in T.unroll(count):
        row = T.meta_var((first + i) * ROWS_OF_TURN)
        for group in T.unroll(source.groups):
            if feed.cta.lane.index % LINE_CHUNKS < source.chunks - group * LINE_CHUNKS:
                copy_chunk(
                    source.destination(origin, row, group * feed.group_bytes),
                    source.pointer(rows[i], group),
                    rows[i] != T.uint32(NO_PLACE),
                )


@T.inline
def gather(feed, task, access, head, kv0):
    """Begin to copy a block, once its stage is empty."""
    block = T.meta_var(feed.cta.tile.block)
    turns = T.meta_var(block // ROWS_OF_TURN)
    places = T.alloc_local((-(-block // WARP),), "uint32")
    look_up_rows(feed, task, access, head, kv0, places)
    feed.pipe.empty.wait(feed.at.parity, feed.at.stage)
    origin: T.let[T.uint32] = T.Cast("uint32", feed.at.stage * feed.block_bytes)
    for batch in T.unroll(turns // TURNS):
        copy_turns(feed, places, origin, batch * TURNS, TURNS)
    feed.pipe.full.arrive_with_copies(feed.at.stage)


@dataclass(frozen=True)
class Gathered:
    """K or V, of which rows are copied.

    Parameters
    ----------
    places : Places
        Where its rows are.
    lane : Expr
        The lane that copies.
    even, odd : Expr
        Addresses of the lane's chunk of the first 4 rows of the ring, and where it would be if they
        were the other half of a swizzle pattern: uint32.
    """

    places: Places
    lane: Expr
    even: Expr
    odd: Expr

    copy_keys = staticmethod(gather)
    copy_values = staticmethod(gather)

    @staticmethod
    def of_cache(cache: Any, layout: str, tile: Any, lane: Expr) -> Gathered:
        """Return the rows of K or V, on their way to a ring."""
        at = tirx.Cast("uint32", swizzled(lane))
        origin = shared_address(tile)
        other = tirx.bitwise_xor(at, T.uint32(ROWS_OF_TURN * CHUNK_BYTES))
        return Gathered(
            Places.of_cache(cache, layout), lane, held(origin + at), held(origin + other)
        )

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        cache = self.places.cache
        return int(cache.shape[-1]) * itemsize(str(cache.dtype)) // CHUNK_BYTES

    @property
    def groups(self) -> int:
        """Groups of 64 columns."""
        return -(-self.chunks // LINE_CHUNKS)

    def destination(self, origin: Expr, row: Expr, offset: Expr) -> Expr:
        """Address of a chunk: of a row of the lane's, from the origin of a stage."""
        is_even = tirx.floormod(tirx.floordiv(row, ROWS_OF_TURN), 2) == 0
        base = tirx.Select(is_even, self.even, self.odd)
        return base + origin + tirx.Cast("uint32", row * ROW_BYTES + offset)

    def pointer(self, place: Expr, group: int) -> Expr:
        """Address of the lane's chunk of 64 columns of a row."""
        column = tirx.floormod(self.lane, LINE_CHUNKS) * (COLUMN_GROUP // LINE_CHUNKS)
        first = self.places.pointer(place, column)
        given = {"source_code": BYTES_AFTER, "return_type": "handle"}
        return T.cuda.func_call("bytes_after", first, group * ROW_BYTES, **given)
