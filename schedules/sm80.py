"""Attention on tensor cores with ``mma.sync``: every NVIDIA GPU from sm_80 on.

Read `attend` first: it is the algorithm of `tvm_attn.tir.attention`, phase by phase under the same
names, with fragments in registers and blocks of K and V in shared memory. Each warp has some of a
tile's query rows and sees all of its keys, so warps wait for one another only to share what was
copied. Copies are asynchronous: a block arrives while the one before it is worked on.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.arrivals import NOBODY, arrive
from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import Lane
from tvm_attn.schedules.primitives.gather import (
    gather_k,
    gather_v,
    load_q,
    locate_q,
    look_up,
    make_k,
    make_v,
    note,
)
from tvm_attn.schedules.primitives.gemm import hold_queries, pv, qk
from tvm_attn.schedules.primitives.merge import merge_unit
from tvm_attn.schedules.primitives.registers import Registers
from tvm_attn.schedules.primitives.relative import prepare_fold, relate, weigher_of
from tvm_attn.schedules.primitives.scores import init_state, logits, mask, score_factor, softmax
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.schedules.primitives.shared import SharedTiles
from tvm_attn.schedules.primitives.staging import commit_copies, copy_rows, wait_for_copies
from tvm_attn.schedules.primitives.store import store_state
from tvm_attn.schedules.primitives.task import (
    Task,
    TaskAccess,
    derive,
    divide_by_page_size,
    forget_places,
    read_item,
    read_request,
)
from tvm_attn.schedules.tiles_cuda import CudaTile
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.access import CacheAccess
from tvm_attn.tir.arguments import GIVEN, bind
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.signature import close_over, ints, strided_rows
from tvm_attn.worklist import NO_SLOT

NUM_OUTPUTS = 5
"""Trailing parameters that are written: partial_o, partial_lse, arrivals, out, lse."""


@T.inline
def settle():
    """Wait until all that was copied is there for all threads."""
    commit_copies()
    wait_for_copies()
    T.cuda.cta_sync()


def access(cta: Cta, task: Task, cache: Any) -> TaskAccess:
    """Access to a task's tokens in the cache."""
    return TaskAccess.to(CacheAccess.of(cta.spec, task.batch, cache), task)


@T.inline
def prepare(cta, task, q, k, v, t, s, pages):
    """Note where the rows and the first two blocks of item `t` are, whose pages were looked up."""
    cache = T.meta_var(access(cta, task, k))
    kv_begin: T.int32 = task.keys()[0]
    note(cta, task, cache, pages, 2 * cta.tile.block, k, v, t, s, kv_begin, T.bool(True))
    locate_q(cta, task, q)
    derive(cta, task, kv_begin, task.keys()[1])


@T.inline
def look_ahead(cta, task, k, pages):
    """Look up the pages of the first two blocks of an item to come."""
    kv_begin: T.int32 = task.keys()[0]
    look_up(cta, task, access(cta, task, k), pages, 2 * cta.tile.block, kv_begin, task.keys()[1])


