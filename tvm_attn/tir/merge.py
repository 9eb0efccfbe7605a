"""Merging attention states: parts of a row are to a merge what keys are to attention.

A state is (o, lse) with a base 2 log-sum-exp; ``(0, -inf)`` is the identity. The sum runs over
parts in their order, so that the same parts give the same bits.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.outputs import Outputs
from tvm_attn.tir.rows import Rows
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr
from tvm_attn.worklist import Merge

PEAK, TOTAL, LSE, SHARE, WEIGHT = range(5)
"""What is kept of a row: its parts' peak and total, its log-sum-exp, the factor of its output, and
the weight of the part at hand."""
ROW_WORDS = 5


def part_weight(hooks: Hooks, outputs: Outputs, row: Any, slot: Expr, place: Expr) -> Expr:
    """Weight of the part in a slot, of a row whose peak is known."""
    state = hooks.accumulation
    return state.weight(outputs.partial_lse[slot, place], state.reference(row[PEAK]))


@T.inline
def close_row(hooks, outputs, query, row, first, parts, place):
    """Find what the parts of a row, from slot `first` on, come to; `query` is its context."""
    state = T.meta_var(hooks.accumulation)
    row[PEAK] = f32(state.hidden)
    row[TOTAL] = f32(0.0)
    for s in T.serial(parts):
        row[PEAK] = state.peak(row[PEAK], outputs.partial_lse[first + s, place])
    for s in T.serial(parts):
        row[TOTAL] = row[TOTAL] + part_weight(hooks, outputs, row, first + s, place)
    row[LSE] = state.lse(state.reference(row[PEAK]), row[TOTAL])
    row[SHARE] = hooks.share(query, row[LSE]) * state.inverse(row[TOTAL])
    row[LSE] = hooks.seeded(query, row[LSE])


@T.inline
def merge_unit(hooks, given, group_size, dim_vo, m):
    """Merge the parts of cut unit `m`, in slot order, and store its rows."""
    outputs = T.meta_var(given.outputs)
    merge_items, merge_indptr = T.meta_var((given.work.merge_items, given.work.merge_indptr))
    request: T.let[T.int32] = merge_items[m, Merge.REQUEST]
    kv_head: T.let[T.int32] = merge_items[m, Merge.KV_HEAD]
    unit = T.meta_var(Rows(hooks, group_size, given.batch, request, kv_head))
    row0: T.let[T.int32] = merge_items[m, Merge.ROW_BEGIN]
    first: T.let[T.int32] = merge_indptr[m]
    parts: T.let[T.int32] = merge_indptr[m + 1] - first
    o = T.sblock_alloc_buffer((dim_vo,), "float32")
    row = T.sblock_alloc_buffer((ROW_WORDS,), "float32")
    for i in T.serial(merge_items[m, Merge.ROW_END] - row0):
        query = T.meta_var(unit.query(row0 + i))
        close_row(hooks, outputs, query, row, first, parts, i)
        for d in T.serial(dim_vo):
            o[d] = f32(0.0)
        for s in T.serial(parts):
            row[WEIGHT] = part_weight(hooks, outputs, row, first + s, i)
            for d in T.serial(dim_vo):
                o[d] = o[d] + row[WEIGHT] * outputs.partial_o[first + s, i, d]
        at = T.meta_var(unit.index(row0 + i))
        for d in T.serial(dim_vo):
            outputs.out[at[0], at[1], d] = outputs.finish(query, o[d] * row[SHARE], row[LSE])
        outputs.lse[at[0], at[1]] = row[LSE] * outputs.lse_scale
