"""Appending tokens to a paged KV cache: one row of K and one of V per token and KV head.

An entry with a negative request or position is skipped, and so is one that points outside of the
page table or the cache. Where the host can look at entries, it looks for such before the first is
written. Elements are moved as the bits they are, so that one kernel serves every dtype of a size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.access import CacheAccess
from tvm_attn.tir.elements import copy, row_of
from tvm_attn.tir.signature import dense, ints, strided
from tvm_attn.variant import Expr

NONE_OUTSIDE = -1


@dataclass(frozen=True)
class Entries:
    """The tokens to append, and where the page table puts them.

    ``requests``, ``positions`` are int32 ``[nnz]``; `access` locates a token of a request, in a
    cache of `num_pages` pages.
    """

    requests: Any
    positions: Any
    access: CacheAccess
    num_pages: Expr

    def is_skipped(self, e: Expr) -> Expr:
        """Whether nothing is meant to be appended for an entry."""
        return tirx.Or(self.requests[e] < 0, self.positions[e] < 0)

    def slot(self, e: Expr) -> tuple[Expr, Expr]:
        """Page of an entry, and its place in the page."""
        return self.access.locate(self.requests[e], self.positions[e])

    def is_outside(self, e: Expr) -> Expr:
        """Whether an entry that is not skipped names a request, token or page that there is not."""
        indptr, indices = self.access.indptr, self.access.indices
        request, page = self.requests[e], tirx.truncdiv(self.positions[e], self.access.page_size)
        index = _wide(indptr[request]) + _wide(page)
        return _any(
            _wide(request) >= _wide(indptr.shape[0]) - 1,
            indptr[request] < 0,
            index >= _wide(indptr[request + 1]),
            index >= _wide(indices.shape[0]),
            indices[index] < 0,
            _wide(indices[index]) >= self.num_pages,
        )


def _wide(value: Expr) -> Expr:
    """Widen an integer, so that a sum cannot pass its end: not even the largest int32 is inside."""
    return tirx.Cast("int64", value)


def _any(*conditions: Expr) -> Expr:
    """Whether one of the conditions holds; those after it are not evaluated."""
    result = tirx.const(False, "bool")
    for condition in reversed(conditions):
        result = tirx.if_then_else(condition, tirx.const(True, "bool"), result)
    return result


def append(spec: AttentionSpec, storage: str) -> tirx.PrimFunc:
    """Define the append of ``k_new, v_new [nnz, num_kv_heads, head_dim]`` to a paged cache.

    Parameters
    ----------
    spec : AttentionSpec
        Head dims; the layout is NHD (a view of an HND cache is one).
    storage : str
        Unsigned integer of the size of the cache's dtype, such as ``"uint16"``.

    Returns
    -------
    tvm.tirx.PrimFunc
        Parameters: k_new, v_new; requests, positions (int32 ``[nnz]``); kv_indices, kv_indptr; and
        the outputs k, v (``[num_pages, page_size, num_kv_heads, head_dim]``).
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(
        k_new_h: T.handle,
        v_new_h: T.handle,
        requests_h: T.handle,
        positions_h: T.handle,
        kv_indices_h: T.handle,
        kv_indptr_h: T.handle,
        k_h: T.handle,
        v_h: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        k_new = strided(k_new_h, "k_new", (None, None, spec.head_dim_qk), storage)
        v_new = strided(v_new_h, "v_new", (None, None, spec.dim_vo), storage)
        requests = ints(requests_h, "requests")
        positions = ints(positions_h, "positions")
        kv_indices = ints(kv_indices_h, "kv_indices")
        kv_indptr = ints(kv_indptr_h, "kv_indptr")
        k = strided(k_h, "k", (None, None, None, spec.head_dim_qk), storage)
        v = strided(v_h, "v", (None, None, None, spec.dim_vo), storage)
        page_size: T.let[T.int32] = T.Cast("int32", k.shape[1])
        access = T.meta_var(CacheAccess(spec, kv_indptr, kv_indices, page_size))
        entries = T.meta_var(Entries(requests, positions, access, k.shape[0]))
        for e in T.serial(requests.shape[0]):
            with T.sblock("tile"):
                ve = T.axis.spatial(requests.shape[0], e)
                T.reads()
                T.writes()
                if T.Not(entries.is_skipped(ve)):
                    if T.Not(entries.is_outside(ve)):
                        at = T.meta_var(entries.slot(ve))
                        for h in T.serial(k.shape[2]):
                            with T.sblock("row"):
                                vh = T.axis.spatial(k.shape[2], h)
                                T.reads()
                                T.writes()
                                k_from = row_of(k_new, ve, vh)
                                k_to = row_of(k, at[0], at[1], vh)
                                copy(k_to, k_from, spec.head_dim_qk)
                                v_from = row_of(v_new, ve, vh)
                                v_to = row_of(v, at[0], at[1], vh)
                                copy(v_to, v_from, spec.dim_vo)

    return definition.with_attr("global_symbol", "append_paged_kv_cache")


def find_outside(spec: AttentionSpec) -> tirx.PrimFunc:
    """Define the search for the first entry that points outside.

    Parameters
    ----------
    spec : AttentionSpec
        As for `append`.

    Returns
    -------
    tvm.tirx.PrimFunc
        Parameters: requests, positions; kv_indices, kv_indptr; num_pages, page_size; and the output
        found (int32 ``[1]``), the entry or -1.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(
        requests_h: T.handle,
        positions_h: T.handle,
        kv_indices_h: T.handle,
        kv_indptr_h: T.handle,
        num_pages: T.int64,
        page_size: T.int32,
        found_h: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        requests = ints(requests_h, "requests")
        positions = ints(positions_h, "positions")
        kv_indices = ints(kv_indices_h, "kv_indices")
        kv_indptr = ints(kv_indptr_h, "kv_indptr")
        found = dense(found_h, "found", (1,), "int32")
        access = T.meta_var(CacheAccess(spec, kv_indptr, kv_indices, page_size))
        entries = T.meta_var(Entries(requests, positions, access, num_pages))
        with T.sblock("root"):
            T.reads()
            T.writes()
            found[0] = NONE_OUTSIDE
            for e in T.serial(requests.shape[0]):
                if found[0] == NONE_OUTSIDE:
                    if T.Not(entries.is_skipped(e)):
                        if entries.is_outside(e):
                            found[0] = e

    return definition.with_attr("global_symbol", "find_outside")
