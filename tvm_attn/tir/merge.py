"""Merging attention states: parts of a row are to a merge what keys are to attention.

A state is (o, lse) with a base 2 log-sum-exp; ``(0, -inf)`` is the identity. The sum runs over
parts in their order, so that the same parts give the same bits.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.tir.rows import Rows
from tvm_attn.tir.states import f32
from tvm_attn.worklist import Merge


@T.inline
def merge_unit(hooks, given, group_size, dim_vo, m):
    """Merge the parts of cut unit `m`, in slot order, and store its rows."""
    state, outputs = T.meta_var((hooks.accumulation, given.outputs))
    merge_items, merge_indptr = T.meta_var((given.work.merge_items, given.work.merge_indptr))
    request: T.let[T.int32] = merge_items[m, Merge.REQUEST]
    kv_head: T.let[T.int32] = merge_items[m, Merge.KV_HEAD]
    unit = T.meta_var(Rows(hooks, group_size, given.batch, request, kv_head))
    row0: T.let[T.int32] = merge_items[m, Merge.ROW_BEGIN]
    first: T.let[T.int32] = merge_indptr[m]
    parts: T.let[T.int32] = merge_indptr[m + 1] - first
    o = T.sblock_alloc_buffer((dim_vo,), "float32")
    row = T.sblock_alloc_buffer((5,), "float32")
    peak, total, lse, share, w = T.meta_var(range(5))
    for i in T.serial(merge_items[m, Merge.ROW_END] - row0):
        row[peak] = f32(state.hidden)
        row[total] = f32(0.0)
        for d in T.serial(dim_vo):
            o[d] = f32(0.0)
        for s in T.serial(parts):
            row[peak] = state.peak(row[peak], outputs.partial_lse[first + s, i])
        for s in T.serial(parts):
            row[w] = state.weight(outputs.partial_lse[first + s, i], state.reference(row[peak]))
            row[total] = row[total] + row[w]
            for d in T.serial(dim_vo):
                o[d] = o[d] + row[w] * outputs.partial_o[first + s, i, d]
        row[w] = state.lse(state.reference(row[peak]), row[total])
        row[lse] = hooks.seeded(unit.query(row0 + i), row[w])
        row[share] = hooks.share(unit.query(row0 + i), row[w]) * state.inverse(row[total])
        at = T.meta_var(unit.index(row0 + i))
        for d in T.serial(dim_vo):
            outputs.out[at[0], at[1], d] = outputs.finish(
                unit.query(row0 + i), o[d] * row[share], row[lse]
            )
        outputs.lse[at[0], at[1]] = row[lse] * outputs.lse_scale