@T.inline
def begin(cta, task, q, k, v, t, s):
    """Begin item `t` without having prepared for it: its first block is at position `s`."""
    pages = T.alloc_local((-(-2 * cta.tile.block // cta.tile.threads),), "int32")
    look_ahead(cta, task, k, pages)
    prepare(cta, task, q, k, v, t, s, pages)
    T.cuda.cta_sync()
    copy_rows(gather_k(cta, k, t, s))
    if cta.tile.stages == 2:
        copy_rows(gather_v(cta, v, t, s))


@T.inline
def catch_up(cta, task, following, q, k, v, t, s):
    """Begin to copy what the `following` item needs and item `t` has not yet asked for."""
    if task.has_one_block(cta.tile.block):
        if cta.tile.holds_queries:
            settle()
        begin(cta, following, q, k, v, t + 1, s)
        load_q(cta, following, q)
    elif not cta.tile.holds_queries:
        load_q(cta, following, q)


@T.inline
def take_queries(cta, following, q, is_first, is_last):
    """Hold the queries of an item from its first block on, and copy the next ones in its last."""
    if is_first:
        hold_queries(cta)
    elif is_last:
        load_q(cta, following, q)


@T.inline
def attend(cta, task, following, q, k, v, t, end, s):
    """Attend from the query rows of item `t` to the keys of its KV range, block by block.

    Blocks of all items are a stream, `s` is the position in it: while the last block of an item is
    worked on, the first of the `following` one is copied.
    """
    cache = T.meta_var(access(cta, task, k))
    block = T.meta_var(cta.tile.block)
    pages = T.alloc_local((-(-2 * block // cta.tile.threads),), "int32")
    factor: T.float32 = score_factor(cta, task)
    init_state(cta)
    kv0: T.int32 = task.first_key
    kv_end: T.int32 = T.max(task.end_key, kv0 + 1)
    while kv0 < kv_end:
        owner = T.meta_var(T.Select(kv0 + block < kv_end, t, t + 1))
        next_k = T.meta_var(gather_k(cta, k, owner, s + 1))
        is_last = T.meta_var(kv0 + block >= kv_end)
        is_asked = T.meta_var(kv0 + 2 * block < kv_end)
        wait_for_copies()
        T.cuda.cta_sync()
        if cta.tile.holds_queries:
            take_queries(cta, following, q, kv0 == task.first_key, T.And(is_last, t + 1 < end))
        make_k(cta, task, s, kv0, kv_end)
        is_next_last: T.bool = T.And(T.And(T.Not(is_asked), T.Not(is_last)), t + 1 < end)
        look_up(cta, task, cache, pages, block, kv0 + 2 * block, kv_end)
        if cta.tile.stages == 2:
            make_v(cta, task, s, kv0, kv_end)
            if cta.shared.are_made:
                T.cuda.cta_sync()
            qk(cta, s, next_k, gather_v(cta, v, owner, s + 1))
            commit_copies()
        else:
            if cta.shared.are_made:
                T.cuda.cta_sync()
            qk(cta, s, gather_v(cta, v, t, s), None)
            commit_copies()
            wait_for_copies()
            T.cuda.cta_sync()
            make_v(cta, task, s, kv0, kv_end)
            if cta.shared.are_made:
                T.cuda.cta_sync()
            copy_rows(next_k)
            commit_copies()
        if is_next_last:
            look_ahead(cta, following, k, pages)
        fold = T.meta_var(prepare_fold(cta, task, kv0))
        if fold is not None:
            relate(cta, task, factor, kv0, fold)
        else:
            logits(cta, task, kv0, T.bool(True))
            mask(cta, task, kv0)
            softmax(cta, factor)
        pv(cta, weigher_of(cta, factor, fold), s)
        if T.Or(T.bool(not cta.shared.are_made), is_asked):  # making takes registers: a branch
            note(cta, task, cache, pages, block, k, v, t, s + 2, kv0 + 2 * block, is_asked)
        if is_next_last:
            prepare(cta, following, q, k, v, t + 1, s + 2, pages)
        s = s + 1
        kv0 = kv0 + block
    if not cta.tile.holds_queries:
        settle()


def attention(
    spec: AttentionSpec, hooks: Hooks, tile: CudaTile, name: str = "attention"
) -> tirx.PrimFunc:
    """Generate attention for a GPU with ``mma.sync``.

    Parameters
    ----------
    spec : AttentionSpec
        What is compiled in.
    hooks : Hooks
        The variant, with its parameters bound to TIR variables.
    tile : CudaTile
        Tile shape, and what a CTA is made of.
    name : str
        Symbol of the function.

    Returns
    -------
    tvm.tirx.PrimFunc
        Parameters as of `tvm_attn.tir.attention.attention`, with ``arrivals``, int32
        ``[num_merges]``, after partial_lse: 0 before and after. A CTA for every queue.
    """
    variant = hooks.variant
    transforms = (variant.key_transform is not None, variant.value_transform is not None)

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
        q, k, v, work, batch = T.meta_var((given.q, given.k, given.v, given.work, given.batch))
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.residents})
        c = T.cta_id([work.cta_indptr.shape[0] - 1])
        thread = T.thread_id([tile.threads])
        warp = T.meta_var(thread // WARP)
        lane = T.meta_var(Lane(thread % WARP))
        shared = T.meta_var(SharedTiles.allocate(spec, tile, transforms))
        registers = T.meta_var(Registers.allocate(tile, spec))
        cta = T.meta_var(
            Cta(spec, hooks, tile, given.scales, thread, warp, lane, shared, registers)
        )
        t: T.int32 = work.cta_indptr[c]
        s: T.int32 = 0
        end = T.meta_var(work.cta_indptr[c + 1])
        if t < end:
            forget_places(cta)
            divide_by_page_size(cta, CacheAccess.of(spec, batch, k))
            for i in T.unroll(3):
                read_item(cta, work.items, t + i, end)
            settle()
            read_request(cta, batch, t, end)
            read_request(cta, batch, t + 1, end)
            settle()
            begin(cta, Task.of(cta, batch, t), q, k, v, t, s)
            load_q(cta, Task.of(cta, batch, t), q)
            commit_copies()
        while t < end:
            task = T.meta_var(Task.of(cta, batch, t))
            following = T.meta_var(Task.of(cta, batch, t + 1))
            attend(cta, task, following, q, k, v, t, end, s)
            if t + 1 < end:
                catch_up(cta, task, following, q, k, v, t, s)
                read_request(cta, batch, t + 2, end)
                read_item(cta, work.items, t + 3, end)
                commit_copies()
            store_state(cta, task, given.outputs)
            if task.slot != NO_SLOT:
                arrive(
                    *(task.slot, work.merge_indptr, arrivals),
                    *(shared.verdict, thread, T.cuda.cta_sync),
                )
                if shared.verdict[0] != NOBODY:
                    merge_unit(cta, given, shared.verdict[0])
            t = t + 1
        wait_for_copies()

    return close_over(kernel, hooks.parameters(), before=NUM_OUTPUTS, name=name, given=GIVEN)
