"""Merging the parts of a cut unit, by the CTA that finished the last of them."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.tir.rows import Rows
from tvm_attn.tir.states import f32
from tvm_attn.worklist import Merge


@T.inline
def merge_row(cta, unit, outputs, first, end, row0, place):
    """Merge the parts of a row and store it."""
    state, hooks = T.meta_var((cta.hooks.accumulation, cta.hooks))
    peak: T.float32 = f32(state.hidden)
    total: T.float32 = f32(0.0)
    slot: T.int32 = first
    while slot < end:
        peak = state.peak(peak, outputs.partial_lse[slot, place])
        slot = slot + 1
    slot = first
    while slot < end:
        total = total + state.weight(outputs.partial_lse[slot, place], state.reference(peak))
        slot = slot + 1
    row = T.meta_var(unit.query(row0 + place))
    at = T.meta_var(unit.index(row0 + place))
    lse: T.float32 = state.lse(state.reference(peak), total)
    share: T.float32 = hooks.share(row, lse) * state.inverse(total)
    lse = hooks.seeded(row, lse)
    d: T.int32 = cta.lane.index
    while d < cta.spec.dim_vo:
        o: T.float32 = f32(0.0)
        slot = first
        while slot < end:
            w = T.meta_var(state.weight(outputs.partial_lse[slot, place], state.reference(peak)))
            o = o + w * outputs.partial_o[slot, place, d]
            slot = slot + 1
        outputs.out[at[0], at[1], d] = outputs.finish(row, o * share, lse)
        d = d + WARP
    if cta.lane.index == 0:
        outputs.lse[at[0], at[1]] = lse * outputs.lse_scale


@T.inline
def merge_unit(cta, given, m):
    """Merge the parts of cut unit `m`, in slot order, and store its rows: a warp takes a row."""
    merge_items, merge_indptr = T.meta_var((given.work.merge_items, given.work.merge_indptr))
    request: T.let[T.int32] = merge_items[m, Merge.REQUEST]
    kv_head: T.let[T.int32] = merge_items[m, Merge.KV_HEAD]
    unit = T.meta_var(Rows(cta.hooks, cta.spec.group_size, given.batch, request, kv_head))
    first: T.int32 = merge_indptr[m]
    end: T.int32 = merge_indptr[m + 1]
    row0: T.int32 = merge_items[m, Merge.ROW_BEGIN]
    count: T.int32 = merge_items[m, Merge.ROW_END] - row0
    place: T.int32 = cta.warp
    while place < count:
        merge_row(cta, unit, given.outputs, first, end, row0, place)
        place = place + cta.tile.warps
