"""A plan: how one batch's work is cut and dealt, readable by people and by kernels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from tvm_attn.errors import PlanError
from tvm_attn.runtime.buffers import Block, Ints
from tvm_attn.runtime.gantt import gantt_svg, gantt_text
from tvm_attn.runtime.placement import Placement
from tvm_attn.worklist import Header


@dataclass(frozen=True)
class Family:
    """A compiled query tile: which requests use it, and what its work costs.

    Attributes
    ----------
    name : str
        ``"decode"``, ``"wide"``, ``"draft"``, ``"short"`` or ``"long"``; the kernel's symbol is
        ``attention_<name>``.
    rows, block : int
        Fused query rows of a tile, KV tokens of a block.
    overhead : int
        Fixed cost of an item, in blocks.
    residents : int
        CTAs at a time of a multiprocessor (on a CPU: of a thread).
    schedule : str
        What made its kernel: ``"cpu"``, ``"decode"``, ``"sm80"`` or ``"sm90"``.
    cached_tokens : int
        KV tokens of one head that a cache holds for all CTAs; 0 if they share none.
    cluster : int
        CTAs that share each item, if the kernel is told that, else 0.
    replaces : str
        The family whose batches it may take instead; empty if it has requests of its own.
    """

    name: str
    rows: int
    block: int
    overhead: int
    residents: int = 1
    schedule: str = "cpu"
    cached_tokens: int = 0
    cluster: int = 0
    replaces: str = ""

    @property
    def stands_in(self) -> bool:
        """Whether it takes batches of another one: in clusters, or by a kernel for that."""
        return self.cluster > 1 or bool(self.replaces)

    @property
    def tile(self) -> str:
        """Its query tile, and on a GPU what made its kernel, in words."""
        by = "" if self.schedule == "cpu" else f" by {self.schedule}"
        return f"{self.name} {self.rows}x{self.block}{by}"

    @property
    def sharers(self) -> int:
        """CTAs that share each item."""
        return max(self.cluster, 1)

    def __hash__(self) -> int:
        """Return a hash that takes little time: plans look their families up."""
        return hash(self.name) + self.cluster

    def arguments(self, follows: bool) -> tuple[int, ...]:
        """Return what the kernel is told besides the plan; it may follow another one of its run."""
        return (self.cluster, int(follows)) if self.cluster else ()

    @staticmethod
    def from_json(fields: dict[str, Any]) -> list[Family]:
        """Return a compiled query tile, after it in clusters of each size there is, largest first.

        They have the same kernel, and serve the same requests.
        """
        sizes = fields.get("clusters")
        given = {name: value for name, value in fields.items() if name != "clusters"}
        clusters = (0,) if sizes is None else (*sizes, 1)
        return [Family(**given, cluster=size) for size in clusters]


def in_order(families: Iterable[Family]) -> list[Family]:
    """Return the order in which a GPU launches kernels: decoding last, where others leave room."""
    return sorted(families, key=lambda family: family.schedule == "decode")


def need_not_wait(before: Sequence[Family]) -> bool:
    """Whether a kernel that begins early need not wait, after these of the same run.

    It must not begin before what came before the run is done. The first kernel's CTAs, all of which
    have begun by then, see to that, unless they let others begin before they wait themselves.
    """
    return bool(before) and before[0].schedule != "decode"


class WorkItem(NamedTuple):
    """One piece of work, as in `worklist`."""

    request: int
    kv_head: int
    row_begin: int
    row_end: int
    kv_begin: int
    kv_end: int
    slot: int


class Dealt(NamedTuple):
    """What the planner says of a work list that it wrote to a block."""

    family: Family
    num_ctas: int
    num_items: int
    num_slots: int
    num_merges: int
    max_load: int
    total_load: int

    @staticmethod
    def of(family: Family, num_ctas: int, header: list[int]) -> Dealt:
        """Return what a header says."""
        return Dealt(
            family,
            num_ctas,
            header[Header.NUM_ITEMS],
            header[Header.NUM_SLOTS],
            header[Header.NUM_MERGES],
            header[Header.MAX_LOAD],
            wide(header, Header.TOTAL_LOAD_LO),
        )

    def work_in(self, block: Block) -> WorkList:
        """Return the work list."""
        items, cta_indptr, merge_items, merge_indptr = block.lists[self.family][0]
        return WorkList(
            self.family,
            items[: self.num_items],
            cta_indptr[: self.num_ctas + 1],
            merge_items[: self.num_merges],
            merge_indptr[: self.num_merges + 1],
            self.num_slots,
            self.max_load,
            self.total_load,
        )


@dataclass
class WorkList:
    """The work of one family: arrays of `worklist` and their sums.

    Attributes
    ----------
    family : Family
        The query tile.
    items, cta_indptr, merge_items, merge_indptr : np.ndarray
        int32 arrays, cut to what is used.
    num_slots : int
        Partial states.
    max_load, total_load : int
        Cost of the longest CTA and of all, in blocks.
    """

    family: Family
    items: Ints
    cta_indptr: Ints
    merge_items: Ints
    merge_indptr: Ints
    num_slots: int
    max_load: int
    total_load: int

    @property
    def arrays(self) -> tuple[Ints, ...]:
        """The arrays a kernel takes, in its order."""
        return self.items, self.cta_indptr, self.merge_items, self.merge_indptr

    @property
    def num_ctas(self) -> int:
        """CTAs (on a CPU: threads) the work is dealt to."""
        return len(self.cta_indptr) - 1

    @property
    def imbalance(self) -> float:
        """Load of the longest CTA over the mean; 1 is perfect."""
        return self.max_load * self.num_ctas / self.total_load if self.total_load else 1.0

    def queues(self) -> Iterator[list[WorkItem]]:
        """Yield each CTA's items, in the order it works on them."""
        rows, ends = self.items.tolist(), self.cta_indptr.tolist()
        for begin, end in pairwise(ends):
            yield [WorkItem(*row[: len(WorkItem._fields)]) for row in rows[begin:end]]

    def cost(self, item: WorkItem) -> int:
        """Cost of an item, in blocks, as the planner counts it."""
        block = self.family.block
        return -(-item.kv_end // block) - item.kv_begin // block + self.family.overhead


class Plan:
    """How one batch is executed, for every layer whose lengths are the same.

    Made by `AttentionModule.plan`. It owns copies of the index arrays, so the caller's may change.
    Replanning into it (``out=``) replaces what it held; no other thread may run it meanwhile. On
    the CPU, threads may run a plan at the same time: where it has partial states, their kernels
    take turns; those of plans that have one `workspace` do not.

    On a GPU it is used by one thread at a time, and on one stream: a run on another stream than the
    one before (at first, the current stream of planning) waits for what is queued there. Replanning
    needs no wait: what queued runs still read is kept until they are done. A CUDA graph reads the
    arrays that the plan had when it was captured: keep the plan, and unless it has limits do not
    replan it, as long as the graph lives.

    Attributes
    ----------
    batch_size, nnz_qo, num_kv_tokens, max_qo_len, max_kv_len, max_page : int
        What the batch holds: requests, query and KV tokens, the longest of each, the largest page
        id (-1 if there is none).
    batch : list of np.ndarray
        int32 qo_indptr, kv_indptr, kv_indices, kv_len, q_pos_offset, kv_pos_offset.
    work : list of WorkList
        One work list for each family of query tiles that has requests.
    params : dict of str to list
        The plan-time parameters as they were given, by parameter: numbers, and arrays on the host.
    header : list of int
        What the planner says of the batch, and of its work list if that was dealt at once.
    single : tuple of Family and int, optional
        Whose work list that is, and for how many CTAs.
    families : frozenset of Family
        Those that have work.
    block : Block, optional
        The memory that `batch` and `work` are in.
    placement : Placement
        The same as kernels read it.
    """

    placement: Placement
    single: tuple[Family, int] | None = None

    def __init__(
        self,
        owner: object,
        header: list[int],
        batch_size: int,
        block: Block | None = None,
    ):
        self.owner = owner
        self.params: dict[str, list[Any]] = {}
        self.families = NO_FAMILIES
        self.hold(header, batch_size, block)

    def hold(self, header: list[int], batch_size: int, block: Block | None) -> None:
        """Become the plan of a batch that the planner wrote to a block."""
        self.block = block
        self.header = header
        self.batch_size = batch_size
        self.nnz_qo, self.max_page, self.max_qo_len, self.max_kv_len = header[LENGTHS]
        low, high, self.num_pages = header[TOTALS]
        self.num_kv_tokens = (high << 32) | (low & 0xFFFFFFFF)

    def renew(self, header: list[int], batch_size: int, block: Block) -> None:
        """Become another batch's plan in the same memory of a device, but for its families."""
        for name in ("batch", "dealt", "work"):
            self.__dict__.pop(name, None)
        self.hold(header, batch_size, block)

    @cached_property
    def batch(self) -> list[Ints]:
        """The arrays of the batch: cut out of the block when they are looked at."""
        assert self.block is not None
        return batch_in(self.block, self.batch_size, self.num_pages)

    @cached_property
    def dealt(self) -> list[Dealt]:
        """What the planner says of each work list, in the order of families."""
        return [Dealt.of(*self.single, self.header)] if self.families and self.single else []

    @cached_property
    def work(self) -> list[WorkList]:
        """The work lists, cut out of the block when they are looked at."""
        if self.block is None:
            return []
        return [dealt.work_in(self.block) for dealt in self.dealt]

    @property
    def device(self) -> torch.device:
        """Where it can be run; of a kernel for a GPU that was planned without one, the CPU."""
        return self.placement.device

    @property
    def partials(self) -> list[tuple[torch.Tensor, ...]]:
        """Of each launch, room for partial outputs and LSEs (and, on a GPU, its counters)."""
        return [launch.partials for launch in self.placement.launches]

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """``qo_len, kv_len [batch]``: tokens of each request."""
        return np.diff(self.batch[0]), self.batch[KV_LEN]

    def placed(self, name: str) -> torch.Tensor:
        """Return an array of the batch as kernels read it: behind its entries there may be room."""
        there = self.placement.there
        if there is not None:
            return there.room.of(name)
        return torch.from_numpy(self.batch[BATCH.index(name)])

    def replace_by(self, other: Plan) -> None:
        """Become `other`, keeping this object's identity; `other` becomes what this was."""
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__
        self.__class__, other.__class__ = other.__class__, self.__class__

    def __reduce__(self) -> NoReturn:
        """Raise `PlanError`: a plan is memory of a kernel and of a device."""
        raise PlanError("a plan can be neither copied nor pickled; plan the batch again")

    def __del__(self) -> None:
        """Leave the memory to plans to come."""
        held = self.__dict__
        block, placement = held.get("block"), held.get("placement")
        if block is None:
            return
        if placement is not None and placement.moved:
            block.device_memory = None  # which another stream uses
        elif block.device_memory is not None:
            block.device_memory.rest()
        block.give_back()

    def check(self) -> None:
        """Raise what planning on a device found wrong; a plan made on the host is always right."""

    @property
    def num_items(self) -> int:
        """Work items of all lists."""
        return sum(len(work.items) for work in self.work)

    @property
    def num_slots(self) -> int:
        """Partial states of all lists."""
        return sum(work.num_slots for work in self.work)

    def to_json(self) -> str:
        """Return the plan as JSON: the batch, and each CTA's queue."""
        batch = {n: a.tolist() for n, a in zip(BATCH, self.batch, strict=True)}
        work = [
            {
                "family": w.family.name,
                "rows": w.family.rows,
                "imbalance": round(w.imbalance, 4),
                "num_slots": w.num_slots,
                "queues": [[item._asdict() for item in queue] for queue in w.queues()],
            }
            for w in self.work
        ]
        return json.dumps({"batch": batch, "work": work})

    def __str__(self) -> str:
        """Return the batch in a line, and every work list as a Gantt chart."""
        head = (
            f"Plan: {self.batch_size} requests, {self.nnz_qo} query tokens, "
            f"{self.num_kv_tokens} KV tokens, {self.num_items} items, {self.num_slots} slots"
        )
        return "\n".join([head, *(gantt_text(work) for work in self.work)])

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return gantt_svg(self.work)


NO_FAMILIES: frozenset[Family] = frozenset()
LENGTHS = slice(Header.NNZ_QO, Header.MAX_KV_LEN + 1)
"""Words of a header: query tokens, the largest page, the longest query and key sequence."""
TOTALS = slice(Header.NUM_TOKENS_LO, Header.NUM_PAGES + 1)
"""And the KV tokens in two words, and pages."""
BATCH = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len", "q_pos_offset", "kv_pos_offset")
"""Arrays of a batch, in the order in which kernels take them."""
KV_LEN = 3
"""Place of kv_len in `Plan.batch`."""


def batch_in(block: Block, size: int, pages: int) -> list[Ints]:
    """Return the arrays of a batch of so many requests and page ids that was written to a block."""
    sizes = zip(BATCH, (size + 1, size + 1, pages, size, size, size), strict=True)
    return [block.arrays[name][:count] for name, count in sizes]


def wide(header: list[int], low: int) -> int:
    """Return the 64-bit number whose low word is ``header[low]``; its high word comes next."""
    return (header[low + 1] << 32) | (header[low] & 0xFFFFFFFF)
