"""Merging attention states that are tensors: rows ``v [..., head_dim]`` and their ``s [...]``.

A state is (v, s) with a base 2 log-sum-exp; ``(0, -inf)`` is the identity. The algebra is that of
`OnlineSoftmax`: parts of a row are to a merge what keys are to attention. Sums run over the parts
in their order, in float32.

Rows are worked on in tiles. In place, every ``s`` of a tile is read before one of it is written, so
that several threads can share a row. Sblocks name what they write where a schedule chooses the
memory that it lies in.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.tir.access import to_float
from tvm_attn.tir.elements import copy, row_of
from tvm_attn.tir.signature import dense, strided
from tvm_attn.tir.states import OnlineSoftmax, f32

STATE = OnlineSoftmax()
PEAK, TOTAL, WEIGHT = range(3)


@T.inline
def clear(row, o, dim):
    """Start the sum of a row whose peak is known."""
    with T.sblock("start"):
        T.reads()
        T.writes(row[0:3])
        row[TOTAL] = f32(0.0)
    for d in T.serial(dim):
        with T.sblock("clear"):
            vd = T.axis.remap("S", [d])
            T.reads()
            T.writes(o[vd])
            o[vd] = f32(0.0)


@T.inline
def add(row, o, stored, part, lse, dim):
    """Add a part with its weight; `stored` holds its elements as they are stored.

    Those of a part that weighs nothing count as 0, whatever they are.
    """
    row[WEIGHT] = STATE.weight(lse, STATE.reference(row[PEAK]))
    row[TOTAL] = row[TOTAL] + row[WEIGHT]
    copy(stored, part, dim)
    for d in T.serial(dim):
        with T.sblock("add"):
            vd = T.axis.remap("S", [d])
            T.reads()
            T.writes()
            is_dead = T.meta_var(row[WEIGHT] == f32(0.0))
            x = T.meta_var(tirx.Select(is_dead, f32(0.0), to_float(stored[vd])))
            o[vd] = o[vd] + row[WEIGHT] * x


@T.inline
def store(row, o, stored, v, s, n, dim):
    """Close the row's state and store it in `v`, and as element `n` of `s`."""
    row[WEIGHT] = STATE.inverse(row[TOTAL])
    for d in T.serial(dim):
        with T.sblock("close"):
            vd = T.axis.remap("S", [d])
            T.reads()
            T.writes(stored[vd])
            stored[vd] = tirx.Cast(str(v.dtype), o[vd] * row[WEIGHT])
    copy(v, stored, dim)
    with T.sblock("store_lse"):
        T.reads()
        T.writes()
        s[n] = STATE.lse(STATE.reference(row[PEAK]), row[TOTAL])


@T.inline
def load_lse(lse, s_a, s_b, row0, rows):
    """Load the log-sum-exps of a tile of rows; past the last row, its."""
    for r in T.serial(rows):
        with T.sblock("load_lse"):
            vr = T.axis.remap("S", [r])
            T.reads()
            T.writes(lse[0:2, vr])
            n: T.let[T.int64] = T.min(row0 + vr, s_a.shape[0] - 1)
            lse[0, vr] = s_a[n]
            lse[1, vr] = s_b[n]


@T.inline
def merge_pair(v_a, v_b, lse, r, v, s, n, i, h, dim):
    """Merge row n, which is (i, h), of two states into v and s, which may be one of them."""
    o = T.sblock_alloc_buffer((dim,), "float32")
    stored = T.sblock_alloc_buffer((dim,), str(v.dtype))
    row = T.sblock_alloc_buffer((3,), "float32")
    row[PEAK] = STATE.peak(lse[0, r], lse[1, r])
    clear(row, o, dim)
    a = row_of(v_a, i, h)
    add(row, o, stored, a, lse[0, r], dim)
    b = row_of(v_b, i, h)
    add(row, o, stored, b, lse[1, r], dim)
    out = row_of(v, i, h)
    store(row, o, stored, out, s, n, dim)


@T.inline
def merge_rows(a, b, out, dim, rows, changes):
    """Merge two states ``(v, s)`` into a third, which may be one of them, where ``changes(i)``."""
    v, s = T.meta_var(out)
    for t in T.serial(T.ceildiv(s.shape[0], rows)):
        with T.sblock("tile"):
            vt = T.axis.spatial(T.ceildiv(s.shape[0], rows), t)
            T.reads()
            T.writes()
            lse = T.sblock_alloc_buffer((2, rows), "float32")
            row0: T.let[T.int64] = vt * rows
            load_lse(lse, a[1], b[1], row0, rows)
            for r in T.serial(rows):
                with T.sblock("row"):
                    vr = T.axis.remap("S", [r])
                    T.reads()
                    T.writes()
                    n: T.let[T.int64] = row0 + vr
                    i: T.let[T.int64] = tirx.truncdiv(n, v.shape[1])
                    h: T.let[T.int64] = tirx.truncmod(n, v.shape[1])
                    if n < s.shape[0]:
                        if changes(i):
                            merge_pair(a[0], b[0], lse, vr, v, s, n, i, h, dim)


