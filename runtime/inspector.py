"""The inspector: turns a batch's index arrays into a plan, on the host, without synchronising."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import PlanError
from tvm_attn.runtime import sizes
from tvm_attn.runtime.buffers import Block, Ints, pack_host
from tvm_attn.runtime.partition import overlaps, queues_beside
from tvm_attn.runtime.plan import BATCH, Family, Plan, WorkList, wide
from tvm_attn.runtime.sharing import UNCUT, Sharing, Work
from tvm_attn.runtime.shelf import Extent, Shelf, Store, Units
from tvm_attn.spec import AttentionSpec
from tvm_attn.worklist import (
    ALONE,
    MERGE_TOKENS,
    Header,
    Status,
)

Params = dict[str, list[Any]]
MAX_ROWS = 2**31 - 1
KV_LEN = 3
"""Place of the lengths in a plan's arrays of a batch."""


class RowBytes(NamedTuple):
    """Bytes of a token's K and V of a head, and of a row of a partial state."""

    token: int
    row: int

    @staticmethod
    def of(spec: AttentionSpec) -> RowBytes:
        """Return those of a kernel."""
        size = getattr(torch, str(spec.kv_dtype)).itemsize
        return RowBytes((spec.head_dim_qk + spec.dim_vo) * size, spec.dim_vo * 4)


