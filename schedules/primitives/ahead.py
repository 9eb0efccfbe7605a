"""Running ahead of the work: a warp looks up pages and copies keys and values of blocks to come.

A warp's blocks of all items are a stream. One block is copied while the one before it is worked on.
Pages are looked up for as many blocks at a time as lanes have room for, and while these are copied,
those of the next ones: a table entry may be long in coming. Both go on into the following item.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import of_lane
from tvm_attn.schedules.primitives.places import Places
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.schedules.primitives.staging import SharedTile, commit_copies, copy_chunk
from tvm_attn.schedules.primitives.task import Request, Task, split_token
from tvm_attn.variant import Expr


class Cursor(IntEnum):
    """Words of a cursor: which blocks are next, those looked up and those asked for."""

    KEY = 0  # first token of the next block to copy
    FIRST = 1  # of the keys of that block's item
    END = 2  # of these, or of the blocks looked up
    LANE = 3  # that has the place of the block's first token
    COPIED = 4  # position in the stream of the first block whose copy has not begun
    ITEM = 5  # of the blocks asked for
    NEXT_KEY = 6  # first token of these
    NEXT_FIRST = 7  # of the item's keys
    NEXT_END = 8
    BEGIN = 9  # of the item's pages in the page table
    HEAD = 10  # the item's KV head
    FOUND = 11  # whether there are such blocks
    PAGE = 12  # of the lane's token of them
    SLOT = 13  # in that page


@dataclass(frozen=True)
class Ahead:
    """How far a warp is ahead, in registers; and what it goes over.

    ``places`` are where in K and in V the lane's token of the blocks looked up is.
    """

    words: Any
    places: Any
    batch: Any
    k: Places
    v: Places

    @staticmethod
    def begin(t: Expr, batch: Any, k: Places, v: Places) -> Ahead:
        """Begin before the first block of item `t`."""
        words = T.alloc_local((len(Cursor),), "int32")
        for word in Cursor:
            T.buffer_store(words, t - 1 if word == Cursor.ITEM else 0, [word])
        return Ahead(words, T.alloc_local((2,), "uint32"), batch, k, v)

    def __getitem__(self, word: Cursor) -> Expr:
        """Read a word of the cursor."""
        return self.words[int(word)]

    def set(self, word: Cursor, value: Expr) -> None:
        """Write a word of the cursor."""
        T.buffer_store(self.words, value, [int(word)])

    def place(self, places: Places) -> Expr:
        """Where in a cache the lane's token is of the blocks asked for."""
        return places.of(self[Cursor.PAGE], self[Cursor.SLOT], self[Cursor.HEAD])

    def has(self, row: Expr) -> Expr:
        """Whether a row of the next block is one of the item's keys."""
        before = self[Cursor.KEY] - self[Cursor.FIRST]
        count = self[Cursor.END] - self[Cursor.FIRST]
        return tirx.Cast("uint32", before + row) < tirx.Cast("uint32", count)


