"""Attention over the rows of a block-sparse KV cache: the definition every kernel implements.

Read `attend` first: a work item loads its query rows and goes over the keys it may see, block by
block, through the BSR indices, keeping an online state; the state goes to the output or, if the
unit was cut, to a slot. `attention` is the kernel around it: every CTA walks its queue of items;
cut units are merged in slot order.

This file says nothing of any machine. Unscheduled it is the semantic reference; a schedule maps
each phase (the sblocks named in `PHASES`) to a machine. How tokens are addressed is in `access`,
what a row may see in `rows`, how weights accumulate in `states`, what a variant adds in `hooks`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.access import CacheAccess, to_float
from tvm_attn.tir.arguments import GIVEN, bind
from tvm_attn.tir.hooks import Context, Hooks
from tvm_attn.tir.merge import merge_unit
from tvm_attn.tir.rows import Rows
from tvm_attn.tir.signature import close_over, strided
from tvm_attn.tir.states import f32
from tvm_attn.tir.tile import BlockAccess, allocate_tile
from tvm_attn.variant import Expr
from tvm_attn.worklist import NO_SLOT, Item

PHASES = (
    "load_q",
    "gather_k",
    "qk",
    "logits",
    "mask",
    "softmax",
    "gather_v",
    "pv",
    "store_state",
    "merge",
)
"""The phases of attention, in order, by the names every schedule and kernel uses."""

NUM_OUTPUTS = 4
"""Trailing parameters that are written: partial_o, partial_lse, out, lse."""


def _pair(unit: Rows, row: Expr, row_end: Expr, token: Expr, kv_end: Expr) -> Context:
    """Context of a query row and a key; beyond the item's, its last: hooks may index arrays."""
    return unit.pair(T.min(row, row_end - 1), T.min(token, kv_end - 1))


@T.inline
def load_q(tile, unit, scales, q, row0, row_end):
    """Load the query rows, transformed and times every factor of a score."""
    for i, d in T.grid(tile.rows, tile.dim_qk):
        with T.sblock("load_q"):
            vi, vd = T.axis.remap("SS", [i, d])
            T.reads()
            row = T.meta_var(T.min(row0 + vi, row_end - 1))
            at = T.meta_var(unit.index(row))
            tile.q[vi, vd] = scales.query(
                unit.query(row), lambda e: to_float(q[at[0], at[1], e]), vd
            )


@T.inline
def init_state(tile, state):
    """Start every row as the empty state."""
    for i in T.serial(tile.rows):
        with T.sblock("init_state"):
            vi = T.axis.remap("S", [i])
            tile.peak[vi] = f32(state.hidden)
            tile.total[vi] = f32(0.0)
    for i, d in T.grid(tile.rows, tile.dim_vo):
        with T.sblock("init_o"):
            vi, vd = T.axis.remap("SS", [i, d])
            tile.o[vi, vd] = f32(0.0)


@T.inline
def locate(tile, unit, cache, kv0, kv_end):
    """Look up where the block's tokens are in the cache."""
    for j in T.serial(tile.block):
        with T.sblock("locate"):
            vj = T.axis.remap("S", [j])
            T.reads()
            at = T.meta_var(cache.locate(unit.request, T.min(kv0 + vj, kv_end - 1)))
            tile.page[vj] = at[0]
            tile.slot[vj] = at[1]


@T.inline
def gather_k(tile, unit, scales, cache, k, kv0, kv_end, k_tile):
    """Gather the block's keys through the BSR indices."""
    for j, d in T.grid(tile.block, tile.dim_qk):
        with T.sblock("gather_k"):
            vj, vd = T.axis.remap("SS", [j, d])
            T.reads()
            token = T.meta_var(T.min(kv0 + vj, kv_end - 1))
            k_tile[vj, vd] = scales.key(unit.key(token), cache.element(k, unit, vj), vd)


