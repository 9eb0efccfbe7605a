"""Memory for plans without limits: of rounded sizes, so that batches alike take the same.

How much a plan takes is known once its batch has been looked at. Until then it is taken to be like
the one before of so many requests and pages; if it is not, its batch is written once more, to where
there is room for its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tvm_attn.runtime.buffers import Block, Layout, Pool
from tvm_attn.runtime.plan import Family
from tvm_attn.runtime.workspace import LISTS, batch_shapes, bounds_of, work_sizes

STEP = 32
"""What small sizes are multiples of; large ones are of an eighth to a quarter of themselves."""
REMEMBERED = 32
"""Sizes for which memory is kept."""


class Units(NamedTuple):
    """What a family has to do: its units and, with a fixed split, the pieces that they are cut in.

    They are counted before KV heads.
    """

    bound: int
    pieces: int = 0


class Extent(NamedTuple):
    """How large a batch is, and for how many CTAs of each family it is planned."""

    requests: int
    pages: int
    num_ctas: tuple[int, ...]

    def rounded(self) -> Extent:
        """Return the size that batches alike have in common."""
        pages = 1 << (self.pages - 1).bit_length() if self.pages else 0
        return Extent(rounded(self.requests), pages, self.num_ctas)


class Store(Protocol):
    """Where memory for a plan comes from."""

    def take(self, extent: Extent) -> Block:
        """Return a block that a batch has room in."""

    def fitting(self, block: Block, extent: Extent, units: Sequence[Units]) -> Block:
        """Return the block, if the batch's work has room there too, or else another one for both.

        `units` are those of each family, clusters left out.
        """


class Shelf:
    """Blocks for plans without limits, for one device and stream.

    Parameters
    ----------
    families : sequence of Family
        All of a kernel; those in clusters take the place of the first that is not.
    num_kv_heads : int
        Of the kernel.
    pinned : bool
        Whether a GPU is to copy them.
    """

    def __init__(self, families: Sequence[Family], num_kv_heads: int, pinned: bool = False):
        self._families = tuple(families)
        self._num_kv_heads = num_kv_heads
        self._pinned = pinned
        self._pools: dict[tuple[Extent, tuple[Units, ...]], Pool] = {}
        self._last: dict[Extent, Pool] = {}

    def take(self, extent: Extent) -> Block:
        """Return a block that a batch has room in."""
        alike = extent.rounded()
        pool = self._last.get(alike)
        if pool is None:
            others = sum(family.cluster < 2 for family in self._families) - 1
            pool = self._pool(alike, (Units(alike.requests), *[Units(0)] * others))
        return pool.take()

    def fitting(self, block: Block, extent: Extent, units: Sequence[Units]) -> Block:
        """Return the block, if it is of the size for a batch's work, or else another one."""
        alike = extent.rounded()
        *others, last = units
        room = [Units(alike.requests if each.bound else 0, rounded(each.pieces)) for each in others]
        pool = self._pool(alike, (*room, Units(rounded(last.bound), rounded(last.pieces))))
        self._last[alike] = pool
        if block.pool is pool:
            return block
        block.give_back()
        return pool.take()

    def _pool(self, extent: Extent, units: tuple[Units, ...]) -> Pool:
        pool = self._pools.get((extent, units))
        if pool is None:
            if len(self._pools) >= REMEMBERED:
                self._pools.clear()
                self._last.clear()
            layout = self._layout(extent, units)
            pool = self._pools[extent, units] = Pool(layout, self._pinned)
        return pool

    def _layout(self, extent: Extent, units: tuple[Units, ...]) -> Layout:
        """Return the places of a batch's arrays, and of a work list for each kernel with units."""
        most: dict[str, int] = {}
        for family, ctas in zip(self._families, extent.num_ctas, strict=True):
            most[family.name] = max(most.get(family.name, 0), ctas)
        shapes: dict[object, tuple[int, ...]] = {}
        for (name, ctas), (bound, pieces) in zip(most.items(), units, strict=True):
            if bound:
                bounds = bounds_of(bound, self._num_kv_heads, ctas, pieces)
                shapes.update({(name, array): s for array, s in work_sizes(bounds).items()})
        shapes.update(batch_shapes(extent.requests, extent.pages))
        lists = {
            family: tuple((family.name, array) for array in LISTS)
            for family in self._families
            if (family.name, LISTS[0]) in shapes
        }
        return Layout(shapes, lists)


def rounded(count: int) -> int:
    """Return a count or a little more, so that there are few of them."""
    step = max(1 << max(count.bit_length() - 3, 0), STEP)
    return -(-count // step) * step
