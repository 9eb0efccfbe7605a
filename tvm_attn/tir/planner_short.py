"""The planner of short requests: checks a batch and, if it has no others, deals it, in one call.

That is what batches in decoding are, which are planned for every token: the host has little time.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_batch import Batch, Derived, derive, has_one_each
from tvm_attn.tir.planner_deal import WorkList
from tvm_attn.tir.planner_ints import (
    LENGTH_LIMIT,
    assign,
    bind,
    carve,
    scalar,
    var,
    wide,
)
from tvm_attn.tir.planner_lists import ListMaker
from tvm_attn.tir.planner_shares import Batch as Shared
from tvm_attn.tir.planner_shares import Cost, Split, share
from tvm_attn.tir.signature import close_over
from tvm_attn.worklist import (
    ALONE,
    HEADER_WORDS,
    ITEM_WORDS,
    MERGE_TOKENS,
    MERGE_WORDS,
    SHARE_WORDS,
    TERM_WORDS,
    Header,
    Share,
    Status,
    Term,
    Way,
)


def is_larger(batch: Batch, terms: Any) -> Any:
    """Whether a batch is larger than a plan's limits, if its row pointers are right."""
    return T.Or(
        batch.size > terms[int(Term.MAX_BATCH)],
        T.Or(
            batch.qo_indptr[batch.size] > terms[int(Term.MAX_QO_TOKENS)],
            batch.kv_indptr[batch.size] > terms[int(Term.MAX_PAGES)],
        ),
    )


def word(value: Any) -> Any:
    """Return a variable with a word that does not change, though what is around it may."""
    variable = scalar("int32")
    assign(variable, value)
    return variable


def place_batch(block: Any, terms: Any) -> Derived:
    """Return where a batch's arrays are in a block."""
    requests, pages = word(terms[int(Term.REQUESTS)]), word(terms[int(Term.PAGES)])
    sizes = {
        Term.QO_INDPTR: requests + 1,
        Term.KV_INDPTR: requests + 1,
        Term.KV_INDICES: pages,
        Term.KV_LEN: requests,
        Term.Q_POS_OFFSET: requests,
        Term.KV_POS_OFFSET: requests,
    }
    return Derived(*(carve(block, word(terms[int(at)]), (size,)) for at, size in sizes.items()))


def place_list(block: Any, row: Any) -> WorkList:
    """Return where a family's work list is in a block; `row` has a word of its `Share`."""
    items, ctas, merges = (
        word(row(name)) for name in (Share.MAX_ITEMS, Share.MAX_CTAS, Share.MAX_MERGES)
    )
    return WorkList(
        carve(block, word(row(Share.ITEMS)), (items, ITEM_WORDS)),
        carve(block, word(row(Share.CTA_INDPTR)), (ctas + 1,)),
        carve(block, word(row(Share.MERGE_ITEMS)), (merges, MERGE_WORDS)),
        carve(block, word(row(Share.MERGE_INDPTR)), (merges + 1,)),
    )


def is_to_deal(batch: Batch, terms: Any, header: Any) -> Any:
    """Whether a batch is right, and has short requests alone."""
    longest = header[int(Header.MAX_QO_LEN)] * batch.group_size
    is_right = header[int(Header.STATUS)] == int(Status.OK)
    return T.And(is_right, longest <= terms[int(Term.ROWS)])


def total_tokens(header: Any) -> Any:
    """KV tokens of the batch."""
    high = T.shift_left(wide(header[int(Header.NUM_TOKENS_HI)]), T.int64(32))
    low = T.reinterpret("uint32", header[int(Header.NUM_TOKENS_LO)])
    return high + T.cast(low, "int64")


def pays_whole(header: Any, heads: Any, cluster: Any) -> Any:
    """Whether clusters that do not cut units are faster than cutting them.

    A cluster has a fraction of the memory's speed; so the longest request must not be much more
    than that fraction of all, unless merging the parts of its units would take longer still.
    """
    longest = wide(header[int(Header.MAX_KV_LEN)]) * T.int64(ALONE)
    tokens = total_tokens(header) * wide(heads)
    return T.truncdiv(longest, wide(cluster)) <= tokens + T.int64(MERGE_TOKENS)


