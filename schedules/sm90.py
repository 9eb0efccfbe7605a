"""Attention on Hopper: warps that copy, and warpgroups that multiply asynchronously.

Read `attend` first: it is the algorithm of `tvm_attn.tir.attention`, block by block from the last
to the first, as a pipeline: queries times the keys of a block begin together with weights times the
values of the block before it, and scores are weighed while the latter run. The pipeline does not
drain between items: the first scores of an item are begun with the last values of the one before.

A CTA has a warpgroup that copies (a warp for keys, which also reads the work list ahead, one for
values, two for the slots of query and output rows) and one, two or three that multiply, 64 rows
each, in turns. Who waits for what is said by barriers in shared memory (`hopper.shared`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.arrivals import NOBODY, arrive
from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import Lane, of_lane
from tvm_attn.schedules.primitives.hopper.barriers import begin_barriers
from tvm_attn.schedules.primitives.hopper.boxes import block_map
from tvm_attn.schedules.primitives.hopper.feeding import (
    Feed,
    announce_and_feed_items,
    feed_items,
    first_block,
    last_block,
)
from tvm_attn.schedules.primitives.hopper.items import wait_for_item
from tvm_attn.schedules.primitives.hopper.multiply import (
    begin_pv,
    begin_qk,
    wait_for_keys,
    wait_for_pv,
    wait_for_qk,
    wait_for_values,
)
from tvm_attn.schedules.primitives.hopper.rows import (
    close_rows,
    hand_over_slot,
    set_rows_aside,
    take_queries,
)
from tvm_attn.schedules.primitives.hopper.scoring import prepare_bias, score, weigh_part
from tvm_attn.schedules.primitives.hopper.shared import HopperShared
from tvm_attn.schedules.primitives.hopper.slots import rows_map, serve_slots
from tvm_attn.schedules.primitives.hopper.softmax import (
    open_rows,
    pack_weights,
    rescale,
    weigh,
)
from tvm_attn.schedules.primitives.hopper.tensor_maps import TensorMap
from tvm_attn.schedules.primitives.hopper.warpgroup import (
    Warpgroup,
    WarpgroupRegisters,
    begin_turns,
    meet,
)
from tvm_attn.schedules.primitives.hopper.wgmma import clear
from tvm_attn.schedules.primitives.merge import merge_unit
from tvm_attn.schedules.primitives.overlap import begin_after_previous, overlapping
from tvm_attn.schedules.primitives.scores import may_hide, score_factor
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.schedules.primitives.task import Task, divide_by_page_size
from tvm_attn.schedules.tiles_sm90 import WARPGROUP_THREADS, HopperTile, comes_in_boxes
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.access import CacheAccess
from tvm_attn.tir.arguments import GIVEN, Arguments, bind
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.signature import close_over, ints, strided_rows
from tvm_attn.worklist import NO_SLOT

NUM_OUTPUTS = 5
"""Trailing parameters that are written: partial_o, partial_lse, arrivals, out, lse."""


@dataclass(frozen=True)
class Maps:
    """Tensor maps of a kernel; None of what is not copied in boxes."""

    q: TensorMap | None
    k: TensorMap | None
    v: TensorMap | None
    out: TensorMap | None

    @staticmethod
    def encode(
        spec: AttentionSpec, tile: HopperTile, given: Arguments, q: Any, k: Any, v: Any, out: Any
    ) -> Maps:
        """Encode them, on the host."""
        keys = values = queries = outputs = None
        if not tile.gathers:
            keys, values = block_map(spec, tile, k, given.k), block_map(spec, tile, v, given.v)
        if comes_in_boxes(spec):
            queries = rows_map(q, given.q, spec.group_size)
            if str(spec.o_dtype) != "float32":
                outputs = rows_map(out, given.outputs.out, spec.group_size)
        return Maps(queries, keys, values, outputs)


@T.inline
def go_to_last_block(cta, group, task):
    """Go to the last block of an item."""
    first: T.let[T.int32] = first_block(cta.tile, task)
    group.place[0] = last_block(cta.tile, task, first)
    group.left[0] = T.floordiv(group.kv0 - first, cta.tile.block)


@T.inline
def wait_for_products(cta, group, pending):
    """Wait for the products with keys; let the slot take other queries after an item's last."""
    wait_for_qk(cta, group, pending)
    if not cta.tile.slots_outputs:
        if group.left[0] == 0:
            hand_over_slot(cta, group, cta.shared.outputs)


