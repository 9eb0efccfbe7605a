"""Running on NVIDIA GPUs: their multiprocessors, plans in their memory, kernels made ready.

Everything but a run works without a GPU: plans are then made for a usual number of multiprocessors,
and stay on the host.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import ArtifactError, PlanError, ProcessError
from tvm_attn.runtime.buffers import Block
from tvm_attn.runtime.device import (
    CPU,
    current_index,
    current_stream,
    on_device,
    raw_stream,
    stream_handle,
)
from tvm_attn.runtime.device_memory import DeviceMemory, IdleStates, KeptMemory, states_of
from tvm_attn.runtime.device_plan import DevicePlan, DevicePlanner, refuses
from tvm_attn.runtime.fixed import FixedMemory, Terms, families_of
from tvm_attn.runtime.later import Later
from tvm_attn.runtime.library import Library, load_cuda_runtime
from tvm_attn.runtime.machine import Guard
from tvm_attn.runtime.params import NO_LENGTHS, plan_values
from tvm_attn.runtime.placement import Placement, is_capturing
from tvm_attn.runtime.plan import Family, Plan
from tvm_attn.runtime.staging import Copies
from tvm_attn.runtime.workspace import family_counts
from tvm_attn.spec import AttentionSpec, Param


class CudaMachine:
    """The GPUs of this process; each plan is for one of them.

    Parameters
    ----------
    spec : AttentionSpec
        Of the kernel.
    families : sequence of Family
        Its query tiles, and how many CTAs of each share a multiprocessor.
    num_ctas : int, optional
        CTAs to deal to, instead of as many as are resident.
    target : str
        What the code was generated for, such as ``"cuda -arch=sm_90a"``.
    multiprocessors : int
        What to plan for where there is no GPU.
    library : Library
        Launches the kernels.
    planner : Library or Later, optional
        Launches the device's planner.
    rows : int
        Units, and pieces of them, that it has room for.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        families: Sequence[Family],
        num_ctas: int | None,
        target: str,
        multiprocessors: int,
        library: Library,
        planner: Library | Later | None = None,
        rows: int = 0,
    ):
        self._planner = planner
        self._rows = rows
        self._spec = spec
        self._families = families
        self._given_ctas = num_ctas
        self._target = target
        self._multiprocessors = multiprocessors
        self._library = library
        self._ready: set[torch.device] = set()
        self._idle: dict[tuple[torch.device, torch.cuda.Stream | None], IdleStates] = {}
        self._num_ctas: dict[torch.device, tuple[int, ...]] = {}

    def plan_device(self, wanted: torch.device | None) -> torch.device:
        """Return the device wanted, else the current GPU, else the CPU where there is none."""
        if wanted is not None:
            return wanted
        return gpu(torch.cuda.current_device()) if has_gpu() else CPU

    def num_ctas(self, device: torch.device) -> Sequence[int]:
        """Return how many CTAs of each family are resident at once."""
        found = self._num_ctas.get(device)
        if found is None:
            found = self._num_ctas[device] = self._resident(device)
        return found

    def _resident(self, device: torch.device) -> tuple[int, ...]:
        if self._given_ctas is not None:
            return (self._given_ctas,) * len(self._families)
        on_gpu = device.type == "cuda"
        count = multiprocessors(device) if on_gpu else self._multiprocessors
        return tuple(_queues(count, family) for family in self._families)

    def fix(
        self, terms: Terms, device: torch.device, workspace: torch.Tensor | None
    ) -> FixedMemory | None:
        """Return memory on a device for all families that a batch may have work for."""
        ctas = self.num_ctas(device)
        heads = (self._spec.group_size, self._spec.num_kv_heads)
        chosen = families_of(self._families, terms, *heads, ctas)
        counts = family_counts(self._spec, self._families, terms.limits, ctas, terms.split)
        counts = {family: counts[family] for family in chosen}
        return FixedMemory(self._spec, terms, counts, device, workspace)

    def check_capture(self, device: torch.device) -> None:
        """Raise `PlanError` while a CUDA graph is captured, before anything is asked of the GPU."""
        if is_capturing(device):
            raise PlanError(
                "a plan is made on the host, which a CUDA graph cannot capture; plan before the "
                "capture, or with limits and arrays that are on the GPU"
            )

    def place(
        self,
        plan: Plan,
        device: torch.device,
        workspace: torch.Tensor | None,
        memory: FixedMemory | None,
    ) -> Placement:
        """Return the plan in the device's memory, where a copy will bring it on its stream."""
        block = plan.block
        assert block is not None, "a plan on the host is in memory of the host"
        stream = current_stream(device) if device.type == "cuda" else None
        if memory is not None:
            memory.check_params(plan.params)
            _fill(memory, plan, block, stream)
            launches = memory.launches
            held = (memory.ones, stream, memory.states, memory)
            run = None if plan.params else memory.run_of(plan, launches)
            return Placement(device, launches, plan.params, *held, run)
        kept = block.device_memory
        if kept is None:
            idle = self._idle.setdefault((device, stream), IdleStates())
            kept = KeptMemory(self._spec, device, block.layout, idle)
            block.device_memory = kept
        launches = kept.launches_of(plan, workspace)
        _fill(kept, plan, block, stream)
        params, owned = plan.params, states_of(launches)
        if params:
            params, arrays = self._params_there(plan, device)
            owned = (*owned, *arrays)
        run = None if params else kept.run_of(plan, launches)
        return Placement(device, launches, params, kept.ones, stream, owned, kept, run)

    @staticmethod
    def _params_there(
        plan: Plan, device: torch.device
    ) -> tuple[dict[str, list[Any]], tuple[torch.Tensor, ...]]:
        """Return a plan's parameters on a device, and the memory that they are in."""
        arrays = [v for values in plan.params.values() for v in values if _is_tensor(v)]
        if not arrays:
            return plan.params, ()
        copies = Copies(device, arrays)
        params = {
            name: [copies.of(v) if _is_tensor(v) else v for v in values]
            for name, values in plan.params.items()
        }
        return params, (copies.block,)

    def plan_there(
        self,
        memory: FixedMemory,
        bsr: BSR,
        params: Sequence[Param],
        given: Mapping[str, Any],
        owner: object,
    ) -> Plan:
        """Launch the device's planner, which a CUDA graph can capture."""
        if self._planner is None:
            raise ArtifactError(
                "this kernel was exported without a planner for GPUs; build it anew"
            )
        if reason := refuses(memory.counts, params, self._rows):
            raise PlanError(f"the batch is on a GPU and cannot be planned there: {reason}")
        if memory.device_planner is None:
            if is_capturing(memory.device):
                raise PlanError("plan once with these limits before planning is captured")
            memory.device_planner = DevicePlanner(
                self._spec, memory, partial(self._planner.launch, "plan_on_device")
            )
        sizes = {"num_qo_heads": self._spec.num_qo_heads, "num_kv_heads": self._spec.num_kv_heads}
        made = plan_values(params, {**bsr.index_params, **given}, NO_LENGTHS, sizes)
        memory.check_params(made)
        memory.device_planner.plan(bsr, [value for values in made.values() for value in values])
        plan = DevicePlan(owner, bsr, made, memory)
        device = memory.device
        stream = current_stream(device) if device.type == "cuda" else None
        given_there = (memory.ones, stream, memory.states, memory)
        plan.placement = Placement(device, memory.launches, made, *given_there)
        return plan

    def ready(self, plan: Plan) -> Guard:
        """Load the kernels, and have the plan's arrays on the current stream of its device."""
        placement = plan.placement
        index, handle = placement.used
        if handle >= 0 and raw_stream(index) == handle and current_index() == index:
            return None
        device = placement.device
        if device not in self._ready:
            self._prepare(device)
        stream = placement.stream
        if stream is None or stream.cuda_stream != stream_handle(device):
            placement.follow(current_stream(device))
        if placement.stream is not None:
            placement.used = device.index, placement.stream.cuda_stream
        return None if current_index() == device.index else on_device(device)

    def describe(self) -> str:
        """Return the number of CTAs, where it is not the device's."""
        return "" if self._given_ctas is None else f", {self._given_ctas} CTAs"

    def _prepare(self, device: torch.device) -> None:
        """Check that the code runs on a device, and load it."""
        load_cuda_runtime()
        if device.type != "cuda":
            raise ProcessError(
                f"this batch was planned where there was no GPU, and {self._target} needs one; "
                "plan it again where the kernel runs"
            )
        check_capability(self._target, device)
        self._library.load_device_code()
        self._ready.add(device)


