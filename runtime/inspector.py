"""The inspector: turns a batch's index arrays into a plan, on the host, without synchronising."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import PlanError
from tvm_attn.runtime import sizes
from tvm_attn.runtime.buffers import Block, pack_host
from tvm_attn.runtime.formats import PageTable
from tvm_attn.runtime.partition import overlaps, queues_beside
from tvm_attn.runtime.plan import BATCH, Dealt, Family, Plan, batch_in, wide
from tvm_attn.runtime.shelf import Shelf, Store, Units
from tvm_attn.runtime.short import Orders, RowBytes, ShortRequests
from tvm_attn.worklist import Header, Status

if TYPE_CHECKING:
    from tvm_attn.runtime.fixed import FixedMemory

Params = dict[str, list[Any]]
NO_PARAMS: tuple[Params, list[Any]] = ({}, [])
MAX_ROWS = 2**31 - 1
FAMILY, NUM_ITEMS = int(Header.FAMILY), int(Header.NUM_ITEMS)
MAX_QO_LEN, NUM_PAGES = int(Header.MAX_QO_LEN), int(Header.NUM_PAGES)


class OddArrays(RuntimeError):
    """The compiled planner does not take arrays as they are: no vectors, or of no one length."""


class Inspector:
    """Plans batches for one kernel.

    Parameters
    ----------
    plan_short, plan_batch, plan_work : callable
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
        plan_short: Callable[..., Any],
        plan_batch: Callable[..., Any],
        plan_work: Callable[..., Any],
        families: Sequence[Family],
        group_size: int,
        num_kv_heads: int,
        row_bytes: RowBytes,
    ):
        self._plan_short = plan_short
        self._plan_batch = plan_batch
        self._plan_work = plan_work
        self._all_families = families
        self._places = [i for i, family in enumerate(families) if not family.stands_in]
        self._families = [families[i] for i in self._places]
        substitutes = (i for i, family in enumerate(families) if family.stands_in)
        self._sharers = [*substitutes, self._places[0]]
        self._rows = (self._families[-2:][0].rows, self._families[-1].rows)
        sharers = [families[i] for i in self._sharers]
        self._short = ShortRequests(sharers, group_size, num_kv_heads, *self._rows, row_bytes)
        self._alone = [frozenset([family]) for family in sharers]
        self._bounds = (0, *(family.rows for family in self._families[:-1]), MAX_ROWS)
        self._group_size = group_size
        self._num_kv_heads = num_kv_heads
        self._shelf = Shelf(families, num_kv_heads)
        self._none = pack_host(torch.empty(0, dtype=torch.int32, device="cpu"))

    def plan(
        self,
        owner: object,
        bsr: BSR,
        bind: Callable[[Plan], Params] | None,
        fixed_split: int,
        num_ctas: Sequence[int],
        store: Store | None = None,
        longest: int = 0,
    ) -> Plan:
        """Check a batch and plan its work.

        `bind` returns the plan-time parameters once the batch is known to be valid, None if there
        are none; `num_ctas` are the CTAs of the machine for each family. The plan is written to
        memory of `store`, or to memory of the host's. `longest` is the most queries of a request,
        0 if there is no such limit.

        Raises
        ------
        PlanError
            If the arrays do not describe a valid batch; nothing is kept of it.
        """
        store = store or self._shelf
        batch_size = bsr.qo_indptr.numel() - 1
        pages = 0 if bsr.kv_indices is None else bsr.kv_indices.numel()
        block = store.take((batch_size, pages, tuple(num_ctas)))
        params, values = NO_PARAMS
        if bind is not None:
            params = self._bind(owner, bsr, bind, block, store)
            values = [value for given in params.values() for value in given]
        words = self._attempt(bsr, values, block, num_ctas, store, fixed_split)
        place = words[FAMILY]
        if place < 0:
            fitting = store.fitting(block, self._units(words, fixed_split))
            if fitting is not block:
                block = fitting
                words = self._attempt(bsr, values, block, num_ctas, store, fixed_split)
                place = words[FAMILY]
        if place >= 0:
            self._note_used(block, place)
        plan = Plan(owner, words, batch_size, block)
        plan.params = params
        if longest and plan.max_qo_len > longest:
            raise PlanError(f"max_qo_len={longest}, but a request has {plan.max_qo_len} queries")
        if place < 0:
            self._deal_all(plan, words, values, fixed_split, num_ctas)
        elif words[NUM_ITEMS]:
            self._note_dealt(plan, place, num_ctas)
        return plan

    def plan_again(
        self,
        plan: Plan,
        arrays: PageTable,
        page_size: int | None,
        memory: FixedMemory,
        num_ctas: Sequence[int],
        stream: Any,
    ) -> bool:
        """Plan a page table's batch into the memory of a plan with limits that is replanned.

        `arrays` are int32 tensors on the host, and `stream` that of the plan before. What is not a
        right batch of short requests is left to `plan`: then nothing has changed.
        """
        block = memory.pool.take()
        try:
            rest = self._orders(block, num_ctas, memory, page_size, 0)
            self._plan_short(*arrays, self._none, self._none, *rest)
        except Exception:
            block.give_back()
            return False
        words: list[int] = block.header.tolist()
        place, most = words[FAMILY], memory.terms.max_qo_len
        if place >= 0:
            self._note_used(block, place)
        if words[0] or place < 0 or not words[NUM_ITEMS] or 0 < most < words[MAX_QO_LEN]:
            block.give_back()
            return False
        memory.fill(block, self._alone[place], words[NUM_PAGES], stream)
        before = plan.block
        plan.renew(words, arrays[0].numel() - 1, block)
        self._note_dealt(plan, place, num_ctas)
        plan.placement.accepted = memory.run_of(plan, memory.launches)
        if before is not None:
            before.give_back()
        return True

    def _note_used(self, block: Block, place: int) -> None:
        """Note in a block that it has work of the family that took a batch of short requests."""
        if block.used is not self._alone[place]:
            block.used = block.used | self._alone[place]

    def _note_dealt(self, plan: Plan, place: int, num_ctas: Sequence[int]) -> None:
        """Note in a plan that it has work of that family alone."""
        plan.families = self._alone[place]
        plan.single = (self._short.families[place], num_ctas[self._sharers[place]])

    def _bind(
        self, owner: object, bsr: BSR, bind: Callable[[Plan], Params], block: Block, store: Store
    ) -> Params:
        """Return a batch's plan-time parameters."""
        store.check(bsr)
        words = self._derive(bsr, block)
        if words[Header.STATUS] != Status.OK:
            block.give_back()
            raise_status(words, bsr)
        plan = Plan(owner, words, bsr.batch_size)
        plan.batch = batch_in(block, bsr.batch_size, plan.num_pages)
        try:
            return bind(plan)
        except BaseException:
            block.give_back()
            raise

    def _attempt(
        self,
        bsr: BSR,
        values: Sequence[Any],
        block: Block,
        num_ctas: Sequence[int],
        store: Store,
        fixed_split: int,
    ) -> list[int]:
        """Check a batch, write it to a block, and deal it if all of it is short.

        Returns
        -------
        list of int
            The planner's header.
        """
        rest = self._orders(block, num_ctas, store, bsr.page_size, fixed_split)
        try:
            self._plan_short(*self._arrays(bsr), *values, *rest)
        except Exception as error:
            block.give_back()
            raise OddArrays(str(error)) from error
        words: list[int] = block.header.tolist()
        if words[0]:
            block.give_back()
            store.check(bsr)
            raise_status(words, bsr)
        return words

    def _orders(
        self,
        block: Block,
        num_ctas: Sequence[int],
        store: Store,
        page_size: int | None,
        fixed_split: int,
    ) -> tuple[Any, ...]:
        """Return what the planner of short requests is told of a block."""
        key = (fixed_split > 0, store.has_device_plans)
        rest = block.orders.get(key)
        if rest is None:
            queues = tuple(num_ctas[i] for i in self._sharers)
            orders = Orders(not fixed_split and store.is_for_short(block), store.has_device_plans)
            given = (block, queues, store.most(page_size), page_size or 1, orders)
            rest = block.orders[key] = self._short.arguments(*given)
        return rest

    def _arrays(self, bsr: BSR) -> tuple[Any, ...]:
        """Return a batch's arrays, empty ones for those it has not."""
        none = self._none
        return (
            bsr.qo_indptr,
            bsr.kv_indptr,
            none if bsr.kv_indices is None else bsr.kv_indices,
            none if bsr.kv_last_page_len is None else bsr.kv_last_page_len,
            none if bsr.q_pos_offset is None else bsr.q_pos_offset,
            none if bsr.kv_pos_offset is None else bsr.kv_pos_offset,
        )

    def _deal_all(
        self,
        plan: Plan,
        words: list[int],
        values: Sequence[Any],
        fixed_split: int,
        num_ctas: Sequence[int],
    ) -> None:
        """Deal the work of each family: of a batch that has longer requests, or a fixed split."""
        block = plan.block
        assert block is not None
        units = self._units(words, fixed_split)
        for index, place in enumerate(self._places):
            count, pieces = units[index], units[len(self._families) + index]
            if not count:
                continue
            family = self._all_families[place]
            given = (plan, family, index, values, fixed_split)
            dealt = self._deal(*given, (count, self._num_kv_heads, num_ctas[place], pieces))
            if not dealt.num_items:
                continue
            plan.dealt.append(dealt)
            plan.families = plan.families | {family}
            if overlaps(family, plan.dealt[0].family):
                few = queues_beside(*(each.work_in(block) for each in (dealt, plan.dealt[0])))
                if few < dealt.num_ctas:
                    plan.dealt[-1] = self._deal(*given, (count, self._num_kv_heads, few, pieces))

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
        of = map(block.packed.__getitem__, BATCH)
        terms = (bsr.page_size or 1, self._group_size, *self._rows)
        try:
            self._plan_batch(*self._arrays(bsr), *terms, *of, block.packed_header)
        except Exception as error:
            block.give_back()
            raise OddArrays(str(error)) from error
        words: list[int] = block.header.tolist()
        return words

    def _deal(
        self,
        plan: Plan,
        family: Family,
        index: int,
        values: Sequence[Any],
        fixed_split: int,
        counts: tuple[int, int, int, int],
    ) -> Dealt:
        units, num_kv_heads, num_ctas, pieces = counts
        block = plan.block
        assert block is not None
        block.used = block.used | {family}
        of = block.packed
        self._plan_work(
            of["qo_indptr"], of["kv_len"], of["q_pos_offset"], of["kv_pos_offset"],
            *values,
            plan.batch_size, num_kv_heads, family.cached_tokens, num_ctas, self._group_size,
            self._bounds[index] + 1, self._bounds[index + 1],
            family.rows, family.block, family.overhead, fixed_split, sizes.max_slots(*counts),
            block.scratch(sizes.scratch_words(units, num_ctas, pieces)), *block.lists[family][1],
            block.packed_header,
        )  # fmt: skip
        words = block.header.tolist()
        if words[Header.STATUS] != Status.OK:
            raise RuntimeError(f"the planner overran its buffers: {Status(words[Header.STATUS])}")
        return Dealt.of(family, num_ctas, words)


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
