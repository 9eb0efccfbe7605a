"""Where a token is: the one place that turns (request, token) into a cache element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.rows import Batch, Rows
from tvm_attn.variant import Expr


@dataclass(frozen=True)
class CacheAccess:
    """Reads K/V tokens of a request through the BSR indices.

    A paged cache is ``[num_pages, page_size, num_kv_heads, head_dim]`` (NHD) or ``[num_pages,
    num_kv_heads, page_size, head_dim]`` (HND). Ragged K/V are the same with one token per page and
    the identity as page table.

    Parameters
    ----------
    spec : AttentionSpec
        Gives layout and paging.
    indptr, indices : Buffer
        int32 BSR row pointers and page ids (`indices` is not read for ragged K/V).
    page_size : Expr
        int32 tokens per page.
    """

    spec: AttentionSpec
    indptr: Any
    indices: Any
    page_size: Expr

    @staticmethod
    def of(spec: AttentionSpec, batch: Batch, cache: Any) -> CacheAccess:
        """Access to `cache` through the batch's page table."""
        page_size = cache.shape[2 if spec.kv_layout == "HND" else 1]
        return CacheAccess(spec, batch.kv_indptr, batch.kv_indices, tirx.Cast("int32", page_size))

    def begin(self, request: Expr) -> Expr:
        """First page of a request in the page table, or its first token if K/V are ragged."""
        return self.indptr[request]

    def locate(self, request: Expr, token: Expr) -> tuple[Expr, Expr]:
        """Page and slot of a token of a request."""
        entry, slot = self.entry(request, token)
        return self.indices[entry] if self.spec.is_paged else entry, slot

    def entry(self, request: Expr, token: Expr) -> tuple[Expr, Expr]:
        """Where a token's page is in the page table, and its slot there."""
        begin = self.begin(request)
        if not self.spec.is_paged:
            return begin + token, tirx.const(0, "int32")
        index, slot = self.split(token)
        return begin + index, slot

    def split(self, token: Expr) -> tuple[Expr, Expr]:
        """Return which of the request's pages a token is in, and its slot there."""
        return tirx.truncdiv(token, self.page_size), tirx.truncmod(token, self.page_size)

    def element(self, cache: Any, unit: Rows, token: Expr) -> Callable[[Expr], Expr]:
        """Return a function from ``d`` to element ``d`` of the unit's token, as float32."""
        *place, _ = self.index(unit, token, 0)
        return lambda d: to_float(cache[(*place, d)])

    def index(self, unit: Rows, token: Expr, d: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """Index of element `d` of the unit's token in the cache."""
        return (*self.order(*self.locate(unit.request, token), unit.kv_head), d)

    def order(self, page: Expr, slot: Expr, kv_head: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the indices of a token's row in the order of the cache's axes."""
        if self.spec.kv_layout == "HND":
            return page, kv_head, slot
        return page, slot, kv_head


def to_float(value: Expr) -> Expr:
    """Widen a stored element to float32, exactly, for every storage dtype."""
    dtype = str(value.ty)
    if dtype == "float8_e4m3fn":
        return e4m3_to_float(tirx.reinterpret("int8", value))
    if dtype == "float8_e5m2":
        return e5m2_to_float(tirx.reinterpret("uint8", value))
    return value if dtype == "float32" else tirx.Cast("float32", value)


def e4m3_to_float(bits: Expr) -> Expr:
    """Decode float8 e4m3fn (OCP OFP8, section 5): no infinities, 0x7f is NaN.

    Sign, exponent and mantissa are put in a float16's places, whose subnormals convert at full
    speed, and the bias difference is multiplied in: exact for subnormals too.
    """
    spread = tirx.shift_left(tirx.Cast("int16", bits), tirx.const(7, "int16"))
    half = tirx.reinterpret("float16", tirx.bitwise_and(spread, tirx.const(-0x4080, "int16")))
    scaled = tirx.Cast("float32", half) * tirx.const(2.0**8, "float32")
    is_nan = tirx.bitwise_and(bits, tirx.const(0x7F, "int8")) == tirx.const(0x7F, "int8")
    nan = tirx.Select(is_nan, tirx.const(0x7FC00000, "int32"), tirx.const(0, "int32"))
    return tirx.reinterpret("float32", tirx.bitwise_or(tirx.reinterpret("int32", scaled), nan))


def e5m2_to_float(bits: Expr) -> Expr:
    """Decode float8 e5m2 (OCP OFP8, section 5): the upper half of a float16."""
    half = tirx.shift_left(tirx.Cast("uint16", bits), tirx.const(8, "uint16"))
    return tirx.Cast("float32", tirx.reinterpret("float16", half))
