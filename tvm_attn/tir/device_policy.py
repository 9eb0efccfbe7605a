"""How a family's work is cut and dealt on a device: the policy of `planner_policy`.

All threads of a CTA do each step together, and know what was decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.device_deal import (
    close_merges,
    deal_line,
    deal_snake,
    measure_line,
    measure_snake,
    place_boundaries,
    write_merges,
)
from tvm_attn.tir.device_units import count_parts, cut_units, keep, sort_longest_first
from tvm_attn.tir.planner_ints import (
    LENGTH_LIMIT,
    as_bit,
    assign,
    high_word,
    low_word,
    saturate,
    scalar,
    var,
    wide,
)
from tvm_attn.tir.planner_line import Line
from tvm_attn.tir.planner_policy import is_uneven
from tvm_attn.tir.planner_units import Longest, Machine, Multiples
from tvm_attn.worklist import Header

NONE, UNITS, PIECES, LINE = range(4)
"""What a plan deals: nothing yet, whole units or their pieces back and forth, a line."""

TABLES = 3
"""Units, their pieces, and what is to spare."""


@dataclass(frozen=True)
class Scratch:
    """Arrays of a CTA's own: int64 for `TABLES` and of all units, and for CTAs; int32 for CTAs."""

    keys: Any
    parts: Any
    at: Any
    counts: Any
    rank: Any
    head: Any
    cut: Any

    def line(self) -> Line:
        """Return the boundaries of a line, and allocate its variables."""
        totals = (scalar("int64") for _ in range(3))
        return Line(self.at, self.rank, self.head, self.cut, *totals)


@dataclass(frozen=True)
class Plan:
    """Variables of the plan settled for: its kind (int32), and totals (int64)."""

    kind: Any
    max_load: Any
    total: Any
    items: Any
    slots: Any
    merges: Any

    @staticmethod
    def allocate() -> Plan:
        """Allocate the variables."""
        return Plan(scalar("int32"), *(scalar("int64") for _ in range(5)))


def carve_scratch(
    carve_int64: Callable[[int], Any], carve_int32: Callable[[int], Any], rows: int, ctas: int
) -> Scratch:
    """Take arrays for so many rows and CTAs."""
    return Scratch(
        carve_int64(TABLES * (rows + 1)),
        carve_int64(rows + 1),
        *(carve_int64(ctas + 1) for _ in range(2)),
        *(carve_int32(ctas + 1) for _ in range(3)),
    )


@T.inline
def settle(plan, kind, max_load, total, items, slots, merges):
    """Settle for a plan."""
    assign(plan.kind, kind)
    assign(plan.max_load, max_load)
    assign(plan.total, total)
    assign(plan.items, items)
    assign(plan.slots, slots)
    assign(plan.merges, merges)


def heads_times(count: Any, machine: Machine) -> Any:
    """Return so many in every head."""
    return wide(count) * wide(machine.heads.value)


@T.inline
def try_table(cta, plan, table, kind, machine, slots, merges):
    """Sort a table, and settle for dealing it unless the plan in hand is as good."""
    load = var(T.int64(0))
    sort_longest_first(cta, table)
    measure_snake(cta, table, machine, load)
    if T.Or(plan.kind == NONE, load < plan.max_load):
        items = T.meta_var(heads_times(table.count, machine))
        settle(plan, kind, load, table.total, items, slots, merges)


@T.inline
def cut_table(cta, table, units, rows, parts, machine, share, split, slots, merges, is_few):
    """Cut long units, or all with a fixed split, unless that makes too many pieces."""
    is_fixed = T.meta_var(split > 0)
    by_split = T.meta_var(Multiples(T.max(T.min(split, LENGTH_LIMIT), 1)))
    assign(share, T.truncdiv(units.total, wide(machine.num_ctas)))
    by_share = T.meta_var(Longest(machine, share))
    most = var(0)
    if T.Or(is_fixed, wide(units.longest) > share):
        count_parts(cta, units, rows, parts, machine, is_fixed, by_split, by_share, most)
    assign(slots, heads_times(most, machine))
    assign(is_few, as_bit(T.And(slots > T.int64(0), slots <= wide(machine.num_ctas))))
    if T.Or(is_fixed, is_few != 0):
        assign(is_few, 1)
        cta.add_up(cta, lambda unit: parts.sums[unit], parts.sums, units.count, [])
        assign(table.first, (TABLES - 1) * (units.keys.shape[0] // TABLES))
        cut_units(
            cta,
            units,
            rows,
            parts,
            table,
            machine,
            lambda *args: T.if_then_else(is_fixed, by_split.edge(*args), by_share.edge(*args)),
        )
        assign(slots, heads_times(parts.slots(units.count), machine))
        assign(merges, heads_times(parts.merges(units.count), machine))


@T.inline
def decide(cta, plan, table, units, rows, parts, line, counts, machine, split):
    """Settle for a plan: the policy. The table holds the units at first, and its pieces at last."""
    is_whole = var(as_bit(split >= LENGTH_LIMIT))
    is_fixed = var(as_bit(T.And(split > 0, is_whole == 0)))
    kind = var(UNITS)
    slots = var(T.int64(0))
    merges = var(T.int64(0))
    is_few = var(0)
    share = var(T.int64(0))
    settle(plan, NONE, T.int64(0), T.int64(0), T.int64(0), T.int64(0), T.int64(0))
    while kind != LINE:
        if T.Or(kind == PIECES, is_fixed == 0):
            try_table(cta, plan, table, kind, machine, slots, merges)
        assign(is_few, 0)
        if kind == UNITS:
            keep(units, table)
            if T.And(is_whole == 0, T.Or(is_fixed != 0, is_uneven(plan, machine))):
                cut_table(
                    cta,
                    table,
                    units,
                    rows,
                    parts,
                    machine,
                    share,
                    split,
                    slots,
                    merges,
                    is_few,
                )
        kind = T.Select(is_few != 0, PIECES, LINE)
    if T.And(split == 0, is_uneven(plan, machine)):
        assign(units.spare, table.spare)
        place_boundaries(cta, line, units, machine, share)
        measure_line(cta, line, counts, units, machine)
        if line.max_load < plan.max_load:
            settle(
                plan,
                LINE,
                line.max_load,
                units.total + line.cuts * wide(machine.overhead),
                heads_times(units.count, machine) + line.cuts,
                line.cuts + line.merges,
                line.merges,
            )


@T.inline
def summarise(plan, header):
    """Write what the plan is to its header: by one thread."""
    header[int(Header.STATUS)] = 0
    header[int(Header.NUM_ITEMS)] = saturate(plan.items)
    header[int(Header.NUM_SLOTS)] = saturate(plan.slots)
    header[int(Header.NUM_MERGES)] = saturate(plan.merges)
    header[int(Header.MAX_LOAD)] = saturate(plan.max_load)
    header[int(Header.TOTAL_LOAD_LO)] = low_word(plan.total)
    header[int(Header.TOTAL_LOAD_HI)] = high_word(plan.total)


@T.inline
def deal(cta, plan, table, units, rows, parts, line, counts, machine, out, room, header):
    """Write the work list that was settled for, and its header."""
    if cta.is_first():
        summarise(plan, header)
    if plan.kind == LINE:
        deal_line(cta, line, counts, units, rows, machine, out)
    else:
        if plan.kind == UNITS:
            keep(table, units)
        deal_snake(cta, table, rows, machine, out)
        if plan.kind == PIECES:
            write_merges(cta, parts, units.count, rows, machine, out)
    close_merges(cta, out, plan, room)
