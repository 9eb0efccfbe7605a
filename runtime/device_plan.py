"""Plans that are made on a device: queued there with the run, and captured with it.

The host neither reads nor writes anything of the batch. What planning finds wrong is a word in the
plan's memory, which `DevicePlan.check` waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import LimitError, PlanError
from tvm_attn.runtime.buffers import Ints
from tvm_attn.runtime.inspector import raise_status
from tvm_attn.runtime.plan import BATCH, Family, Plan, WorkList, wide
from tvm_attn.runtime.staging import Copies, Room
from tvm_attn.runtime.workspace import Counts, PlanLimits
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.worklist import (
    DEVICE_CTAS,
    JOB_WORDS,
    PLACE_WORDS,
    Header,
    Job,
    Place,
    Role,
    Status,
)

if TYPE_CHECKING:
    from tvm_attn.runtime.fixed import FixedMemory

MAX_ROWS = 2**31 - 1
PLANNERS = 32
"""CTAs that plan the same family's work and share the writing of its items."""
COPIED_PAGES = 4096
"""Page ids that a CTA copies."""
MOST_COPIERS = 64


def refuses(counts: Mapping[Family, Counts], params: Sequence[Param], rows: int) -> str:
    """Say why a device with room for so many rows cannot plan batches; empty if it can."""
    for param in params:
        if param.at == "plan" and param.kind != "scalar":
            return f"{param.name} is an array that is given at plan()"
    for family, of_family in counts.items():
        if family.cached_tokens:
            return (
                f"the kernel for requests of many query tokens ({family.name}) has its work dealt "
                "on the host; give a max_qo_len that needs none"
            )
        if of_family.rows > rows:
            return f"its limits are for {of_family.rows} units and pieces of them, more than {rows}"
        if of_family.num_ctas > DEVICE_CTAS:
            return f"there are {of_family.num_ctas} CTAs, more than it deals to"
    return ""