@T.inline
def score(tile, unit, scales, hooks, cache, k, row0, row_end, kv0, kv_end):
    """Score the block's keys: queries times keys, the logits hook, the mask."""
    with T.sblock("scores"):
        T.reads()
        T.writes()
        k_tile = T.sblock_alloc_buffer((tile.block, tile.dim_qk), "float32")
        product = T.sblock_alloc_buffer((tile.rows, tile.block), "float32")
        logit = T.sblock_alloc_buffer((tile.rows, tile.block), "float32")
        gather_k(tile, unit, scales, cache, k, kv0, kv_end, k_tile)
        for i, j, d in T.grid(tile.rows, tile.block, tile.dim_qk):
            with T.sblock("qk"):
                vi, vj, vd = T.axis.remap("SSR", [i, j, d])
                with T.init():
                    product[vi, vj] = f32(0.0)
                product[vi, vj] = product[vi, vj] + tile.q[vi, vd] * k_tile[vj, vd]
        for i, j in T.grid(tile.rows, tile.block):
            with T.sblock("logits"):
                vi, vj = T.axis.remap("SS", [i, j])
                T.reads(product[vi, vj])
                pair = T.meta_var(_pair(unit, row0 + vi, row_end, kv0 + vj, kv_end))
                logit[vi, vj] = scales.score(pair, product[vi, vj])
        for i, j in T.grid(tile.rows, tile.block):
            with T.sblock("mask"):
                vi, vj = T.axis.remap("SS", [i, j])
                T.reads(logit[vi, vj])
                pair = T.meta_var(_pair(unit, row0 + vi, row_end, kv0 + vj, kv_end))
                tile.score[vi, vj] = T.Select(
                    hooks.visible(pair, kv0 + vj < kv_end),
                    logit[vi, vj],
                    f32(hooks.accumulation.hidden),
                )


