"""Merging the parts of a cut unit, by the CTA that finished the last of them."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import load_run
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.tir.merge import LSE, ROW_WORDS, WEIGHT, Parts, close_rows
from tvm_attn.tir.rows import Rows
from tvm_attn.tir.states import f32
from tvm_attn.worklist import Merge

ROWS = 4
"""Rows that a warp merges side by side: what it waits for is mostly loads."""
RUN = 4
"""Neighbouring elements of a lane: 16 bytes."""


@T.inline
def merge_elements(cta, parts, d, end):
    """Merge a run of elements, from `d` on, of some rows; only those before place `end` are."""
    o = T.alloc_local((ROWS * RUN,), "float32")
    run = T.alloc_local((ROWS * RUN,), "float32")
    for i in T.unroll(ROWS * RUN):
        o[i] = f32(0.0)
    for s in T.serial(parts.count):
        for i in T.unroll(ROWS):
            parts.words[i, WEIGHT] = parts.weight(i, s)
            load_run(run, i * RUN, parts.pointer(i, s, d))
        for i in T.unroll(ROWS):
            for e in T.unroll(RUN):
                o[i * RUN + e] = o[i * RUN + e] + parts.words[i, WEIGHT] * run[i * RUN + e]
    for i in T.unroll(ROWS):
        if parts.place(i) < end:
            at = T.meta_var(parts.index(i))
            for e in T.unroll(RUN):
                parts.outputs.out[at[0], at[1], d + e] = parts.finish(i, o[i * RUN + e])


@T.inline
def merge_unit(cta, given, m):
    """Merge the parts of cut unit `m`, in slot order, and store its rows: warps share them."""
    outputs = T.meta_var(given.outputs)
    merge_items, merge_indptr = T.meta_var((given.work.merge_items, given.work.merge_indptr))
    request: T.let[T.int32] = merge_items[m, Merge.REQUEST]
    kv_head: T.let[T.int32] = merge_items[m, Merge.KV_HEAD]
    unit = T.meta_var(Rows(cta.hooks, cta.spec.group_size, given.batch, request, kv_head))
    first: T.int32 = merge_indptr[m]
    count: T.int32 = merge_indptr[m + 1] - first
    row0: T.int32 = merge_items[m, Merge.ROW_BEGIN]
    end: T.int32 = merge_items[m, Merge.ROW_END] - row0
    words = T.alloc_local((ROWS, ROW_WORDS), "float32")
    place0: T.int32 = cta.warp * ROWS
    while place0 < end:
        place = T.meta_var(lambda i: T.min(place0 + i, end - 1))
        parts = T.meta_var(Parts(cta.hooks, outputs, unit, row0, first, count, words, place))
        close_rows(parts, ROWS)
        d: T.int32 = cta.lane.index * RUN
        while d < cta.spec.dim_vo:
            merge_elements(cta, parts, d, end)
            d = d + WARP * RUN
        if cta.lane.index == 0:
            for i in T.unroll(ROWS):
                at = T.meta_var(parts.index(i))
                outputs.lse[at[0], at[1]] = words[i, LSE] * outputs.lse_scale
        place0 = place0 + cta.tile.warps * ROWS
