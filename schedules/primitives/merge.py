"""Merging the parts of a cut unit, by the CTA that finished the last of them."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import load_run, of_pair
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.tir.merge import LSE, PEAK, ROW_WORDS, TOTAL, Parts, close_row, close_rows
from tvm_attn.tir.rows import Rows
from tvm_attn.tir.states import f32
from tvm_attn.worklist import Merge

STEPS = 5
"""In which what all lanes of a warp have is brought together."""
RUN = 4
"""Neighbouring elements of a lane: 16 bytes."""


@T.inline
def fold_lanes(words, word, fold):
    """Fold what all lanes have of a word of each row: every lane has the result."""
    for i in T.unroll(words.shape[0]):
        for step in T.unroll(STEPS):
            words[i, word] = fold(words[i, word], of_pair(words[i, word], 1 << step))


@T.inline
def close_rows_by_lanes(cta, parts):
    """Find what the parts of some rows come to: lanes take turns with the parts.

    Those of the last turn that have none look at the last part again.
    """
    state, words = T.meta_var((parts.hooks.accumulation, parts.words))
    rows = T.meta_var(cta.tile.rows_at_once)
    for i in T.unroll(rows):
        words[i, PEAK] = f32(state.hidden)
        words[i, TOTAL] = f32(0.0)
    for turn in T.serial(T.ceildiv(parts.count, WARP)):
        s = T.meta_var(T.min(turn * WARP + cta.lane.index, parts.count - 1))
        for i in T.unroll(rows):
            words[i, PEAK] = state.peak(words[i, PEAK], parts.lse(i, s))
    fold_lanes(words, PEAK, state.peak)
    for turn in T.serial(T.ceildiv(parts.count, WARP)):
        s = T.meta_var(turn * WARP + cta.lane.index)
        for i in T.unroll(rows):
            weight = T.meta_var(parts.weight(i, T.min(s, parts.count - 1)))
            words[i, TOTAL] = words[i, TOTAL] + T.Select(s < parts.count, weight, f32(0.0))
    fold_lanes(words, TOTAL, lambda a, b: a + b)
    for i in T.unroll(rows):
        close_row(parts, i)


@T.inline
def merge_elements(cta, parts, d, end):
    """Merge a run of elements, from `d` on, of some rows; only those before place `end` are."""
    rows, at_once = T.meta_var((cta.tile.rows_at_once, cta.tile.parts_at_once))
    o = T.alloc_local((rows * RUN,), "float32")
    run = T.alloc_local((at_once * rows * RUN,), "float32")
    weights = T.alloc_local((at_once * rows,), "float32")
    for i in T.unroll(rows * RUN):
        o[i] = f32(0.0)
    for s in T.serial(0, parts.count, step=at_once):
        for n in T.unroll(at_once):
            if T.Or(T.bool(n == 0), s + n < parts.count):
                for i in T.unroll(rows):
                    weights[n * rows + i] = parts.weight(i, s + n)
                    load_run(run, (n * rows + i) * RUN, parts.pointer(i, s + n, d))
        for n in T.unroll(at_once):
            if T.Or(T.bool(n == 0), s + n < parts.count):
                for i in T.unroll(rows):
                    at = T.meta_var(n * rows + i)
                    for e in T.unroll(RUN):
                        o[i * RUN + e] = o[i * RUN + e] + weights[at] * run[at * RUN + e]
    for i in T.unroll(rows):
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
    rows = T.meta_var(cta.tile.rows_at_once)
    words = T.alloc_local((rows, ROW_WORDS), "float32")
    at_once = T.meta_var(cta.tile.parts_at_once)
    place0: T.int32 = cta.warp * rows
    while place0 < end:
        held = T.meta_var(lambda i: T.min(place0 + i, end - 1))
        place = T.meta_var(held if at_once == 1 else lambda i: place0 + i)  # of one address
        row = T.meta_var(lambda i: row0 + held(i))
        parts = T.meta_var(Parts(cta.hooks, outputs, unit, first, count, words, place, row))
        if cta.tile.parts_at_once > 1:
            close_rows_by_lanes(cta, parts)
        else:
            close_rows(parts, rows)
        d: T.int32 = cta.lane.index * RUN
        while d < cta.spec.dim_vo:
            merge_elements(cta, parts, d, end)
            d = d + WARP * RUN
        if cta.lane.index == 0:
            for i in T.unroll(rows):
                if parts.place(i) < end:
                    at = T.meta_var(parts.index(i))
                    outputs.lse[at[0], at[1]] = words[i, LSE] * outputs.lse_scale
        place0 = place0 + cta.tile.warps * rows
