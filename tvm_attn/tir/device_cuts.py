"""Pieces that units are cut in on a device: by the threads of a CTA.

They are those of `tvm_attn.tir.planner_units`, in the order of units and KV ranges, and so are
their slots, head after head. Pieces are rows behind those of units; a unit that is not cut keeps
its row, and its key.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.tir.device_units import (
    Row,
    begin_table,
    cost_of,
    end_table,
    find_row,
    key_of,
    note_cost,
    pack,
)
from tvm_attn.tir.parallel import each, find_last, spread, spread_behind
from tvm_attn.tir.planner_ints import as_bit, assign, low_word, var, wide
from tvm_attn.tir.planner_units import Longest


@T.inline
def count_parts(cta, units, parts, parts_of):
    """Find in how many parts every unit is cut, and add up."""

    @T.inline
    def count_unit(i):
        key = var(units.key(i))
        unit = var(low_word(key))
        count = var(1)
        parts_of(key, unit, count)
        is_cut = var(as_bit(count > 1))
        parts.sums[unit] = pack(count, is_cut * count, is_cut)

    each(cta, units.count, count_unit)
    cta.add_up(cta, lambda unit: parts.sums[unit], parts.sums, units.count, [])


@T.inline
def find_piece(row, unit, rows, parts, count, machine, slot, edge_of):
    """Find the piece of a slot, and the unit it is of, among so many."""
    find_last(parts.slots, count + 1, slot, unit)
    find_row(row, rows, unit)
    begin = var(row.kv_begin)
    end = var(row.kv_end)
    granules = var(machine.cost(begin, end) - machine.overhead)
    first = var(parts.slots(unit))
    part = var(slot - first)
    of_unit = var(parts.slots(unit + 1) - first)
    if part > 0:
        assign(row.kv_begin, T.min(edge_of(begin, granules, part, of_unit), end))
    assign(row.kv_end, T.min(edge_of(begin, granules, part + 1, of_unit), end))
    assign(row.slot, first * machine.heads.value + part)
    assign(row.stride, of_unit)


@T.inline
def cut_all(cta, units, pieces, rows, parts, machine, rule):
    """Cut every unit by a rule: all pieces are listed, and still to be sorted."""

    @T.inline
    def parts_of(key, unit, count):
        row = T.meta_var(Row.allocate())
        find_row(row, rows, unit)
        granules = T.meta_var(cost_of(key) - machine.overhead)
        assign(count, rule.parts(unit, row.kv_begin, row.kv_end, granules))

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
        row = T.meta_var(Row.allocate())
        find_piece(row, unit, rows, parts, units.count, machine, slot, rule.edge)
        index = var(rows.first_piece + slot)
        row.write(rows.table, index, 0)
        at = var(parts.rows(unit) + slot - parts.slots(unit))
        note_cost(pieces, at, machine.cost(row.kv_begin, row.kv_end), index)

    count_parts(cta, units, parts, parts_of)
    begin_table(pieces, parts.rows(units.count))
    spread(cta, units.count, leave)
    spread(cta, parts.slots(units.count), cut)
    end_table(cta, pieces, machine)


@T.inline
def count_long(cta, units, parts, machine, share):
    """Find in how many parts units longer than a share are cut."""
    rule = T.meta_var(Longest(machine, share))

    @T.inline
    def parts_of(key, unit, count):
        if wide(cost_of(key)) > share:
            assign(count, rule.parts(0, 0, 0, cost_of(key) - machine.overhead))

    count_parts(cta, units, parts, parts_of)


@T.inline
def cut_long(cta, units, rows, parts, keys, machine, share):
    """Cut units longer than a share. The keys of their pieces have the number of the unit.

    Threads do not know of one another's pieces yet.
    """
    rule = T.meta_var(Longest(machine, share))

    @T.inline
    def cut(slot):
        unit = var(0)
        row = T.meta_var(Row.allocate())
        find_piece(row, unit, rows, parts, units.count, machine, slot, rule.edge)
        row.write(rows.table, rows.first_piece + slot, 0)
        keys[slot] = key_of(machine.cost(row.kv_begin, row.kv_end), unit)

    spread_behind(cta, machine.num_ctas + 1, parts.slots(units.count), cut)


@T.inline
def insert_pieces(cta, pieces, units, rows, parts, keys, machine, share):
    """Order pieces, and what is left of units, once these are sorted: the first of them are cut.

    A row is where there are as many before it, of pieces and of units. Most units are shorter than
    any piece.
    """
    num_cut = var(parts.merges(units.count))
    num_pieces = var(parts.slots(units.count))
    num_left = var(units.count - num_cut)
    shortest = var(Longest(machine, share).least + wide(machine.overhead))

    @T.inline
    def insert(i):
        is_piece = T.meta_var(i < num_pieces)
        slot = var(T.Select(is_piece, i, 0))
        left = var(i - num_pieces)
        key = var(T.if_then_else(is_piece, keys[slot], units.key(num_cut + left)))
        before = var(T.Select(wide(cost_of(key)) < shortest, num_pieces, 0))
        other = var(before)
        while other < num_pieces:
            before = before + as_bit(keys[other] < key + wide(as_bit(other < slot)))
            other = other + 1
        if is_piece:
            find_last(lambda rank: units.key(num_cut - 1 + rank), num_left + 1, key, left)
            key = key_of(cost_of(key), rows.first_piece + slot)
        pieces.keys[pieces.first + before + left] = key

    assign(pieces.count, num_left + num_pieces)
    more = T.meta_var((num_pieces - num_cut) * machine.overhead)
    assign(pieces.total, units.total + wide(more) * wide(machine.heads.value))
    each(cta, pieces.count, insert)
    assign(pieces.longest, pieces.cost(0))
    assign(pieces.shortest, pieces.cost(pieces.count - 1))
