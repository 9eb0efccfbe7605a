"""Units of work on a device, and the pieces they are cut in: by the threads of a CTA.

The tables are those of `tvm_attn.tir.planner_units`, row for row. A row's cost and number are a key
that is sorted, so that `Keys` have the rows longest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.parallel import add_up, added, each, find_last, largest, least, sort
from tvm_attn.tir.planner_deal import put
from tvm_attn.tir.planner_ints import (
    INT32_MAX,
    as_bit,
    assign,
    high_word,
    low_word,
    scalar,
    var,
    wide,
)
from tvm_attn.tir.planner_units import visible
from tvm_attn.worklist import NO_SLOT, Item

COUNT_BITS = 21
"""Bits of each of the three counts that are added up in one number."""

HALF_WORDS = 4
"""Words of a row that are moved at once."""


@dataclass(frozen=True)
class Keys:
    """Rows of a table longest first, equally long ones in their order.

    ``keys`` is an int64 array. The rest are variables: `count` of rows, `total` cost over all heads
    (int64), cost of the `longest` and `shortest` row.
    """

    keys: Any
    count: Any
    total: Any
    longest: Any
    shortest: Any

    @staticmethod
    def allocate(keys: Any) -> Keys:
        """Allocate the variables."""
        return Keys(keys, *(scalar(dtype) for dtype in ("int32", "int64", "int32", "int32")))

    def row(self, i: Any) -> Any:
        """Row that is ``i``-th longest."""
        return low_word(self.keys[i])

    def cost(self, i: Any) -> Any:
        """Cost of that row."""
        return INT32_MAX - high_word(self.keys[i])


def key_of(cost: Any, row: Any) -> Any:
    """Return the key of a row."""
    return T.shift_left(wide(INT32_MAX - cost), T.int64(32)) + wide(row)


@dataclass(frozen=True)
class Counts:
    """Sums over all before each, in an int64 array, of three numbers: rows, slots and merges.

    Of units, the rows they are cut in, and if they are cut also their parts, and one merge. Of
    CTAs, their items, those that are parts, and the units that begin to be cut.
    """

    sums: Any

    def _count(self, i: Any, number: int) -> Any:
        bits = T.shift_right(self.sums[i], T.int64(number * COUNT_BITS))
        return low_word(T.bitwise_and(bits, T.int64((1 << COUNT_BITS) - 1)))

    def rows(self, i: Any) -> Any:
        """Return the rows before."""
        return self._count(i, 0)

    def slots(self, i: Any) -> Any:
        """Return the slots before."""
        return self._count(i, 1)

    def merges(self, i: Any) -> Any:
        """Return the merges before."""
        return self._count(i, 2)


def pack(rows: Any, slots: Any, merges: Any) -> Any:
    """Return three numbers as they are added up."""
    shifts = (T.int64(0), T.int64(COUNT_BITS), T.int64(2 * COUNT_BITS))
    shifted = [
        T.shift_left(wide(number), by)
        for number, by in zip((rows, slots, merges), shifts, strict=True)
    ]
    return shifted[0] + shifted[1] + shifted[2]


def quad(*words: Any) -> Any:
    """Return four words as one value."""
    value = T.Broadcast(words[0], HALF_WORDS)
    for column, word in enumerate(words[1:], start=1):
        value = put(value, column, word, HALF_WORDS)
    return value


def write_row(
    rows: Any, row: Any, unit: Sequence[Any], piece: Sequence[Any], own: Sequence[Any]
) -> None:
    """Write a row: (request, head, first and last fused row), (KV begin, end), (slot, stride)."""
    for half, words in enumerate((unit, (*piece, *own))):
        T.buffer_store(rows, quad(*words), [row, T.Ramp(half * HALF_WORDS, 1, HALF_WORDS)])


@T.inline
def sort_longest_first(cta, table, machine, spare):
    """Complete the totals of a table whose rows are all written, and sort its keys."""
    cta.agree([(table.total, added), (table.longest, largest), (table.shortest, least)])
    table.total = table.total * wide(machine.heads.value)
    if table.shortest < table.longest:
        sort(cta, table.keys, spare, table.count)


@T.inline
def begin_table(table, count):
    """Begin a table of so many rows."""
    assign(table.count, count)
    assign(table.total, T.int64(0))
    assign(table.longest, 0)
    assign(table.shortest, INT32_MAX)


@T.inline
def note_cost(table, row, cost):
    """Note the cost of a row."""
    table.keys[row] = key_of(cost, row)
    assign(table.total, table.total + wide(cost))
    assign(table.longest, T.max(table.longest, cost))
    assign(table.shortest, T.min(table.shortest, cost))


@T.inline
def list_units(cta, units, rows, sums, lengths, family, machine, is_plain, kv_bounds):
    """List the units of the family's requests with the KV range each sees, longest first.

    If `is_plain` is not 0, each request is known to be one of its units.
    """

    @T.inline
    def count_tiles(request):
        of_request = var(lengths.qo_len(request) * family.group.value)
        is_own = T.meta_var(T.And(of_request >= family.row_min, of_request <= family.row_max))
        sums[request] = wide(T.if_then_else(is_own, family.tiles(of_request), 0))

    @T.inline
    def list_unit(unit):
        request = var(unit)
        tile = var(0)
        if is_plain == 0:
            find_last(lambda b: sums[b], lengths.count + 1, wide(unit), request)
            tile = unit - low_word(sums[request])
        row_begin = var(tile * family.tile_rows)
        of_request = var(lengths.qo_len(request) * family.group.value)
        row_end = var(T.min(row_begin + family.tile_rows, of_request))
        kv = T.meta_var(visible(kv_bounds, lengths, family, request, (row_begin, row_end)))
        begin = var(kv[0])
        end = var(kv[1])
        if begin >= end:
            begin = 0
            end = 0
        write_row(rows, unit, (request, 0, row_begin, row_end), (begin, end), (NO_SLOT, 0))
        note_cost(units, unit, machine.cost(begin, end))

    begin_table(units, lengths.count)
    if is_plain == 0:
        each(cta, lengths.count, count_tiles)
        add_up(cta, sums, lengths.count)
        units.count = low_word(sums[lengths.count])
    each(cta, units.count, list_unit)
    sort_longest_first(cta, units, machine, sums)


@T.inline
def count_parts(cta, units, rows, parts, machine, parts_of):
    """Find in how many parts every unit is cut."""

    @T.inline
    def count_unit(unit):
        begin = var(rows[unit, int(Item.KV_BEGIN)])
        end = var(rows[unit, int(Item.KV_END)])
        granules = var(machine.cost(begin, end) - machine.overhead)
        count = var(parts_of(unit, begin, end, granules))
        is_cut = var(as_bit(count > 1))
        parts.sums[unit] = pack(count, is_cut * count, is_cut)

    each(cta, units.count, count_unit)
    add_up(cta, parts.sums, units.count)


@T.inline
def cut_units(cta, units, rows, parts, pieces, piece_rows, sums, machine, edge_of):
    """Cut every unit in its parts: rows in a row; slots, head after head, are consecutive."""

    @T.inline
    def cut(piece):
        unit = var(0)
        find_last(parts.rows, units.count + 1, piece, unit)
        begin = var(rows[unit, int(Item.KV_BEGIN)])
        end = var(rows[unit, int(Item.KV_END)])
        granules = var(machine.cost(begin, end) - machine.overhead)
        part = var(piece - parts.rows(unit))
        count = var(parts.rows(unit + 1) - parts.rows(unit))
        is_cut = var(as_bit(count > 1))
        left = var(
            T.if_then_else(part > 0, T.min(edge_of(begin, granules, part, count), end), begin)
        )
        right = var(T.min(edge_of(begin, granules, part + 1, count), end))
        slot = var(T.Select(is_cut != 0, parts.slots(unit) * machine.heads.value + part, NO_SLOT))
        write_row(
            piece_rows,
            piece,
            [rows[unit, word] for word in range(HALF_WORDS)],
            (left, right),
            (slot, is_cut * count),
        )
        note_cost(pieces, piece, machine.cost(left, right))

    begin_table(pieces, parts.rows(units.count))
    each(cta, pieces.count, cut)
    sort_longest_first(cta, pieces, machine, sums)
