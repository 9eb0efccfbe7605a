"""Blocks of K and V row by row, by the lanes of warps: of pages that have no boxes, or small ones.

Rows go to where the copy engine would put them. What an item does not have becomes zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import of_lane
from tvm_attn.schedules.primitives.places import NO_PLACE, Places, page_and_slot
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
"""Turns that begin together, at most."""
PAUSE = 20
"""Nanoseconds between them, about: copies in a row keep others of the scheduler's warps waiting."""
BYTES_AFTER = r"""
__device__ __forceinline__ void* bytes_after(void* base, int bytes) { return (char*)base + bytes; }
"""


def swizzled(lane: Expr) -> Expr:
    """Offset of the chunk that a lane copies, from the first of the first 4 rows: in bytes."""
    row, chunk = tirx.floordiv(lane, LINE_CHUNKS), tirx.floormod(lane, LINE_CHUNKS)
    return row * ROW_BYTES + tirx.bitwise_xor(chunk, row) * CHUNK_BYTES


@T.inline
def look_up_rows(feed, task, access, head, kv0, places):
    """Look up where a lane's rows of a block are, every 32nd: all are asked for together."""
    source, page_size = T.meta_var((feed.source, feed.cta.tile.page))
    pages = T.alloc_local((source.shares,), "int32")
    begin: T.let[T.int32] = access.begin(task.request)
    first: T.let[T.int32] = kv0 + source.first_row + feed.cta.lane.index
    end: T.let[T.int32] = T.min(task.end_key, kv0 + source.first_row + source.rows)
    for i in T.unroll(source.shares):
        pages[i] = NOWHERE
        if first + i * WARP < end:
            index = T.meta_var(page_and_slot(first + i * WARP, page_size)[0])
            pages[i] = access.indices[begin + T.Cast("int32", index)]
    for i in T.unroll(source.shares):
        slot = T.meta_var(page_and_slot(first + i * WARP, page_size)[1])
        place: T.let[T.uint32] = source.places.of(pages[i], slot, head)
        places[i] = held(T.Select(pages[i] == NOWHERE, T.uint32(NO_PLACE), place))


@T.inline
def copy_turns(feed, places, stage, first):
    """Begin to copy some turns of rows; eight neighbouring lanes copy 128 bytes of a row."""
    source = T.meta_var(feed.source)
    rows = T.alloc_local((source.together,), "uint32")
    for i in T.unroll(source.together):
        row = T.meta_var((first + i) * ROWS_OF_TURN)
        rows[i] = of_lane(places[row // WARP], row % WARP + feed.cta.lane.index // LINE_CHUNKS)
    for i in T.unroll(source.together):
        row = T.meta_var((first + i) * ROWS_OF_TURN)
        for group in T.unroll(feed.groups):
            if feed.cta.lane.index % LINE_CHUNKS < source.chunks - group * LINE_CHUNKS:
                copy_chunk(
                    source.destination(stage, row, group * feed.group_bytes),
                    source.pointer(feed.cta.lane.index, rows[i], group),
                    rows[i] != T.uint32(NO_PLACE),
                )


@T.inline
def gather(feed, task, access, head, kv0):
    """Begin to copy the warp's part of a block, once its stage is empty."""
    source = T.meta_var(feed.source)
    places = T.alloc_local((source.shares,), "uint32")
    look_up_rows(feed, task, access, head, kv0, places)
    feed.pipe.empty.wait(feed.at.parity, feed.at.stage)
    stage: T.let[T.uint32] = T.Cast("uint32", feed.at.stage * feed.block_bytes)
    for turns in T.unroll(source.turns // source.together):
        copy_turns(feed, places, stage, turns * source.together)
        T.cuda.nano_sleep(T.uint64(PAUSE))
    feed.pipe.full.arrive_with_copies(feed.at.stage)


@dataclass(frozen=True)
class Gathered:
    """K or V, of which rows are copied: of each block, those of a part.

    Parameters
    ----------
    places : Places
        Where its rows are.
    rows : int
        Rows of a part.
    first_row : Expr
        The part's first row.
    origin : Expr
        Address of the lane's chunk of the part's first 4 rows in the ring, uint32.
    """

    places: Places
    rows: int
    first_row: Expr
    origin: Expr

    copy_keys = copy_values = staticmethod(gather)

    @staticmethod
    def of_cache(cta: Cta, cache: Any, tile: Any, part: Expr) -> Gathered:
        """Return the rows of a part of K or V, on their way to a ring."""
        rows = cta.tile.block // cta.tile.feeders
        first_row = part * rows
        at = tirx.Cast("uint32", first_row * ROW_BYTES + swizzled(cta.lane.index))
        places = Places.of_cache(cache, cta.spec.kv_layout)
        return Gathered(places, rows, first_row, held(shared_address(tile) + at))

    @property
    def shares(self) -> int:
        """Rows that a lane looks up."""
        return -(-self.rows // WARP)

    @property
    def turns(self) -> int:
        """Turns that a part takes."""
        return self.rows // ROWS_OF_TURN

    @property
    def together(self) -> int:
        """Turns that begin together."""
        return gcd(self.turns, TURNS)

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        cache = self.places.cache
        return int(cache.shape[-1]) * itemsize(str(cache.dtype)) // CHUNK_BYTES

    def destination(self, stage: Expr, row: Expr, offset: Expr) -> Expr:
        """Address of the lane's chunk of 4 rows of the part, from the offset of a stage."""
        half = tirx.floormod(tirx.floordiv(row, ROWS_OF_TURN), 2) * (ROWS_OF_TURN * CHUNK_BYTES)
        first = tirx.bitwise_xor(self.origin + stage, tirx.Cast("uint32", half))
        return first + tirx.Cast("uint32", row * ROW_BYTES + offset)

    def pointer(self, lane: Expr, place: Expr, group: Expr) -> Expr:
        """Address of a lane's chunk of 64 columns of a row."""
        column = tirx.floormod(lane, LINE_CHUNKS) * (COLUMN_GROUP // LINE_CHUNKS)
        first = self.places.pointer(place, column)
        given = {"source_code": BYTES_AFTER, "return_type": "handle"}
        return T.cuda.func_call("bytes_after", first, group * ROW_BYTES, **given)
