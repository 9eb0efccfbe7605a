"""Dealing work to CTAs on a device: back and forth, or along a line, by the threads of a CTA.

The work lists are those of `tvm_attn.tir.planner_deal` and `tvm_attn.tir.planner_line`, bit for
bit. CTAs that plan the same batch share the writing of its items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.device_units import HALF_WORDS, pack, write_row
from tvm_attn.tir.parallel import add_up, added, each, find_last, largest, spread
from tvm_attn.tir.planner_deal import write_merge
from tvm_attn.tir.planner_ints import as_bit, assign, ceil_div, div, low_word, var, wide
from tvm_attn.tir.planner_line import Line, place_boundary, set_boundary
from tvm_attn.tir.planner_units import MIN_PIECE, STRIDE, Machine
from tvm_attn.worklist import MERGE_WORDS, NO_SLOT, Item


@T.inline
def spread_shared(cta, count, visit):
    """Visit numbers below `count` as `spread`; CTAs that plan the same share them."""
    share = var(ceil_div(count, cta.planners))
    first = var(T.min(cta.planner * share, count))

    @T.inline
    def visit_own(i):
        visit(first + i)

    spread(cta, T.min(share, count - first), visit_own)


def write_item(
    items: Any, index: Any, rows: Any, row: Any, head: Any, piece: Sequence[Any], slot: Any
) -> None:
    """Write the item of a head of a row, with its own KV range and slot."""
    request, _, *bounds = (rows[row, word] for word in range(HALF_WORDS))
    write_row(items, index, (request, head, *bounds), piece, (slot, 0))


@T.inline
def measure_snake(cta, table, machine, max_load):
    """Find the load of the longest CTA under `deal_snake`."""
    count = var(table.count * machine.heads.value)
    turns = var(ceil_div(count, machine.num_ctas))

    @T.inline
    def measure(c):
        load = var(T.int64(0))
        for turn in T.serial(turns):
            place = var(T.Select(turn % 2 == 0, c, machine.num_ctas - 1 - c))
            unit = var(turn * machine.num_ctas + place)
            if unit < count:
                load = load + wide(table.cost(machine.heads.div(unit)))
        assign(max_load, T.max(max_load, load))

    if table.shortest == table.longest:
        assign(max_load, wide(turns) * wide(table.longest))
    else:
        assign(max_load, T.int64(0))
        spread(cta, machine.num_ctas, measure)
        cta.agree([(max_load, largest)])


def first_item(machine: Machine, c: Any, rounds: Any, rest: Any) -> Any:
    """Return how many units `deal_snake` gives to the CTAs before one, in rounds and a rest."""
    even, odd = T.min(c, rest), T.max(c - (machine.num_ctas - rest), 0)
    return c * rounds + T.Select(rounds % 2 == 0, even, odd)


@T.inline
def deal_snake(cta, table, rows, machine, out):
    """Deal the units one to a CTA, longest first, turning back at the last CTA and at the first."""
    count = var(table.count * machine.heads.value)
    rounds = var(div(count, machine.num_ctas))
    rest = var(count - rounds * machine.num_ctas)

    @T.inline
    def write_first(c):
        out.cta_indptr[c] = first_item(machine, c, rounds, rest)

    @T.inline
    def deal(unit):
        turn = var(div(unit, machine.num_ctas))
        place = var(unit - turn * machine.num_ctas)
        c = var(T.Select(turn % 2 == 0, place, machine.num_ctas - 1 - place))
        rank = var(machine.heads.div(unit))
        head = var(unit - rank * machine.heads.value)
        row = var(table.row(rank))
        slot = var(rows[row, int(Item.SLOT)])
        write_item(
            out.items,
            first_item(machine, c, rounds, rest) + turn,
            rows,
            row,
            head,
            (rows[row, int(Item.KV_BEGIN)], rows[row, int(Item.KV_END)]),
            slot + head * rows[row, STRIDE],
        )

    spread(cta, machine.num_ctas + 1, write_first)
    spread_shared(cta, count, deal)


@T.inline
def write_merges(cta, parts, count, rows, machine, out):
    """Write the merges of those of so many units that are cut in parts."""

    @T.inline
    def write(slot):
        unit = var(0)
        find_last(lambda u: parts.slots(u) * machine.heads.value, count + 1, slot, unit)
        of_unit = var(parts.slots(unit + 1) - parts.slots(unit))
        in_unit = var(slot - parts.slots(unit) * machine.heads.value)
        head = var(div(in_unit, of_unit))
        if in_unit == head * of_unit:
            index = var(parts.merges(unit) * machine.heads.value + head)
            write_merge(out, index, rows, unit, head, slot)

    spread(cta, parts.slots(count) * machine.heads.value, write)


@T.inline
def close_merges(cta, out, plan, room):
    """Write the number of slots behind the last merge, and merges of nothing, up to the end."""

    @T.inline
    def close(i):
        if i >= low_word(plan.merges):
            out.merge_indptr[i] = low_word(plan.slots)
            if i < room:
                for word in T.unroll(MERGE_WORDS):
                    out.merge_items[i, word] = 0

    spread(cta, room + 1, close)


@T.inline
def place_boundaries(cta, line, units, machine):
    """Divide the line, among fewer CTAs if shares would be too short to be worth cutting for."""
    sums = T.meta_var(units.room(units.spare))
    worthwhile = var(T.truncdiv(units.total, wide(MIN_PIECE + machine.overhead)))
    shares = var(T.max(T.min(wide(machine.num_ctas), worthwhile), T.int64(1)))
    share = var(T.truncdiv(units.total, shares))

    @T.inline
    def place_inside(c):
        target = var(T.truncdiv(units.total * wide(c), shares))
        rank = var(0)
        find_last(lambda i: sums[i], units.count, target, rank)
        cost = var(wide(units.cost(rank)))
        place_boundary(line, machine, c, target, share, rank, sums[rank], cost)

    @T.inline
    def place(c):
        if c == 0:
            set_boundary(line, 0, T.int64(0), 0, 0, 0)
        else:
            if c < low_word(shares):
                place_inside(c)
            else:
                set_boundary(line, c, units.total, units.count, 0, 0)

    add_up(
        cta,
        lambda rank: wide(units.cost(rank)) * wide(machine.heads.value),
        sums,
        units.count,
    )
    each(cta, machine.num_ctas + 1, place)


@T.inline
def measure_line(cta, line, machine):
    """Find the longest CTA, and count cuts and the units that have them."""
    assign(line.max_load, T.int64(0))
    assign(line.cuts, T.int64(0))
    assign(line.merges, T.int64(0))

    @T.inline
    def measure(c):
        is_cut = var(as_bit(line.cut[c] > 0))
        length = var(line.at[c + 1] - line.at[c])
        assign(line.max_load, T.max(line.max_load, length + wide(is_cut * machine.overhead)))
        assign(line.cuts, line.cuts + wide(is_cut))
        if is_cut != 0:  # the first boundary is never a cut, so there is one before
            again = T.meta_var(T.And(line.cut[c - 1] > 0, line.is_same_unit(c - 1, c)))
            assign(line.merges, line.merges + T.int64(1) - wide(again))

    spread(cta, machine.num_ctas, measure)
    cta.agree([(line.max_load, largest), (line.cuts, added), (line.merges, added)])


def count_stretch(line: Line, machine: Machine, c: Any) -> Any:
    """Return a CTA's items, pieces and units that begin to be cut, as `Counts` have them."""
    whole = (line.rank[c + 1] - line.rank[c]) * machine.heads.value
    stops, cut = as_bit(line.cut[c + 1] > 0), as_bit(line.cut[c] > 0)
    items = whole + line.head[c + 1] - line.head[c] + stops
    both = as_bit(items == 1) * cut * stops
    return pack(items, as_bit(items > 0) * (cut + stops - both), stops - both)


