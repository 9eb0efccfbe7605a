"""What bitmaps say of a unit: which blocks of keys they hide from all of its rows, and which not.

The planner looks, so that kernels need not: keys are granules (blocks) here. A unit's KV range is
cut to the granules in which a row sees a key, and the longest run of granules that all rows see is
noted, where kernels leave the mask out. Holes in between are for kernels to mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.planner_ints import as_bit, assign, var, wide
from tvm_attn.tir.visibility import clear_bits_hide
from tvm_attn.worklist import MAX_SEEN, SEEN_BITS

WORD = 64
LOW_BITS = T.int64(WORD - 1)
ALL_SET = tirx.max_value("uint64")


@dataclass(frozen=True)
class Bitmaps:
    """Bitmaps of a mask: their bits as 64-bit words, and the byte where each request begins.

    Parameters
    ----------
    hiding : sequence of (Buffer, Buffer)
        Those whose clear bits hide keys.
    all : sequence of (Buffer, Buffer)
        All: where their bits are set, the rest of the mask decides alone.
    """

    hiding: Sequence[tuple[Any, Any]]
    all: Sequence[tuple[Any, Any]]

    @staticmethod
    def of(hooks: Hooks) -> Bitmaps | None:
        """Return those of a variant's mask, if it has any."""
        given = hooks.bitmaps()
        if not given or hooks.variant.mask is None:
            return None
        return Bitmaps([given[n] for n in given if clear_bits_hide(hooks, n)], [*given.values()])


def word_at(bitmap: tuple[Any, Any], request: Any, bit: Any) -> Any:
    """Return 64 bits of a request's bitmap, from a bit on."""
    bits, indptr = bitmap
    words = T.decl_buffer((bits.shape[0],), "uint64", data=bits.data)
    place = indptr[request] * T.int64(8) + bit
    index, shift = T.shift_right(place, T.int64(6)), T.bitwise_and(place, LOW_BITS)
    low = T.shift_right(words[index], T.cast(shift, "uint64"))
    high = T.shift_left(words[index + T.int64(1)], T.cast(LOW_BITS - shift, "uint64"))
    return T.bitwise_or(low, T.shift_left(high, T.uint64(1)))


def words_at(bitmaps: Sequence[tuple[Any, Any]], request: Any, bit: Any) -> Any:
    """Return 64 bits that are set where they are in all of some bitmaps."""
    return reduce(T.bitwise_and, (word_at(b, request, bit) for b in bitmaps), ALL_SET)


@T.inline
def look_at_granule(bitmaps, request, tokens, kv_len, keys, sees_some, sees_all):
    """Find whether any of some query tokens sees any of some keys, and whether all see all.

    It is looked no further once that is known.
    """
    token = var(tokens[0])
    sees_some = 0
    sees_all = 1
    while T.And(token < tokens[1], T.Or(sees_some == 0, sees_all == 1)):
        key = var(keys[0])
        while T.And(key < keys[1], T.Or(sees_some == 0, sees_all == 1)):
            bit = var(wide(token) * wide(kv_len) + wide(key))
            left = var(wide(T.min(keys[1] - key, WORD)))
            there = var(T.shift_right(ALL_SET, T.cast(T.int64(WORD) - left, "uint64")))
            some = T.meta_var(words_at(bitmaps.hiding, request, bit))
            every = T.meta_var(words_at(bitmaps.all, request, bit))
            hits = var(as_bit(T.bitwise_and(some, there) != T.uint64(0)))
            fills = var(as_bit(T.bitwise_and(every, there) == there))
            sees_some = T.bitwise_or(sees_some, hits)
            sees_all = T.bitwise_and(sees_all, fills)
            key = key + WORD
        token = token + 1


@T.inline
def survey(bitmaps, machine, request, tokens, kv_len, begin, end, seen):
    """Cut the range of keys that a unit's tokens see, and note which of its granules all see."""
    size = T.meta_var(machine.granule.value)
    sees_some = var(0)
    sees_all = var(0)
    first = var(end)
    last = var(begin)
    run = var(0)
    longest = var(0)
    assign(seen, 0)
    for granule in T.serial(machine.granule.div(begin), machine.granule.ceil_div(end)):
        keys = T.meta_var((granule * size, T.min(granule * size + size, kv_len)))
        look_at_granule(bitmaps, request, tokens, kv_len, keys, sees_some, sees_all)
        if sees_some != 0:
            first = T.min(first, granule * size)
            last = granule * size + size
        run = (run + 1) * sees_all
        if T.And(run > longest, granule < MAX_SEEN):
            longest = run
            past = var(granule + 1)
            assign(seen, T.bitwise_or(past - run, T.shift_left(past, SEEN_BITS)))
    begin = T.max(begin, first)
    end = T.min(end, last)
