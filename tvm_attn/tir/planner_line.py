"""Sharing work out along a line: every CTA gets an equal stretch, whatever the units' lengths.

Units are laid end to end, longest first, heads after one another, and the line is divided into
equal shares. A unit that lies across a boundary is cut there, unless one of its ends is so near
that the boundary may as well be moved to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_deal import put, write_heads, write_merge
from tvm_attn.tir.planner_ints import as_bit, carve, div, low_word, scalar, store, var, wide
from tvm_attn.tir.planner_units import MIN_PIECE
from tvm_attn.worklist import ITEM_WORDS, Item

SNAP = 24
"""A boundary moves to an end of a unit that is within this part of a share."""


@dataclass(frozen=True)
class Line:
    """Boundaries of the CTAs' stretches: arrays [num_ctas + 1], CTA ``c`` has ``c`` to ``c + 1``.

    `at` (int64) is the place on the line. There begins head `head` of the unit ranked `rank`, or,
    if `cut` is not 0, that unit is cut after so many granules. Int64 variables: `max_load`, and the
    numbers of `cuts` and of `merges` (units that are cut).
    """

    at: Any
    rank: Any
    head: Any
    cut: Any
    max_load: Any
    cuts: Any
    merges: Any

    def is_same_unit(self, i: Any, j: Any) -> Any:
        """Whether two boundaries are in the same unit."""
        return T.And(self.rank[i] == self.rank[j], self.head[i] == self.head[j])


def set_boundary(line: Line, cta: Any, at: Any, rank: Any, head: Any, cut: Any) -> None:
    """Write a boundary."""
    store(line.at, cta, at)
    store(line.rank, cta, rank)
    store(line.head, cta, head)
    store(line.cut, cta, cut)


def carve_line(scratch: Any, begin: Any, length: Any) -> Line:
    """Return a line, in ``5 * length`` words from an even one on."""
    at = carve(scratch, div(begin, 2), (length,), "int64")
    rank, head, cut = (carve(scratch, begin + i * length, (length,)) for i in (2, 3, 4))
    return Line(at, rank, head, cut, *(scalar("int64") for _ in range(3)))


@T.inline
def place_boundary(line, machine, cta, target, share, rank, begin, cost):
    """Place a boundary in a unit, or at an end that is near, of what shares are long.

    The heads of the unit, ranked `rank`, begin at `begin` and cost so much each.
    """
    head = var(T.truncdiv(target - begin, cost))
    before = var(target - begin - head * cost)
    after = var(cost - before)
    granules = var(before - wide(machine.overhead))
    if T.And(
        T.min(before, after) * T.int64(SNAP) > share,
        T.min(granules, after) >= T.int64(MIN_PIECE),
    ):
        set_boundary(line, cta, target, rank, low_word(head), low_word(granules))
    else:
        to_end = var(as_bit(before > after))
        next_head = var(low_word(head) + to_end)
        wraps = var(as_bit(next_head == machine.heads.value))
        at = var(target - before + wide(to_end) * cost)
        set_boundary(line, cta, at, rank + wraps, (1 - wraps) * next_head, 0)


@T.inline
def place_boundaries(line, units, machine):
    """Divide the line, among fewer CTAs if shares would be too short to be worth cutting for."""
    worthwhile = var(T.truncdiv(units.total, wide(MIN_PIECE + machine.overhead)))
    shares = var(T.max(T.min(wide(machine.num_ctas), worthwhile), T.int64(1)))
    share = var(T.truncdiv(units.total, shares))
    rank = var(0)
    begin = var(T.int64(0))
    set_boundary(line, 0, T.int64(0), 0, 0, 0)
    for cta in T.serial(1, low_word(shares)):
        target = var(T.truncdiv(units.total * wide(cta), shares))
        cost = var(wide(units.cost[units.ranked(rank)]))
        while begin + cost * wide(machine.heads.value) <= target:
            begin = begin + cost * wide(machine.heads.value)
            rank = rank + 1
            cost = wide(units.cost[units.ranked(rank)])
        place_boundary(line, machine, cta, target, share, rank, begin, cost)
    for cta in T.serial(low_word(shares), machine.num_ctas + 1):
        set_boundary(line, cta, units.total, units.count, 0, 0)


@T.inline
def measure_line(line, machine):
    """Find the longest CTA, and count cuts and the units that have them."""
    line.max_load = T.int64(0)
    line.cuts = T.int64(0)
    line.merges = T.int64(0)
    for cta in T.serial(machine.num_ctas):
        is_cut = var(as_bit(line.cut[cta] > 0))
        length = var(line.at[cta + 1] - line.at[cta])
        line.max_load = T.max(line.max_load, length + wide(is_cut * machine.overhead))
        line.cuts = line.cuts + wide(is_cut)
        if is_cut != 0:  # the first boundary is never a cut, so there is one before
            again = T.meta_var(T.And(line.cut[cta - 1] > 0, line.is_same_unit(cta - 1, cta)))
            line.merges = line.merges + T.int64(1) - wide(again)


@T.inline
def write_piece(out, index, units, row, head, piece):
    """Write the item of a head of a row that is cut: of a `piece` of KV tokens, with a slot."""
    words = var(units.rows.vload([row, 0], f"int32x{ITEM_WORDS}"))
    words = put(put(words, int(Item.KV_HEAD), head), int(Item.SLOT), piece[2])
    words = put(put(words, int(Item.KV_BEGIN), piece[0]), int(Item.KV_END), piece[1])
    out.items.vstore([index, 0], put(words, int(Item.SEEN), units.seen[row]))


@T.inline
def deal_line(line, units, machine, out, uncut):
    """Write every CTA's stretch: whole units, and pieces of those cut at its two ends.

    Pieces take slots in the order of the line, which is KV order within a unit; the piece that
    begins a unit begins its merge. Finds the longest `uncut` unit.
    """
    index = var(0)
    slot = var(0)
    merge = var(0)
    uncut = 0
    for cta in T.serial(machine.num_ctas):
        out.cta_indptr[cta] = index
        rank = var(line.rank[cta])
        head = var(line.head[cta])
        cut = var(line.cut[cta])
        stop = var(line.cut[cta + 1])
        is_stopped = var(as_bit(stop > 0))
        whole = var((line.rank[cta + 1] - rank) * machine.heads.value)
        left = var(whole + line.head[cta + 1] - head + is_stopped)
        while left > 0:
            row = var(units.ranked(rank))
            taken = var(T.min(left - is_stopped, machine.heads.value - head))
            if T.Or(cut > 0, taken == 0):
                taken = 1
                kv_begin = var(units.rows[row, int(Item.KV_BEGIN)])
                begin = var(T.Select(cut > 0, machine.cut(kv_begin, cut), kv_begin))
                end = var(units.rows[row, int(Item.KV_END)])
                if left == is_stopped:
                    end = machine.cut(kv_begin, stop)
                write_piece(out, index, units, row, head, [begin, end, slot])
                if cut == 0:
                    write_merge(out, merge, units.rows, row, head, slot)
                    merge = merge + 1
                slot = slot + 1
                cut = 0
            else:
                write_heads(out.items, lambda i: index + i, units, row, head, taken)
                uncut = T.max(uncut, units.cost[row])
            index = index + taken
            left = left - taken
            head = head + taken
            if head == machine.heads.value:
                head = 0
                rank = rank + 1
    out.cta_indptr[machine.num_ctas] = index
    out.merge_indptr[merge] = slot
