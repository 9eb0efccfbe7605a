"""How a family's work is cut and dealt on a device: the policy of `planner_policy`.

All threads of a CTA do each step together, and know what was decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.device_cuts import count_long, cut_all, cut_long, insert_pieces
from tvm_attn.tir.device_deal import (
    bound_snake,
    close_merges,
    deal_line,
    deal_snake,
    lay_out,
    measure_line,
    measure_snake,
    place_boundaries,
    write_merges,
)
from tvm_attn.tir.device_units import DeviceMachine, Keys, keep, sort_longest_first
from tvm_attn.tir.parallel import largest
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
from tvm_attn.tir.planner_units import Machine, Multiples
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


def first_of_pieces(table: Keys) -> Any:
    """Return where the keys of pieces begin."""
    return (TABLES - 1) * (table.keys.shape[0] // TABLES)


def may_be_uneven(table: Keys, machine: DeviceMachine) -> Any:
    """Whether `is_uneven` may hold of a table that is dealt back and forth."""
    return bound_snake(table, machine) * T.int64(10) > table.total * T.int64(11)


def heads_times(count: Any, machine: Machine) -> Any:
    """Return so many in every head."""
    return wide(count) * wide(machine.heads.value)


@T.inline
def settle_for_snake(plan, table, kind, machine, load, slots, merges):
    """Settle for dealing a table back and forth unless the plan in hand is as good."""
    if T.Or(plan.kind == NONE, load < plan.max_load):
        items = T.meta_var(heads_times(table.count, machine))
        settle(plan, kind, load, table.total, items, slots, merges)


@T.inline
def settle_for_line(plan, line, units, machine):
    """Settle for the line unless the plan in hand is as good, or even enough."""
    if T.And(is_uneven(plan, machine), line.max_load < plan.max_load):
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
def prepare(cta, units, parts, machine, share, is_few):
    """Lay units along a line, and find whether those longer than a share are few pieces."""
    assign(share, T.truncdiv(units.total, wide(machine.num_ctas)))
    lay_out(cta, units, machine)
    if wide(units.longest) > share:
        count_long(cta, units, parts, machine, share)
        slots = var(parts.slots(units.count) * machine.heads.value)
        assign(is_few, as_bit(T.And(slots > 0, slots <= machine.num_ctas)))


@T.inline
def decide(cta, plan, table, units, rows, parts, line, counts, machine, split):
    """Settle for a plan: the policy. The table holds the units at first, and its pieces at last.

    Where units may not be even enough, cutting and the line are prepared while it is measured.
    """
    kind = var(UNITS)
    slots = var(T.int64(0))
    merges = var(T.int64(0))
    is_few = var(0)
    load = var(T.int64(0))
    share = var(T.int64(0))
    settle(plan, NONE, T.int64(0), T.int64(0), T.int64(0), T.int64(0), T.int64(0))
    if T.And(split > 0, split < LENGTH_LIMIT):
        keep(units, table)
        table.first = first_of_pieces(table)
        cut_all(cta, units, table, rows, parts, machine, Multiples(T.max(split, 1)))
        kind = PIECES
        slots = heads_times(parts.slots(units.count), machine)
        merges = heads_times(parts.merges(units.count), machine)
    sort_longest_first(cta, table)
    may_share = var(as_bit(T.And(split == 0, may_be_uneven(table, machine))))
    if kind == UNITS:
        keep(units, table)
    if may_share != 0:
        prepare(cta, units, parts, machine, share, is_few)
        place_boundaries(cta, line, units, machine, share)
    if is_few != 0:
        cut_long(cta, units, rows, parts, counts.sums, machine, share)
    measure_snake(cta, table, machine, load)
    if T.Or(may_share != 0, table.shortest < table.longest):
        cta.agree([(load, largest)])
    settle_for_snake(plan, table, kind, machine, load, slots, merges)
    if T.And(may_share != 0, is_uneven(plan, machine)):
        if is_few != 0:
            table.first = first_of_pieces(table)
            insert_pieces(cta, table, units, rows, parts, counts.sums, machine, share)
            measure_snake(cta, table, machine, load)
        measure_line(cta, line, counts, units, machine, load)
        if is_few != 0:
            slots = heads_times(parts.slots(units.count), machine)
            merges = heads_times(parts.merges(units.count), machine)
            settle_for_snake(plan, table, PIECES, machine, load, slots, merges)
        settle_for_line(plan, line, units, machine)


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
