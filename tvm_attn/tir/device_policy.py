"""How a family's work is cut and dealt on a device: the policy of `tvm_attn.tir.planner`.

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
from tvm_attn.tir.device_units import count_parts, cut_units
from tvm_attn.tir.planner import is_uneven
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
from tvm_attn.tir.planner_units import Longest, Machine, Multiples
from tvm_attn.worklist import Header

NONE, UNITS, PIECES, LINE = range(4)
"""What a plan deals: nothing yet, whole units or their pieces back and forth, a line."""


@dataclass(frozen=True)
class Scratch:
    """Arrays of a CTA's own: int64 for so many rows, and for so many CTAs; int32 for CTAs."""

    unit_keys: Any
    piece_keys: Any
    parts: Any
    sums: Any
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
        *(carve_int64(rows + 1) for _ in range(4)),
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
def try_pieces(cta, plan, units, pieces, rows, parts, machine, split, load, spare):
    """Cut long units, or all with a fixed split, and settle for that if it is better."""
    is_fixed = T.meta_var(split > 0)
    share = var(T.truncdiv(units.total, wide(machine.num_ctas)))
    by_split = T.meta_var(Multiples(T.max(T.min(split, LENGTH_LIMIT), 1)))
    by_share = T.meta_var(Longest(machine, share))
    count_parts(
        cta,
        units,
        rows[0],
        parts,
        machine,
        lambda *args: T.if_then_else(is_fixed, by_split.parts(*args), by_share.parts(*args)),
    )
    slots = var(heads_times(parts.slots(units.count), machine))
    is_few = T.meta_var(T.And(slots > T.int64(0), slots <= wide(machine.num_ctas)))
    if T.Or(is_fixed, is_few):
        cut_units(
            cta,
            units,
            rows[0],
            parts,
            pieces,
            rows[1],
            spare,
            machine,
            lambda *args: T.if_then_else(is_fixed, by_split.edge(*args), by_share.edge(*args)),
        )
        measure_snake(cta, pieces, machine, load)
        if T.Or(plan.kind == NONE, load < plan.max_load):
            merges = T.meta_var(heads_times(parts.merges(units.count), machine))
            count = T.meta_var(heads_times(pieces.count, machine))
            settle(plan, PIECES, load, pieces.total, count, slots, merges)


@T.inline
def decide(cta, plan, units, pieces, rows, parts, line, scratch, machine, split):
    """Settle for a plan: the policy."""
    is_whole = var(as_bit(split >= LENGTH_LIMIT))
    load = var(T.int64(0))
    settle(plan, NONE, T.int64(0), T.int64(0), T.int64(0), T.int64(0), T.int64(0))
    if T.Or(split == 0, is_whole != 0):
        measure_snake(cta, units, machine, load)
        items = T.meta_var(heads_times(units.count, machine))
        settle(plan, UNITS, load, units.total, items, T.int64(0), T.int64(0))
    if is_whole == 0:
        if T.Or(split > 0, is_uneven(plan, machine)):
            try_pieces(cta, plan, units, pieces, rows, parts, machine, split, load, scratch.sums)
        if T.And(split == 0, is_uneven(plan, machine)):
            place_boundaries(cta, line, scratch.sums, units, machine)
            measure_line(cta, line, machine)
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
def deal(cta, plan, units, pieces, rows, parts, line, counts, machine, out, room):
    """Write the work list that was settled for."""
    if plan.kind == UNITS:
        deal_snake(cta, units, rows[0], machine, out)
    if plan.kind == PIECES:
        deal_snake(cta, pieces, rows[1], machine, out)
        write_merges(cta, parts, units, rows[0], machine, out)
    if plan.kind == LINE:
        deal_line(cta, line, counts, units, rows[0], machine, out)
    close_merges(cta, out, plan, room)


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
