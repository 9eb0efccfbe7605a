"""Running ahead of the work: a warp looks up pages and copies keys and values of blocks to come.

A warp's blocks of all items are a stream. One block is copied while the one before it is worked on,
and the pages of the next are looked up; both go on into the following item.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.gather import offset
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.schedules.primitives.shared import NOWHERE
from tvm_attn.schedules.primitives.staging import Copy, commit_copies, copy_rows
from tvm_attn.schedules.primitives.task import Task, TaskAccess
from tvm_attn.tir.access import CacheAccess
from tvm_attn.variant import Expr


class Cursor(IntEnum):
    """Words of a cursor."""

    ITEM = 0
    KEY = 1  # the first one of the block whose pages are looked up next
    END = 2  # of the item's keys
    FOUND = 3  # whether the pages of a block are looked up that is not copied yet
    COPIED = 4  # position in the stream of the first block whose copy has not begun
    PAGE = 5  # of the lane's token of that block


@dataclass(frozen=True)
class Ahead:
    """How far a warp is ahead: a cursor, in registers; and what it goes over."""

    words: Any
    batch: Any
    k: Any
    v: Any

    @staticmethod
    def begin(t: Expr, batch: Any, k: Any, v: Any) -> Ahead:
        """Begin before the first block of item `t`."""
        words = T.alloc_local((len(Cursor),), "int32")
        for word in Cursor:
            T.buffer_store(words, t - 1 if word == Cursor.ITEM else 0, [word])
        return Ahead(words, batch, k, v)

    def __getitem__(self, word: Cursor) -> Expr:
        """Read a word of the cursor."""
        return self.words[int(word)]

    def set(self, word: Cursor, value: Expr) -> None:
        """Write a word of the cursor."""
        T.buffer_store(self.words, value, [int(word)])


@T.inline
def gather_k(cta, ahead, s):
    """Begin to copy the keys at position `s` of the stream, whose places are noted."""
    place = T.meta_var(lambda row: cta.shared.k_place[row])
    copy_rows(Copy(cta.shared.k, cta.stage(s), ahead.k, place, cta.lane.index, WARP))


@T.inline
def gather_v(cta, ahead, s):
    """Begin to copy the values at position `s` of the stream, whose places are noted."""
    place = T.meta_var(lambda row: cta.shared.v_place[row])
    copy_rows(Copy(cta.shared.v, cta.stage(s), ahead.v, place, cta.lane.index, WARP))


@T.inline
def note(cta, ahead):
    """Note where the tokens of the block are whose pages were looked up."""
    if cta.lane.index < cta.tile.block:
        task = T.meta_var(Task.of(cta, ahead.batch, ahead[Cursor.ITEM]))
        cache = T.meta_var(TaskAccess.to(CacheAccess.of(cta.spec, ahead.batch, ahead.k), task))
        token = T.meta_var(ahead[Cursor.KEY] - cta.turn + cta.lane.index)
        slot: T.let[T.int32] = cache.split(token)[1] if cta.spec.is_paged else 0
        at = T.meta_var((*cache.order(ahead[Cursor.PAGE], slot, task.kv_head), 0))
        nowhere = T.meta_var(ahead[Cursor.PAGE] == NOWHERE)
        cta.shared.k_place[cta.lane.index] = T.Select(
            nowhere, T.int64(NOWHERE), offset(ahead.k, at)
        )
        cta.shared.v_place[cta.lane.index] = T.Select(
            nowhere, T.int64(NOWHERE), offset(ahead.v, at)
        )


@T.inline
def look_up(cta, ahead, last):
    """Look up the pages of the warp's next block, of an item up to `last`: nothing waits yet."""
    while T.And(ahead[Cursor.KEY] >= ahead[Cursor.END], ahead[Cursor.ITEM] < last):
        ahead.set(Cursor.ITEM, ahead[Cursor.ITEM] + 1)
        ahead.set(Cursor.KEY, cta.first_key(Task.of(cta, ahead.batch, ahead[Cursor.ITEM])))
        ahead.set(Cursor.END, Task.of(cta, ahead.batch, ahead[Cursor.ITEM]).end_key)
    ahead.set(Cursor.FOUND, T.Cast("int32", ahead[Cursor.KEY] < ahead[Cursor.END]))
    if ahead[Cursor.FOUND] != 0:
        task = T.meta_var(Task.of(cta, ahead.batch, ahead[Cursor.ITEM]))
        cache = T.meta_var(TaskAccess.to(CacheAccess.of(cta.spec, ahead.batch, ahead.k), task))
        token = T.meta_var(ahead[Cursor.KEY] + cta.lane.index)
        ahead.set(Cursor.PAGE, NOWHERE)
        if T.And(cta.lane.index < cta.tile.block, token < ahead[Cursor.END]):
            ahead.set(Cursor.PAGE, cache.locate(task.request, token)[0])
        ahead.set(Cursor.KEY, ahead[Cursor.KEY] + cta.turn)


@T.inline
def run_ahead(cta, ahead, last):
    """Begin to copy the next block, if its pages were looked up, and look up those after it."""
    T.cuda.warp_sync()
    if ahead[Cursor.FOUND] != 0:
        note(cta, ahead)
        T.cuda.warp_sync()
        gather_k(cta, ahead, ahead[Cursor.COPIED])
        gather_v(cta, ahead, ahead[Cursor.COPIED])
        ahead.set(Cursor.COPIED, ahead[Cursor.COPIED] + 1)
    commit_copies()
    look_up(cta, ahead, last)


@T.inline
def catch_up(cta, ahead, last, s):
    """Run ahead until the block at position `s` is copied, and once more: then wait for it."""
    is_copied: T.int32 = 0
    while is_copied == 0:
        is_copied = T.Cast("int32", ahead[Cursor.COPIED] > s)
        run_ahead(cta, ahead, last)
    T.ptx.cp.async_.wait_group(1)
    T.cuda.warp_sync()