@T.inline
def choose_split(terms, shares, header, choice):
    """Choose the split of the only family there is, as a device's planner does.

    With few units of like length none is cut, and clusters take one each. With few of which some
    are much longer, clusters have fewer parts to merge.
    """
    cluster = var(shares[choice[0], int(Share.CLUSTER)])
    if cluster > 1:
        heads = T.meta_var(terms[int(Term.NUM_KV_HEADS)])
        choice[1] = T.Select(pays_whole(header, heads, cluster), LENGTH_LIMIT, 0)


@T.inline
def choose(count, shared, split, terms, shares, given, header, choice):
    """Choose the family of a batch of so many units before heads, and its split."""
    heads = T.meta_var(terms[int(Term.NUM_KV_HEADS)])
    units = var(wide(count) * wide(heads))
    choice[0] = terms[int(Term.USUAL)]
    choice[1] = 0
    if terms[int(Term.WAY)] == int(Way.ONLY):
        choose_split(terms, shares, header, choice)
    if terms[int(Term.WAY)] == int(Way.FASTEST):
        is_few = T.meta_var(units <= wide(terms[int(Term.FEW)]))
        if T.And(is_few, header[int(Header.MAX_KV_LEN)] > 0):
            rows = T.meta_var(header[int(Header.MAX_QO_LEN)] * terms[int(Term.GROUP_SIZE)])
            shape = T.meta_var((shares.shape[0], len(Cost)))
            at = T.meta_var(rows * shares.shape[0] * len(Cost))
            parts, all_costs, rates = T.meta_var(given)
            costs = carve(all_costs, at, shape, "float32")
            block = var(shares[choice[0], int(Share.GRANULE)])
            share(shared, split, block, parts, costs, rates, choice)


def deal_short(
    maker: ListMaker, batch: Batch, derived: Derived, terms: Any, row: Any, split: Any, memory: Any
) -> None:
    """Make the work list of a family, whose `Share` words `row` has, with a split."""
    lengths = (derived.qo_indptr, derived.kv_len, derived.q_pos_offset, derived.kv_pos_offset)
    scratch, block, header = memory
    maker.make(
        *(lengths, scratch, place_list(block, row), header, batch.size),
        *(terms[int(Term.NUM_KV_HEADS)], row(Share.CACHED_TOKENS), row(Share.NUM_CTAS)),
        *(terms[int(Term.GROUP_SIZE)], 1, terms[int(Term.ROWS)], row(Share.TILE_ROWS)),
        *(row(Share.GRANULE), row(Share.OVERHEAD), split, row(Share.MAX_SLOTS)),
    )


