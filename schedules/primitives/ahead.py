"""Running ahead of the work: a warp looks up pages and copies keys and values of blocks to come.

A warp's blocks of all items are a stream. One block is copied while the one before it is worked on,
and the pages of the next are looked up; both go on into the following item.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import of_lane
from tvm_attn.schedules.primitives.places import NO_PLACE, Places
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.schedules.primitives.staging import commit_copies, copy_chunk
from tvm_attn.schedules.primitives.task import Request, Task, split_token
from tvm_attn.variant import Expr


class Cursor(IntEnum):
    """Words of a cursor: where the next block is whose pages are looked up."""

    ITEM = 0
    KEY = 1  # its first token
    END = 2  # of the item's keys
    BEGIN = 3  # of the item's pages in the page table
    HEAD = 4  # the item's KV head
    FOUND = 5  # whether the pages of a block are looked up that is not copied yet
    PAGE = 6  # of the lane's token of that block
    SLOT = 7  # in that page
    COPIED = 8  # position in the stream of the first block whose copy has not begun


@dataclass(frozen=True)
class Ahead:
    """How far a warp is ahead, in registers; and what it goes over."""

    words: Any
    batch: Any
    k: Places
    v: Places

    @staticmethod
    def begin(t: Expr, batch: Any, k: Places, v: Places) -> Ahead:
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

    def place(self, places: Places) -> Expr:
        """Where in a cache the lane's token is of the block that was looked up."""
        place = places.of(self[Cursor.PAGE], self[Cursor.SLOT], self[Cursor.HEAD])
        return tirx.Select(self[Cursor.PAGE] < 0, T.uint32(NO_PLACE), place)


@T.inline
def copy_block(cta, tile, s, places, place):
    """Begin to copy the rows of a block to position `s`; each lane knows one row's place.

    Neighbouring lanes copy neighbouring chunks.
    """
    chunks = T.meta_var(tile.columns // tile.chunk)
    total = T.meta_var(tile.rows * chunks)
    turns = T.meta_var(-(-total // WARP))
    rows = T.alloc_local((turns,), "uint32")
    for i in T.unroll(turns):
        row = T.meta_var((i * WARP + cta.lane.index) // chunks)
        rows[i] = of_lane(place, row % WARP)
    for i in T.unroll(turns):
        at = T.meta_var(i * WARP + cta.lane.index)
        column = T.meta_var(at % chunks * tile.chunk)
        if T.Or(T.bool(total % WARP == 0), at < total):
            copy_chunk(
                tile.pointer(cta.stage(s), at // chunks, column),
                places.pointer(rows[i], column),
                rows[i] != T.uint32(NO_PLACE),
            )


@T.inline
def gather_k(cta, ahead):
    """Begin to copy the keys of the block that was looked up."""
    place: T.let[T.uint32] = ahead.place(ahead.k)
    copy_block(cta, cta.shared.k, ahead[Cursor.COPIED], ahead.k, place)


@T.inline
def gather_v(cta, ahead):
    """Begin to copy the values of the block that was looked up."""
    place: T.let[T.uint32] = ahead.place(ahead.v)
    copy_block(cta, cta.shared.v, ahead[Cursor.COPIED], ahead.v, place)


@T.inline
def look_up(cta, ahead, t, last):
    """Look up the pages of the warp's next block, of items `t` to `last`: nothing waits yet.

    A warp that had no keys of the items before `t` did not look at them, and their words are gone.
    """
    ahead.set(Cursor.ITEM, T.max(ahead[Cursor.ITEM], t - 1))
    while T.And(ahead[Cursor.KEY] >= ahead[Cursor.END], ahead[Cursor.ITEM] < last):
        ahead.set(Cursor.ITEM, ahead[Cursor.ITEM] + 1)
        task = T.meta_var(Task.of(cta, ahead.batch, ahead[Cursor.ITEM]))
        ahead.set(Cursor.KEY, cta.first_key(task))
        ahead.set(Cursor.END, task.end_key)
        ahead.set(Cursor.BEGIN, task.words[task.first + Request.KV_BEGIN])
        ahead.set(Cursor.HEAD, task.kv_head)
    ahead.set(Cursor.FOUND, T.Cast("int32", ahead[Cursor.KEY] < ahead[Cursor.END]))
    if ahead[Cursor.FOUND] != 0:
        token: T.let[T.int32] = ahead[Cursor.KEY] + cta.lane.index
        ahead.set(Cursor.PAGE, -1)
        if T.And(cta.lane.index < cta.tile.block, token < ahead[Cursor.END]):
            if cta.spec.is_paged:
                at = T.meta_var(split_token(token, cta.page_reciprocal, cta.page_size))
                ahead.set(Cursor.PAGE, ahead.batch.kv_indices[ahead[Cursor.BEGIN] + at[0]])
                ahead.set(Cursor.SLOT, at[1])
            else:
                ahead.set(Cursor.PAGE, ahead[Cursor.BEGIN] + token)
        ahead.set(Cursor.KEY, ahead[Cursor.KEY] + cta.turn)


@T.inline
def run_ahead(cta, ahead, t, last):
    """Begin to copy the next block, if its pages were looked up, and look up those after it."""
    T.cuda.warp_sync()  # all lanes are done with what is overwritten
    if ahead[Cursor.FOUND] != 0:
        gather_k(cta, ahead)
        gather_v(cta, ahead)
        ahead.set(Cursor.COPIED, ahead[Cursor.COPIED] + 1)
    commit_copies()
    look_up(cta, ahead, t, last)


@T.inline
def catch_up(cta, ahead, t, last, s):
    """Run ahead until the block at position `s` is copied, and once more: then wait for it.

    Blocks are those of items `t`, the one at work, to `last`.
    """
    is_copied: T.int32 = 0
    while is_copied == 0:
        is_copied = T.Cast("int32", ahead[Cursor.COPIED] > s)
        run_ahead(cta, ahead, t, last)
    T.ptx.cp.async_.wait_group(1)
    T.cuda.warp_sync()