class Inspector:
    """Plans batches for one kernel.

    Parameters
    ----------
    plan_batch, plan_work, share_out : callable
        The compiled planner.
    families : sequence of Family
        Query tiles, shortest first; a request belongs to the first that holds all of its rows, else
        to the last. Those in clusters take the place of the first one that is not where it pays.
    group_size, num_kv_heads : int
        Of the kernel.
    row_bytes : RowBytes
        What is read of a token, and written of a part.
    """

    def __init__(
        self,
        plan_batch: Callable[..., Any],
        plan_work: Callable[..., Any],
        share_out: Callable[..., Any],
        families: Sequence[Family],
        group_size: int,
        num_kv_heads: int,
        row_bytes: RowBytes,
    ):
        self._plan_batch = plan_batch
        self._plan_work = plan_work
        self._all_families = families
        self._places = [i for i, family in enumerate(families) if not family.stands_in]
        self._families = [families[i] for i in self._places]
        substitutes = (i for i, family in enumerate(families) if family.stands_in)
        self._sharers = [*substitutes, self._places[0]]
        self._sharing = Sharing(share_out, [families[i] for i in self._sharers], num_kv_heads)
        self._bounds = (0, *(family.rows for family in self._families[:-1]), MAX_ROWS)
        self._group_size = group_size
        self._num_kv_heads = num_kv_heads
        self._bytes = row_bytes
        self._shelf = Shelf(families, num_kv_heads)
        self._none = pack_host(torch.empty(0, dtype=torch.int32))

    def plan(
        self,
        owner: object,
        bsr: BSR,
        bind: Callable[[Plan], Params],
        fixed_split: int,
        num_ctas: Sequence[int],
        store: Store | None = None,
    ) -> Plan:
        """Check a batch and plan its work.

        `bind` returns the plan-time parameters once the batch is known to be valid; `num_ctas` are
        the CTAs of the machine for each family. The plan is written to memory of `store`, or to
        memory of the host's.

        Raises
        ------
        PlanError
            If the arrays do not describe a valid batch; nothing is kept of it.
        """
        store = store or self._shelf
        pages = 0 if bsr.kv_indices is None else bsr.kv_indices.shape[0]
        extent = Extent(bsr.batch_size, pages, tuple(num_ctas))
        block = store.take(extent)
        words = self._derive(bsr, block)
        if words[Header.STATUS] != Status.OK:
            block.give_back()
            raise_status(words, bsr)
        units = self._units(words, fixed_split)
        fitting = store.fitting(block, units)
        if fitting is not block:
            block = fitting
            self._derive(bsr, block)
        plan = Plan(owner, words, _batch_of(block, bsr), block)
        plan.params = bind(plan)
        values = [value for given in plan.params.values() for value in given]
        for index, usual in enumerate(self._places):
            count, pieces = units[index], units[len(self._families) + index]
            if not count:
                continue
            place, split = usual, fixed_split
            if index == 0 and not fixed_split:
                place, split = self._choose(plan, count, num_ctas, store)
            family = self._all_families[place]
            given = (plan, family, index, values, split, block)
            work = self._deal(*given, (count, self._num_kv_heads, num_ctas[place], pieces))
            if not work.items.size:
                continue
            plan.work.append(work)
            if overlaps(family, plan.work[0].family):
                few = queues_beside(work, plan.work[0])
                if few < work.num_ctas:
                    plan.work[-1] = self._deal(*given, (count, self._num_kv_heads, few, pieces))
        return plan

    def _choose(
        self, plan: Plan, units: int, num_ctas: Sequence[int], store: Store
    ) -> tuple[int, int]:
        """Return the place of the first family, or of one that takes its batch, and its split."""
        usual, units = self._places[0], units * self._num_kv_heads
        rows = plan.max_qo_len * self._group_size
        first = next((i for i in self._sharers if num_ctas[i]), usual)
        if first == usual or rows > self._families[0].rows:
            return usual, 0
        if store.has_device_plans:
            return self._choose_simply(plan, first)
        if units > max(num_ctas[i] for i in self._sharers) or not plan.max_kv_len:
            return (usual if num_ctas[usual] else first), 0
        queues = tuple([num_ctas[i] for i in self._sharers])
        work = Work(self._bytes.token, rows * self._bytes.row)
        chosen, split = self._sharing.choose(plan.batch[KV_LEN], queues, work)
        return self._sharers[chosen], split

    def _choose_simply(self, plan: Plan, only: int) -> tuple[int, int]:
        """Return the only family there is, and its split, as a device's planner does.

        With few units of like length none is cut, and clusters take one each. With few of which
        some are much longer, clusters have fewer parts to merge.
        """
        family = self._all_families[only]
        is_whole = family.cluster > 1 and self._pays_whole(plan, family)
        return only, UNCUT if is_whole else 0

    def _pays_whole(self, plan: Plan, family: Family) -> bool:
        """Whether clusters that do not cut units are faster than cutting them.

        A cluster has a fraction of the memory's speed; so the longest request must not be much more
        than that fraction of all, unless merging the parts of its units would take longer still.
        """
        tokens = plan.num_kv_tokens * self._num_kv_heads
        return plan.max_kv_len * ALONE // family.cluster <= tokens + MERGE_TOKENS

    def _units(self, words: list[int], fixed_split: int) -> Units:
        """Bound the units of each family, and their pieces: what is sure to have none has 0."""
        longest = words[Header.MAX_QO_LEN] * self._group_size
        short = words[Header.UNITS_SHORT]
        counts = [short if longest > rows else 0 for rows in self._bounds[:-2]]
        counts.append(words[Header.UNITS_LONG])
        if not fixed_split:
            return (*counts, *[0] * len(counts))
        tokens = wide(words, Header.NUM_TOKENS_LO)
        tiles = [1] * (len(counts) - 1) + [-(-longest // self._families[-1].rows)]
        pieces = (
            sizes.split_pieces(count, most, tokens, fixed_split)
            for count, most in zip(counts, tiles, strict=True)
        )
        return (*counts, *pieces)

    def _derive(self, bsr: BSR, block: Block) -> list[int]:
        """Check a batch, and write it to a block; return the planner's header."""
        of, none = block.packed, self._none
        self._plan_batch(
            bsr.qo_indptr,
            bsr.kv_indptr,
            none if bsr.kv_indices is None else bsr.kv_indices,
            none if bsr.kv_last_page_len is None else bsr.kv_last_page_len,
            none if bsr.q_pos_offset is None else bsr.q_pos_offset,
            none if bsr.kv_pos_offset is None else bsr.kv_pos_offset,
            bsr.page_size or 1,
            self._group_size,
            self._families[-2].rows,
            self._families[-1].rows,
            *map(of.__getitem__, BATCH),
            block.packed_header,
        )
        words: list[int] = block.header.tolist()
        return words

    def _deal(
        self,
        plan: Plan,
        family: Family,
        index: int,
        values: list[Any],
        fixed_split: int,
        block: Block,
        counts: tuple[int, int, int, int],
    ) -> WorkList:
        units, num_kv_heads, num_ctas, pieces = counts
        arrays, packed = block.lists[family]
        block.used.add(family)
        of = block.packed
        self._plan_work(
            of["qo_indptr"], of["kv_len"], of["q_pos_offset"], of["kv_pos_offset"],
            *values,
            plan.batch_size, num_kv_heads, family.cached_tokens, num_ctas, self._group_size,
            self._bounds[index] + 1, self._bounds[index + 1],
            family.rows, family.block, family.overhead, fixed_split, sizes.max_slots(*counts),
            block.scratch(sizes.scratch_words(units, num_ctas, pieces)), *packed,
            block.packed_header,
        )  # fmt: skip
        words = block.header.tolist()
        if words[Header.STATUS] != Status.OK:
            raise RuntimeError(f"the planner overran its buffers: {Status(words[Header.STATUS])}")
        items, cta_indptr, merge_items, merge_indptr = arrays
        merges = words[Header.NUM_MERGES]
        return WorkList(
            family,
            items[: words[Header.NUM_ITEMS]],
            cta_indptr[: num_ctas + 1],
            merge_items[:merges],
            merge_indptr[: merges + 1],
            words[Header.NUM_SLOTS],
            words[Header.MAX_LOAD],
            wide(words, Header.TOTAL_LOAD_LO),
        )


def _batch_of(block: Block, bsr: BSR) -> list[Ints]:
    """Return the arrays of a batch that was written to a block."""
    size, of = bsr.batch_size, block.arrays
    kv_indptr = of["kv_indptr"][: size + 1]
    pages = 0 if bsr.kv_indices is None else int(kv_indptr[size])
    return [
        of["qo_indptr"][: size + 1],
        kv_indptr,
        of["kv_indices"][:pages],
        of["kv_len"][:size],
        of["q_pos_offset"][:size],
        of["kv_pos_offset"][:size],
    ]


def raise_status(words: list[int], bsr: BSR) -> NoReturn:
    """Raise the `PlanError` of a planner's verdict."""
    where, value = words[Header.WHERE], words[Header.VALUE]
    if words[Header.STATUS] == Status.TOO_LONG:
        raise PlanError(
            f"request {where} has {value} in {_too_long(where, value, bsr)}; its rows (query "
            "tokens times group size), KV tokens and positions must stay within 2**29"
        )
    messages = {
        Status.QO_INDPTR: f"qo_indptr[{where}] is {value}; it must start at 0 and never decrease",
        Status.KV_INDPTR: f"kv_indptr[{where}] is {value}; it must start at 0 and never decrease",
        Status.KV_INDICES_SHORT: f"kv_indices has {where} entries, kv_indptr[-1] asks for {value}",
        Status.KV_INDEX: f"kv_indices[{where}] is {value}; page ids are at least 0",
        Status.LAST_PAGE_LEN: (
            f"kv_last_page_len[{where}] is {value}; a request with pages has 1..{bsr.page_size} "
            "tokens in its last page"
        ),
    }
    raise PlanError(messages[Status(words[Header.STATUS])])


def _too_long(request: int, value: int, bsr: BSR) -> str:
    """Name the array that gives a request this many tokens or pages, or this position."""
    for name in ("q_pos_offset", "kv_pos_offset"):
        offsets = getattr(bsr, name)
        if offsets is not None and int(offsets[request]) == value:
            return name
    begin, end = bsr.qo_indptr[request : request + 2].tolist()
    return "qo_indptr" if end - begin == value else "kv_indptr"
