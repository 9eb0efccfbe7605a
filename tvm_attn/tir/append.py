"""Appending tokens to a paged KV cache: one row of K and one of V per token and KV head.

Every entry is checked before the first is written, and one with a negative request or position is
skipped. Elements are moved as the bits they are, so that one kernel serves every dtype of a size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.access import CacheAccess
from tvm_attn.tir.signature import dense, ints, strided
from tvm_attn.variant import Expr

NONE_WRONG = -1


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
        """Whether nothing is appended for an entry."""
        return tirx.Or(self.requests[e] < 0, self.positions[e] < 0)

    def slot(self, e: Expr) -> tuple[Expr, Expr]:
        """Page of an entry, and its place in the page."""
        return self.access.locate(self.requests[e], self.positions[e])

    def is_outside(self, e: Expr) -> Expr:
        """Whether an entry names a request, a token or a page that there is not."""
        indptr, indices = self.access.indptr, self.access.indices
        request, page_size = self.requests[e], self.access.page_size
        index = indptr[request] + tirx.floordiv(self.positions[e], page_size)
        return _any(
            request >= indptr.shape[0] - 1,
            indptr[request] < 0,
            index >= indptr[request + 1],
            index >= indices.shape[0],
            indices[index] < 0,
            tirx.Cast("int64", indices[index]) >= self.num_pages,
        )


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
        Parameters: k_new, v_new; requests, positions (int32 ``[nnz]``); kv_indices, kv_indptr; the
        outputs k, v (``[num_pages, page_size, num_kv_heads, head_dim]``) and wrong (int32 ``[1]``):
        the first entry that points outside, after which nothing is written, or -1.
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
        wrong_h: T.handle,
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
        wrong = dense(wrong_h, "wrong", (1,), "int32")
        page_size: T.let[T.int32] = T.Cast("int32", k.shape[1])
        access = T.meta_var(CacheAccess(spec, kv_indptr, kv_indices, page_size))
        entries = T.meta_var(Entries(requests, positions, access, k.shape[0]))
        wrong[0] = NONE_WRONG
        for e in T.serial(requests.shape[0]):
            if wrong[0] == NONE_WRONG:
                if T.Not(entries.is_skipped(e)):
                    if entries.is_outside(e):
                        wrong[0] = e
        if wrong[0] == NONE_WRONG:
            for e in T.parallel(requests.shape[0]):
                if T.Not(entries.is_skipped(e)):
                    at = T.meta_var(entries.slot(e))
                    for h in T.serial(k.shape[2]):
                        for d in T.vectorized(spec.head_dim_qk):
                            k[at[0], at[1], h, d] = k_new[e, h, d]
                        for d in T.vectorized(spec.dim_vo):
                            v[at[0], at[1], h, d] = v_new[e, h, d]

    return definition.with_attr("global_symbol", "append_paged_kv_cache")
