"""Bitmaps on fragments: the bits of a lane's rows for a block of keys, in a few registers a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
class BlockBits:
    """The bits of a block: of each bitmap parameter, registers for each of a lane's rows.

    Bit ``8 n + e`` of a row is that of the lane's column ``e`` in column tile ``n``.
    """

    words: dict[str, Any]
    per_row: int

    @staticmethod
    def allocate(cta: Cta) -> BlockBits:
        """Allocate the registers, if there are bitmaps."""
        per_row = -(-cta.tile.block // WORD)
        size = per_row * cta.rows
        words = {name: T.alloc_local((size,), "uint32") for name in cta.hooks.bitmaps()}
        return BlockBits(words, per_row)

    def rows(self, rows: LaneRows, i: Expr, n: Expr, e: Expr) -> LaneRows:
        """Return rows whose hooks read the bits of row `i` and an element of column tile `n`."""
        if not self.words:
            return rows
        bit = n * COLUMNS + e
        values = {}
        for name, words in self.words.items():
            word = words[i * self.per_row + tirx.floordiv(bit, WORD)]
            shift = tirx.Cast("uint32", tirx.floormod(bit, WORD))
            values[name] = tirx.bitwise_and(tirx.shift_right(word, shift), T.uint32(1)) != 0
        return replace(rows, hooks=rows.hooks.reading(values))


def first_bit(rows: LaneRows, i: Expr, indptr: Any, key: Expr) -> Expr:
    """Place in a bitmap of the bit of row `i` and a key, counted from the first request's."""
    row = tirx.Cast("int64", rows.token(i)) * tirx.Cast("int64", rows.kv_len)
    return indptr[rows.request] * 8 + row + key


def window(low: Expr, high: Expr, shift: Expr) -> Expr:
    """Return the 32 bits from bit `shift` (0..31) on of two words."""
    both = tirx.shift_left(tirx.Cast("uint64", high), T.uint64(WORD))
    both = tirx.bitwise_or(both, tirx.Cast("uint64", low))
    return tirx.Cast("uint32", tirx.shift_right(both, tirx.Cast("uint64", shift)))


def load_bits(cta: Cta, rows: LaneRows, bits: BlockBits, kv0: Expr) -> None:
    """Load the bits of the lane's rows for the block that begins with key `kv0`.

    Bits are loaded by aligned words, of which a window may take three; words after the bitmap's
    last are not read.
    """
    count = bits.per_row
    raw = T.alloc_local((count + 1,), "uint32")
    column = tirx.Cast("uint32", cta.lane.column(0))
    for name, (bitmap, indptr) in cta.hooks.bitmaps().items():
        last = tirx.max(tirx.shift_right(bitmap.shape[0] - 1, T.int64(2)), T.int64(0))
        words = bits.words[name]
        for i in range(cta.rows):
            first = first_bit(rows, i, indptr, kv0)
            for w in range(count + 1):
                at = tirx.min(tirx.shift_right(first, T.int64(5)) + w, last)
                T.evaluate(load_word(raw[w], bitmap.ptr_to([at * WORD_BYTES])))
            shift = tirx.Cast("uint32", tirx.bitwise_and(first, T.int64(WORD - 1)))
            for w in range(count):
                value = window(raw[w], raw[w + 1], shift)
                T.buffer_store(words, value, [i * count + w])
            for w in range(count - 1):
                value = window(words[i * count + w], words[i * count + w + 1], column)
                T.buffer_store(words, value, [i * count + w])
            top = i * count + count - 1
            T.buffer_store(words, tirx.shift_right(words[top], column), [top])