def turns_of(tile: SharedTile) -> int:
    """Return how many chunks of a block a lane copies."""
    return -(-tile.rows * (tile.columns // tile.chunk) // WARP)


@T.inline
def locate_rows(cta, ahead, tile, place, step, rows):
    """Find where the rows of the lane's chunks are; lanes know the places of every few tokens.

    From one of these tokens to the next it is `step`.
    """
    for i in T.unroll(turns_of(tile)):
        row = T.meta_var((i * WARP + cta.lane.index) // (tile.columns // tile.chunk))
        lane = T.meta_var(ahead[Cursor.LANE] + T.shift_right(row, cta.run_bits))
        rest = T.meta_var(T.bitwise_and(row, T.shift_left(1, cta.run_bits) - 1))
        rows[i] = of_lane(place, lane) + T.Cast("uint32", rest) * step


@T.inline
def copy_rows(cta, ahead, tile, places, rows):
    """Begin to copy the rows of the next block: neighbouring lanes copy neighbouring chunks."""
    chunks = T.meta_var(tile.columns // tile.chunk)
    total = T.meta_var(tile.rows * chunks)
    for i in T.unroll(turns_of(tile)):
        at = T.meta_var(i * WARP + cta.lane.index)
        column = T.meta_var(at % chunks * tile.chunk)
        if T.Or(T.bool(total % WARP == 0), at < total):
            copy_chunk(
                tile.pointer(cta.stage(ahead[Cursor.COPIED]), at // chunks, column),
                places.pointer(rows[i], column),
                ahead.has(at // chunks),
            )


@T.inline
def copy_block(cta, ahead, tile, places, place):
    """Begin to copy the rows of the next block."""
    rows = T.alloc_local((turns_of(tile),), "uint32")
    locate_rows(cta, ahead, tile, place, cta.token_step(places), rows)
    copy_rows(cta, ahead, tile, places, rows)


@T.inline
def gather_k(cta, ahead):
    """Begin to copy the keys of the next block."""
    copy_block(cta, ahead, cta.shared.k, ahead.k, ahead.places[0])


@T.inline
def gather_v(cta, ahead):
    """Begin to copy the values of the next block."""
    copy_block(cta, ahead, cta.shared.v, ahead.v, ahead.places[1])


@T.inline
def look_up(cta, ahead, t, last):
    """Ask for the pages of the warp's next blocks, of items `t` to `last`: nothing waits yet.

    A warp that had no keys of the items before `t` did not look at them, and their words are gone.
    """
    if ahead[Cursor.FOUND] == 0:
        ahead.set(Cursor.ITEM, T.max(ahead[Cursor.ITEM], t - 1))
        while T.And(ahead[Cursor.NEXT_KEY] >= ahead[Cursor.NEXT_END], ahead[Cursor.ITEM] < last):
            ahead.set(Cursor.ITEM, ahead[Cursor.ITEM] + 1)
            task = T.meta_var(Task.of(cta, ahead.batch, ahead[Cursor.ITEM]))
            ahead.set(Cursor.NEXT_KEY, cta.first_key(task))
            ahead.set(Cursor.NEXT_FIRST, task.first_key)
            ahead.set(Cursor.NEXT_END, task.end_key)
            ahead.set(Cursor.BEGIN, task.words[task.first + Request.KV_BEGIN])
            ahead.set(Cursor.HEAD, task.kv_head)
        ahead.set(Cursor.FOUND, T.Cast("int32", ahead[Cursor.NEXT_KEY] < ahead[Cursor.NEXT_END]))
        token: T.let[T.int32] = ahead[Cursor.NEXT_KEY] + cta.token_of_lane
        if token < ahead[Cursor.NEXT_END]:
            if cta.spec.is_paged:
                at = T.meta_var(split_token(token, cta.page_reciprocal, cta.page_size))
                ahead.set(Cursor.PAGE, ahead.batch.kv_indices[ahead[Cursor.BEGIN] + at[0]])
                ahead.set(Cursor.SLOT, at[1])
            else:
                ahead.set(Cursor.PAGE, ahead[Cursor.BEGIN] + token)


@T.inline
def take(cta, ahead):
    """Take the blocks that were asked for, if the last ones are copied."""
    if T.And(ahead[Cursor.KEY] >= ahead[Cursor.END], ahead[Cursor.FOUND] != 0):
        ahead.places[0] = ahead.place(ahead.k)
        ahead.places[1] = ahead.place(ahead.v)
        ahead.set(Cursor.KEY, ahead[Cursor.NEXT_KEY])
        ahead.set(Cursor.FIRST, ahead[Cursor.NEXT_FIRST])
        ahead.set(Cursor.LANE, 0)
        ahead.set(Cursor.NEXT_KEY, ahead[Cursor.NEXT_KEY] + cta.tokens_of_lanes)
        ahead.set(Cursor.END, T.min(ahead[Cursor.NEXT_END], ahead[Cursor.NEXT_KEY]))
        ahead.set(Cursor.FOUND, 0)


@T.inline
def go_on(cta, ahead):
    """Go on to the block after the one whose copy has begun."""
    ahead.set(Cursor.COPIED, ahead[Cursor.COPIED] + 1)
    ahead.set(Cursor.KEY, ahead[Cursor.KEY] + cta.turn)
    ahead.set(Cursor.LANE, ahead[Cursor.LANE] + cta.lanes_of_block)


@T.inline
def locate_first(cta, ahead, k_rows, v_rows):
    """Find where the rows of the warp's first block are, once its pages are there."""
    T.cuda.warp_sync()
    take(cta, ahead)
    locate_rows(cta, ahead, cta.shared.k, ahead.places[0], cta.token_step(ahead.k), k_rows)
    locate_rows(cta, ahead, cta.shared.v, ahead.places[1], cta.token_step(ahead.v), v_rows)


@T.inline
def copy_first(cta, ahead, t, k_rows, v_rows):
    """Begin to copy the warp's first block, which has been located, and look up those to come."""
    if ahead[Cursor.KEY] < ahead[Cursor.END]:
        copy_rows(cta, ahead, cta.shared.k, ahead.k, k_rows)
        copy_rows(cta, ahead, cta.shared.v, ahead.v, v_rows)
        go_on(cta, ahead)
    commit_copies()
    look_up(cta, ahead, t, t)


@T.inline
def run_ahead(cta, ahead, t, last):
    """Begin to copy the next block, if its pages were looked up, and look up those to come."""
    T.cuda.warp_sync()  # all lanes are done with what is overwritten
    take(cta, ahead)
    if ahead[Cursor.KEY] < ahead[Cursor.END]:
        gather_k(cta, ahead)
        gather_v(cta, ahead)
        go_on(cta, ahead)
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
