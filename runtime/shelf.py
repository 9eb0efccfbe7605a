"""Memory for plans without limits: of rounded sizes, so that batches alike take the same.

How much a plan takes is known once its batch has been looked at. Until then it is taken to be like
the one before of so many requests and pages; if it is not, its batch is written once more, to where
there is room for its work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tvm_attn.bsr import BSR
from tvm_attn.runtime.buffers import Block, Layout, Pool
from tvm_attn.runtime.plan import Family
from tvm_attn.runtime.workspace import LISTS, batch_shapes, bounds_of, work_sizes

UNLIMITED = 2**31 - 1
"""More requests, tokens or pages than any batch has."""
STEP = 32
"""What small sizes are multiples of; large ones are of an eighth to a quarter of themselves."""
REMEMBERED = 32
"""Sizes for which memory is kept."""


Units = tuple[int, ...]
"""Bounds of what each family has to do: units, then pieces of a fixed split.

Those that stand in for another one are left out. Units are counted before KV heads.
"""


class Extent(NamedTuple):
    """How large a batch is, and for how many CTAs of each family it is planned."""

    requests: int
    pages: int
    num_ctas: tuple[int, ...]

    def rounded(self) -> Extent:
        """Return the size that batches alike have in common."""
        pages = 1 << (self.pages - 1).bit_length() if self.pages else 0
        return Extent(rounded(self.requests), pages, self.num_ctas)


class Most(NamedTuple):
    """The largest batch there may be: its requests, query tokens and pages."""

    requests: int = UNLIMITED
    qo_tokens: int = UNLIMITED
    pages: int = UNLIMITED


Size = tuple[Extent, Units]
"""What memory has room for."""


class Store(Protocol):
    """Where memory for a plan comes from."""

    @property
    def has_device_plans(self) -> bool:
        """Whether a device has planned there: then the host has to come to the same."""

    def take(self, extent: tuple[int, int, tuple[int, ...]]) -> Block:
        """Return a block that a batch has room in; fields are those of `Extent`."""

    def fitting(self, block: Block, units: Units) -> Block:
        """Return the block, if the batch's work has room there too, or else another one for both.

        It is a block that `take` returned for the batch.
        """

    def is_for_short(self, block: Block) -> bool:
        """Whether a block is what a batch of short requests alone takes."""

    def most(self, page_size: int | None) -> Most:
        """Return the largest batch that there may be."""

    def check(self, bsr: BSR) -> None:
        """Raise `LimitError` if a batch is larger."""


class Shelf:
    """Blocks for plans without limits, for one device and stream.

    Parameters
    ----------
    families : sequence of Family
        All of a kernel; some stand in for the first that does not.
    num_kv_heads : int
        Of the kernel.
    pinned : bool
        Whether a GPU is to copy them.
    """

    def __init__(self, families: Sequence[Family], num_kv_heads: int, pinned: bool = False):
        self._families = tuple(families)
        self._num_kv_heads = num_kv_heads
        self._pinned = pinned
        self._others = sum(not family.stands_in for family in families) - 1
        self._pools: dict[Size, Pool] = {}
        self._last: dict[Extent, Pool] = {}

    def take(self, extent: tuple[int, int, tuple[int, ...]]) -> Block:
        """Return a block that a batch has room in; fields are those of `Extent`."""
        alike = Extent(*extent).rounded()
        pool = self._last.get(alike)
        if pool is None:
            pool = self._pool((alike, (alike.requests, *[0] * (2 * self._others + 1))))
        return pool.take()

    @property
    def has_device_plans(self) -> bool:
        """No: devices plan within limits."""
        return False

    def fitting(self, block: Block, units: Units) -> Block:
        """Return the block, if it is of the size for a batch's work, or else another one."""
        alike, had = block.pool.size
        counts, pieces = units[: self._others], units[self._others :]
        room = (*[alike.requests if each else 0 for each in counts], *map(rounded, pieces))
        if room == had:
            return block
        block.give_back()
        pool = self._last[alike] = self._pool((alike, room))
        return pool.take()

    def is_for_short(self, block: Block) -> bool:
        """Whether a block has room for the first family's work alone."""
        extent, (first, *others) = block.pool.size
        return bool(self._others) and 0 < first == extent.requests and not any(others)

    def most(self, page_size: int | None) -> Most:
        """Return no limits."""
        return Most()

    def check(self, bsr: BSR) -> None:
        """Do nothing."""

    def _pool(self, size: Size) -> Pool:
        pool = self._pools.get(size)
        if pool is None:
            if len(self._pools) >= REMEMBERED:
                self._pools.clear()
                self._last.clear()
            pool = self._pools[size] = Pool(self._layout(*size), self._pinned, size)
        return pool

    def _layout(self, extent: Extent, units: Units) -> Layout:
        """Return the places of a batch's arrays, and of a work list for each kernel with units."""
        most: dict[str, tuple[int, int]] = {}
        for family, ctas in zip(self._families, extent.num_ctas, strict=True):
            had = most.get(_place(family), (0, 0))
            most[_place(family)] = (max(had[0], ctas), max(had[1], family.sharers))
        shapes: dict[object, tuple[int, ...]] = {}
        by_place = zip(most.items(), units[: len(most)], units[len(most) :], strict=True)
        for (place, (ctas, sharers)), bound, pieces in by_place:
            if bound:
                bounds = bounds_of(bound, self._num_kv_heads, ctas, pieces, sharers)
                shapes.update({(place, array): s for array, s in work_sizes(bounds).items()})
        shapes.update(batch_shapes(extent.requests, extent.pages))
        lists = {
            family: tuple((_place(family), array) for array in LISTS)
            for family in self._families
            if (_place(family), LISTS[0]) in shapes
        }
        return Layout(shapes, lists)


def _place(family: Family) -> str:
    """Return whose place a work list is in: its family's, or that of the one it stands in for."""
    return family.replaces or family.name


@functools.lru_cache(1024)
def rounded(count: int) -> int:
    """Return a count or a little more, so that there are few of them."""
    step = max(1 << max(count.bit_length() - 3, 0), STEP)
    return -(-count // step) * step
