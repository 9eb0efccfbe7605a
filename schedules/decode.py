"""Decoding: few query rows against many keys, at the speed of memory. Every GPU from sm_80 on.

Read `attend` first: it is the algorithm of `tvm_attn.tir.attention`, phase by phase under the same
names, as each warp goes through it by itself. A CTA's warps have the same query rows and take turns
with the keys; each copies its own blocks ahead of its work, into the next item too, and no warp
waits for another until an item's keys are done. Then their states are joined in shared memory.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.ahead import (
    Ahead,
    catch_up,
    copy_first,
    locate_first,
    look_up,
    turns_of,
)
from tvm_attn.schedules.primitives.arrivals import (
    NOBODY,
    ask_for_units,
    count_in,
    find_parts,
)
from tvm_attn.schedules.primitives.clusters import (
    arrive_at_cluster,
    bits_of_size,
    rank_in_cluster,
    shares_item,
    size_of_cluster,
)
from tvm_attn.schedules.primitives.fragments import Lane
from tvm_attn.schedules.primitives.held import HeldTask, derive_keys, factor_of
from tvm_attn.schedules.primitives.join import store_state
from tvm_attn.schedules.primitives.overlap import (
    end_after_previous,
    let_next_begin,
    overlapping,
    wait_for_previous,
)
from tvm_attn.schedules.primitives.parts import merge_unit
from tvm_attn.schedules.primitives.places import Places
from tvm_attn.schedules.primitives.queries import hold_queries, load_q
from tvm_attn.schedules.primitives.registers import Registers, held
from tvm_attn.schedules.primitives.scores import (
    init_state,
    logits,
    mask,
    score_factor,
    softmax,
    weigher,
)
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.schedules.primitives.shares import open_shares
from tvm_attn.schedules.primitives.staging import commit_copies, settle_warp, wait_for_copies
from tvm_attn.schedules.primitives.stream_gemm import pv, qk
from tvm_attn.schedules.primitives.streams import StreamingCta, StreamTiles, run_bits
from tvm_attn.schedules.primitives.task import (
    Task,
    read_item,
    read_request,
)
from tvm_attn.schedules.tiles_decode import DecodeTile
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.access import CacheAccess
from tvm_attn.tir.arguments import GIVEN, bind
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.signature import close_over, ints, strided_rows
from tvm_attn.worklist import NO_SLOT

NUM_OUTPUTS = 7
"""Trailing parameters: partial_o, partial_lse, arrivals, size, follows, out, lse."""


@T.inline
def begin(cta, work, batch, q, ahead, t, end):
    """Read the first items, and begin to copy the first one's queries and the warp's first block.

    Pages are looked up while the kernel before ends, unless a hook needs a scale it may have made.
    """
    first = T.meta_var(Task.of(cta, batch, t))
    is_early = T.meta_var(cta.hooks.variant.logits_transform is None)
    k_rows, v_rows = T.meta_var(
        [T.alloc_local((turns_of(tile),), "uint32") for tile in (cta.shared.k, cta.shared.v)]
    )
    for i in T.unroll(3):
        read_item(cta.own, work.items, t + i, end)
    settle_warp()
    read_request(cta.own, batch, t, end)
    read_request(cta.own, batch, t + 1, end)
    settle_warp()
    if not is_early:
        wait_for_previous(cta)
    derive_keys(cta, first)
    T.cuda.warp_sync()
    look_up(cta, ahead, t, t)
    locate_first(cta, ahead, k_rows, v_rows)
    if is_early:
        wait_for_previous(cta)
    load_q(cta, first, q, t)
    commit_copies()
    copy_first(cta, ahead, t, k_rows, v_rows)
    T.ptx.cp.async_.wait_group(1)
    T.cuda.cta_sync()


@T.inline
def prepare(cta, work, batch, q, t, end):
    """Read what is to come after item `t`, each item a step further than the one behind it."""
    following = T.meta_var(Task.of(cta, batch, t + 1))
    T.cuda.warp_sync()  # all lanes are done with the item whose words are overwritten
    read_item(cta.own, work.items, t + 3, end)
    read_request(cta.own, batch, t + 2, end)
    if t + 1 < end:
        derive_keys(cta, following)
        load_q(cta, following, q, t + 1)
    T.cuda.warp_sync()


@T.inline
def attend(cta, task, ahead, t, end, s):
    """Attend from the query rows of item `t` to the warp's keys of its KV range, block by block.

    Blocks of all items are a stream, `s` is the position in it.
    """
    is_folded = T.meta_var(cta.hooks.variant.logits_transform is None)
    factor: T.float32 = factor_of(cta, task) if is_folded else score_factor(cta, task)
    hold_queries(cta, t)
    init_state(cta)
    kv0: T.int32 = cta.first_key(task)
    while kv0 < task.end_key:
        catch_up(cta, ahead, t, T.min(t + 1, end - 1), s)
        qk(cta, t, s)
        logits(cta, task, kv0, T.bool(True))
        mask(cta, task, kv0)
        softmax(cta, factor)
        pv(cta, weigher(cta, factor), s)
        s = s + 1
        kv0 = kv0 + cta.turn
    if kv0 < cta.first_key(task) + 2 * cta.turn:
        settle_warp()  # what was begun for the next items is not waited for otherwise


def attention(
    spec: AttentionSpec, hooks: Hooks, tile: DecodeTile, name: str = "attention"
) -> tirx.PrimFunc:
    """Generate attention for few query rows.

    Parameters
    ----------
    spec, hooks, name
        As of `tvm_attn.schedules.sm80.attention`; keys and values are not transformed.
    tile : DecodeTile
        What a CTA is made of.

    Returns
    -------
    tvm.tirx.PrimFunc
        Parameters as of `tvm_attn.schedules.sm80.attention`, and after arrivals ``size``: how many
        CTAs share each item, and ``follows``: 1 if another kernel of the run was launched before.
    """

    @T.prim_func(check_well_formed=False)
    def kernel(
        q_h: T.handle,
        k_h: T.handle,
        v_h: T.handle,
        items_h: T.handle,
        cta_indptr_h: T.handle,
        merge_items_h: T.handle,
        merge_indptr_h: T.handle,
        qo_indptr_h: T.handle,
        kv_indptr_h: T.handle,
        kv_indices_h: T.handle,
        kv_len_h: T.handle,
        q_pos_offset_h: T.handle,
        kv_pos_offset_h: T.handle,
        k_scale_h: T.handle,
        v_scale_h: T.handle,
        sm_scale: T.float32,
        q_scale: T.float32,
        lse_scale: T.float32,
        partial_o_h: T.handle,
        partial_lse_h: T.handle,
        arrivals_h: T.handle,
        size: T.int32,
        follows: T.int32,
        out_h: T.handle,
        lse_h: T.handle,
    ):
        given = T.meta_var(
            bind(
                spec,
                hooks,
                tile.rows,
                strided_rows,
                qkv=(q_h, k_h, v_h),
                work=(items_h, cta_indptr_h, merge_items_h, merge_indptr_h),
                batch=(
                    qo_indptr_h,
                    kv_indptr_h,
                    kv_indices_h,
                    kv_len_h,
                    q_pos_offset_h,
                    kv_pos_offset_h,
                ),
                scales=(k_scale_h, v_scale_h, sm_scale, q_scale),
                outputs=(lse_scale, partial_o_h, partial_lse_h, out_h, lse_h),
            )
        )
        arrivals = ints(arrivals_h, "arrivals")
        q, k, v, work, batch = T.meta_var((given.q, given.k, given.v, given.work, given.batch))
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.residents})
        place = T.cta_id([(work.cta_indptr.shape[0] - 1) * size])
        rank = T.meta_var(rank_in_cluster(tile, size))
        c = T.meta_var(T.shift_right(place, bits_of_size(tile, size)))
        thread = T.thread_id([tile.threads])
        warp = T.warp_id([tile.warps])
        lane = T.meta_var(Lane(T.Cast("int32", held(T.Cast("uint32", thread % WARP)))))
        shared = T.meta_var(StreamTiles.allocate(spec, tile, warp))
        registers = T.meta_var(Registers.allocate(tile, spec))
        pages = T.meta_var(CacheAccess.of(spec, batch, k).page_size)
        reciprocal = T.meta_var(held(T.uint32(0xFFFFFFFF) // T.Cast("uint32", pages)))
        runs = T.meta_var(run_bits(spec, tile, pages))
        who = T.meta_var((thread, warp, lane, shared, registers))
        sharers = T.meta_var(size_of_cluster(tile, size))
        where = T.meta_var((pages, reciprocal, runs, sharers, rank, follows))
        cta = T.meta_var(StreamingCta(spec, hooks, tile, given.scales, *who, *where))
        t: T.int32 = work.cta_indptr[c]
        end: T.let[T.int32] = work.cta_indptr[c + 1]
        s: T.int32 = 0
        probe, cut = T.meta_var([T.alloc_local((size,), "int32") for size in (1, 3)])
        k_places, v_places = T.meta_var(
            [Places.of_cache(cache, spec.kv_layout) for cache in (k, v)]
        )
        ahead = T.meta_var(Ahead.begin(t, batch, k_places, v_places))
        let_next_begin(cta)
        if shares_item(cta):
            open_shares(cta)
        if t < end:
            begin(cta, work, batch, q, ahead, t, end)
        else:
            wait_for_previous(cta)  # for kernels to come, which wait for this one alone
        while t < end:
            task = T.meta_var(Task.of(cta, batch, t))
            prepare(cta, work, batch, q, t, end)
            ask_for_units(work.merge_indptr, lane.index, probe)
            attend(cta, HeldTask.hold(task), ahead, t, end, s)
            if T.And(task.slot != NO_SLOT, warp == 0):
                find_parts(work.merge_indptr, task.slot, lane.index, probe, cut)
            store_state(cta, task, given.outputs)
            if task.slot != NO_SLOT:
                parts = T.meta_var(shared.verdict)
                counter = T.meta_var(cut[0] * sharers + rank)
                count_in(counter, arrivals, cut, parts, thread, T.cuda.cta_sync)
                if parts[0] != NOBODY:
                    merge_unit(cta, task, given.outputs, parts[0], parts[1], t + 1 == end)
            t = t + 1
            if shares_item(cta):
                if t < end:
                    arrive_at_cluster()
        wait_for_copies()
        end_after_previous(cta)

    function = close_over(kernel, hooks.parameters(), before=NUM_OUTPUTS, name=name, given=GIVEN)
    return overlapping(function, in_clusters=bool(tile.clusters)) if tile.overlaps else function
