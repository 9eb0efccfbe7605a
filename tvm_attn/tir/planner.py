"""The planner: cuts the work of a batch and deals it to CTAs (the inspector).

`batch_planner` checks a batch and derives what a plan needs; `work_planner` makes the work list of
one kernel family from that, by the policy of `planner_policy`.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_batch import batch_planner
from tvm_attn.tir.planner_deal import WorkList
from tvm_attn.tir.planner_ints import bind, smallest
from tvm_attn.tir.planner_lists import ListMaker
from tvm_attn.tir.planner_policy import table_words
from tvm_attn.tir.planner_units import KvBounds
from tvm_attn.tir.signature import close_over
from tvm_attn.worklist import HEADER_WORDS, ITEM_WORDS, MERGE_WORDS

__all__ = ["KvBounds", "batch_planner", "work_planner"]


def work_planner(maker: ListMaker) -> Any:
    """Return the PrimFunc ``plan_work``: make the work list of one kernel family.

    Parameters of the function, in order, arrays int32 and on the host:

    ===================  ==================  =====================================================
    qo_indptr            [>= batch + 1]      ) as `batch_planner` wrote them
    kv_len               [>= batch]          )
    q_pos_offset         [>= batch]          )
    kv_pos_offset        [>= batch]          )
    *maker.extra_params                      what its bounds and bitmaps read
    batch                scalar              requests
    num_kv_heads         scalar
    tokens_at_once       scalar              0; or units are dealt each to the CTA with least, those
                                             of a head of requests with so many KV tokens before
                                             those of the next
    num_ctas             scalar              CTAs (threads) to deal to
    group_size           scalar              query heads that share a KV head
    row_min, row_max     scalars             the family has requests with so many fused rows
    tile_rows            scalar              fused rows of its query tile
    kv_block             scalar              KV tokens of a granule: costs count them, cuts are at
                                             their multiples
    overhead             scalar              fixed cost of an item, in granules
    fixed_split          scalar              0, or KV tokens at whose multiples all units are cut
    max_slots            scalar              partial states there is room for
    scratch              [scratch_words]     see `tvm_attn.runtime.sizes`
    items                [max_items, 8]      ) the work list (see `tvm_attn.worklist`)
    cta_indptr           [num_ctas + 1]      )
    merge_items          [max_merges, 4]     )
    merge_indptr         [max_merges + 1]    )
    header               [HEADER_WORDS]      status and totals; other words are left alone
    ===================  ==================  =====================================================

    When an output is too small, ``STATUS`` says which, ``WHERE`` how much room there is, ``VALUE``
    how much is needed, and no output but `header` is written. ``NUM_ITEMS``, ``NUM_SLOTS`` and
    ``NUM_MERGES`` are always what is needed. A scratch that is too small is ``ITEMS_FULL``.

    A unit that sees nothing has one item, with an empty KV range at 0: its output rows still have
    to be written. ``MAX_UNIT`` is the cost of the longest unit left whole.

    Parameters
    ----------
    maker : ListMaker
        What makes the list.

    Returns
    -------
    PrimFunc
        Raises RuntimeError when a scalar that must be positive is not, or `cta_indptr` or `scratch`
        is too small for `num_ctas`.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def plan_work(
        qo_indptr_h: T.handle,
        kv_len_h: T.handle,
        q_pos_offset_h: T.handle,
        kv_pos_offset_h: T.handle,
        batch: T.int32,
        num_kv_heads: T.int32,
        tokens_at_once: T.int32,
        num_ctas: T.int32,
        group_size: T.int32,
        row_min: T.int32,
        row_max: T.int32,
        tile_rows: T.int32,
        kv_block: T.int32,
        overhead: T.int32,
        fixed_split: T.int32,
        max_slots: T.int32,
        scratch_h: T.handle,
        items_h: T.handle,
        cta_indptr_h: T.handle,
        merge_items_h: T.handle,
        merge_indptr_h: T.handle,
        header_h: T.handle,
    ):
        qo_indptr = bind(qo_indptr_h, "qo_indptr")
        kv_len = bind(kv_len_h, "kv_len")
        q_pos_offset = bind(q_pos_offset_h, "q_pos_offset")
        kv_pos_offset = bind(kv_pos_offset_h, "kv_pos_offset")
        scratch = bind(scratch_h, "scratch")
        items = bind(items_h, "items", ITEM_WORDS)
        cta_indptr = bind(cta_indptr_h, "cta_indptr")
        merge_items = bind(merge_items_h, "merge_items", MERGE_WORDS)
        merge_indptr = bind(merge_indptr_h, "merge_indptr")
        header = T.match_buffer(header_h, (HEADER_WORDS,), "int32", align=4)
        assert smallest(num_kv_heads, num_ctas, group_size, tile_rows, kv_block) > 0, (
            "plan_work: num_kv_heads, num_ctas, group_size, tile_rows and kv_block must be positive"
        )
        assert T.And(cta_indptr.shape[0] > num_ctas, scratch.shape[0] >= table_words(num_ctas)), (
            "plan_work: cta_indptr or scratch is too small for num_ctas"
        )
        with T.sblock("plan_work"):
            T.reads()
            T.writes()
            lengths = T.meta_var((qo_indptr, kv_len, q_pos_offset, kv_pos_offset))
            out = T.meta_var(WorkList(items, cta_indptr, merge_items, merge_indptr))
            maker.make(
                *(lengths, scratch, out, header),
                *(batch, num_kv_heads, tokens_at_once, num_ctas, group_size, row_min, row_max),
                *(tile_rows, kv_block, overhead, fixed_split, max_slots),
            )

    return close_over(plan_work, maker.extra_params, before=18, name="plan_work", given=())