def short_planner(paged: bool, maker: ListMaker) -> Any:
    """Return the PrimFunc ``plan_short``: plan a batch whose requests are all short.

    Parameters of the function, in order, arrays int32 and on the host unless said:

    ===================  ==================  =====================================================
    qo_indptr ... kv_pos_offset              as for `batch_planner`
    *maker.extra_params                      what its bounds and bitmaps read
    terms                [TERM_WORDS]        see `tvm_attn.worklist.Term`
    shares               [any, SHARE_WORDS]  see `Share`: the families that may take a batch
    parts                [splits]            ) the estimate's, see `planner_shares`; costs are
    costs                [any, len(Cost)]    ) float32, those of each family for 0 fused rows, then
    rates                [families, any]     ) for 1, and so on
    scratch              [scratch_words]     see `tvm_attn.runtime.sizes`
    block                [any]               where the batch and its work list are written
    header               [HEADER_WORDS]      verdict and totals
    ===================  ==================  =====================================================

    What is wrong with a batch is reported as by `batch_planner`. A batch that is right is written
    to the block; ``FAMILY`` is -1 if it has longer requests, or is not to be dealt by `terms`, and
    else the row of `shares` whose work list was made.

    Parameters
    ----------
    paged, maker
        As for `batch_planner` and `work_planner`.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def plan_short(
        qo_indptr_h: T.handle,
        kv_indptr_h: T.handle,
        kv_indices_h: T.handle,
        last_page_len_h: T.handle,
        q_pos_offset_h: T.handle,
        kv_pos_offset_h: T.handle,
        terms_h: T.handle,
        shares_h: T.handle,
        parts_h: T.handle,
        costs_h: T.handle,
        rates_h: T.handle,
        scratch_h: T.handle,
        block_h: T.handle,
        header_h: T.handle,
    ):
        num_costs = T.int32()
        num_families = T.int32()
        num_rates = T.int32()
        qo_indptr = bind(qo_indptr_h, "qo_indptr")
        kv_indptr = T.match_buffer(kv_indptr_h, (qo_indptr.shape[0],), "int32", align=4)
        kv_indices = bind(kv_indices_h, "kv_indices")
        last_page_len = bind(last_page_len_h, "last_page_len")
        q_pos_offset = bind(q_pos_offset_h, "q_pos_offset")
        kv_pos_offset = bind(kv_pos_offset_h, "kv_pos_offset")
        terms = T.match_buffer(terms_h, (TERM_WORDS,), "int32", align=4)
        shares = bind(shares_h, "shares", SHARE_WORDS)
        parts = bind(parts_h, "parts")
        costs = T.match_buffer(costs_h, (num_costs, len(Cost)), "float32", align=4)
        rates = T.match_buffer(rates_h, (num_families, num_rates), "float32", align=4)
        scratch = bind(scratch_h, "scratch")
        block = bind(block_h, "block")
        header = T.match_buffer(header_h, (HEADER_WORDS,), "int32", align=4)
        batch_size = T.meta_var(qo_indptr.shape[0] - 1)
        assert has_one_each(batch_size, last_page_len, (q_pos_offset, kv_pos_offset), paged), (
            "plan_short: last_page_len, q_pos_offset or kv_pos_offset is not one per request"
        )
        with T.sblock("plan_short"):
            T.reads()
            T.writes()
            choice = T.alloc_buffer((2,), "int32")
            page_size = var(terms[int(Term.PAGE_SIZE)] if paged else 1)
            group_size = var(terms[int(Term.GROUP_SIZE)])
            batch = T.meta_var(
                Batch(
                    size=batch_size,
                    qo_indptr=qo_indptr,
                    kv_indptr=kv_indptr,
                    last_page_len=last_page_len,
                    q_pos_offset=q_pos_offset,
                    kv_pos_offset=kv_pos_offset,
                    page_size=page_size,
                    group_size=group_size,
                    paged=paged,
                )
            )
            derived = T.meta_var(place_batch(block, terms))
            if is_larger(batch, terms):
                header[int(Header.STATUS)] = int(Status.OVER_LIMIT)
            else:
                rows = T.meta_var((terms[int(Term.SHORT_ROWS)], terms[int(Term.LONG_ROWS)]))
                derive(batch, kv_indices, derived, rows[0], rows[1], header)
            header[int(Header.FAMILY)] = -1
            header[int(Header.NUM_ITEMS)] = 0
            count = var(0)
            heads = var(terms[int(Term.NUM_KV_HEADS)])
            shared = T.meta_var(Shared.of(derived.kv_len, batch_size, heads))
            split = T.meta_var(Split.carve(scratch, batch_size))
            if is_to_deal(batch, terms, header):
                count = header[int(Header.UNITS_SHORT)] + header[int(Header.UNITS_LONG)]
                given = T.meta_var((parts, costs, rates))
                choose(count, shared, split, terms, shares, given, header, choice)
                header[int(Header.FAMILY)] = choice[0]
            row = T.meta_var(lambda word: shares[choice[0], int(word)])
            if count > 0:
                memory = T.meta_var((scratch, block, header))
                deal_short(maker, batch, derived, terms, row, choice[1], memory)

    offsets = ("q_pos_offset", "kv_pos_offset")
    given = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", *offsets)
    return close_over(plan_short, maker.extra_params, before=8, name="plan_short", given=given)
