"""Dealing whole pieces of work to CTAs: longest first, back and forth.

The heads of a row of the table follow one another. Sorts are stable and all else is sums of
integers, so the result does not depend on the order in which it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_ints import as_bit, ceil_div, div, low_word, store, var, wide
from tvm_attn.tir.planner_units import STRIDE
from tvm_attn.worklist import ITEM_WORDS, Item, Merge

SORT_BITS = 11
SORT_BINS = 1 << SORT_BITS
STREAMS = 8
"""CTAs whose items are written side by side: no more than a first-level cache has ways."""


@dataclass(frozen=True)
class WorkList:
    """The arrays of a work list (see `tvm_attn.worklist`)."""

    items: Any
    cta_indptr: Any
    merge_items: Any
    merge_indptr: Any


def digit_of(cost: Any, step: Any) -> Any:
    """Bin of a cost in a pass of the sort."""
    return T.bitwise_and(T.shift_right(cost, step * SORT_BITS), SORT_BINS - 1)


@T.inline
def sort_longest_first(table, bins):
    """Rank rows by cost, equal ones in table order: a radix sort from the lowest digit up."""
    passes = var(
        1
        + as_bit(T.shift_right(table.longest, SORT_BITS) > 0)
        + as_bit(T.shift_right(table.longest, 2 * SORT_BITS) > 0)
    )
    for i in T.serial(table.count):
        table.rank[passes % 2, table.first + i] = table.first + i
    for step in T.serial(passes):
        source = var((passes - step) % 2)
        used = var(T.min(T.shift_right(table.longest, step * SORT_BITS) + 1, SORT_BINS))
        for i in T.serial(used):
            bins[i] = 0
        for i in T.serial(table.count):
            digit = var(digit_of(table.cost[table.first + i], step))
            bins[digit] = bins[digit] + 1
        begin = var(table.first)
        for i in T.serial(used):
            held = var(bins[used - 1 - i])
            bins[used - 1 - i] = begin
            begin = begin + held
        for i in T.serial(table.count):
            row = var(table.rank[source, table.first + i])
            digit = var(digit_of(table.cost[row], step))
            table.rank[1 - source, bins[digit]] = row
            bins[digit] = bins[digit] + 1


@T.inline
def measure_snake(table, machine, load, max_load):
    """Find the load of the longest CTA under `deal_snake`.

    The heads of a row are on neighbouring CTAs, going around once or more: `load` gets the steps of
    their costs from each CTA to the next, which are then summed up.
    """
    position = var(0)
    backward = var(0)
    height = var(T.int64(0))
    max_load = T.int64(0)
    for cta in T.serial(machine.num_ctas + 1):
        load[cta] = T.int64(0)
    for i in T.serial(table.count):
        cost = var(wide(table.cost[table.ranked(i)]))
        left = var(machine.heads.value)
        while left > 0:
            taken = var(T.min(left, machine.num_ctas - position))
            end = var(position + taken)
            begin = var(T.Select(backward != 0, machine.num_ctas - end, position))
            load[begin] = load[begin] + cost
            load[begin + taken] = load[begin + taken] - cost
            left = left - taken
            position = T.Select(end == machine.num_ctas, 0, end)
            backward = T.bitwise_xor(backward, as_bit(end == machine.num_ctas))
    for cta in T.serial(machine.num_ctas):
        height = height + load[cta]
        max_load = T.max(max_load, height)


@T.inline
def count_snake(num_units, machine, cta_indptr):
    """Write how many units each CTA gets, as row pointers."""
    rounds = var(div(num_units, machine.num_ctas))
    rest = var(num_units - rounds * machine.num_ctas)
    begin = var(0)
    for cta in T.serial(machine.num_ctas):
        cta_indptr[cta] = begin
        place = var(T.Select(rounds % 2 == 0, cta, machine.num_ctas - 1 - cta))
        begin = begin + rounds + as_bit(place < rest)
    cta_indptr[machine.num_ctas] = begin


def put(words: Any, column: int, value: Any, count: int = ITEM_WORDS) -> Any:
    """Return the words of an item, or so many of them, with one of them replaced."""
    here = T.Ramp(0, 1, count) == T.Broadcast(column, count)
    return T.Select(here, T.Broadcast(value, count), words)


@T.inline
def write_heads(items, index_of, table, row, head, count):
    """Write the items of some heads of a row, each at its index.

    From one head to the next an item changes by a vector: its head by 1, its slot by the stride.
    """
    stride = var(table.rows[row, STRIDE])
    slot = var(table.rows[row, int(Item.SLOT)] + head * stride)
    words = var(table.rows.vload([row, 0], f"int32x{ITEM_WORDS}"))
    words = put(put(words, int(Item.KV_HEAD), head), int(Item.SLOT), slot)
    words = put(words, int(Item.SEEN), table.seen[row])
    step = var(T.Broadcast(0, ITEM_WORDS))
    step = put(put(step, int(Item.KV_HEAD), 1), int(Item.SLOT), stride)
    for i in T.serial(count):
        items.vstore([index_of(i), 0], words)
        words = words + step


@T.inline
def deal_snake(table, machine, out):
    """Deal the units one to a CTA, longest first, turning back at the last CTA and at the first.

    CTAs are written in groups, round by round: a round gives a group consecutive units.
    """
    num_units = var(table.count * machine.heads.value)
    count_snake(num_units, machine, out.cta_indptr)
    for group in T.serial(ceil_div(machine.num_ctas, STREAMS)):
        first = var(group * STREAMS)
        width = var(T.min(machine.num_ctas - first, STREAMS))
        for turn in T.serial(ceil_div(num_units, machine.num_ctas)):
            back = var(turn % 2)
            step = var(1 - 2 * back)
            place = var(T.Select(back == 0, first, machine.num_ctas - first - width))
            unit = var(turn * machine.num_ctas + place)
            rank = var(machine.heads.div(unit))
            head = var(unit - rank * machine.heads.value)
            cta = var(first + back * (width - 1))
            left = var(T.min(width, num_units - unit))
            while left > 0:
                taken = var(T.min(left, machine.heads.value - head))
                write_heads(
                    out.items,
                    lambda i: out.cta_indptr[cta + i * step] + turn,
                    table,
                    table.ranked(rank),
                    head,
                    taken,
                )
                left = left - taken
                cta = cta + taken * step
                head = 0
                rank = rank + 1


def write_merge(out: WorkList, index: Any, rows: Any, row: Any, head: Any, slot: Any) -> None:
    """Write the merge of a unit that is cut, which starts at a slot."""
    store(out.merge_items, [index, int(Merge.REQUEST)], rows[row, int(Item.REQUEST)])
    store(out.merge_items, [index, int(Merge.KV_HEAD)], head)
    store(out.merge_items, [index, int(Merge.ROW_BEGIN)], rows[row, int(Item.ROW_BEGIN)])
    store(out.merge_items, [index, int(Merge.ROW_END)], rows[row, int(Item.ROW_END)])
    store(out.merge_indptr, index, slot)


@T.inline
def write_merges(table, machine, out):
    """Write the merges of a table's cut units, whose pieces are rows in a row."""
    merge = var(0)
    row = var(table.first)
    while merge < low_word(table.merges):
        parts = var(table.rows[row, STRIDE])
        slot = var(table.rows[row, int(Item.SLOT)])
        if parts > 0:
            for head in T.serial(machine.heads.value):
                write_merge(out, merge + head, table.rows, row, head, slot + head * parts)
            merge = merge + machine.heads.value
        row = row + T.max(parts, 1)
    out.merge_indptr[merge] = low_word(table.slots)