@T.inline
def begin_products(cta, group, parity):
    """Begin queries times the next keys, and weights times the next values; wait for the former."""
    group.take_turn()
    begin_qk(cta, group, parity)
    wait_for_values(cta, group)
    begin_pv(cta, group)
    wait_for_products(cta, group, 1)


@T.inline
def attend_block(cta, group, task, factor, parity):
    """Attend to one more block of an item, whose rows are open."""
    hides: T.int32 = may_hide(cta, task, group.kv0)
    fold = T.meta_var(prepare_bias(cta, task, group.kv0))
    begin_products(cta, group, parity)
    group.flags.set("moved", T.bool(False))
    weigh_part(cta, group, task, factor, hides, fold)
    wait_for_pv(cta, group)
    weigh(cta, cta.tile.split, cta.key_tiles)
    pack_weights(cta)
    if group.flags.moved:
        rescale(cta)


@T.inline
def weigh_first(cta, group):
    """Weigh the scores of an item's first block."""
    weigh(cta, 0, cta.key_tiles)
    pack_weights(cta)
    group.flags.set("adds", T.bool(False))


@T.inline
def finish_item(cta, group, given, task, parity):
    """Close the rows of an item of this parity and store them, after those before were stored."""
    if cta.tile.holds_queries:
        cta.shared.stored.wait(T.bitwise_xor(parity, 1), group.index)
    close_rows(cta, group, task, given.outputs, parity)
    if cta.tile.slots_outputs:
        hand_over_slot(cta, group, cta.shared.outputs)


@T.inline
def merge_parts(cta, given, task, arrivals):
    """Merge the parts of a unit, if the item was its last one."""
    if task.slot != NO_SLOT:
        verdict = T.meta_var(cta.shared.verdict)
        meet_all = T.meta_var(partial(meet, cta.tile))
        arrive(task.slot, given.work.merge_indptr, arrivals, verdict, cta.thread, meet_all)
        if verdict[0] != NOBODY:
            merge_unit(cta, given, verdict[0])
        if not cta.tile.slots_outputs:
            clear(cta.registers.out)


@T.inline
def attend(cta, group, given, arrivals, t0, end):
    """Attend from the query rows of all items to the keys of their KV ranges."""
    t: T.int32 = t0
    parity: T.int32 = 0
    factor: T.float32 = 0.0
    if group.index == 0:
        begin_turns()
    cta.shared.known.wait(0, t % cta.tile.tasks)
    opening = T.meta_var(Task.of(cta, given.batch, t))
    go_to_last_block(cta, group, opening)
    factor = score_factor(cta, opening)
    take_queries(cta, group, parity)
    if cta.tile.shares_slots:
        hand_over_slot(cta, group, cta.shared.outputs)
    wait_for_keys(cta, group)
    begin_qk(cta, group, parity)
    wait_for_products(cta, group, 0)
    score(cta, group, opening, may_hide(cta, opening, group.kv0))
    open_rows(cta, group, factor)
    weigh_first(cta, group)
    while t < end:
        task = T.meta_var(Task.of(cta, given.batch, t))
        following = T.meta_var(Task.of(cta, given.batch, t + 1))
        while group.left[0] > 0:
            group.left[0] = group.left[0] - 1
            group.place[0] = group.kv0 - cta.tile.block
            wait_for_keys(cta, group)
            attend_block(cta, group, task, factor, parity)
        set_rows_aside(cta)
        if t + 1 < end:
            parity = T.bitwise_xor(parity, 1)
            wait_for_item(cta, t + 1, t0)
            go_to_last_block(cta, group, following)
            factor = score_factor(cta, following)
            take_queries(cta, group, parity)
            wait_for_keys(cta, group)
            begin_products(cta, group, parity)
            score(cta, group, following, may_hide(cta, following, group.kv0))
            open_rows(cta, group, factor)
            wait_for_pv(cta, group)
            finish_item(cta, group, given, task, T.bitwise_xor(parity, 1))
            weigh_first(cta, group)
        else:
            group.take_turn()
            wait_for_values(cta, group)
            begin_pv(cta, group)
            wait_for_pv(cta, group)
            if cta.tile.shares_slots:
                cta.shared.queries.wait(T.bitwise_xor(parity, 1), group.index)
            finish_item(cta, group, given, task, parity)
        merge_parts(cta, given, task, arrivals)
        t = t + 1


