"""Units of work: which there are, what they see and cost, and how they are cut.

A unit is a (request, query tile) pair in every KV head: a row of a `Table`, as are the pieces it is
cut in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_bitmaps import survey
from tvm_attn.tir.planner_ints import (
    INT32_MAX,
    Divisor,
    as_bit,
    assign,
    carve,
    ceil_div,
    div,
    low_word,
    scalar,
    var,
    wide,
)
from tvm_attn.worklist import ITEM_WORDS, NO_SLOT, Item

KvBounds = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]
"""``(request, qo_len, kv_len, q_pos_lo, q_pos_hi) -> (kv_pos_lo, kv_pos_hi)`` on int32 expressions:
key positions, exclusive end, outside of which no query position ``q_pos_lo..q_pos_hi`` (inclusive)
sees anything. Either may be None. Positions are within 2**30, so that much may be added to them."""

MIN_PIECE = 4
"""Fewest granules of a piece: less is not worth a partial state."""

ROW_WORDS = ITEM_WORDS + 4
"""Words of scratch that a row of a table takes."""

STRIDE = int(Item.SEEN)
"""Column of a row: slots from one head to the next, 0 if uncut. In items it is what is seen."""


@dataclass(frozen=True)
class Machine:
    """What work is dealt to and what it costs there.

    An item costs the granules it touches (of so many KV tokens, counted from the request's first)
    plus `overhead`; cut at granules, a range costs as much as its pieces but for that.
    """

    num_ctas: Any
    heads: Divisor
    granule: Divisor
    overhead: Any

    def cost(self, begin: Any, end: Any) -> Any:
        """Cost of a KV range."""
        return self.granule.ceil_div(end) - self.granule.div(begin) + self.overhead

    def cut(self, begin: Any, granules: Any) -> Any:
        """KV index where a range is cut so many granules after its beginning."""
        return (self.granule.div(begin) + granules) * self.granule.value


@dataclass(frozen=True)
class Table:
    """A table of pieces; rows look like items of KV head 0 but for `STRIDE`.

    It takes up to `room` rows of the arrays `rows` [rows, ITEM_WORDS], `cost` [rows], `rank`
    [2, rows] and `seen` [rows] (`Item.SEEN`), from `first` on. Sorted, ``rank[0]`` has its rows
    longest first.

    The rest are variables: `count` of rows (those without room are only counted), cost of the
    `longest` row and of the longest `uncut` one, and, int64, `total` cost over all heads and the
    `slots` and `merges` of the units that are cut.
    """

    rows: Any
    cost: Any
    rank: Any
    seen: Any
    room: Any
    first: Any
    count: Any
    longest: Any
    uncut: Any
    total: Any
    slots: Any
    merges: Any

    def ranked(self, i: Any) -> Any:
        """Row that is ``i``-th longest."""
        return self.rank[0, self.first + i]


def carve_tables(scratch: Any, begin: Any, room: Any) -> tuple[Table, Table]:
    """Return a table, with place for two of its size, and the view of what it holds at first."""
    both = 2 * room
    rows = carve(scratch, begin, (both, ITEM_WORDS))
    cost = carve(scratch, begin + ITEM_WORDS * both, (both,))
    rank = carve(scratch, begin + (ITEM_WORDS + 1) * both, (2, both))
    seen = carve(scratch, begin + (ITEM_WORDS + 3) * both, (both,))
    ints, longs = [scalar("int32") for _ in range(5)], [scalar("int64") for _ in range(4)]
    table = Table(rows, cost, rank, seen, room, *ints[:4], *longs[:3])
    return table, replace(table, first=0, count=ints[4], total=longs[3])


def clear(table: Table, first: Any) -> None:
    """Empty a table, and have it begin at a row."""
    assign(table.first, first)
    for variable in (table.count, table.longest, table.uncut):
        assign(variable, 0)
    for variable in (table.total, table.slots, table.merges):
        assign(variable, T.int64(0))


@T.inline
def add_row(table, machine, unit, begin, end, slot, stride, seen):
    """Append a piece of a unit (request, first and last fused row)."""
    cost = var(machine.cost(begin, end))
    row = var(table.first + table.count)
    if table.count < table.room:
        table.rows[row, int(Item.REQUEST)] = unit[0]
        table.rows[row, int(Item.KV_HEAD)] = 0
        table.rows[row, int(Item.ROW_BEGIN)] = unit[1]
        table.rows[row, int(Item.ROW_END)] = unit[2]
        table.rows[row, int(Item.KV_BEGIN)] = begin
        table.rows[row, int(Item.KV_END)] = end
        table.rows[row, int(Item.SLOT)] = slot
        table.rows[row, STRIDE] = stride
        table.cost[row] = cost
        table.seen[row] = seen
    table.count = T.min(table.count, INT32_MAX - 1) + 1
    table.longest = T.max(table.longest, cost)
    table.total = table.total + wide(cost)


@dataclass(frozen=True)
class Lengths:
    """What `batch_planner` derived of each request."""

    count: Any
    qo_indptr: Any
    kv_len: Any
    q_pos_offset: Any
    kv_pos_offset: Any

    def qo_len(self, request: Any) -> Any:
        """Query tokens of a request."""
        return self.qo_indptr[request + 1] - self.qo_indptr[request]


@dataclass(frozen=True)
class Family:
    """Which requests a kernel family takes (by their fused rows), and its query tile."""

    group: Divisor
    row_min: Any
    row_max: Any
    tile_rows: Any

    def tokens(self, row_begin: Any, row_end: Any) -> tuple[Any, Any]:
        """Return the first query token of some fused rows, and one past the last."""
        return self.group.div(row_begin), self.group.div(row_end - 1) + 1

    def tiles(self, rows: Any) -> Any:
        """Query tiles of a request; most have one, which takes no division."""
        return T.if_then_else(rows <= self.tile_rows, 1, ceil_div(rows, self.tile_rows))


def clip(a: Any, low: Any, high: Any) -> Any:
    """Nearest number between two."""
    return T.max(low, T.min(a, high))


def visible(
    kv_bounds: KvBounds | None,
    lengths: Lengths,
    family: Family,
    request: Any,
    rows: tuple[Any, Any],
) -> tuple[Any, Any]:
    """Return the KV range that fused rows of a request see; it may be empty or turned around."""
    kv_len, first = lengths.kv_len[request], lengths.kv_pos_offset[request]
    if kv_bounds is None:
        return T.int32(0), kv_len
    q_pos_lo = lengths.q_pos_offset[request] + family.group.div(rows[0])
    q_pos_hi = lengths.q_pos_offset[request] + family.group.div(rows[1] - 1)
    low, high = kv_bounds(request, lengths.qo_len(request), kv_len, q_pos_lo, q_pos_hi)
    begin = T.int32(0) if low is None else clip(low, first, first + kv_len) - first
    end = kv_len if high is None else clip(high, first, first + kv_len) - first
    return begin, end


@T.inline
def list_units(table, lengths, family, machine, kv_bounds, bitmaps):
    """List the units of the family's requests with the KV range each sees."""
    seen = var(0)
    for request in T.serial(lengths.count):
        rows = var(lengths.qo_len(request) * family.group.value)
        if T.And(rows >= family.row_min, rows <= family.row_max):
            for tile in T.serial(family.tiles(rows)):
                row_begin = var(tile * family.tile_rows)
                row_end = var(T.min(row_begin + family.tile_rows, rows))
                kv = T.meta_var(visible(kv_bounds, lengths, family, request, (row_begin, row_end)))
                begin = var(kv[0])
                end = var(kv[1])
                unit = T.meta_var((request, row_begin, row_end))
                if bitmaps is not None:
                    tokens = T.meta_var(family.tokens(row_begin, row_end))
                    kv_len = T.meta_var(lengths.kv_len[request])
                    survey(bitmaps, machine, request, tokens, kv_len, begin, end, seen)
                if begin >= end:
                    begin = 0
                    end = 0
                add_row(table, machine, unit, begin, end, NO_SLOT, 0, seen)
    table.uncut = table.longest
    table.total = table.total * wide(machine.heads.value)


@T.inline
def cut_units(units, table, machine, parts_of, edge_of):
    """Cut every unit in so many parts, each up to its edge or the end of the unit's KV range.

    Pieces of a unit are rows in a row. Its slots, head after head, are consecutive.
    """
    for i in T.serial(units.count):
        begin = var(units.rows[i, int(Item.KV_BEGIN)])
        end = var(units.rows[i, int(Item.KV_END)])
        granules = var(units.cost[i] - machine.overhead)
        parts = var(parts_of(i, begin, end, granules))
        is_cut = var(as_bit(parts > 1))
        left = var(begin)
        for part in T.serial(parts):
            right = var(T.min(edge_of(begin, granules, part + 1, parts), end))
            add_row(
                table,
                machine,
                [units.rows[i, int(w)] for w in (Item.REQUEST, Item.ROW_BEGIN, Item.ROW_END)],
                left,
                right,
                T.Select(is_cut != 0, low_word(table.slots) + part, NO_SLOT),
                is_cut * parts,
                units.seen[i],
            )
            left = right
        table.uncut = T.max(table.uncut, (1 - is_cut) * units.cost[i])
        table.slots = table.slots + wide(is_cut * parts) * wide(machine.heads.value)
        table.merges = table.merges + wide(is_cut * machine.heads.value)
    table.total = table.total * wide(machine.heads.value)


@dataclass(frozen=True)
class Multiples:
    """The rule of a fixed split: cut at all multiples of so many KV tokens."""

    split: Any

    def parts(self, row: Any, begin: Any, end: Any, granules: Any) -> Any:
        """In how many parts a row's KV range is cut."""
        return T.max(div(end - 1, self.split) - div(begin, self.split), 0) + 1

    def edge(self, begin: Any, granules: Any, part: Any, parts: Any) -> Any:
        """Where a part begins."""
        return (div(begin, self.split) + part) * self.split


@dataclass(frozen=True)
class Longest:
    """The rule of an uneven batch: units longer than a CTA's share in parts of half a share up."""

    machine: Machine
    share: Any

    @property
    def least(self) -> Any:
        """Fewest granules of a part."""
        return T.max(T.shift_right(self.share + T.int64(1), T.int64(1)), T.int64(MIN_PIECE))

    def parts(self, row: Any, begin: Any, end: Any, granules: Any) -> Any:
        """In how many parts a row's KV range is cut."""
        parts = T.max(low_word(T.truncdiv(wide(granules), self.least)), 1)
        return T.Select(wide(granules + self.machine.overhead) > self.share, parts, 1)

    def edge(self, begin: Any, granules: Any, part: Any, parts: Any) -> Any:
        """Where a part begins."""
        return self.machine.cut(
            begin, low_word(T.truncdiv(wide(granules) * wide(part), wide(parts)))
        )


@T.inline
def count_slots(units, machine, rule, slots):
    """Count the parts of the units that a rule of `Longest` cuts, but of no more than is too many.

    The units are sorted: none is cut behind the first that is not.
    """
    i = var(0)
    while i < units.count:
        granules = var(units.cost[units.ranked(i)] - machine.overhead)
        parts = var(rule.parts(0, 0, 0, granules))
        slots = slots + wide(as_bit(parts > 1) * parts) * wide(machine.heads.value)
        i = T.Select(T.And(parts > 1, slots <= wide(machine.num_ctas)), i + 1, units.count)
