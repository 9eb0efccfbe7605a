"""Where the rows of a cache are, in 32 bits: counted in the largest unit that all strides share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.registers import held
from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr

NO_PLACE = 0xFFFFFFFF
LARGEST_UNIT = 2**20
"""Elements."""
LOWEST_BIT = r"""
__device__ __forceinline__ long long lowest_bit(long long bits) { return __ffsll(bits) - 1; }
"""
UNITS_AFTER = r"""
__device__ __forceinline__ void* units_after(void* base, unsigned units, unsigned bytes) {
  void* at;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(units), "r"(bytes), "l"(base));
  return at;
}
"""
"""In one instruction, which sums and casts of 64 bits do not become."""


def lowest_bit(bits: Expr) -> Expr:
    """Return the place of the lowest bit that is set, int64."""
    given = {"source_code": LOWEST_BIT, "return_type": "int64"}
    return T.cuda.func_call("lowest_bit", bits, **given)


def page_and_slot(token: Expr, page_size: int) -> tuple[Expr, Expr]:
    """Return which of a request's pages a token is in, and its slot there: uint32."""
    unsigned, size = tirx.Cast("uint32", token), T.uint32(page_size)
    return tirx.truncdiv(unsigned, size), tirx.truncmod(unsigned, size)


@dataclass(frozen=True)
class Places:
    """Rows of a strided cache ``[pages, ...]``; where they begin is a multiple of `unit` elements.

    The unit is the largest power of two that divides all strides: at least the 16 bytes that rows
    are aligned to, and most often a row. So 32 bits reach 64 GB in any case.

    Attributes
    ----------
    cache : Buffer
        K or V.
    page, slot, head : Expr
        Units from one to the next, uint32.
    unit : Expr
        Bytes of a unit, uint32.
    """

    cache: Any
    page: Expr
    slot: Expr
    head: Expr
    unit: Expr

    @staticmethod
    def of_cache(cache: Any, layout: str) -> Places:
        """Return the places of a cache in the layout NHD or HND."""
        strides = [
            tirx.Select(size == T.int64(1), T.int64(0), stride)
            for size, stride in zip(cache.shape[:3], cache.strides[:3], strict=True)
        ]
        bits = reduce(tirx.bitwise_or, strides, T.int64(LARGEST_UNIT))
        shift = T.Bind(lowest_bit(bits))
        page, second, third = (
            held(tirx.Cast("uint32", tirx.shift_right(stride, shift))) for stride in strides
        )
        slot, head = (third, second) if layout == "HND" else (second, third)
        unit = tirx.shift_left(T.int64(itemsize(str(cache.dtype))), shift)
        return Places(cache, page, slot, head, held(tirx.Cast("uint32", unit)))

    def of(self, page: Expr, slot: Expr, head: Expr) -> Expr:
        """Place of a token of a page and a head."""
        terms = ((page, self.page), (slot, self.slot), (head, self.head))
        a, b, c = (tirx.Cast("uint32", index) * step for index, step in terms)
        return a + b + c

    def pointer(self, place: Expr, column: Expr) -> Expr:
        """Address of an element of the row at a place."""
        base = self.cache.ptr_to([0, 0, 0, column])
        given = {"source_code": UNITS_AFTER, "return_type": "handle"}
        return T.cuda.func_call("units_after", base, place, self.unit, **given)