def merge_state(dtype: str, dim: int, rows: int) -> tirx.PrimFunc:
    """Define the merge of two states into a third: v_a, s_a, v_b, s_b, and the results v, s.

    Parameters
    ----------
    dtype : str
        Of ``v [n, num_heads, dim]``; ``s [n * num_heads]`` is float32.
    dim : int
        Head dim.
    rows : int
        Rows of a tile.
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
        s_a = dense(s_a_h, "s_a", (None,), "float32")
        v_b = strided(v_b_h, "v_b", (None, None, dim), dtype)
        s_b = dense(s_b_h, "s_b", (None,), "float32")
        v = strided(v_h, "v", (None, None, dim), dtype)
        s = dense(s_h, "s", (None,), "float32")
        merge_rows((v_a, s_a), (v_b, s_b), (v, s), dim, rows, lambda i: True)

    return definition.with_attr("global_symbol", "merge_state")


def merge_state_in_place(dtype: str, dim: int, rows: int) -> tirx.PrimFunc:
    """Define the merge of a state into another: v, s, v_other, s_other, and the rows to change.

    Parameters
    ----------
    dtype, dim, rows
        As for `merge_state`; the mask is bool ``[n]``, or empty: then all rows change.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(
        v_h: T.handle, s_h: T.handle, v_other_h: T.handle, s_other_h: T.handle, mask_h: T.handle
    ):
        v = strided(v_h, "v", (None, None, dim), dtype)
        s = dense(s_h, "s", (None,), "float32")
        v_other = strided(v_other_h, "v_other", (None, None, dim), dtype)
        s_other = dense(s_other_h, "s_other", (None,), "float32")
        mask = dense(mask_h, "mask", (None,), "bool")
        changes = T.meta_var(lambda i: T.if_then_else(mask.shape[0] == 0, True, mask[i]))
        merge_rows((v, s), (v_other, s_other), (v, s), dim, rows, changes)

    return definition.with_attr("global_symbol", "merge_state_in_place")


def merge_states(dtype: str, dim: int, rows: int) -> tirx.PrimFunc:
    """Define the merge of any number of states of each row: v, s, and the results v_out, s_out.

    Parameters
    ----------
    dtype : str
        Of ``v [n, num_states, num_heads, dim]``; ``s [n, num_states, num_heads]`` is float32, and
        ``s_out`` is ``[n * num_heads]``.
    dim, rows
        As for `merge_state`.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(v_h: T.handle, s_h: T.handle, v_out_h: T.handle, s_out_h: T.handle):
        v = strided(v_h, "v", (None, None, None, dim), dtype)
        s = dense(s_h, "s", (None, None, None), "float32")
        v_out = strided(v_out_h, "v_out", (None, None, dim), dtype)
        s_out = dense(s_out_h, "s_out", (None,), "float32")
        for t in T.serial(T.ceildiv(s_out.shape[0], rows)):
            with T.sblock("tile"):
                vt = T.axis.spatial(T.ceildiv(s_out.shape[0], rows), t)
                T.reads()
                T.writes()
                for r in T.serial(rows):
                    with T.sblock("row"):
                        vr = T.axis.remap("S", [r])
                        T.reads()
                        T.writes()
                        n: T.let[T.int64] = vt * rows + vr
                        i: T.let[T.int64] = tirx.truncdiv(n, v_out.shape[1])
                        h: T.let[T.int64] = tirx.truncmod(n, v_out.shape[1])
                        if n < s_out.shape[0]:
                            merge_parts(v, s, v_out, s_out, n, i, h, dim)

    return definition.with_attr("global_symbol", "merge_states")


@T.inline
def merge_parts(v, s, v_out, s_out, n, i, h, dim):
    """Merge all parts of row n, which is (i, h), into v_out and s_out."""
    o = T.sblock_alloc_buffer((dim,), "float32")
    stored = T.sblock_alloc_buffer((dim,), str(v.dtype))
    row = T.sblock_alloc_buffer((3,), "float32")
    row[PEAK] = f32(STATE.hidden)
    for p in T.serial(v.shape[1]):
        row[PEAK] = STATE.peak(row[PEAK], s[i, p, h])
    clear(row, o, dim)
    for p in T.serial(v.shape[1]):
        part = row_of(v, i, p, h)
        add(row, o, stored, part, s[i, p, h], dim)
    out = row_of(v_out, i, h)
    store(row, o, stored, out, s_out, n, dim)
