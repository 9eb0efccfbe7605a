"""Dealing work to CTAs on a device: back and forth, or along a line, by the threads of a CTA.

The work lists are those of `tvm_attn.tir.planner_deal` and `tvm_attn.tir.planner_line`, bit for
bit. CTAs that plan the same batch share the writing of its items.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.device_units import DeviceMachine, Keys, Row, find_row, pack, quad
from tvm_attn.tir.parallel import find_last, largest, spread, spread_last, spread_shared
from tvm_attn.tir.planner_deal import WorkList
from tvm_attn.tir.planner_ints import as_bit, assign, ceil_div, div, low_word, store, var, wide
from tvm_attn.tir.planner_line import Line, place_boundary, set_boundary
from tvm_attn.tir.planner_units import MIN_PIECE, Machine
from tvm_attn.worklist import MERGE_WORDS


def bound_snake(table: Keys, machine: DeviceMachine) -> Any:
    """Return what no CTA passes under `deal_snake`, times CTAs; the longest does if all are alike.

    What one has more than another is less than the longest, since rounds are of ever shorter units.
    """
    turns = machine.ctas.ceil_div(table.count * machine.heads.value)
    longest = wide(table.longest) * wide(machine.num_ctas)
    is_alike = table.shortest == table.longest
    return T.if_then_else(is_alike, wide(turns) * longest, table.total + longest)


def both(a: Any, b: Any) -> Any:
    """Return the sum of two costs."""
    one, other = var(a), var(b)
    return wide(one + other)


@T.inline
def measure_snake(cta, table, machine, max_load):
    """Find the load of the longest CTA under `deal_snake`, that of one and its mirror at once.

    Threads do not know of one another yet.
    """
    count = var(table.count * machine.heads.value)
    turn = var(2 * machine.num_ctas)
    cost = T.meta_var(lambda unit: table.cost(machine.heads.div(unit)))
    rest = T.meta_var(lambda unit: T.Select(unit < count, cost(T.min(unit, count - 1)), 0))

    @T.inline
    def measure(c):
        near = var(c)
        far = var(machine.num_ctas - 1 - c)
        left = var(T.int64(0))
        right = var(T.int64(0))
        begin = var(0)
        while begin + turn <= count:
            left = left + both(cost(begin + near), cost(begin + turn - 1 - near))
            right = right + both(cost(begin + far), cost(begin + turn - 1 - far))
            begin = begin + turn
        left = left + both(rest(begin + near), rest(begin + turn - 1 - near))
        right = right + both(rest(begin + far), rest(begin + turn - 1 - far))
        assign(max_load, T.max(max_load, T.max(left, right)))

    assign(max_load, T.int64(0))
    if table.shortest == table.longest:
        turns = T.meta_var(machine.ctas.ceil_div(count))
        assign(max_load, wide(turns) * wide(table.longest))
    else:
        spread_last(cta, ceil_div(machine.num_ctas, 2), measure)


def first_item(machine: Machine, c: Any, rounds: Any, rest: Any) -> Any:
    """Return how many units `deal_snake` gives to the CTAs before one, in rounds and a rest."""
    even, odd = T.min(c, rest), T.max(c - (machine.num_ctas - rest), 0)
    return c * rounds + T.Select(rounds % 2 == 0, even, odd)


@T.inline
def deal_snake(cta, table, rows, machine, out):
    """Deal the units one to a CTA, longest first, turning back at the last CTA and at the first."""
    count = var(table.count * machine.heads.value)
    rounds = var(machine.ctas.div(count))
    rest = var(count - rounds * machine.num_ctas)

    @T.inline
    def write_first(c):
        out.cta_indptr[c] = first_item(machine, c, rounds, rest)

    @T.inline
    def deal(unit):
        turn = var(machine.ctas.div(unit))
        place = var(unit - turn * machine.num_ctas)
        c = var(T.Select(turn % 2 == 0, place, machine.num_ctas - 1 - place))
        rank = var(machine.heads.div(unit))
        head = var(unit - rank * machine.heads.value)
        row = T.meta_var(Row.allocate())
        find_row(row, rows, table.row(rank))
        assign(row.slot, row.slot + head * row.stride)
        row.write(out.items, first_item(machine, c, rounds, rest) + turn, head, 0)

    spread_shared(cta, machine.num_ctas + 1, write_first)
    spread_shared(cta, count, deal)


def write_merge(out: WorkList, index: Any, row: Row, head: Any, slot: Any) -> None:
    """Write the merge of a unit that is cut, which starts at a slot."""
    words = quad(row.request, head, row.row_begin, row.row_end)
    T.buffer_store(out.merge_items, words, [index, T.Ramp(0, 1, MERGE_WORDS)])
    store(out.merge_indptr, index, slot)


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
            row = T.meta_var(Row.allocate())
            find_row(row, rows, unit)
            write_merge(out, parts.merges(unit) * machine.heads.value + head, row, head, slot)

    spread_shared(cta, parts.slots(count) * machine.heads.value, write)


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

    spread_shared(cta, room + 1, close)


@T.inline
def lay_out(cta, units, machine):
    """Lay units along a line: where each begins is in the room to spare."""
    cta.add_up(
        cta,
        lambda rank: wide(units.cost(rank)) * wide(machine.heads.value),
        units.room(units.spare),
        units.count,
        [],
    )


@T.inline
def place_boundaries(cta, line, units, machine, share_of_all):
    """Divide the line, among fewer CTAs if shares would be too short to be worth cutting for.

    Threads do not know of one another's boundaries yet.
    """
    sums = T.meta_var(units.room(units.spare))
    shares = var(machine.num_ctas)
    share = var(share_of_all)
    least = var(wide(MIN_PIECE + machine.overhead))
    if units.total < least * wide(machine.num_ctas):
        shares = low_word(T.max(T.truncdiv(units.total, least), T.int64(1)))
        share = T.truncdiv(units.total, wide(shares))
    rest = var(low_word(units.total - share * wide(shares)))

    @T.inline
    def place_inside(c):
        target = var(share * wide(c) + wide(div(rest * c, shares)))
        rank = var(0)
        find_last(lambda i: sums[i], units.count, target, rank)
        cost = var(wide(units.cost(rank)))
        place_boundary(line, machine, c, target, share, rank, sums[rank], cost)

    @T.inline
    def place(c):
        if c == 0:
            set_boundary(line, 0, T.int64(0), 0, 0, 0)
        else:
            if c < shares:
                place_inside(c)
            else:
                set_boundary(line, c, units.total, units.count, 0, 0)

    spread(cta, machine.num_ctas + 1, place)


def count_stretch(line: Line, machine: Machine, c: Any) -> Any:
    """Return a CTA's items, pieces and units that begin to be cut, as `Counts` have them."""
    whole = (line.rank[c + 1] - line.rank[c]) * machine.heads.value
    stops, cut = as_bit(line.cut[c + 1] > 0), as_bit(line.cut[c] > 0)
    items = whole + line.head[c + 1] - line.head[c] + stops
    both = as_bit(items == 1) * cut * stops
    return pack(items, as_bit(items > 0) * (cut + stops - both), stops - both)


