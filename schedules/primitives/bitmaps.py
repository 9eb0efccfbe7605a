"""Bitmaps on fragments: the bits of a lane's rows for a block of keys, in two registers a row."""

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
WORDS = 2
"""Registers of a row: a block has at most 64 keys."""


@dataclass(frozen=True)
class BlockBits:
    """The bits of a block: of each bitmap parameter, `WORDS` registers for each of a lane's rows.

    Bit ``8 n + e`` of a row is that of the lane's column ``e`` in column tile ``n``.
    """

    words: dict[str, Any]

    @staticmethod
    def allocate(cta: Cta) -> BlockBits:
        """Allocate the registers, if there are bitmaps."""
        size = WORDS * cta.rows
        return BlockBits({name: T.alloc_local((size,), "uint32") for name in cta.hooks.bitmaps()})

    def rows(self, rows: LaneRows, i: Expr, n: Expr, e: Expr) -> LaneRows:
        """Return rows whose hooks read the bits of row `i` and an element of column tile `n`."""
        if not self.words:
            return rows
        bit = n * COLUMNS + e
        values = {}
        for name, words in self.words.items():
            word = words[i * WORDS + tirx.floordiv(bit, WORD)]
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
    raw = T.alloc_local((WORDS + 1,), "uint32")
    column = tirx.Cast("uint32", cta.lane.column(0))
    for name, (bitmap, indptr) in cta.hooks.bitmaps().items():
        last = tirx.max(tirx.shift_right(bitmap.shape[0] - 1, T.int64(2)), T.int64(0))
        words = bits.words[name]
        for i in range(cta.rows):
            first = first_bit(rows, i, indptr, kv0)
            for w in range(WORDS + 1):
                at = tirx.min(tirx.shift_right(first, T.int64(5)) + w, last)
                T.evaluate(load_word(raw[w], bitmap.ptr_to([at * WORD_BYTES])))
            shift = tirx.Cast("uint32", tirx.bitwise_and(first, T.int64(WORD - 1)))
            for w in range(WORDS):
                value = window(raw[w], raw[w + 1], shift)
                T.buffer_store(words, value, [i * WORDS + w])
            low = window(words[i * WORDS], words[i * WORDS + 1], column)
            T.buffer_store(words, low, [i * WORDS])
            high = tirx.shift_right(words[i * WORDS + 1], column)
            T.buffer_store(words, high, [i * WORDS + 1])