@T.inline
def copy(cta, given, maps, t0, end):
    """Copy what the warpgroups that multiply need, and what they leave behind.

    K and V are fed by a warp each, or where rows are gathered by two: then the warps that serve the
    slots feed values as well.
    """
    warp: T.let[T.int32] = of_lane(cta.warp, 0)
    part = T.meta_var(warp % cta.tile.feeders)
    if warp == 0:
        keys = T.meta_var(Feed.of_keys(cta, given.k, maps.k, part))
        announce_and_feed_items(keys, given, t0, end)
    elif cta.tile.feeders == 1:
        if warp == 1:
            values = T.meta_var(Feed.of_values(cta, given.v, maps.v, part))
            feed_items(values, given.batch, t0, end)
        elif T.Or(T.bool(cta.tile.multipliers > 1), warp == 2):
            serve_slots(cta, given, maps, warp - 2, t0, end, None)
    elif warp == 1:
        keys = T.meta_var(Feed.of_keys(cta, given.k, maps.k, part))
        feed_items(keys, given.batch, t0, end)
    else:
        values = T.meta_var(Feed.of_values(cta, given.v, maps.v, part))
        serve_slots(cta, given, maps, warp - 2, t0, end, values)


def attention(
    spec: AttentionSpec, hooks: Hooks, tile: HopperTile, name: str = "attention"
) -> tirx.PrimFunc:
    """Generate attention for Hopper.

    Parameters
    ----------
    spec : AttentionSpec
        What is compiled in.
    hooks : Hooks
        The variant, with its parameters bound to TIR variables.
    tile : HopperTile
        Blocks, and how they are copied.
    name : str
        Symbol of the function.

    Returns
    -------
    tvm.tirx.PrimFunc
        Parameters as of `tvm_attn.schedules.sm80.attention`.
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
        q_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        k_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        v_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        out_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        maps = T.meta_var(Maps.encode(spec, tile, given, q_map, k_map, v_map, out_map))
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.residents})
        c = T.cta_id([given.work.cta_indptr.shape[0] - 1])
        thread = T.thread_id([tile.threads])
        role = T.warpgroup_id([tile.threads // WARPGROUP_THREADS])
        shared = T.meta_var(HopperShared.allocate(spec, tile))
        scales = T.meta_var(given.scales)
        lane = T.meta_var(Lane(thread % WARP))
        t0: T.let[T.int32] = given.work.cta_indptr[c]
        end: T.let[T.int32] = given.work.cta_indptr[c + 1]
        copier = T.meta_var(
            Cta(spec, hooks, tile, scales, thread, thread // WARP, lane, shared, None)
        )
        divide_by_page_size(copier, CacheAccess.of(spec, given.batch, given.k))
        if thread == 0:
            shared.initialise()
            begin_barriers()
        T.cuda.cta_sync()
        begin_after_previous(copier)
        if t0 < end:
            if role == 0:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](tile.copying)
                copy(copier, given, maps, t0, end)
            else:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](tile.multiplying)
                place = T.meta_var(thread - WARPGROUP_THREADS)
                registers = T.meta_var(WarpgroupRegisters.allocate(tile, spec))
                cta = T.meta_var(
                    Cta(spec, hooks, tile, scales, place, place // WARP, lane, shared, registers)
                )
                group = T.meta_var(Warpgroup.begin(role - 1, tile, shared))
                attend(cta, group, given, arrivals, t0, end)

    function = close_over(kernel, hooks.parameters(), before=NUM_OUTPUTS, name=name, given=GIVEN)
    return overlapping(function, in_clusters=False) if tile.waits else function