@functools.cache
def has_gpu() -> bool:
    """Whether this process can use a GPU."""
    return torch.cuda.is_available()


@functools.cache
def gpu(index: int) -> torch.device:
    """Return a GPU."""
    return torch.device("cuda", index)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_capability(target: str, device: torch.device) -> None:
    """Raise `ArtifactError` if a GPU does not run code of a target.

    Code for an architecture runs on those of its major version that are not older; code for
    ``sm_90a`` runs on that one alone.
    """
    built_for = re.search(r"sm_(\d+)(\d)(a?)", target)
    if built_for is None:
        raise ArtifactError(f"the kernel was built for {target}, which is no GPU's architecture")
    major, minor = torch.cuda.get_device_capability(device)
    wanted = int(built_for[1]), int(built_for[2])
    runs = (major, minor) == wanted if built_for[3] else major == wanted[0] and minor >= wanted[1]
    if not runs:
        raise ArtifactError(
            f"this kernel was built for {target}, and {device} is an sm_{major}{minor} "
            f'({torch.cuda.get_device_name(device)}); build it for "cuda -arch=sm_{major}{minor}"'
        )


def _queues(multiprocessors: int, family: Family) -> int:
    """Return how many CTAs, or clusters, of a family are resident at once.

    The multiprocessors of a large cluster are neighbours: some of a card's are left over.
    """
    count = multiprocessors * family.residents // max(family.cluster, 1)
    return count if family.cluster <= 2 else max(count * 9 // 10, 1)


def _fill(there: DeviceMemory, plan: Plan, block: Block, stream: torch.cuda.Stream | None) -> None:
    """Copy a plan to a device's memory, on the stream that is its current one."""
    given = (block, plan.families, plan.num_pages, stream)
    if stream is None or current_index() == there.device.index:
        there.fill(*given)
        return
    with on_device(there.device):
        there.fill(*given)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
