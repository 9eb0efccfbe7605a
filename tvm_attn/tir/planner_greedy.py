"""Dealing whole pieces of work to the CTA that has least: longest first, part by part.

That is more even than `deal_snake` and takes longer. A part is a head of some requests, whose K and
V a cache can hold: CTAs that work at the same time read the same ones, and neighbours the same
blocks of them. Short pieces, which fill up a last round, come after all else. Ties go to the first
CTA, so the result does not depend on the order in which it is computed.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_deal import SORT_BINS, write_heads
from tvm_attn.tir.planner_ints import INT32_MAX, as_bit, assign, ceil_div, low_word, var, wide
from tvm_attn.tir.planner_units import STRIDE, Table
from tvm_attn.worklist import Item

CTA_BITS = 20
"""Lowest bits of an entry of a heap: the CTA; those above are its load."""

ATTEMPTS = 4
"""Sizes of parts that are tried: one, two and four heads of some requests, and all of all."""


def load_of(entry: Any) -> Any:
    """Load of an entry of the heap."""
    return T.shift_right(entry, T.int64(CTA_BITS))


@T.inline
def give_to_least(heap, size, cost, cta):
    """Give a cost to the CTA with the least load, which becomes `cta`."""
    entry = var(heap[0])
    assign(cta, low_word(T.bitwise_and(entry, T.int64((1 << CTA_BITS) - 1))))
    entry = entry + T.shift_left(wide(cost), T.int64(CTA_BITS))
    place = var(0)
    child = var(1)
    while child < size:
        other = T.meta_var(T.min(child + 1, size - 1))
        least = var(child + as_bit(T.And(child + 1 < size, heap[other] < heap[child])))
        if heap[least] < entry:
            heap[place] = heap[least]
            place = least
            child = 2 * least + 1
        else:
            child = size
    heap[place] = entry


@T.inline
def part_requests(table, tokens_at_once):
    """Note of each row which part it is in: requests of so many KV tokens, or a single one.

    Pieces of less than half of the longest row are the last part.
    """
    part = var(0)
    tokens = var(T.int64(0))
    request = var(-1)
    length = var(0)
    for i in T.serial(table.count):
        row = var(table.first + i)
        if table.rows[row, int(Item.REQUEST)] != request:
            request = table.rows[row, int(Item.REQUEST)]
            tokens = tokens + wide(length)
            length = 0
        length = T.max(length, table.rows[row, int(Item.KV_END)])
        if T.And(tokens > T.int64(0), tokens + wide(length) > wide(tokens_at_once)):
            part = T.min(part + 1, SORT_BINS - 2)
            tokens = T.int64(0)
        is_piece = T.meta_var(table.rows[row, STRIDE] > 0)
        is_short = T.meta_var(T.And(is_piece, 2 * table.cost[row] < table.longest))
        table.rows[row, int(Item.KV_HEAD)] = T.Select(is_short, SORT_BINS - 1, part)


@T.inline
def sort_by_part(table, bins):
    """Rank rows part by part, in a part as they are ranked: for `in_parts`."""
    begin = var(table.first)
    for i in T.serial(SORT_BINS):
        bins[i] = 0
    for i in T.serial(table.count):
        part = var(table.rows[table.first + i, int(Item.KV_HEAD)])
        bins[part] = bins[part] + 1
    for i in T.serial(SORT_BINS):
        held = var(bins[i])
        bins[i] = begin
        begin = begin + held
    for i in T.serial(table.count):
        row = var(table.ranked(i))
        part = var(table.rows[row, int(Item.KV_HEAD)])
        table.rank[1, bins[part]] = row
        bins[part] = bins[part] + 1


def in_parts(table: Table, i: Any) -> Any:
    """Row of rank `i` after `sort_by_part`."""
    return table.rank[1, table.first + i]


@T.inline
def go_over_units(table, machine, heads_at_once, heap, visit):
    """Give every unit of a table to a CTA: ``visit(row, head, cta)``; heads of a row together."""
    cta = var(0)
    begin = var(0)
    end = var(0)
    for i in T.serial(machine.num_ctas):
        heap[i] = wide(i)
    while begin < table.count:
        part = var(table.rows[in_parts(table, begin), int(Item.KV_HEAD)])
        end = begin + 1
        while T.And(
            end < table.count,
            table.rows[in_parts(table, T.min(end, table.count - 1)), int(Item.KV_HEAD)] == part,
        ):
            end = end + 1
        for group in T.serial(ceil_div(machine.heads.value, heads_at_once)):
            first = var(group * heads_at_once)
            for i in T.serial(end - begin):
                row = var(in_parts(table, begin + i))
                for head in T.serial(T.min(heads_at_once, machine.heads.value - first)):
                    give_to_least(heap, machine.num_ctas, table.cost[row], cta)
                    visit(row, first + head, cta)
        begin = end


def is_uneven(max_load: Any, total: Any, num_ctas: Any) -> Any:
    """Whether the longest CTA has more than a twentieth above the mean."""
    return max_load * wide(num_ctas) * T.int64(20) > total * T.int64(21)


@T.inline
def deal_greedy(table, machine, tokens_at_once, bins, heap, out, plan):
    """Deal the units of a table; ``plan.max_load`` becomes that of the longest CTA.

    They are dealt twice: CTAs' items are counted, then written. If parts make them uneven, as long
    units of the last part do, parts have two heads, then four; at last all units are one part.
    """
    indptr = T.meta_var(out.cta_indptr)
    heads = var(1)
    tokens = var(tokens_at_once)
    is_dealt = var(0)

    @T.inline
    def count(row, head, cta):
        indptr[cta + 1] = indptr[cta + 1] + 1

    @T.inline
    def write(row, head, cta):
        write_heads(out.items, lambda _: indptr[cta], table, row, head, 1)
        indptr[cta] = indptr[cta] + 1

    for attempt in T.serial(ATTEMPTS):
        if is_dealt == 0:
            heads = T.min(T.shift_left(1, attempt), machine.heads.value)
            if attempt == ATTEMPTS - 1:
                heads = machine.heads.value
                tokens = INT32_MAX
            part_requests(table, tokens)
            sort_by_part(table, bins)
            for i in T.serial(machine.num_ctas + 1):
                indptr[i] = 0
            go_over_units(table, machine, heads, heap, count)
            plan.max_load = T.int64(0)
            for i in T.serial(machine.num_ctas):
                plan.max_load = T.max(plan.max_load, load_of(heap[i]))
            is_dealt = as_bit(T.Not(is_uneven(plan.max_load, plan.total, machine.num_ctas)))
    for i in T.serial(machine.num_ctas):
        indptr[i + 1] = indptr[i + 1] + indptr[i]
    go_over_units(table, machine, heads, heap, write)
    for i in T.serial(machine.num_ctas):
        indptr[machine.num_ctas - i] = indptr[machine.num_ctas - i - 1]
    indptr[0] = 0