@T.inline
def deal_line(cta, line, counts, units, rows, machine, out):
    """Write every CTA's stretch: whole units, and pieces of those cut at its two ends."""

    @T.inline
    def write_first(c):
        out.cta_indptr[c] = counts.rows(c)

    @T.inline
    def deal(index):
        c = var(0)
        find_last(counts.rows, machine.num_ctas + 1, index, c)
        i = var(index - counts.rows(c))
        place = var(line.rank[c] * machine.heads.value + line.head[c] + i)
        rank = var(machine.heads.div(place))
        head = var(place - rank * machine.heads.value)
        row = var(units.row(rank))
        cut = var(T.Select(i == 0, line.cut[c], 0))
        stop = var(T.Select(index + 1 == counts.rows(c + 1), line.cut[c + 1], 0))
        kv_begin = var(rows[row, int(Item.KV_BEGIN)])
        kv_end = var(rows[row, int(Item.KV_END)])
        is_piece = var(as_bit(T.Or(cut > 0, stop > 0)))
        before = var(as_bit(T.And(i > 0, line.cut[c] > 0)))
        slot = var(counts.slots(c) + before)
        write_item(
            out.items,
            index,
            rows,
            row,
            head,
            (
                T.Select(cut > 0, machine.cut(kv_begin, cut), kv_begin),
                T.Select(stop > 0, machine.cut(kv_begin, stop), kv_end),
            ),
            T.Select(is_piece != 0, slot, NO_SLOT),
        )
        if T.And(is_piece != 0, cut == 0):
            write_merge(out, counts.merges(c), rows, row, head, slot)

    add_up(cta, lambda c: count_stretch(line, machine, c), counts.sums, machine.num_ctas)
    spread(cta, machine.num_ctas + 1, write_first)
    spread_shared(cta, counts.rows(machine.num_ctas), deal)
