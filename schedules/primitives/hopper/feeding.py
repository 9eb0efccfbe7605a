"""The warps that feed blocks of keys and values to shared memory, through the BSR indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import of_lane
from tvm_attn.schedules.primitives.hopper.barriers import Cursor, Pipe, advance, publish_to_copies
from tvm_attn.schedules.primitives.hopper.items import (
    known_parity,
    meet_first_items,
    meet_next_item,
    task_access,
)
from tvm_attn.schedules.primitives.hopper.tensor_maps import TensorMap, encode, is_elected
from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES, WARP
from tvm_attn.schedules.primitives.task import Task
from tvm_attn.schedules.tiles_sm90 import COLUMN_GROUP, HopperTile
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr


def block_map(spec: AttentionSpec, tile: HopperTile, handle: Any, cache: Any) -> TensorMap:
    """Encode the map of K or V: ``(dim, token, head)``, of pages ``(dim, slot, head, page)``."""
    page, slot, head, dim = (0, 2, 1, 3) if spec.kv_layout == "HND" else (0, 1, 2, 3)
    if not spec.is_paged:
        return encode(handle, cache, (dim, page, head), (COLUMN_GROUP, tile.box, 1))
    return encode(handle, cache, (dim, slot, head, page), (COLUMN_GROUP, tile.box, 1, 1))


@dataclass(frozen=True)
class Feed:
    """What a warp feeds: blocks of K, or of V, of one item after another.

    Parameters
    ----------
    cta : Cta
        As that warp sees it.
    map : TensorMap
        Of the tensor.
    num_pages : Expr
        Its first size: a page of this number is outside.
    tile : Buffer
        The ring in shared memory.
    dim : int
        Its columns.
    pipe : Pipe
        What the blocks of the ring are.
    at : Cursor
        The stage to fill next.
    """

    cta: Cta
    map: TensorMap
    num_pages: Expr
    tile: Any
    dim: int
    pipe: Pipe
    at: Cursor

    @property
    def groups(self) -> int:
        """Groups of columns."""
        return self.dim // COLUMN_GROUP

    @property
    def group_elements(self) -> int:
        """Elements of a group of columns of a block."""
        return int(self.cta.tile.block * COLUMN_GROUP)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.groups * self.group_elements * itemsize(self.cta.dtype)

    def pointer(self, group: Expr, row: Expr, column: Expr = 0) -> Expr:
        """Address of an element of the stage to fill, as if it were not swizzled."""
        tile = self.at.stage * self.groups + group
        return self.tile.ptr_to([tile * self.group_elements + row * COLUMN_GROUP + column])


def first_block(tile: HopperTile, task: Any) -> Expr:
    """First key of an item's first block: a box does not begin inside of another."""
    if not tile.begins_early:
        return task.first_key
    return task.first_key - tirx.floormod(task.first_key, tile.box)


def last_block(tile: HopperTile, task: Any, first: Expr) -> Expr:
    """First key of an item's last block; an item without keys has one block too."""
    count = tirx.max(task.end_key - first - 1, 0)
    return first + tirx.floordiv(count, tile.block) * tile.block


@T.inline
def copy_ragged(feed, begin, head, kv0, barrier):
    """Begin to copy a block of ragged K or V, of a request that begins with token `begin`."""
    if is_elected():
        for group in T.unroll(feed.groups):
            feed.map.load(
                feed.pointer(group, 0), (group * COLUMN_GROUP, begin + kv0, head), barrier
            )


@T.inline
def copy_pages(feed, head, where, barrier):
    """Begin to copy a block of pages, whose boxes were looked up."""
    tile = T.meta_var(feed.cta.tile)
    pages = T.alloc_local((tile.boxes,), "int32")
    slots = T.alloc_local((tile.boxes,), "int32")
    for i in T.unroll(tile.boxes):
        pages[i] = of_lane(where[0], i)
        slots[i] = 0 if tile.box == tile.page else of_lane(where[1], i)
    if is_elected():
        for i in T.unroll(tile.boxes):
            for group in T.unroll(feed.groups):
                feed.map.load(
                    feed.pointer(group, i * tile.box),
                    (group * COLUMN_GROUP, slots[i], head, pages[i]),
                    barrier,
                )


