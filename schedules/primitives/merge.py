"""Merging the parts of a cut unit, by the CTA that finished the last of them."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.tir.merge import LSE, ROW_WORDS, SHARE, close_row, part_weight
from tvm_attn.tir.rows import Rows
from tvm_attn.tir.states import f32
from tvm_attn.worklist import Merge


@T.inline
def merge_row(cta, unit, outputs, first, parts, row0, place):
    """Merge the parts of a row and store it: lanes share its elements."""
    row = T.alloc_local((ROW_WORDS,), "float32")
    query = T.meta_var(unit.query(row0 + place))
    close_row(cta.hooks, outputs, query, row, first, parts, place)
    at = T.meta_var(unit.index(row0 + place))
    d: T.int32 = cta.lane.index
    while d < cta.spec.dim_vo:
        o: T.float32 = f32(0.0)
        for s in T.serial(parts):
            weight = T.meta_var(part_weight(cta.hooks, outputs, row, first + s, place))
            o = o + weight * outputs.partial_o[first + s, place, d]
        outputs.out[at[0], at[1], d] = outputs.finish(query, o * row[SHARE], row[LSE])
        d = d + WARP
    if cta.lane.index == 0:
        outputs.lse[at[0], at[1]] = row[LSE] * outputs.lse_scale


@T.inline
def merge_unit(cta, given, m):
    """Merge the parts of cut unit `m`, in slot order, and store its rows: a warp takes a row."""
    merge_items, merge_indptr = T.meta_var((given.work.merge_items, given.work.merge_indptr))
    request: T.let[T.int32] = merge_items[m, Merge.REQUEST]
    kv_head: T.let[T.int32] = merge_items[m, Merge.KV_HEAD]
    unit = T.meta_var(Rows(cta.hooks, cta.spec.group_size, given.batch, request, kv_head))
    first: T.int32 = merge_indptr[m]
    parts: T.int32 = merge_indptr[m + 1] - first
    row0: T.int32 = merge_items[m, Merge.ROW_BEGIN]
    count: T.int32 = merge_items[m, Merge.ROW_END] - row0
    place: T.int32 = cta.warp
    while place < count:
        merge_row(cta, unit, given.outputs, first, parts, row0, place)
        place = place + cta.tile.warps
