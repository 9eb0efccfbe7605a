"""Bitmaps on fragments: the bits of a lane's rows for a block of keys, in a few registers a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import load_word
from tvm_attn.schedules.primitives.shapes import COLUMNS, WORD_BYTES
from tvm_attn.schedules.primitives.task import LaneRows
from tvm_attn.variant import Expr

WORD = 32


@dataclass(frozen=True)
class RowBits:
    """The bits of a row for a block: of each bitmap parameter, in registers.

    Bit ``8 n + e`` is that of the lane's column ``e`` in column tile ``n``.
    """

    words: dict[str, Any]

    def read_by(self, rows: LaneRows, n: Expr, e: Expr) -> LaneRows:
        """Return rows whose hooks read the bits of an element of column tile `n`."""
        bit = n * COLUMNS + e
        shift = tirx.Cast("uint32", tirx.floormod(bit, WORD))
        words = {name: row[tirx.floordiv(bit, WORD)] for name, row in self.words.items()}
        values = {
            name: tirx.bitwise_and(tirx.shift_right(word, shift), T.uint32(1)) != 0
            for name, word in words.items()
        }
        return replace(rows, hooks=rows.hooks.reading(values)) if values else rows

    def all_are_set(self, n: Expr, e: Expr) -> Expr:
        """Whether the bits of an element of column tile `n` are set in all bitmaps."""
        bit = n * COLUMNS + e
        word = reduce(tirx.bitwise_and, (row[tirx.floordiv(bit, WORD)] for row in self.all))
        mask = tirx.shift_left(T.uint32(1), tirx.Cast("uint32", tirx.floormod(bit, WORD)))
        return tirx.bitwise_and(word, mask) != T.uint32(0)

    @property
    def all(self) -> list[Any]:
        """The registers of every bitmap."""
        return [*self.words.values()]


def first_bit(rows: LaneRows, i: Expr, indptr: Any, key: Expr) -> Expr:
    """Place in a bitmap of the bit of row `i` and a key, counted from the first request's."""
    row = tirx.Cast("int64", rows.token(i)) * tirx.Cast("int64", rows.kv_len)
    return indptr[rows.request] * 8 + row + key


def window(low: Expr, high: Expr, shift: Expr) -> Expr:
    """Return the 32 bits from bit `shift` (0..31) on of two words."""
    both = tirx.shift_left(tirx.Cast("uint64", high), T.uint64(WORD))
    both = tirx.bitwise_or(both, tirx.Cast("uint64", low))
    return tirx.Cast("uint32", tirx.shift_right(both, tirx.Cast("uint64", shift)))


def words_per_row(cta: Cta) -> int:
    """Return the words of a row for a block."""
    return -(-int(cta.tile.block) // WORD)


def load_bits(cta: Cta, rows: LaneRows, i: int, kv0: Expr) -> RowBits:
    """Load the bits of the lane's row `i` for the block that begins with key `kv0`.

    That is for rows that have keys: else there may be no bitmap. Bits are loaded by aligned words,
    up to `READ_BEYOND` bytes past the bitmap's last one.
    """
    count = words_per_row(cta)
    raw = T.alloc_local((count + 1,), "uint32")
    words = {name: T.alloc_local((count,), "uint32") for name in cta.hooks.bitmaps()}
    for name, (bitmap, indptr) in cta.hooks.bitmaps().items():
        first = first_bit(rows, i, indptr, kv0 + cta.lane.column(0))
        begin = tirx.shift_right(first, T.int64(5)) * WORD_BYTES
        shift = tirx.Cast("uint32", tirx.bitwise_and(first, T.int64(WORD - 1)))
        for w in range(count + 1):
            T.buffer_store(raw, T.uint32(0), [w])
        with T.If(rows.first_key < rows.end_key), T.Then():
            for w in range(count + 1):
                T.evaluate(load_word(raw[w], bitmap.ptr_to([begin + w * WORD_BYTES])))
        for w in range(count):
            T.buffer_store(words[name], window(raw[w], raw[w + 1], shift), [w])
    return RowBits(words)


def keep_range(cta: Cta, bits: RowBits, first: Expr | None, last: Expr) -> None:
    """Clear the bits of keys that are not in a range, counted from the lane's first column."""
    words = bits.all[0]
    for w in range(words_per_row(cta)):
        kept = lowest_bits(last + 1 - w * WORD)
        if first is not None:
            kept = tirx.bitwise_and(kept, tirx.bitwise_not(lowest_bits(first - w * WORD)))
        T.buffer_store(words, tirx.bitwise_and(words[w], kept), [w])


def lowest_bits(count: Expr) -> Expr:
    """Return a word whose lowest bits are set, so many: none if it is less than 0, at most all."""
    inside = tirx.Cast("uint64", tirx.max(tirx.min(count, T.int32(WORD)), T.int32(0)))
    return tirx.Cast("uint32", tirx.shift_left(T.uint64(1), inside) - T.uint64(1))