@T.inline
def measure_line(cta, line, counts, units, machine, load):
    """Find the longest CTA, and count items, cuts and the units that have them.

    Threads also come to know the largest of another `load`.
    """
    assign(line.max_load, T.int64(0))

    @T.inline
    def measure(c):
        overhead = T.meta_var(as_bit(line.cut[c] > 0) * machine.overhead)
        load = T.meta_var(line.at[c + 1] - line.at[c] + wide(overhead))
        assign(line.max_load, T.max(line.max_load, load))

    spread(cta, machine.num_ctas, measure)
    cta.add_up(
        cta,
        lambda c: count_stretch(line, machine, c),
        counts.sums,
        machine.num_ctas,
        [(line.max_load, largest), (load, largest)],
    )
    items = T.meta_var(wide(units.count) * wide(machine.heads.value))
    assign(line.cuts, wide(counts.rows(machine.num_ctas)) - items)
    assign(line.merges, wide(counts.merges(machine.num_ctas)))


@T.inline
def deal_line(cta, line, counts, units, rows, machine, out):
    """Write every CTA's stretch: whole units, and pieces of those cut at its two ends."""

    @T.inline
    def write_first(c):
        out.cta_indptr[c] = counts.rows(c)

    @T.inline
    def deal(index):
        c = var(0)
        find_last(counts.rows, machine.num_ctas, index, c)
        i = var(index - counts.rows(c))
        place = var(line.rank[c] * machine.heads.value + line.head[c] + i)
        rank = var(machine.heads.div(place))
        head = var(place - rank * machine.heads.value)
        cut = var(T.Select(i == 0, line.cut[c], 0))
        stop = var(T.Select(index + 1 == counts.rows(c + 1), line.cut[c + 1], 0))
        row = T.meta_var(Row.allocate())
        find_row(row, rows, units.row(rank))
        begin = var(row.kv_begin)
        if cut > 0:
            assign(row.kv_begin, machine.cut(begin, cut))
        if stop > 0:
            assign(row.kv_end, machine.cut(begin, stop))
        if T.Or(cut > 0, stop > 0):
            before = T.meta_var(as_bit(T.And(i > 0, line.cut[c] > 0)))
            assign(row.slot, counts.slots(c) + before)
            if cut == 0:
                write_merge(out, counts.merges(c), row, head, row.slot)
        row.write(out.items, index, head, 0)

    spread_shared(cta, machine.num_ctas + 1, write_first)
    spread_shared(cta, counts.rows(machine.num_ctas), deal)
