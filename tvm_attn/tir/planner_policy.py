"""How the work of one kernel family is cut and dealt to CTAs: the policy, in the order it is tried.

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

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_deal import (
    SORT_BINS,
    deal_snake,
    measure_snake,
    sort_longest_first,
    write_merges,
)
from tvm_attn.tir.planner_greedy import deal_greedy
from tvm_attn.tir.planner_ints import (
    LENGTH_LIMIT,
    as_bit,
    assign,
    carve,
    div,
    high_word,
    low_word,
    saturate,
    scalar,
    store,
    var,
    wide,
)
from tvm_attn.tir.planner_line import Line, carve_line, deal_line, measure_line, place_boundaries
from tvm_attn.tir.planner_round import LastRound
from tvm_attn.tir.planner_units import (
    ROW_WORDS,
    Longest,
    Machine,
    Multiples,
    Table,
    carve_tables,
    clear,
    count_slots,
    cut_units,
    list_units,
)
from tvm_attn.worklist import MERGE_WORDS, Header, Status

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


def is_few(slots: Any, machine: Machine) -> Any:
    """Whether units are cut, in at most as many parts as there are CTAs."""
    return T.And(slots > T.int64(0), slots <= wide(machine.num_ctas))


@T.inline
def decide(plan, tables, machine, fixed_split, is_greedy):
    """Settle for a plan of the units, which are what the table holds at first: the policy."""
    table, units, line, load, bins = T.meta_var(
        (tables.table, tables.units, tables.line, tables.load, tables.bins)
    )
    by_round = T.meta_var(LastRound(units, machine, *tables.round))
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
            by_round.decide(plan.max_load, T.And(is_greedy, plan.kind == SNAKE))
            is_round = T.meta_var(by_round.is_wanted)
            wanted = wanted * as_bit(T.Or(T.Or(is_fixed, is_round), is_uneven(plan, machine)))
            if T.And(wanted != 0, T.Not(T.Or(is_fixed, is_round))):
                slots = var(T.int64(0))
                count_slots(units, machine, by_share, slots)
                wanted = as_bit(is_few(slots, machine))
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
                may_be = T.meta_var(T.Or(is_fixed, is_few(table.slots, machine)))
                wanted = as_bit(T.And(table.count <= table.room, may_be))
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
    """Allocate the variables of a plan."""
    ints, longs = [scalar("int32") for _ in range(4)], [scalar("int64") for _ in range(5)]
    return Plan(*ints, *longs)


def begin_plan(plan: Plan) -> None:
    """Have no plan yet."""
    for variable in (plan.kind, plan.first, plan.count, plan.uncut):
        assign(variable, 0)
    for variable in (plan.max_load, plan.total, plan.items, plan.slots, plan.merges):
        assign(variable, T.int64(0))


@dataclass(frozen=True)
class Policy:
    """What is asked of a work list: all of it is of `plan_work`'s parameters."""

    fixed_split: Any
    tokens_at_once: Any
    max_slots: Any


def table_words(num_ctas: Any) -> Any:
    """Words of scratch before the tables of units."""
    return SORT_BINS + CTA_WORDS * (num_ctas + 1)


@T.inline
def pad(plan, machine, out):
    """Make no units of what is behind the last cut one, and no items of CTAs behind the last."""
    merges = var(low_word(plan.merges))
    for i in T.serial(out.merge_items.shape[0] - merges):
        for word in T.serial(MERGE_WORDS):
            out.merge_items[merges + i, word] = 0
    for i in T.serial(out.merge_indptr.shape[0] - 1 - merges):
        out.merge_indptr[merges + 1 + i] = low_word(plan.slots)
    for i in T.serial(out.cta_indptr.shape[0] - 1 - machine.num_ctas):
        out.cta_indptr[machine.num_ctas + 1 + i] = low_word(plan.items)


@dataclass(frozen=True)
class Tables:
    """Scratch of a family's planning, and its variables, for so many CTAs."""

    room: Any
    round: tuple[Any, Any]
    bins: Any
    load: Any
    line: Line
    table: Table
    units: Table
    plan: Plan

    @staticmethod
    def carve(scratch: Any, num_ctas: Any) -> Tables:
        """Take them from scratch; `num_ctas` may be a variable that is assigned later."""
        room, begin, length = scalar("int32"), table_words(num_ctas), num_ctas + 1
        bins = carve(scratch, 0, (SORT_BINS,))
        load = carve(scratch, SORT_BINS // 2, (length,), "int64")
        line = carve_line(scratch, SORT_BINS + 2 * length, length)
        last_round = (scalar("int32"), scalar("int32"))
        return Tables(
            room,
            last_round,
            bins,
            load,
            line,
            *carve_tables(scratch, begin, room),
            plan_variables(),
        )


@T.inline
def plan_family(tables, lengths, family, machine, policy, kv_bounds, bitmaps, scratch, out, header):
    """Make the work list of a family."""
    bins, load, line, table, units, plan = T.meta_var(
        (tables.bins, tables.load, tables.line, tables.table, tables.units, tables.plan)
    )
    room = T.meta_var(tables.room)
    is_greedy = T.meta_var(policy.tokens_at_once > 0)

    assign(room, div(scratch.shape[0] - table_words(machine.num_ctas), 2 * ROW_WORDS))
    begin_plan(plan)
    clear(table, 0)
    list_units(table, lengths, family, machine, kv_bounds, bitmaps)
    assign(units.count, table.count)
    assign(units.total, table.total)
    assign(plan.items, wide(units.count) * wide(machine.heads.value))
    decide(plan, tables, machine, policy.fixed_split, is_greedy)

    for i in T.serial(3):
        header[i] = 0
    items_room = T.meta_var(T.Select(plan.kind == NONE, room, out.items.shape[0]))
    merges_room = T.meta_var(T.min(out.merge_items.shape[0], out.merge_indptr.shape[0] - 1))
    items_needed = T.meta_var(
        T.Select(plan.kind == NONE, T.max(plan.items, wide(room) + T.int64(1)), plan.items)
    )
    check_room(items_needed, items_room, int(Status.ITEMS_FULL), header)
    check_room(plan.slots, policy.max_slots, int(Status.SLOTS_FULL), header)
    check_room(plan.merges, merges_room, int(Status.MERGES_FULL), header)
    if header[int(Header.STATUS)] == int(Status.OK):
        deal(plan, table, units, line, machine, policy.tokens_at_once, bins, load, out)
        pad(plan, machine, out)
    summarise(plan, header)
