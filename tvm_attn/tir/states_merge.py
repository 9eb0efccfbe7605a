"""Merging attention states that are tensors: rows ``v [..., head_dim]`` and their ``s [...]``.

A state is (v, s) with a base 2 log-sum-exp; ``(0, -inf)`` is the identity. The algebra is that of
`OnlineSoftmax`: parts of a row are to a merge what keys are to attention. Sums run over the parts
in their order, in float32.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.tir.access import to_float
from tvm_attn.tir.signature import dense, strided
from tvm_attn.tir.states import OnlineSoftmax, f32

PEAK, TOTAL, WEIGHT = range(3)


@T.inline
def merge_row(parts, lse, value, v, s, i, h, dim):
    """Merge parts ``p`` of (``value(p, d)``, ``lse(p)``) into row (i, h) of v and s."""
    state = T.meta_var(OnlineSoftmax())
    o = T.sblock_alloc_buffer((dim,), "float32")
    row = T.sblock_alloc_buffer((3,), "float32")
    row[PEAK] = f32(state.hidden)
    for p in T.serial(parts):
        row[PEAK] = state.peak(row[PEAK], lse(p))
    row[TOTAL] = f32(0.0)
    for d in T.vectorized(dim):
        o[d] = f32(0.0)
    for p in T.serial(parts):
        row[WEIGHT] = state.weight(lse(p), state.reference(row[PEAK]))
        row[TOTAL] = row[TOTAL] + row[WEIGHT]
        for d in T.vectorized(dim):
            o[d] = o[d] + row[WEIGHT] * to_float(value(p, d))
    row[WEIGHT] = state.inverse(row[TOTAL])
    for d in T.vectorized(dim):
        v[i, h, d] = tirx.Cast(str(v.dtype), o[d] * row[WEIGHT])
    s[i, h] = state.lse(state.reference(row[PEAK]), row[TOTAL])


@T.inline
def merge_pair(v_a, s_a, v_b, s_b, v, s, i, h, dim):
    """Merge row (i, h) of two states into v and s, which may be one of them."""
    merge_row(
        2,
        lambda p: tirx.Select(p == 0, s_a[i, h], s_b[i, h]),
        lambda p, d: tirx.Select(p == 0, v_a[i, h, d], v_b[i, h, d]),
        v,
        s,
        i,
        h,
        dim,
    )


def merge_state(dtype: str, dim: int) -> tirx.PrimFunc:
    """Define the merge of two states into a third: v_a, s_a, v_b, s_b, and the results v, s.

    Parameters
    ----------
    dtype : str
        Of ``v [n, num_heads, dim]``; ``s [n, num_heads]`` is float32.
    dim : int
        Head dim.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(
        v_a_h: T.handle,
        s_a_h: T.handle,
        v_b_h: T.handle,
        s_b_h: T.handle,
        v_h: T.handle,
        s_h: T.handle,
    ):
        v_a = strided(v_a_h, "v_a", (None, None, dim), dtype)
        s_a = dense(s_a_h, "s_a", (None, None), "float32")
        v_b = strided(v_b_h, "v_b", (None, None, dim), dtype)
        s_b = dense(s_b_h, "s_b", (None, None), "float32")
        v = strided(v_h, "v", (None, None, dim), dtype)
        s = dense(s_h, "s", (None, None), "float32")
        for r in T.parallel(v.shape[0] * v.shape[1]):
            with T.sblock("merge"):
                vr = T.axis.spatial(v.shape[0] * v.shape[1], r)
                T.reads()
                T.writes()
                i: T.let[T.int64] = vr // v.shape[1]
                h: T.let[T.int64] = vr % v.shape[1]
                merge_pair(v_a, s_a, v_b, s_b, v, s, i, h, dim)

    return definition.with_attr("global_symbol", "merge_state")


def merge_state_in_place(dtype: str, dim: int) -> tirx.PrimFunc:
    """Define the merge of a state into another: v, s, v_other, s_other, and the rows to change.

    Parameters
    ----------
    dtype, dim
        As for `merge_state`; the mask is bool ``[n]``.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(
        v_h: T.handle, s_h: T.handle, v_other_h: T.handle, s_other_h: T.handle, mask_h: T.handle
    ):
        v = strided(v_h, "v", (None, None, dim), dtype)
        s = dense(s_h, "s", (None, None), "float32")
        v_other = strided(v_other_h, "v_other", (None, None, dim), dtype)
        s_other = dense(s_other_h, "s_other", (None, None), "float32")
        mask = dense(mask_h, "mask", (None,), "bool")
        for r in T.parallel(v.shape[0] * v.shape[1]):
            with T.sblock("merge"):
                vr = T.axis.spatial(v.shape[0] * v.shape[1], r)
                T.reads()
                T.writes()
                i: T.let[T.int64] = vr // v.shape[1]
                h: T.let[T.int64] = vr % v.shape[1]
                if mask[i]:
                    merge_pair(v, s, v_other, s_other, v, s, i, h, dim)

    return definition.with_attr("global_symbol", "merge_state_in_place")


def merge_states(dtype: str, dim: int) -> tirx.PrimFunc:
    """Define the merge of any number of states of each row: v, s, and the results v_out, s_out.

    Parameters
    ----------
    dtype : str
        Of ``v [n, num_states, num_heads, dim]``; ``s [n, num_states, num_heads]`` is float32.
    dim : int
        Head dim.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(v_h: T.handle, s_h: T.handle, v_out_h: T.handle, s_out_h: T.handle):
        v = strided(v_h, "v", (None, None, None, dim), dtype)
        s = dense(s_h, "s", (None, None, None), "float32")
        v_out = strided(v_out_h, "v_out", (None, None, dim), dtype)
        s_out = dense(s_out_h, "s_out", (None, None), "float32")
        for r in T.parallel(v_out.shape[0] * v_out.shape[1]):
            with T.sblock("merge"):
                vr = T.axis.spatial(v_out.shape[0] * v_out.shape[1], r)
                T.reads()
                T.writes()
                i: T.let[T.int64] = vr // v_out.shape[1]
                h: T.let[T.int64] = vr % v_out.shape[1]
                merge_row(
                    v.shape[1],
                    lambda p: s[i, p, h],
                    lambda p, d: v[i, p, h, d],
                    v_out,
                    s_out,
                    i,
                    h,
                    dim,
                )

    return definition.with_attr("global_symbol", "merge_states")