@T.inline
def softmax(tile, state):
    """Weigh the scores, and carry peak and total of every row over to this block."""
    with T.sblock("softmax"):
        T.reads()
        T.writes()
        block_peak = T.sblock_alloc_buffer((tile.rows,), "float32")
        new_peak = T.sblock_alloc_buffer((tile.rows,), "float32")
        reference = T.sblock_alloc_buffer((tile.rows,), "float32")
        block_total = T.sblock_alloc_buffer((tile.rows,), "float32")
        for i, j in T.grid(tile.rows, tile.block):
            with T.sblock("block_peak"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    block_peak[vi] = tirx.min_value("float32")
                block_peak[vi] = state.peak(block_peak[vi], tile.score[vi, vj])
        for i in T.serial(tile.rows):
            with T.sblock("new_peak"):
                vi = T.axis.remap("S", [i])
                T.reads(block_peak[vi])
                new_peak[vi] = state.peak(tile.peak[vi], block_peak[vi])
        for i in T.serial(tile.rows):
            with T.sblock("new_reference"):
                vi = T.axis.remap("S", [i])
                T.reads(new_peak[vi])
                T.writes(reference[vi], tile.rescale[vi], tile.peak[vi])
                reference[vi] = state.reference(new_peak[vi])
                tile.rescale[vi] = state.rescale(tile.peak[vi], reference[vi])
                tile.peak[vi] = new_peak[vi]
        for i, j in T.grid(tile.rows, tile.block):
            with T.sblock("weigh"):
                vi, vj = T.axis.remap("SS", [i, j])
                tile.weight[vi, vj] = state.weight(tile.score[vi, vj], reference[vi])
        for i, j in T.grid(tile.rows, tile.block):
            with T.sblock("block_total"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    block_total[vi] = f32(0.0)
                block_total[vi] = block_total[vi] + tile.weight[vi, vj]
        for i in T.serial(tile.rows):
            with T.sblock("new_total"):
                vi = T.axis.remap("S", [i])
                T.reads(tile.rescale[vi], block_total[vi])
                T.writes(tile.total[vi])
                tile.total[vi] = tile.total[vi] * tile.rescale[vi] + block_total[vi]


@T.inline
def gather_v(tile, unit, scales, cache, v, kv0, kv_end, v_tile):
    """Gather the block's values through the BSR indices."""
    for j, d in T.grid(tile.block, tile.dim_vo):
        with T.sblock("gather_v"):
            vj, vd = T.axis.remap("SS", [j, d])
            T.reads()
            token = T.meta_var(T.min(kv0 + vj, kv_end - 1))
            v_tile[vj, vd] = scales.value(unit.key(token), cache.element(v, unit, vj), vd)


@T.inline
def accumulate(tile, unit, scales, cache, v, kv0, kv_end):
    """Add the block's weighted values to the output rows."""
    with T.sblock("accumulate"):
        T.reads()
        T.writes()
        v_tile = T.sblock_alloc_buffer((tile.block, tile.dim_vo), "float32")
        block_o = T.sblock_alloc_buffer((tile.rows, tile.dim_vo), "float32")
        gather_v(tile, unit, scales, cache, v, kv0, kv_end, v_tile)
        for i, d, j in T.grid(tile.rows, tile.dim_vo, tile.block):
            with T.sblock("pv"):
                vi, vd, vj = T.axis.remap("SSR", [i, d, j])
                with T.init():
                    block_o[vi, vd] = f32(0.0)
                block_o[vi, vd] = block_o[vi, vd] + tile.weight[vi, vj] * v_tile[vj, vd]
        for i, d in T.grid(tile.rows, tile.dim_vo):
            with T.sblock("new_o"):
                vi, vd = T.axis.remap("SS", [i, d])
                T.reads(tile.rescale[vi], block_o[vi, vd])
                T.writes(tile.o[vi, vd])
                tile.o[vi, vd] = tile.o[vi, vd] * tile.rescale[vi] + block_o[vi, vd]


@T.inline
def store_state(tile, unit, hooks, outputs, row0, row_end, slot):
    """Close the rows and store them: results of a whole unit, a partial state of a piece."""
    state = T.meta_var(hooks.accumulation)
    for i in T.serial(tile.rows):
        with T.sblock("close_state"):
            vi = T.axis.remap("S", [i])
            T.reads(tile.peak[vi], tile.total[vi])
            tile.part_lse[vi] = state.lse(state.reference(tile.peak[vi]), tile.total[vi])
            tile.row_lse[vi] = hooks.seeded(unit.query(row0 + vi), tile.part_lse[vi])
            tile.share[vi] = hooks.share(unit.query(row0 + vi), tile.part_lse[vi])
            tile.inverse[vi] = state.inverse(tile.total[vi])
    for i, d in T.grid(tile.rows, tile.dim_vo):
        with T.sblock("store_state"):
            vi, vd = T.axis.remap("SS", [i, d])
            T.reads(tile.o[vi, vd], tile.inverse[vi], tile.share[vi], tile.row_lse[vi])
            T.writes()
            if row0 + vi < row_end:
                part = T.meta_var(tile.o[vi, vd] * tile.inverse[vi])
                if slot == NO_SLOT:
                    at = T.meta_var(unit.index(row0 + vi))
                    outputs.out[at[0], at[1], vd] = outputs.finish(
                        unit.query(row0 + vi), part * tile.share[vi], tile.row_lse[vi]
                    )
                else:
                    outputs.partial_o[slot, vi, vd] = part
    for i in T.serial(tile.rows):
        with T.sblock("store_lse"):
            vi = T.axis.remap("S", [i])
            T.reads(tile.part_lse[vi], tile.row_lse[vi])
            T.writes()
            if row0 + vi < row_end:
                if slot == NO_SLOT:
                    at = T.meta_var(unit.index(row0 + vi))
                    outputs.lse[at[0], at[1]] = tile.row_lse[vi] * outputs.lse_scale
                else:
                    outputs.partial_lse[slot, vi] = tile.part_lse[vi]


@T.inline
def attend(tile, spec, hooks, given, t):
    """Attend from the query rows of a work item to the keys of its KV range."""
    items, scales = T.meta_var((given.work.items, given.scales))
    request: T.let[T.int32] = items[t, Item.REQUEST]
    kv_head: T.let[T.int32] = items[t, Item.KV_HEAD]
    row0: T.let[T.int32] = items[t, Item.ROW_BEGIN]
    row_end: T.let[T.int32] = items[t, Item.ROW_END]
    slot: T.let[T.int32] = items[t, Item.SLOT]
    unit = T.meta_var(Rows(hooks, spec.group_size, given.batch, request, kv_head))
    seen = T.meta_var(unit.key_range(row0, row_end))
    kv_begin: T.let[T.int32] = T.max(items[t, Item.KV_BEGIN], seen[0])
    kv_end: T.let[T.int32] = T.min(items[t, Item.KV_END], seen[1])
    cache = T.meta_var(CacheAccess.of(spec, given.batch, given.k))
    located = T.meta_var(BlockAccess.to(cache, tile))

    load_q(tile, unit, scales, given.q, row0, row_end)
    init_state(tile, hooks.accumulation)
    for b in T.serial(T.ceildiv(T.max(kv_end - kv_begin, 0), tile.block)):
        kv0: T.let[T.int32] = kv_begin + b * tile.block
        locate(tile, unit, cache, kv0, kv_end)
        score(tile, unit, scales, hooks, located, given.k, row0, row_end, kv0, kv_end)
        softmax(tile, hooks.accumulation)
        accumulate(tile, unit, scales, located, given.v, kv0, kv_end)
    store_state(tile, unit, hooks, given.outputs, row0, row_end, slot)


def attention(
    spec: AttentionSpec, hooks: Hooks, *, rows: int, block: int, name: str = "attention"
) -> tirx.PrimFunc:
    """Define attention for query tiles of `rows` fused rows and KV blocks of `block` tokens.

    Parameters
    ----------
    spec : AttentionSpec
        What is compiled in: group size, head dims, dtypes, layout, paged or ragged.
    hooks : Hooks
        The variant, with its parameters bound to TIR variables.
    rows, block : int
        Tile shape.
    name : str
        Symbol of the function.

    Returns
    -------
    tvm.tirx.PrimFunc
        Parameters: q, k, v; the work list (items, cta_indptr, merge_items, merge_indptr); the batch
        (qo_indptr, kv_indptr, kv_indices, kv_len, q_pos_offset, kv_pos_offset); k_scale, v_scale
        (float32 [num_kv_heads]); sm_scale, q_scale, lse_scale; the variant's parameters; and the
        outputs partial_o, partial_lse, out, lse.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(
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
        out_h: T.handle,
        lse_h: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        given = T.meta_var(
            bind(
                spec,
                hooks,
                rows,
                strided,
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
        work = T.meta_var(given.work)
        for c in T.serial(work.cta_indptr.shape[0] - 1):
            with T.sblock("cta"):
                vc = T.axis.spatial(work.cta_indptr.shape[0] - 1, c)
                T.reads()
                T.writes()
                tile = T.meta_var(allocate_tile(rows, block, spec.head_dim_qk, spec.dim_vo))
                for t in T.serial(work.cta_indptr[vc + 1] - work.cta_indptr[vc]):
                    item: T.let[T.int32] = work.cta_indptr[vc] + t
                    attend(tile, spec, hooks, given, item)
        for m in T.serial(work.merge_indptr.shape[0] - 1):
            with T.sblock("merge"):
                vm = T.axis.spatial(work.merge_indptr.shape[0] - 1, m)
                T.reads()
                T.writes()
                merge_unit(hooks, given, spec.group_size, spec.dim_vo, vm)

    return close_over(definition, hooks.parameters(), before=NUM_OUTPUTS, name=name, given=GIVEN)
