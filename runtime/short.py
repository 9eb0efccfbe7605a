"""What the planner of short requests is told: where it writes, what it deals to, what that costs.

All of it depends on a block of memory and on a machine, and is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tvm_attn.runtime import sizes
from tvm_attn.runtime.buffers import Block, pack_host
from tvm_attn.runtime.plan import BATCH, Family
from tvm_attn.runtime.sharing import PARTS, Floats, Work, tables
from tvm_attn.runtime.shelf import UNLIMITED, Most
from tvm_attn.runtime.workspace import LISTS
from tvm_attn.spec import AttentionSpec
from tvm_attn.worklist import SHARE_WORDS, TERM_WORDS, Share, Term, Way


class RowBytes(NamedTuple):
    """Bytes of a token's K and V of a head, and of a row of a partial state."""

    token: int
    row: int

    @staticmethod
    def of(spec: AttentionSpec) -> RowBytes:
        """Return those of a kernel."""
        size = getattr(torch, str(spec.kv_dtype)).itemsize
        return RowBytes((spec.head_dim_qk + spec.dim_vo) * size, spec.dim_vo * 4)


class Orders(NamedTuple):
    """Whether the work list of short requests is made, and as a device's planner makes it."""

    deals: bool
    as_on_device: bool


class ShortRequests:
    """Tells the planner of short requests what it has to know.

    Parameters
    ----------
    families : sequence of Family
        Those that may take a batch of short requests, the usual one last.
    group_size, num_kv_heads : int
        Of the kernel.
    short_rows, long_rows : int
        Fused rows of the tiles of the last family but one, and of the last.
    row_bytes : RowBytes
        What is read of a token, and written of a part.
    """

    def __init__(
        self,
        families: Sequence[Family],
        group_size: int,
        num_kv_heads: int,
        short_rows: int,
        long_rows: int,
        row_bytes: RowBytes,
    ):
        self.families = tuple(families)
        self._group_size = group_size
        self._num_kv_heads = num_kv_heads
        self._rows = (short_rows, long_rows)
        self._bytes = row_bytes
        self._parts = pack_host(PARTS)
        self._none = pack_host(np.zeros((1, 8), np.float32))
        self._estimates: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def arguments(
        self, block: Block, queues: tuple[int, ...], most: Most, page_size: int, orders: Orders
    ) -> tuple[Any, ...]:
        """Return the planner's arguments after a batch; `queues` are those of each family."""
        deals = orders.deals
        way = self._way(queues, orders.as_on_device)
        costs, rates = self._none, self._none
        if way == Way.FASTEST and deals:
            costs, rates = self._estimate(queues)
        terms = np.zeros(TERM_WORDS, np.int32)
        for term, value in {
            Term.PAGE_SIZE: page_size,
            Term.GROUP_SIZE: self._group_size,
            Term.NUM_KV_HEADS: self._num_kv_heads,
            Term.SHORT_ROWS: self._rows[0],
            Term.LONG_ROWS: self._rows[1],
            Term.MAX_BATCH: min(most.requests, UNLIMITED - 1),  # one may be added to it
            Term.MAX_QO_TOKENS: most.qo_tokens,
            Term.MAX_PAGES: most.pages,
            Term.ROWS: self.families[-1].rows if deals else -1,
            Term.WAY: way,
            Term.USUAL: _usual(queues),
            Term.FEW: max(queues),
            Term.REQUESTS: len(block.arrays["kv_len"]),
            Term.PAGES: len(block.arrays["kv_indices"]),
        }.items():
            terms[term] = min(value, UNLIMITED)
        for offset, name in enumerate(BATCH):
            terms[Term.QO_INDPTR + offset] = block.layout.begins[name]
        shares = np.zeros((len(queues), SHARE_WORDS), np.int32)
        for row, family, count in zip(shares, self.families, queues, strict=True):
            if deals and count:
                _fill_share(row, block, family, count)
        words = max(sizes.scratch_words(len(block.arrays["kv_len"]), count) for count in queues)
        return (
            *(pack_host(terms), pack_host(shares), self._parts, costs, rates),
            *(block.scratch(words), pack_host(block.memory.numpy()), block.packed_header),
        )

    def _way(self, queues: tuple[int, ...], as_on_device: bool) -> Way:
        """Return how a family is chosen."""
        if not any(queues[:-1]):
            return Way.USUAL
        return Way.ONLY if as_on_device else Way.FASTEST

    def _estimate(self, queues: tuple[int, ...]) -> tuple[Any, Any]:
        """Return tables of costs, for each number of fused rows, and of rates."""
        if queues not in self._estimates:
            costs: list[Floats] = []
            for rows in range(self.families[-1].rows + 1):
                work = Work(self._bytes.token, rows * self._bytes.row)
                of_rows, rates = tables(self.families, queues, work)
                costs.append(of_rows)
            self._estimates[queues] = pack_host(np.concatenate(costs)), pack_host(rates)
        return self._estimates[queues]


def _usual(queues: tuple[int, ...]) -> int:
    """Return the place of the family that takes batches of many units: the last, if it may."""
    return len(queues) - 1 if queues[-1] else next((i for i, n in enumerate(queues) if n), 0)


def _fill_share(row: Any, block: Block, family: Family, queues: int) -> None:
    """Write where a family's work list is in a block, and what there is to know of the family."""
    names, (arrays, _) = block.layout.lists[family], block.lists[family]
    for offset, name in enumerate(names):
        row[Share.ITEMS + offset] = block.layout.begins[name]
    assert len(names) == len(LISTS)
    items, cta_indptr, merge_items, _ = arrays
    for word, value in {
        Share.MAX_ITEMS: len(items),
        Share.MAX_SLOTS: sizes.max_slots(0, 1, queues),
        Share.MAX_MERGES: len(merge_items),
        Share.MAX_CTAS: len(cta_indptr) - 1,
        Share.NUM_CTAS: queues,
        Share.TILE_ROWS: family.rows,
        Share.GRANULE: family.block,
        Share.OVERHEAD: family.overhead,
        Share.CACHED_TOKENS: family.cached_tokens,
        Share.CLUSTER: family.cluster,
    }.items():
        row[word] = value
