"""Units of work on a device: by the threads of a CTA.

What is sorted are keys, a row's cost and its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.device_batch import NO_FAULT, Derived, kv_position
from tvm_attn.tir.parallel import added, find_last, largest, least, spread
from tvm_attn.tir.planner_batch import Batch
from tvm_attn.tir.planner_deal import put
from tvm_attn.tir.planner_ints import (
    INT32_MAX,
    Divisor,
    assign,
    high_word,
    low_word,
    scalar,
    var,
    wide,
)
from tvm_attn.tir.planner_units import Family, KvBounds, Machine, visible
from tvm_attn.worklist import NO_SLOT, Item

COUNT_BITS = 21
"""Bits of each of the three counts that are added up in one number."""

HALF_WORDS = 4
"""Words of a row that are moved at once."""


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
        """Return a divisor, given a reciprocal as of `Divisor` in the bits of an int32."""
        made = Reciprocal(value, reciprocal, scalar("int32"))
        assign(made.shift, 31 - T.clz(2 * value - 1))
        return made


@dataclass(frozen=True)
class DeviceMachine(Machine):
    """What work is dealt to; numbers are divided by the number of `ctas`, too."""

    ctas: Reciprocal


@dataclass(frozen=True)
class Keys:
    """Rows of a table, once they are sorted longest first, equally long ones in their order.

    ``keys`` is an int64 array. The rest are variables: where in it the keys begin (`first`), and
    where there is as much room to `spare`; `count` of rows, `total` cost over all heads (int64),
    cost of the `longest` and `shortest` row, or bounds of it.
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


@dataclass(frozen=True)
class GivenLengths:
    """A batch as it is given, or replaced: its lengths are computed again where they are needed."""

    batch: Batch
    given: tuple[Any, Any]
    derived: Derived

    @property
    def count(self) -> Any:
        """Requests."""
        return self.derived.size

    @property
    def is_right(self) -> Any:
        """Whether the batch is as it was given."""
        return self.derived.fault == T.int64(NO_FAULT)

    def qo_len(self, b: Any) -> Any:
        """Query tokens of a request."""
        indptr = self.derived.qo_indptr
        return T.if_then_else(self.is_right, self.batch.qo_len(b), indptr[b + 1] - indptr[b])


@dataclass(frozen=True)
class Everywhere:
    """An array all of whose entries are a variable."""

    entry: Any

    def __getitem__(self, b: Any) -> Any:
        """Return it."""
        return self.entry


@dataclass(frozen=True)
class LengthsOfOne:
    """What `tvm_attn.tir.planner_units.Lengths` has, of one request: variables."""

    tokens: Any
    kv_len: Everywhere
    q_pos_offset: Everywhere
    kv_pos_offset: Everywhere

    @staticmethod
    def allocate() -> LengthsOfOne:
        """Allocate the variables."""
        return LengthsOfOne(scalar("int32"), *(Everywhere(scalar("int32")) for _ in range(3)))

    def qo_len(self, b: Any) -> Any:
        """Query tokens of the request."""
        return self.tokens


@T.inline
def look_up(lengths, b, one):
    """Find the lengths and positions of a request."""
    batch, given, derived = T.meta_var((lengths.batch, lengths.given, lengths.derived))
    assign(one.tokens, lengths.qo_len(b))
    if lengths.is_right:
        assign(one.kv_len.entry, batch.kv_len(b))
        ends = T.meta_var(one.kv_len.entry - one.tokens)
        assign(one.q_pos_offset.entry, T.if_then_else(given[0], batch.q_pos_offset[b], ends))
        assign(one.kv_pos_offset.entry, kv_position(batch, given, b))
    else:
        assign(one.kv_len.entry, derived.kv_len[b])
        assign(one.q_pos_offset.entry, derived.q_pos_offset[b])
        assign(one.kv_pos_offset.entry, derived.kv_pos_offset[b])


