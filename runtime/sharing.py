"""How the CTAs of a GPU share out the units of a batch that has few of them.

CTAs take units alone, or in clusters of which each CTA has a part of the keys, and units are whole
or cut in pieces of so many tokens. For each of these ways it is estimated how long a run takes; the
figures are of an H200, and were fitted to 250 measured plans of 24 batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from tvm_attn.runtime.plan import Family

UNCUT = 2**29
"""A split that no request is longer than."""
PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""In how many pieces the longest unit may be cut."""
SHORTEST = 4
"""Granules of the shortest piece of a CTA alone, and at least so many for the CTAs of a cluster."""
CROWD = 2
"""Pieces for each queue that are as many as there may be."""
MEMORY, COPYING, MERGING = 4.5e6, 140e3, 36e3
"""Bytes a microsecond: what all CTAs read together, what one copies, what one merges."""
TOKEN = 2.8e-3
"""Microseconds of a CTA for a token besides."""
BESIDE_PARTS = 1.045
"""How much longer reading takes where parts are written and merged meanwhile."""


class Costs(NamedTuple):
    """Microseconds: of a launch, of every item of a CTA after its first, of cutting units."""

    launch: float
    item: float
    cut: float


COSTS = {
    1: Costs(3.1, 0.7, 2.9),
    2: Costs(4.6, 1.0, 2.3),
    4: Costs(4.6, 3.6, 3.1),
    8: Costs(4.8, 4.0, 3.2),
}
"""By the size of the clusters."""


@dataclass(frozen=True)
class Work:
    """What there is to read: KV tokens of each request, and the bytes of a token of one head.

    `part_bytes` are those of a unit's partial state.
    """

    kv_len: np.ndarray[Any, np.dtype[np.int64]]
    heads: int
    token_bytes: int
    part_bytes: int

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest unit."""
        return int(self.kv_len.max())

    @property
    def cta_speed(self) -> float:
        """Bytes a microsecond that a CTA reads when it has the memory for itself."""
        return self.token_bytes / (TOKEN + self.token_bytes / COPYING)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all units."""
        return int(self.kv_len.sum()) * self.heads

    def pieces(self, splits: Sequence[int]) -> list[int]:
        """Return how many pieces all units are cut in, for each split."""
        pieces = -(-self.kv_len // np.array(splits)[:, None])
        return [int(count) * self.heads for count in pieces.sum(1)]

    def longest_queue(self, split: int, queues: int) -> int:
        """Return the tokens of the longest queue, if pieces are dealt back and forth."""
        whole, rest = np.divmod(self.kv_len, split)
        sizes = np.concatenate([np.full(int(whole.sum()), split), rest[rest > 0]])
        dealt = np.repeat(np.sort(sizes)[::-1], self.heads)
        rounds = np.pad(dealt, (0, -len(dealt) % queues)).reshape(-1, queues)
        rounds[1::2] = rounds[1::2, ::-1]
        return int(rounds.sum(0).max())


@dataclass(frozen=True)
class Way:
    """A way to share work out: the queues of a family, and a split into so many pieces."""

    family: Family
    queues: int
    split: int
    pieces: int

    @property
    def costs(self) -> Costs:
        """What it costs besides reading."""
        return COSTS[self.family.cluster]

    def least(self, work: Work) -> float:
        """Return how long it takes if all that are busy have the same to read."""
        ctas = min(self.pieces, self.queues) * self.family.cluster
        slowness = ((work.cta_speed * ctas) ** -2.5 + MEMORY**-2.5) ** 0.4
        reading = work.tokens * work.token_bytes * float(slowness)
        parts = -(-work.longest // self.split)
        if parts > 1:
            merging = parts * work.part_bytes / MERGING
            return self.costs.launch + reading * BESIDE_PARTS + self.costs.cut + merging
        return self.costs.launch + reading

    def estimate(self, work: Work) -> float:
        """Return how long it takes: the longest queue goes on alone, at its own speed."""
        busy = min(self.pieces, self.queues)
        longest = min(work.longest, self.split)
        if self.pieces > self.queues:
            longest = work.longest_queue(self.split, self.queues)
        rest = (longest - work.tokens / busy) * work.token_bytes
        alone = rest / (work.cta_speed * self.family.cluster)
        return self.least(work) + alone + (self.pieces / busy - 1) * self.costs.item


def ways(work: Work, queues: Mapping[Family, int]) -> Iterator[Way]:
    """Yield the ways that may be good: whole units, or neither short pieces nor a great many."""
    block = next(iter(queues)).block
    splits = [UNCUT, *(-(-work.longest // (parts * block)) * block for parts in PARTS)]
    for split, pieces in zip(splits, work.pieces(splits), strict=True):
        for family, count in queues.items():
            shortest = family.block * max(SHORTEST, family.cluster)
            if split == UNCUT or (split >= shortest and pieces <= CROWD * count):
                yield Way(family, count, split, pieces)


def share_out(work: Work, queues: Mapping[Family, int]) -> tuple[Family, int]:
    """Return the family, of those that may take a batch, and the split that take the least time."""
    found = sorted(((way.least(work), way) for way in ways(work, queues)), key=itemgetter(0))
    best, chosen = math.inf, found[0][1]
    for least, way in found:
        if least >= best:
            break
        time = way.estimate(work)
        if time < best:
            best, chosen = time, way
    return chosen.family, chosen.split
