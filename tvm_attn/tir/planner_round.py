"""The rule of a last round that few CTAs have work in: its units are cut, for all to share.

Units of like length are dealt in rounds. If the last round is far from full, all others wait for
the few that have one more: the heads of the last rows, as many as that round has, are cut instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_ints import assign, ceil_div, div, low_word, wide
from tvm_attn.tir.planner_units import Machine, Table

MIN_SHARE = 8
"""Fewest granules of a piece that is cut for balance alone: it costs a state, and merging."""


@dataclass(frozen=True)
class LastRound:
    """Rows from `first` on that cost no more than it, in `parts_of_row` parts each; 1 cuts none.

    Both are variables.
    """

    units: Table
    machine: Machine
    first: Any
    parts_of_row: Any

    def decide(self, max_load: Any, applies: Any) -> None:
        """Decide which rows of `units` are cut, given the longest CTA's load.

        It applies where units are sorted, and dealt to the CTA with least: elsewhere none is cut.
        """
        units, machine, first = self.units, self.machine, self.first
        heads, num_ctas = machine.heads.value, machine.num_ctas
        total = wide(units.count) * wide(heads)
        rest = low_word(total - T.truncdiv(total, wide(num_ctas)) * wide(num_ctas))
        rows = ceil_div(rest, heads)
        last = T.max(units.count - rows, 0)
        assign(first, T.if_then_else(T.And(applies, rest > 0), units.ranked(last), 0))
        cost = units.cost[first]
        granules = cost - machine.overhead
        parts = T.min(div(num_ctas, T.max(rows * heads, 1)), div(granules, MIN_SHARE))
        saved = cost - ceil_div(granules, T.max(parts, 1)) - 2 * machine.overhead
        pays = T.And(wide(saved) * T.int64(100) >= max_load, 4 * units.longest <= 5 * cost)
        is_wanted = T.And(T.And(applies, total > wide(num_ctas)), T.And(parts > 1, pays))
        assign(self.parts_of_row, T.Select(is_wanted, parts, 1))

    @property
    def is_wanted(self) -> Any:
        """Whether any row is cut."""
        return self.parts_of_row > 1

    def parts(self, row: Any, begin: Any, end: Any, granules: Any) -> Any:
        """In how many parts a row's KV range is cut."""
        cost, edge = self.units.cost[row], self.units.cost[self.first]
        is_last = T.Or(cost < edge, T.And(cost == edge, row >= self.first))
        return T.Select(is_last, self.parts_of_row, 1)