@dataclass(frozen=True)
class Row:
    """A unit, or a piece of one: variables; `stride` is from the slot of a head to the next."""

    request: Any
    row_begin: Any
    row_end: Any
    kv_begin: Any
    kv_end: Any
    slot: Any
    stride: Any

    @staticmethod
    def allocate() -> Row:
        """Allocate the variables."""
        return Row(*(scalar("int32") for _ in range(7)))

    def read(self, table: Any, row: Any) -> None:
        """Read a row of a table."""
        columns = (*(i for i in range(2 * HALF_WORDS) if i != int(Item.KV_HEAD)),)
        for variable, column in zip(vars(self).values(), columns, strict=True):
            assign(variable, table[row, column])

    def write(self, table: Any, row: Any, head: Any, last: Any = None) -> None:
        """Write a row of a table, or an item if the last word is none of its own."""
        unit = (self.request, head, self.row_begin, self.row_end)
        piece = (self.kv_begin, self.kv_end, self.slot, self.stride if last is None else last)
        for half, words in enumerate((unit, piece)):
            T.buffer_store(table, quad(*words), [row, T.Ramp(half * HALF_WORDS, 1, HALF_WORDS)])


@dataclass(frozen=True)
class Rows:
    """Rows of units and their pieces, which begin at `first_piece`: in a table.

    If `is_plain` is not 0, units are requests, and are not there but computed again.
    """

    table: Any
    first_piece: Any
    is_plain: Any
    lengths: Any
    family: Family
    kv_bounds: KvBounds | None


@T.inline
def describe(row, rows, request, tile):
    """Find what a query tile of a request sees."""
    one = T.meta_var(LengthsOfOne.allocate())
    look_up(rows.lengths, request, one)
    row_begin = var(tile * rows.family.tile_rows)
    of_request = var(one.tokens * rows.family.group.value)
    row_end = var(T.min(row_begin + rows.family.tile_rows, of_request))
    bounds = T.meta_var((row_begin, row_end))
    kv = T.meta_var(visible(rows.kv_bounds, one, rows.family, request, bounds))
    begin = var(kv[0])
    end = var(kv[1])
    if begin >= end:
        begin = 0
        end = 0
    assign(row.request, request)
    assign(row.row_begin, row_begin)
    assign(row.row_end, row_end)
    assign(row.kv_begin, begin)
    assign(row.kv_end, end)
    assign(row.slot, NO_SLOT)
    assign(row.stride, 0)


@T.inline
def find_row(row, rows, index):
    """Find what there is to know of a row."""
    if T.And(rows.is_plain != 0, index < rows.first_piece):
        describe(row, rows, index, 0)
    else:
        row.read(rows.table, index)


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


def totals_of(table: Keys) -> list[tuple[Any, Any]]:
    """Return what threads agree on once all costs are noted."""
    return [(table.total, added), (table.longest, largest), (table.shortest, least)]


@T.inline
def end_table(cta, table, machine):
    """Complete the totals of a table once all costs are noted; all threads meet."""
    cta.agree(totals_of(table))
    table.total = table.total * wide(machine.heads.value)


def tiles_of(family: Family, lengths: Any, request: Any) -> Any:
    """Return the query tiles of a request that the family takes."""
    rows = lengths.qo_len(request) * family.group.value
    is_own = T.And(rows >= family.row_min, rows <= family.row_max)
    return wide(T.if_then_else(is_own, family.tiles(rows), 0))


@T.inline
def list_units(cta, units, rows, lengths, family, machine):
    """List the units of the family's requests with the KV range each sees, in a table."""
    sums = T.meta_var(units.room(units.spare))

    @T.inline
    def list_unit(unit):
        request = var(0)
        find_last(lambda b: sums[b], lengths.count + 1, wide(unit), request)
        tile = var(unit - low_word(sums[request]))
        row = T.meta_var(Row.allocate())
        describe(row, rows, request, tile)
        row.write(rows.table, unit, 0)
        cost = var(machine.cost(row.kv_begin, row.kv_end))
        note_cost(units, unit, cost, unit)

    cta.add_up(cta, lambda b: tiles_of(family, lengths, b), sums, lengths.count, [])
    begin_table(units, low_word(sums[lengths.count]))
    spread(cta, units.count, list_unit)
    end_table(cta, units, machine)
