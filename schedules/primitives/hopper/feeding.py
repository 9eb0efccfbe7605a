"""The warps that feed blocks of keys and values to shared memory, through the BSR indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.hopper.barriers import Cursor, Pipe, advance
from tvm_attn.schedules.primitives.hopper.boxes import Boxes
from tvm_attn.schedules.primitives.hopper.gathering import Gathered
from tvm_attn.schedules.primitives.hopper.items import (
    known_parity,
    meet_first_items,
    meet_next_item,
    task_access,
)
from tvm_attn.schedules.primitives.hopper.tensor_maps import TensorMap
from tvm_attn.schedules.primitives.task import Task
from tvm_attn.schedules.tiles_sm90 import COLUMN_GROUP, HopperTile
from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr


@dataclass(frozen=True)
class Feed:
    """What a warp feeds: blocks of K, or of V, of one item after another.

    Parameters
    ----------
    cta : Cta
        As that warp sees it.
    source : Boxes or Gathered
        How they are copied.
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
    source: Boxes | Gathered
    tile: Any
    dim: int
    pipe: Pipe
    at: Cursor

    @staticmethod
    def begin(cta: Cta, map: TensorMap | None, cache: Any, tile: Any, dim: int, pipe: Pipe) -> Feed:
        """Begin at the first stage of a ring: to copy boxes, if there is a map, else rows."""
        source: Boxes | Gathered
        if map is None:
            source = Gathered.of_cache(cache, cta.spec.kv_layout, tile, cta.lane.index)
        else:
            source = Boxes.of_cache(map, cache)
        return Feed(cta, source, tile, dim, pipe, Cursor.begin(pipe, fills=True))

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
def feed_values(feed, given, t0, end):
    """Feed the values of all items."""
    cta = T.meta_var(feed.cta)
    t: T.int32 = t0
    while t < end:
        cta.shared.known.wait(known_parity(cta, t, t0), t % cta.tile.tasks)
        task = T.meta_var(Task.of(cta, given.batch, t))
        access = T.meta_var(task_access(cta, task, given.batch, given.v))
        head: T.int32 = task.kv_head
        first: T.int32 = first_block(cta.tile, task)
        kv0: T.int32 = last_block(cta.tile, task, first)
        while kv0 >= first:
            feed.source.copy_values(feed, task, access, head, kv0)
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
        access = T.meta_var(task_access(cta, task, given.batch, given.k))
        head: T.int32 = task.kv_head
        first: T.int32 = first_block(cta.tile, task)
        kv0: T.int32 = last_block(cta.tile, task, first)
        is_first: T.int32 = 1
        while kv0 >= first:
            feed.source.copy_keys(feed, task, access, head, kv0)
            advance(feed.at)
            if is_first != 0:
                meet_next_item(cta, given, t, end)
                is_first = 0
            kv0 = kv0 - cta.tile.block
        t = t + 1
