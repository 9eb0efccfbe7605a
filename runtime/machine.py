"""What kernels run on: how many CTAs there are, where a plan's arrays go, when a run may start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, Protocol

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import PlanError
from tvm_attn.runtime.device import CPU
from tvm_attn.runtime.fixed import FixedMemory, Terms
from tvm_attn.runtime.host import check_process
from tvm_attn.runtime.library import num_threads
from tvm_attn.runtime.placement import Launch, Placement
from tvm_attn.runtime.plan import Family, Plan
from tvm_attn.runtime.workspace import partial_states
from tvm_attn.spec import AttentionSpec, Param

Guard = AbstractContextManager[Any] | None


class Machine(Protocol):
    """What a kernel runs on."""

    def plan_device(self, wanted: torch.device | None) -> torch.device:
        """Return the device to plan for; `wanted` is that of what was given, if it says one."""

    def num_ctas(self, device: torch.device) -> Sequence[int]:
        """Return the CTAs that each family's work is dealt to."""

    def fix(
        self, terms: Terms, device: torch.device, workspace: torch.Tensor | None
    ) -> FixedMemory | None:
        """Return memory that a plan keeps when it is replanned, where graphs may read it."""

    def check_capture(self, device: torch.device) -> None:
        """Raise `PlanError` while a graph is captured that a plan made on the host cannot be in."""

    def place(
        self,
        plan: Plan,
        device: torch.device,
        workspace: torch.Tensor | None,
        memory: FixedMemory | None,
    ) -> Placement:
        """Return a plan as kernels read it: in `memory`, or with its partial states in `workspace`.

        Raises
        ------
        WorkspaceError, ShapeError, DTypeError
            If `workspace` does not serve.
        """

    def plan_there(
        self,
        memory: FixedMemory,
        bsr: BSR,
        params: Sequence[Param],
        given: Mapping[str, Any],
        owner: object,
    ) -> Plan:
        """Plan a batch on the device of the memory, queued on its current stream.

        Raises
        ------
        PlanError, ArtifactError
            If it cannot be planned there; the message says why.
        """

    def ready(self, plan: Plan) -> Guard:
        """Prepare a run of a plan, and return what it has to run within, if anything.

        Raises
        ------
        ProcessError, ArtifactError
            If the kernel cannot run here.
        """

    def describe(self) -> str:
        """Return what there is to add to a kernel's target, after a comma."""


class CpuMachine:
    """The CPU of this process: one CTA a thread.

    Parameters
    ----------
    spec : AttentionSpec
        Of the kernel.
    families : sequence of Family
        Its query tiles.
    num_ctas : int, optional
        CTAs to deal to, instead of the number of threads.
    """

    def __init__(self, spec: AttentionSpec, families: Sequence[Family], num_ctas: int | None):
        self._spec = spec
        self._num_ctas = [num_ctas or num_threads() * family.residents for family in families]
        self._ones = torch.ones(spec.num_kv_heads, dtype=torch.float32, device="cpu")

    def plan_device(self, wanted: torch.device | None) -> torch.device:
        """Return the CPU."""
        return CPU

    def num_ctas(self, device: torch.device) -> Sequence[int]:
        """Return the number of threads, for each family."""
        return self._num_ctas

    def fix(
        self, terms: Terms, device: torch.device, workspace: torch.Tensor | None
    ) -> FixedMemory | None:
        """Return nothing: there are no graphs."""
        return None

    def check_capture(self, device: torch.device) -> None:
        """Do nothing: there are no graphs."""

    def place(
        self,
        plan: Plan,
        device: torch.device,
        workspace: torch.Tensor | None,
        memory: FixedMemory | None,
    ) -> Placement:
        """Return the plan's own arrays: kernels read them where they are."""
        slots = [(work.family, work.num_slots) for work in plan.work]
        launches = [
            Launch(work.family.name, (*work.arrays, *plan.batch), partials)
            for work, partials in zip(
                plan.work, partial_states(self._spec, slots, workspace, CPU), strict=True
            )
        ]
        turn = RLock() if any(count for _, count in slots) else None
        return Placement(CPU, launches, plan.params, self._ones, turn=turn)

    def plan_there(
        self,
        memory: FixedMemory,
        bsr: BSR,
        params: Sequence[Param],
        given: Mapping[str, Any],
        owner: object,
    ) -> Plan:
        """Not for a CPU: it has no memory that stays."""
        raise PlanError("a kernel for the CPU plans on the host")

    def ready(self, plan: Plan) -> Guard:
        """Check that the thread pool is in this process."""
        check_process()
        return None

    def describe(self) -> str:
        """Return the number of threads, or of CTAs in their place."""
        return f", {self._num_ctas[0]} threads"