@T.inline
def look_up_box(feed, task, cache, kv0, where):
    """Look up a lane's box of a block, its page and slot: outside if nothing of it is needed."""
    tile = T.meta_var(feed.cta.tile)
    token: T.let[T.int32] = kv0 + feed.cta.lane.index * tile.box
    where[0] = T.Cast("int32", feed.num_pages)
    where[1] = 0
    if T.And(token < task.end_key, token + tile.box > task.first_key):
        where[0] = cache.locate(task.request, token)[0]
        where[1] = cache.split(token)[1]


def zero_chunk(pointer: Expr) -> Expr:
    """Zero 16 bytes of shared memory."""
    return T.ptx["st.shared.v4.b32"](pointer, *[T.uint32(0)] * 4)


@T.inline
def zero_rows(feed, first, end):
    """Zero the rows of a block outside of `first` to `end`: what is there may be no number."""
    chunks = T.meta_var(COLUMN_GROUP * itemsize(feed.cta.dtype) // CHUNK_BYTES)
    elements = T.meta_var(CHUNK_BYTES // itemsize(feed.cta.dtype))
    per_turn = T.meta_var(WARP // chunks)
    for turn in T.serial(feed.cta.tile.block // per_turn):
        row: T.let[T.int32] = turn * per_turn + feed.cta.lane.index // chunks
        if T.Or(row < first, row >= end):
            for group in T.unroll(feed.groups):
                zero_chunk(feed.pointer(group, row, feed.cta.lane.index % chunks * elements))


@T.inline
def copy_block(feed, task, cache, head, kv0, barrier):
    """Begin to copy a block, once its stage is empty, to where it announces its bytes."""
    where = T.alloc_local((2,), "int32")
    if feed.cta.spec.is_paged:
        look_up_box(feed, task, cache, kv0, where)
    feed.pipe.empty.wait(feed.at.parity, feed.at.stage)
    if is_elected():
        T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier, T.uint32(feed.block_bytes))
    if feed.cta.spec.is_paged:
        copy_pages(feed, head, where, barrier)
    else:
        copy_ragged(feed, cache.begin(task.request), head, kv0, barrier)


@T.inline
def feed_values(feed, given, t0, end):
    """Feed the values of all items. What the item does not have is zeroed: 0 times it is 0.

    That is what comes before its first key, and after the request's last one.
    """
    cta = T.meta_var(feed.cta)
    shared = T.meta_var(cta.shared)
    parity: T.int32 = 0
    t: T.int32 = t0
    while t < end:
        shared.known.wait(known_parity(cta, t, t0), t % cta.tile.tasks)
        task = T.meta_var(Task.of(cta, given.batch, t))
        cache = T.meta_var(task_access(cta, task, given.batch, given.v))
        head: T.int32 = task.kv_head
        first: T.int32 = first_block(cta.tile, task)
        kv0: T.int32 = last_block(cta.tile, task, first)
        while kv0 >= first:
            is_whole: T.let[T.bool] = T.And(
                task.first_key <= kv0, kv0 + cta.tile.block <= task.kv_len
            )
            lands: T.let[T.int32] = T.Select(
                is_whole, feed.pipe.full.first + feed.at.stage, shared.landing.first
            )
            copy_block(feed, task, cache, head, kv0, shared.landing.words.ptr_to([lands]))
            if T.Not(is_whole):
                shared.landing.wait(parity)
                parity = T.bitwise_xor(parity, 1)
                zero_rows(feed, task.first_key - kv0, task.kv_len - kv0)
                publish_to_copies()
                T.cuda.warp_sync()
                if cta.lane.index == 0:
                    feed.pipe.full.arrive(feed.at.stage)
            advance(feed.at)
            kv0 = kv0 - cta.tile.block
        t = t + 1


@T.inline
def feed_keys(feed, given, t0, end):
    """Feed the keys of all items, and tell the other warps of each item, ahead of time."""
    cta = T.meta_var(feed.cta)
    t: T.int32 = t0
    meet_first_items(cta, given, t0, end)
    while t < end:
        task = T.meta_var(Task.of(cta, given.batch, t))
        cache = T.meta_var(task_access(cta, task, given.batch, given.k))
        head: T.int32 = task.kv_head
        first: T.int32 = first_block(cta.tile, task)
        kv0: T.int32 = last_block(cta.tile, task, first)
        is_first: T.int32 = 1
        while kv0 >= first:
            copy_block(feed, task, cache, head, kv0, feed.pipe.full.pointer(feed.at.stage))
            advance(feed.at)
            if is_first != 0:
                meet_next_item(cta, given, t, end)
                is_first = 0
            kv0 = kv0 - cta.tile.block
        t = t + 1
