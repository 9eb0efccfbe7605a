"""The planner: cuts the work of a batch and deals it to CTAs (the inspector).

`batch_planner` checks a batch and derives what a plan needs; `work_planner` makes the work list of
one kernel family from that. Its policy, in the order it is tried:

1. Units (a (request, KV head, query tile) and the KV range it sees) are ordered longest first and
   dealt back and forth over the CTAs. That is the plan if the longest CTA has at most 1.1 times
   the mean: cutting costs more than it gains.
2. Units longer than a CTA's even share are cut in pieces of half a share and more, provided these
   are at most as many as CTAs, and all is dealt again. That is the plan if it is even enough now.
3. Units are laid along a line that the CTAs share evenly; those across a boundary are cut.

The last is taken if it makes the longest CTA shorter than 1 and 2 do. So the longest CTA of a plan
has at most 1.1 times the mean load, or one unit that is not worth cutting, or, where loads are few
granules, the mean plus a few `MIN_PIECE`. There are at most two partial states a CTA.

Where CTAs share a cache, what 1 and 2 deal back and forth is dealt to the CTA with least instead,
and the units of a last round that is far from full are cut if that pays (`LastRound`).

With a fixed split, units are cut at all multiples of it and dealt as in 1, so that how a request is
cut depends on that request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_batch import batch_planner
from tvm_attn.tir.planner_bitmaps import Bitmaps
from tvm_attn.tir.planner_deal import (
    SORT_BINS,
    WorkList,
    deal_snake,
    measure_snake,
    sort_longest_first,
    write_merges,
)
from tvm_attn.tir.planner_greedy import deal_greedy
from tvm_attn.tir.planner_ints import (
    LENGTH_LIMIT,
    Divisor,
    as_bit,
    assign,
    bind,
    carve,
    div,
    high_word,
    low_word,
    reciprocal,
    saturate,
    scalar,
    smallest,
    store,
    var,
    wide,
)
from tvm_attn.tir.planner_line import carve_line, deal_line, measure_line, place_boundaries
from tvm_attn.tir.planner_round import LastRound
from tvm_attn.tir.planner_units import (
    ROW_WORDS,
    Family,
    KvBounds,
    Lengths,
    Longest,
    Machine,
    Multiples,
    carve_tables,
    clear,
    cut_units,
    list_units,
)
from tvm_attn.tir.signature import close_over
from tvm_attn.worklist import HEADER_WORDS, ITEM_WORDS, MERGE_WORDS, Header, Status

__all__ = ["KvBounds", "batch_planner", "work_planner"]

CTA_WORDS = 8
"""Words of scratch that a CTA takes: its load, and a boundary of the line."""


@dataclass(frozen=True)
class Plan:
    """Variables of the plan settled for: its `kind`, and what goes to the header (int64).

    A plan of kind NONE needs larger tables, for `items`. One of kind SNAKE is `deal_snake` of the
    table of `count` rows that begins at row `first`; one of kind LINE is `deal_line` of the units.
    """

    kind: Any
    first: Any
    count: Any
    uncut: Any
    max_load: Any
    total: Any
    items: Any
    slots: Any
    merges: Any


NONE, SNAKE, LINE = range(3)


@T.inline
def settle_for_snake(plan, table, machine, load, bins):
    """Order a table, and settle for dealing it unless the plan in hand is as good."""
    max_load = var(T.int64(0))
    sort_longest_first(table, bins)
    measure_snake(table, machine, load, max_load)
    if T.Or(plan.kind == NONE, max_load < plan.max_load):
        plan.kind = SNAKE
        plan.first = table.first
        plan.count = table.count
        plan.uncut = table.uncut
        plan.max_load = max_load
        plan.total = table.total
        plan.items = wide(table.count) * wide(machine.heads.value)
        plan.slots = table.slots
        plan.merges = table.merges


@T.inline
def settle_for_line(plan, line, units, machine):
    """Share the units along a line, and settle for that unless the plan in hand is as good."""
    place_boundaries(line, units, machine)
    measure_line(line, machine)
    if line.max_load < plan.max_load:
        plan.kind = LINE
        plan.max_load = line.max_load
        plan.total = units.total + line.cuts * wide(machine.overhead)
        plan.items = wide(units.count) * wide(machine.heads.value) + line.cuts
        plan.slots = line.cuts + line.merges
        plan.merges = line.merges


def is_uneven(plan: Plan, machine: Machine) -> Any:
    """Whether the longest CTA has more than 1.1 times the mean."""
    return plan.max_load * wide(machine.num_ctas) * T.int64(10) > plan.total * T.int64(11)


@T.inline
def decide(plan, table, units, line, machine, fixed_split, is_greedy, load, bins):
    """Settle for a plan of the units, which are what the table holds at first: the policy."""
    is_fixed = T.meta_var(fixed_split > 0)
    share = var(T.truncdiv(units.total, wide(machine.num_ctas)))
    by_split = T.meta_var(Multiples(T.max(T.min(fixed_split, LENGTH_LIMIT), 1)))
    by_share = T.meta_var(Longest(machine, share))
    wanted = var(0)
    for attempt in T.serial(2):
        wanted = as_bit(units.count <= units.room)
        if attempt == 0:
            wanted = wanted * as_bit(T.Not(is_fixed))
        else:
            by_round = T.meta_var(
                LastRound.of(units, machine, plan.max_load, T.And(is_greedy, plan.kind == SNAKE))
            )
            is_round = T.meta_var(by_round.is_wanted)
            wanted = wanted * as_bit(T.Or(T.Or(is_fixed, is_round), is_uneven(plan, machine)))
            if wanted != 0:
                clear(table, table.room)
                cut_units(
                    units,
                    table,
                    machine,
                    lambda *args: T.if_then_else(
                        is_fixed,
                        by_split.parts(*args),
                        T.if_then_else(is_round, by_round.parts(*args), by_share.parts(*args)),
                    ),
                    lambda *args: T.if_then_else(
                        is_fixed, by_split.edge(*args), by_share.edge(*args)
                    ),
                )
                is_few = T.meta_var(
                    T.And(table.slots > T.int64(0), table.slots <= wide(machine.num_ctas))
                )
                wanted = as_bit(T.And(table.count <= table.room, T.Or(is_fixed, is_few)))
        if wanted != 0:
            settle_for_snake(plan, table, machine, load, bins)
    if T.And(T.Not(is_fixed), is_uneven(plan, machine)):
        settle_for_line(plan, line, units, machine)


def check_room(needed: Any, room: Any, code: int, header: Any) -> None:
    """Report an output that is too small for the plan, unless another was before."""
    fails = T.And(header[int(Header.STATUS)] == int(Status.OK), needed > wide(room))
    for word, value in (
        (Header.WHERE, room),
        (Header.VALUE, saturate(needed)),
        (Header.STATUS, code),
    ):
        store(header, int(word), T.Select(fails, value, header[int(word)]))


def summarise(plan: Plan, header: Any) -> None:
    """Write what the plan is, or would be, to the header."""
    for word, value in (
        (Header.NUM_ITEMS, saturate(plan.items)),
        (Header.NUM_SLOTS, saturate(plan.slots)),
        (Header.NUM_MERGES, saturate(plan.merges)),
        (Header.MAX_LOAD, saturate(plan.max_load)),
        (Header.TOTAL_LOAD_LO, low_word(plan.total)),
        (Header.TOTAL_LOAD_HI, high_word(plan.total)),
        (Header.MAX_UNIT, plan.uncut),
    ):
        store(header, int(word), value)


@T.inline
def deal(plan, table, units, line, machine, tokens_at_once, bins, load, out):
    """Write the work list that was settled for."""
    if plan.kind == LINE:
        deal_line(line, units, machine, out, plan.uncut)
    else:
        table.first = plan.first
        table.count = plan.count
        table.slots = plan.slots
        table.merges = plan.merges
        if tokens_at_once > 0:
            deal_greedy(table, machine, tokens_at_once, bins, load, out, plan)
        else:
            deal_snake(table, machine, out)
        write_merges(table, machine, out)


def plan_variables() -> Plan:
    """Allocate the variables of a plan, which is none yet."""
    ints, longs = [scalar("int32") for _ in range(4)], [scalar("int64") for _ in range(5)]
    for variable in ints:
        assign(variable, 0)
    for variable in longs:
        assign(variable, T.int64(0))
    return Plan(*ints, *longs)


def work_planner(
    kv_bounds: KvBounds | None = None,
    extra_params: Sequence[Any] = (),
    bitmaps: Bitmaps | None = None,
) -> Any:
    """Return the PrimFunc ``plan_work``: make the work list of one kernel family.

    Parameters of the function, in order, arrays int32 and on the host:

    ===================  ==================  =====================================================
    qo_indptr            [>= batch + 1]      ) as `batch_planner` wrote them
    kv_len               [>= batch]          )
    q_pos_offset         [>= batch]          )
    kv_pos_offset        [>= batch]          )
    *extra_params                            what `kv_bounds` and `bitmaps` read
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
    kv_bounds : callable, optional
        Which key positions query positions can see, see `KvBounds`; None is all of them.
    extra_params : sequence of (Var or Buffer)
        What `kv_bounds` reads besides its arguments, and `bitmaps`, by closure conversion.
    bitmaps : Bitmaps, optional
        Bitmaps of the mask. Their words may be read up to `READ_BEYOND` bytes past the end.

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
        tables: T.let[T.int32] = SORT_BINS + CTA_WORDS * (num_ctas + 1)
        assert smallest(num_kv_heads, num_ctas, group_size, tile_rows, kv_block) > 0, (
            "plan_work: num_kv_heads, num_ctas, group_size, tile_rows and kv_block must be positive"
        )
        assert T.And(cta_indptr.shape[0] > num_ctas, scratch.shape[0] >= tables), (
            "plan_work: cta_indptr or scratch is too small for num_ctas"
        )
        with T.sblock("plan_work"):
            T.reads()
            T.writes()
            room: T.let[T.int32] = div(scratch.shape[0] - tables, 2 * ROW_WORDS)
            length = T.meta_var(num_ctas + 1)
            bins = carve(scratch, 0, (SORT_BINS,))
            load = carve(scratch, SORT_BINS // 2, (length,), "int64")
            line = T.meta_var(carve_line(scratch, SORT_BINS + 2 * length, length))
            table, units = T.meta_var(carve_tables(scratch, tables, room))
            plan = T.meta_var(plan_variables())
            heads_reciprocal = var(reciprocal(num_kv_heads))
            block_reciprocal = var(reciprocal(kv_block))
            group_reciprocal = var(reciprocal(group_size))
            machine = T.meta_var(
                Machine(
                    num_ctas,
                    Divisor(num_kv_heads, heads_reciprocal),
                    Divisor(kv_block, block_reciprocal),
                    overhead,
                )
            )
            family = T.meta_var(
                Family(Divisor(group_size, group_reciprocal), row_min, row_max, tile_rows)
            )
            lengths = T.meta_var(Lengths(batch, qo_indptr, kv_len, q_pos_offset, kv_pos_offset))
            out = T.meta_var(WorkList(items, cta_indptr, merge_items, merge_indptr))

            clear(table, 0)
            list_units(table, lengths, family, machine, kv_bounds, bitmaps)
            units.count = table.count
            units.total = table.total
            plan.items = wide(units.count) * wide(num_kv_heads)
            decide(plan, table, units, line, machine, fixed_split, tokens_at_once > 0, load, bins)

            for i in T.serial(3):
                header[i] = 0
            items_room = T.meta_var(T.Select(plan.kind == NONE, room, items.shape[0]))
            merges_room = T.meta_var(T.min(merge_items.shape[0], merge_indptr.shape[0] - 1))
            items_needed = T.meta_var(
                T.Select(plan.kind == NONE, T.max(plan.items, wide(room) + T.int64(1)), plan.items)
            )
            check_room(items_needed, items_room, int(Status.ITEMS_FULL), header)
            check_room(plan.slots, max_slots, int(Status.SLOTS_FULL), header)
            check_room(plan.merges, merges_room, int(Status.MERGES_FULL), header)
            if header[int(Header.STATUS)] == int(Status.OK):
                deal(plan, table, units, line, machine, tokens_at_once, bins, load, out)
            summarise(plan, header)

    return close_over(plan_work, extra_params, before=18, name="plan_work", given=())
