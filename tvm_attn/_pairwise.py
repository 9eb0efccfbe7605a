"""Pairwise covering: few combinations in which any two values of two factors meet."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
"""One value, which can be hashed, for each factor."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]

CANDIDATES = 60


def pairwise_rows(
    factors: Mapping[str, Sequence[Hashable]], *, given: Iterable[Row] = (), seed: int = 0
) -> list[Row]:
    """Return rows, one value of each factor, that cover every pair of values of two factors.

    Greedy: each row is the best of a number of candidates, and each candidate starts at a pair that
    is not covered yet. The same arguments give the same rows.

    Parameters
    ----------
    factors : mapping of str to sequence
        The values of each factor.
    given : iterable of dict
        Rows that come first and count.
    seed : int
        Of the candidates.
    """
    chance = random.Random(seed)
    rows = list(given)
    missing = set(uncovered_pairs(factors, rows))
    while missing:
        ordered = sorted(missing, key=repr)
        candidates = (_candidate(factors, ordered, missing, chance) for _ in range(CANDIDATES))
        rows.append(max(candidates, key=lambda row: len(missing.intersection(_pairs(row)))))
        missing.difference_update(_pairs(rows[-1]))
    return rows


def uncovered_pairs(factors: Mapping[str, Sequence[Hashable]], rows: Iterable[Row]) -> list[Pair]:
    """Return the pairs of values of two factors that meet in no row."""
    covered = {pair for row in rows for pair in _pairs(row)}
    return [
        ((a, x), (b, y))
        for a, b in combinations(sorted(factors), 2)
        for x, y in product(factors[a], factors[b])
        if ((a, x), (b, y)) not in covered
    ]


def _candidate(
    factors: Mapping[str, Sequence[Hashable]],
    ordered: Sequence[Pair],
    missing: set[Pair],
    chance: random.Random,
) -> Row:
    row: Row = dict(chance.choice(ordered))
    rest = [name for name in sorted(factors) if name not in row]
    chance.shuffle(rest)
    for name in rest:
        values = list(factors[name])
        chance.shuffle(values)
        row[name] = max(
            values, key=lambda v: sum(_pair(name, v, o) in missing for o in row.items())
        )
    return row


def _pairs(row: Row) -> list[Pair]:
    return list(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def _pair(name: str, value: Hashable, other: tuple[str, Any]) -> Pair:
    return ((name, value), other) if name < other[0] else (other, (name, value))