def reciprocal(number: int) -> int:
    """Return the reciprocal that a device divides by a number with (see `planner_ints.Divisor`)."""
    return -(-(1 << 31 + (number - 1).bit_length()) // number)


class DevicePlanner:
    """Plans batches within limits on a device, into one plan's memory.

    Parameters
    ----------
    spec : AttentionSpec
        Of the kernel.
    memory : FixedMemory
        Where the plan is.
    launch : callable
        Launches the planner.
    """

    def __init__(self, spec: AttentionSpec, memory: FixedMemory, launch: Callable[..., None]):
        self._spec = spec
        self._launch = launch
        self._memory = memory
        room, counts = memory.room, memory.counts
        place = np.zeros(PLACE_WORDS, np.int32)
        for word, name in zip(Place, BATCH, strict=False):
            place[word] = room.begin(name)
        place[Place.HEADER], words = room.begin("header"), room.begin("words")
        for number, word in enumerate(
            (Place.ARRIVALS, Place.FIRST_BAD, Place.PLANNED, Place.EXPECTED)
        ):
            place[word] = words + number
        jobs = np.zeros((len(counts), JOB_WORDS), np.int32)
        least = 1
        for row, (family, of_family) in zip(jobs, counts.items(), strict=True):
            _fill_job(row, family, of_family, room, least)
            least = family.rows + 1
            for at, number in (
                (Job.OF_HEADS, spec.num_kv_heads),
                (Job.OF_GRANULE, family.block),
                (Job.OF_GROUP, spec.group_size),
                (Job.OF_CTAS, of_family.num_ctas),
            ):
                row[at : at + 2] = np.array([reciprocal(number)]).view(np.int32)
        [last] = jobs[-1:]
        last[Job.ROW_MAX] = MAX_ROWS
        clusters = [family for family in counts if family.cluster > 1]
        if clusters:
            jobs[0, Job.ROLE] = Role.CLUSTERS
        self._clusters = [(f.cluster, counts[f].num_ctas, f.rows) for f in clusters] or [(0, 0, 0)]
        tables = Copies(memory.device, (place, jobs))
        self._place, self._jobs = tables.of(place), tables.of(jobs)
        self._none = torch.empty(0, dtype=torch.int32, device=memory.device)

    def plan(self, bsr: BSR, values: Sequence[Any]) -> None:
        """Queue the planning of a batch on the current stream."""
        spec, terms, none = self._spec, self._memory.terms, self._none
        limits = terms.limits
        pages = limits.max_kv_tokens // (spec.page_size or 1)
        arrays = (bsr.kv_indices, bsr.kv_last_page_len, bsr.q_pos_offset, bsr.kv_pos_offset)
        copiers = max(min(-(-pages // COPIED_PAGES), MOST_COPIERS), 1) if spec.is_paged else 1
        self._launch(
            *(bsr.qo_indptr, bsr.kv_indptr),
            *(none if array is None else array for array in arrays),
            *values,
            *(self._place, self._jobs),
            *(spec.page_size or 1, spec.group_size, spec.num_kv_heads, terms.split),
            *(limits.max_batch, limits.max_qo_tokens, pages, terms.max_qo_len),
            MAX_ROWS if limits.num_pages is None else limits.num_pages,
            *self._clusters[0],
            *(PLANNERS, copiers),
            self._memory.room.block,
        )


def _fill_job(row: Ints, family: Family, counts: Counts, room: Room, least: int) -> None:
    """Write what a device has to know of a family, whose requests have so many rows at least."""
    names = {
        Job.ITEMS: "items",
        Job.CTA_INDPTR: "cta_indptr",
        Job.MERGE_ITEMS: "merge_items",
        Job.MERGE_INDPTR: "merge_indptr",
        Job.HEADER: "header",
        Job.UNIT_ROWS: "unit_rows",
        Job.PIECE_ROWS: "piece_rows",
    }
    for word, name in names.items():
        row[word] = room.begin((family, name))
    row[Job.MERGES], row[Job.NUM_CTAS] = counts.merges, counts.num_ctas
    row[Job.ROW_MIN], row[Job.ROW_MAX], row[Job.TILE_ROWS] = least, family.rows, family.rows
    row[Job.GRANULE], row[Job.OVERHEAD] = family.block, family.overhead


class DevicePlan(Plan):
    """A plan that was made on its device.

    ``nnz_qo``, ``num_kv_tokens``, ``max_qo_len``, ``max_kv_len`` and ``max_page`` are those of the
    largest batch it may hold. What it holds (`batch`, `work`, and all that is printed) is copied to
    the host when it is asked for, which waits for the device.
    """

    def __init__(
        self,
        owner: object,
        bsr: BSR,
        params: dict[str, list[Any]],
        memory: FixedMemory,
    ):
        self.owner = owner
        self.params = params
        self._memory = memory
        self._bsr = bsr
        limits, longest = memory.terms.limits, memory.terms.max_qo_len
        self.batch_size = bsr.batch_size
        self.nnz_qo = limits.max_qo_tokens
        self.num_kv_tokens = self.max_kv_len = limits.max_kv_tokens
        self.max_qo_len = longest or limits.max_qo_tokens
        self.max_page = (limits.num_pages or 0) - 1

    def check(self) -> None:
        """Wait for the device, and raise what planning found wrong there."""
        words = self._memory.room.of("header").tolist()
        if words[Header.STATUS] != Status.OK:
            raise_device_status(words, self._bsr, self._memory.terms.limits, self.max_qo_len)

    def to_host(self) -> Plan:
        """Return what the plan holds, as a plan made on the host has it."""
        self.check()
        held = Held(self._memory.room)
        words = held.header("header")
        size = self.batch_size
        pages = 0 if self._bsr.page_size is None else int(held.of("kv_indptr")[size])
        sizes = dict(zip(BATCH, (size + 1, size + 1, pages, size, size, size), strict=True))
        batch = [held.of(name)[:count] for name, count in sizes.items()]
        words[Header.MAX_PAGE] = int(batch[2].max(initial=-1))
        plan = Plan(self.owner, words, size)
        plan.batch, plan.params, plan.placement = batch, self.params, self.placement
        plan.work = [work for family in self._memory.counts if (work := held.work(family))]
        return plan

    @property
    def batch(self) -> list[Ints]:
        """The batch, copied to the host."""
        return self.to_host().batch

    @property
    def work(self) -> list[WorkList]:
        """The work lists, copied to the host."""
        return self.to_host().work

    def to_json(self) -> str:
        """Return the plan as JSON, of what is copied to the host."""
        return self.to_host().to_json()

    def __str__(self) -> str:
        """Return the plan in words, of what is copied to the host."""
        return str(self.to_host())

    __repr__ = __str__


class Held:
    """A copy on the host of what a plan's memory holds."""

    def __init__(self, room: Room):
        self._room = room
        self._words = room.block.cpu().numpy()

    def of(self, name: Any) -> Ints:
        """Return an array."""
        shape = tuple(self._room.of(name).shape)
        begin = self._room.begin(name)
        array: Ints = self._words[begin : begin + int(np.prod(shape))].reshape(shape)
        return array

    def header(self, name: Any) -> list[int]:
        """Return the words of a header."""
        words: list[int] = self.of(name).tolist()
        return words

    def work(self, family: Family) -> WorkList | None:
        """Return the work of a family, if it has any."""
        words = self.header((family, "header"))
        items, merges = words[Header.NUM_ITEMS], words[Header.NUM_MERGES]
        if not items:
            return None
        return WorkList(
            family,
            self.of((family, "items"))[:items],
            self.of((family, "cta_indptr")),
            self.of((family, "merge_items"))[:merges],
            self.of((family, "merge_indptr"))[: merges + 1],
            words[Header.NUM_SLOTS],
            words[Header.MAX_LOAD],
            wide(words, Header.TOTAL_LOAD_LO),
        )


def raise_device_status(words: list[int], bsr: BSR, limits: PlanLimits, max_qo_len: int) -> None:
    """Raise the error of a device's verdict."""
    where, value, page_size = words[Header.WHERE], words[Header.VALUE], bsr.page_size or 1
    status = Status(words[Header.STATUS])
    if status == Status.QO_LIMIT:
        raise LimitError(limits.excess("max_qo_tokens", value))
    if status == Status.KV_LIMIT:
        raise LimitError(limits.excess("max_kv_tokens", value * page_size))
    if status == Status.QO_LEN:
        raise PlanError(f"max_qo_len={max_qo_len}, but a request has {value} queries")
    if status == Status.NO_PAGE:
        raise PlanError(
            f"kv_indices[{where}] is {value}; the plan's limits have num_pages={limits.num_pages}"
        )
    raise_status(words, bsr)
