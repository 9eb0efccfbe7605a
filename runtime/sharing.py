"""How the CTAs of a GPU share out the units of a batch that has few of them.

CTAs take units alone, or in clusters of which each CTA has a part of the keys, and units are whole
or cut in pieces of so many tokens. For each of these ways the planner estimates how long a run
takes (`tvm_attn.tir.planner_shares`), by the tables made here; the figures are of an H200.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_attn.runtime.plan import Family

Floats = np.ndarray[Any, np.dtype[np.float32]]

PARTS = np.array((2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), np.int32)
"""In how many pieces the longest unit may be cut."""
MEMORY, MERGING = 4.3e6, 19e3
"""Bytes a microsecond: what all CTAs read together, what one merges."""
BESIDE_PARTS = 1.04
"""How much longer reading takes where parts are written and merged meanwhile."""


class Speed(NamedTuple):
    """Of a CTA: microseconds for a token, and bytes a microsecond that it copies besides."""

    token: float
    copying: float

    def of(self, token_bytes: int) -> float:
        """Return the bytes a microsecond that a CTA reads when it has the memory for itself."""
        return token_bytes / (self.token + token_bytes / self.copying)


class Costs(NamedTuple):
    """Microseconds: of a launch, of every item of a queue after its first, of cutting units."""

    launch: float
    item: float
    cut: float


SHARING = Speed(2.7e-3, 100e3)
ALONE = Speed(1.9e-3, 450e3)
"""Of CTAs of which several share a multiprocessor, and of those that have it for themselves."""
COSTS_SHARING = {
    1: Costs(3.2, 2.0, 1.5),
    2: Costs(4.0, 2.5, 2.0),
    4: Costs(3.4, 5.0, 1.9),
    8: Costs(3.8, 2.9, 2.9),
}
COSTS_ALONE = {
    1: Costs(3.5, 1.3, 1.7),
    2: Costs(3.9, 1.6, 2.2),
    4: Costs(4.2, 4.4, 0.7),
    8: Costs(4.5, 2.6, 2.5),
}
"""Of these, by the size of the clusters."""


class Work(NamedTuple):
    """What is read of a token of one head, and written of a part of a unit, in bytes."""

    token_bytes: int
    part_bytes: int


def rates_of(family: Family, most: int, work: Work) -> Floats:
    """Return the microseconds of a token that is read while so many CTAs are busy, or none."""
    speeds = speed_of(family).of(work.token_bytes) * np.arange(1, most + 1)
    rates = work.token_bytes * (speeds**-2.5 + MEMORY**-2.5) ** 0.4
    return np.concatenate([rates[:1], rates]).astype(np.float32)


def costs_of(family: Family, queues: int, work: Work) -> tuple[float, ...]:
    """Return a family's row of the table of costs, in the order of its columns.

    One that has no queues takes forever.
    """
    costs = (COSTS_ALONE if family.replaces else COSTS_SHARING)[family.sharers]
    if not queues:
        queues, costs = 1, costs._replace(launch=math.inf)
    part = work.part_bytes / (MERGING * family.sharers)
    alone = work.token_bytes / (speed_of(family).of(work.token_bytes) * family.sharers)
    return family.sharers, queues, *costs, part, alone, BESIDE_PARTS


def speed_of(family: Family) -> Speed:
    """Return how fast a family's CTAs are."""
    return ALONE if family.replaces else SHARING


def tables(families: Sequence[Family], queues: Sequence[int], work: Work) -> tuple[Floats, Floats]:
    """Return the planner's tables of costs and of rates, for families with so many queues."""
    pairs = list(zip(families, queues, strict=True))
    most = max(family.sharers * max(count, 1) for family, count in pairs)
    costs = np.array([costs_of(family, count, work) for family, count in pairs], np.float32)
    return costs, np.stack([rates_of(family, most, work) for family in families])
