"""The warps that feed blocks of keys and values to shared memory, through the BSR indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.hopper.barriers import Cursor, Pipe, advance
from tvm_attn.schedules.primitives.hopper.boxes import Boxes
from tvm_attn.schedules.primitives.hopper.gathering import Gathered
from tvm_attn.schedules.primitives.hopper.items import (
    meet_first_items,
    meet_next_item,
    task_access,
    wait_for_item,
)
from tvm_attn.schedules.primitives.hopper.tensor_maps import TensorMap
from tvm_attn.schedules.primitives.task import Task, in_registers
from tvm_attn.schedules.tiles_sm90 import COLUMN_GROUP, HopperTile
from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr


@dataclass(frozen=True)
class Feed:
    """What a warp feeds: blocks of K, or of V, or its part of them, of one item after another.

    Parameters
    ----------
    cta : Cta
        As that warp sees it.
    cache : Buffer
        K or V.
    source : Boxes or Gathered
        How it is copied.
    copy : callable
        Copies a block, or begins to, once its stage is empty.
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
    cache: Any
    source: Boxes | Gathered
    copy: Callable[..., Any]
    tile: Any
    dim: int
    pipe: Pipe
    at: Cursor

    @staticmethod
    def of_keys(cta: Cta, cache: Any, map: TensorMap | None, part: Expr) -> Feed:
        """Begin to feed keys: in boxes, if there is a map, else a part of their rows."""
        shared = cta.shared
        source = _source(cta, cache, map, shared.k, part)
        at = Cursor.begin(shared.keys, fills=True)
        return Feed(cta, cache, source, source.copy_keys, shared.k, shared.dim_qk, shared.keys, at)

    @staticmethod
    def of_values(cta: Cta, cache: Any, map: TensorMap | None, part: Expr) -> Feed:
        """Begin to feed values, as `of_keys`."""
        shared = cta.shared
        source = _source(cta, cache, map, shared.v, part)
        at = Cursor.begin(shared.values, fills=True)
        return Feed(
            cta, cache, source, source.copy_values, shared.v, shared.dim_vo, shared.values, at
        )

    @property
    def groups(self) -> int:
        """Groups of columns."""
        return self.dim // COLUMN_GROUP

    @property
    def group_elements(self) -> int:
        """Elements of a group of columns of a block."""
        return int(self.cta.tile.block * COLUMN_GROUP)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of columns of a block."""
        return self.group_elements * itemsize(self.cta.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.groups * self.group_bytes

    def pointer(self, group: Expr, row: Expr, column: Expr = 0) -> Expr:
        """Address of an element of the stage to fill, as if it were not swizzled."""
        tile = self.at.stage * self.groups + group
        return self.tile.ptr_to([tile * self.group_elements + row * COLUMN_GROUP + column])


def _source(cta: Cta, cache: Any, map: TensorMap | None, tile: Any, part: Expr) -> Boxes | Gathered:
    if map is None:
        return Gathered.of_cache(cta, cache, tile, part)
    return Boxes.of_cache(map, cache)


def first_block(tile: HopperTile, task: Any) -> Expr:
    """First key of an item's first block: a box does not begin inside of another."""
    if not tile.begins_early:
        return task.first_key
    return task.first_key - tirx.floormod(task.first_key, tile.box)


def last_block(tile: HopperTile, task: Any, first: Expr) -> Expr:
    """First key of an item's last block; an item without keys has one block too."""
    count = tirx.max(task.end_key - first - 1, 0)
    return first + tirx.floordiv(count, tile.block) * tile.block


def item(cta: Cta, batch: Any, t: Expr) -> Task:
    """Return the task of item `t`, in registers, if there are any left besides rows to gather."""
    task = Task.of(cta, batch, t)
    return task if cta.tile.gathers else in_registers(task)


@T.inline
def feed_last_block(feed, batch, t):
    """Feed the last block of item `t`, which is the first that is attended to, if one feeds any."""
    if feed is not None:
        tile = T.meta_var(feed.cta.tile)
        task = T.meta_var(item(feed.cta, batch, t))
        access = T.meta_var(task_access(feed.cta, task, batch, feed.cache))
        head: T.int32 = task.kv_head
        kv0: T.let[T.int32] = last_block(tile, task, first_block(tile, task))
        feed.copy(feed, task, access, head, kv0)
        advance(feed.at)


@T.inline
def feed_blocks(feed, batch, t, fed):
    """Feed the blocks of item `t`, from its last to its first, but for some that were fed."""
    if feed is not None:
        tile = T.meta_var(feed.cta.tile)
        task = T.meta_var(item(feed.cta, batch, t))
        access = T.meta_var(task_access(feed.cta, task, batch, feed.cache))
        head: T.int32 = task.kv_head
        first: T.int32 = first_block(tile, task)
        kv0: T.int32 = last_block(tile, task, first) - fed * tile.block
        while kv0 >= first:
            feed.copy(feed, task, access, head, kv0)
            advance(feed.at)
            kv0 = kv0 - tile.block


@T.inline
def feed_items(feed, batch, t0, end):
    """Feed the blocks of all items, as they become known.

    Of ragged values one lane alone copies. It meets the others, which have read the item as well:
    they tell nobody that another item may take its place.
    """
    cta = T.meta_var(feed.cta)
    t: T.int32 = t0
    while t < end:
        wait_for_item(cta, t, t0)
        feed_blocks(feed, batch, t, 0)
        if not cta.spec.is_paged:
            T.cuda.warp_sync()
        t = t + 1


@T.inline
def announce_and_feed_items(feed, given, t0, end):
    """Feed the blocks of all items, and tell the other warps of each item, ahead of time."""
    cta = T.meta_var(feed.cta)
    t: T.int32 = t0
    meet_first_items(cta, given, t0, end)
    while t < end:
        task = T.meta_var(item(cta, given.batch, t))
        access = T.meta_var(task_access(cta, task, given.batch, feed.cache))
        head: T.int32 = task.kv_head
        first: T.int32 = first_block(cta.tile, task)
        kv0: T.int32 = last_block(cta.tile, task, first)
        is_first: T.int32 = 1
        while kv0 >= first:
            feed.copy(feed, task, access, head, kv0)
            advance(feed.at)
            if is_first != 0:
                meet_next_item(cta, given, t, end)
                is_first = 0
            kv0 = kv0 - cta.tile.block
        t = t + 1
