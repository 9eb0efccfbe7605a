"""Units of work on a device, and the pieces they are cut in: by the threads of a CTA.

The pieces are those of `tvm_attn.tir.planner_units`. What is sorted are keys, a row's cost and its
number; a unit that is not cut has the same row among the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.parallel import add_up, added, each, find_last, largest, least, spread
from tvm_attn.tir.planner_deal import put
from tvm_attn.tir.planner_ints import (
    INT32_MAX,
    Divisor,
    as_bit,
    assign,
    high_word,
    low_word,
    scalar,
    var,
    wide,
)
from tvm_attn.tir.planner_units import Family, visible
from tvm_attn.worklist import NO_SLOT, Item

COUNT_BITS = 21
"""Bits of each of the three counts that are added up in one number."""

HALF_WORDS = 4
"""Words of a row that are moved at once."""

MOST_PARTS = 1 << 16
"""As many parts of a unit as any more, where it is asked whether there are few."""


@dataclass(frozen=True)
class Reciprocal(Divisor):
    """A divisor on a device: `shift` is the least with ``value <= 1 << shift``."""

    shift: Any

    def div(self, a: Any) -> Any:
        """Quotient, rounded down: the upper half of a product, shifted."""
        twice = T.shift_left(T.cast(a, "uint32"), T.uint32(1))
        product = T.cast(twice, "uint64") * T.cast(T.cast(self.reciprocal, "uint32"), "uint64")
        upper = T.cast(T.shift_right(product, T.uint64(32)), "uint32")
        return T.cast(T.shift_right(upper, T.cast(self.shift, "uint32")), "int32")

    @staticmethod
    def of(value: Any, reciprocal: Any) -> Reciprocal:
        """Return a divisor, given a reciprocal as of `Divisor`."""
        made = Reciprocal(value, scalar("int64"), scalar("int32"))
        assign(made.reciprocal, reciprocal)
        assign(made.shift, 31 - T.clz(2 * value - 1))
        return made


@dataclass(frozen=True)
class Keys:
    """Rows of a table, once they are sorted longest first, equally long ones in their order.

    ``keys`` is an int64 array. The rest are variables: where in it the keys begin (`first`), and
    where there is as much room to `spare`; `count` of rows, `total` cost over all heads (int64),
    cost of the `longest` and `shortest` row.
    """

    keys: Any
    first: Any
    spare: Any
    count: Any
    total: Any
    longest: Any
    shortest: Any

    @staticmethod
    def allocate(keys: Any) -> Keys:
        """Allocate the variables."""
        dtypes = ("int32", "int32", "int32", "int64", "int32", "int32")
        return Keys(keys, *(scalar(dtype) for dtype in dtypes))

    def key(self, i: Any) -> Any:
        """Key of the ``i``-th row."""
        return self.keys[self.first + i]

    def row(self, i: Any) -> Any:
        """Row that is ``i``-th longest."""
        return low_word(self.key(i))

    def cost(self, i: Any) -> Any:
        """Cost of that row."""
        return cost_of(self.key(i))

    def room(self, begin: Any) -> Any:
        """View the array from a place on."""
        keys = self.keys
        return T.decl_buffer(
            keys.shape, "int64", data=keys.data, elem_offset=keys.elem_offset + begin
        )


def cost_of(key: Any) -> Any:
    """Return the cost of a row with a key."""
    return INT32_MAX - high_word(key)


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
def sort_longest_first(cta, table):
    """Sort a table, whose totals are known."""
    if table.shortest < table.longest:
        low, high = T.meta_var((INT32_MAX - table.longest, INT32_MAX - table.shortest))
        cta.sort(cta, table.keys, table.first, table.spare, table.count, low, high)


@T.inline
def begin_table(table, count):
    """Begin a table of so many rows."""
    assign(table.count, count)
    assign(table.total, T.int64(0))
    assign(table.longest, 0)
    assign(table.shortest, INT32_MAX)


def keep(kept: Keys, table: Keys) -> None:
    """Keep what is said of a table, whose keys stay where they are."""
    for name in ("first", "spare", "count", "total", "longest", "shortest"):
        assign(getattr(kept, name), getattr(table, name))


@T.inline
def note_cost(table, i, cost, row):
    """Note that the ``i``-th row has a cost."""
    table.keys[table.first + i] = key_of(cost, row)
    assign(table.total, table.total + wide(cost))
    assign(table.longest, T.max(table.longest, cost))
    assign(table.shortest, T.min(table.shortest, cost))


@T.inline
def end_table(cta, table, machine):
    """Complete the totals of a table once all costs are noted; all threads meet."""
    cta.agree([(table.total, added), (table.longest, largest), (table.shortest, least)])
    table.total = table.total * wide(machine.heads.value)


def tiles_of(family: Family, lengths: Any, request: Any) -> Any:
    """Return the query tiles of a request that the family takes."""
    rows = lengths.qo_len(request) * family.group.value
    is_own = T.And(rows >= family.row_min, rows <= family.row_max)
    return wide(T.if_then_else(is_own, family.tiles(rows), 0))


@T.inline
def list_units(cta, units, rows, lengths, family, machine, is_plain, kv_bounds):
    """List the units of the family's requests with the KV range each sees.

    If `is_plain` is not 0, each request is known to be one of its units.
    """
    sums = T.meta_var(units.room(units.spare))

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
        note_cost(units, unit, machine.cost(begin, end), unit)

    begin_table(units, lengths.count)
    if is_plain == 0:
        add_up(cta, lambda b: tiles_of(family, lengths, b), sums, lengths.count)
        units.count = low_word(sums[lengths.count])
    spread(cta, units.count, list_unit)
    end_table(cta, units, machine)


@T.inline
def count_parts(cta, units, parts, machine, parts_of, most):
    """Find in how many parts every unit is cut, and how many there are of those cut (`most`)."""

    @T.inline
    def count_unit(i):
        key = var(units.key(i))
        unit = var(low_word(key))
        count = var(parts_of(unit, cost_of(key) - machine.overhead))
        is_cut = var(as_bit(count > 1))
        parts.sums[unit] = pack(count, is_cut * count, is_cut)
        assign(most, most + is_cut * T.min(count, MOST_PARTS))

    assign(most, 0)
    spread(cta, units.count, count_unit)
    cta.agree([(most, added)])


@T.inline
def cut_units(cta, units, rows, parts, pieces, piece_rows, machine, edge_of):
    """Cut units in their parts, which are rows from `piece_rows` on; others stay as they are.

    Pieces are in the order of units and KV ranges. Slots, head after head, are consecutive.
    """

    @T.inline
    def leave(i):
        key = var(units.key(i))
        unit = var(low_word(key))
        at = var(parts.rows(unit))
        if parts.rows(unit + 1) - at == 1:
            note_cost(pieces, at, cost_of(key), unit)

    @T.inline
    def cut(slot):
        unit = var(0)
        find_last(parts.slots, units.count + 1, slot, unit)
        begin = var(rows[unit, int(Item.KV_BEGIN)])
        end = var(rows[unit, int(Item.KV_END)])
        granules = var(machine.cost(begin, end) - machine.overhead)
        first = var(parts.slots(unit))
        part = var(slot - first)
        count = var(parts.slots(unit + 1) - first)
        left = var(
            T.if_then_else(part > 0, T.min(edge_of(begin, granules, part, count), end), begin)
        )
        right = var(T.min(edge_of(begin, granules, part + 1, count), end))
        row = var(piece_rows + slot)
        write_row(
            rows,
            row,
            [rows[unit, word] for word in range(HALF_WORDS)],
            (left, right),
            (first * machine.heads.value + part, count),
        )
        note_cost(pieces, parts.rows(unit) + part, machine.cost(left, right), row)

    begin_table(pieces, parts.rows(units.count))
    spread(cta, units.count, leave)
    spread(cta, parts.slots(units.count), cut)
    end_table(cta, pieces, machine)
