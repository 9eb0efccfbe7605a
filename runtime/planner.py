"""From what plan() is given to a plan on its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import DTypeError, LimitError, PlanError
from tvm_attn.runtime.device import CPU, stream_handle
from tvm_attn.runtime.fixed import FixedMemory, Terms
from tvm_attn.runtime.formats import (
    PageTable,
    batch_format,
    check_on_host,
    one_gpu,
    plain_arrays,
    to_host,
)
from tvm_attn.runtime.inspector import Inspector, OddArrays
from tvm_attn.runtime.machine import Machine
from tvm_attn.runtime.params import UNBOUNDED, plan_values
from tvm_attn.runtime.plan import Family, Plan
from tvm_attn.runtime.shelf import Shelf
from tvm_attn.runtime.workspace import PlanLimits
from tvm_attn.spec import AttentionSpec, Param, integer

Arguments = dict[str, Any]
Binder = Callable[[Plan], dict[str, list[Any]]]
"""Finds the plan-time parameters of a batch."""


class Planner:
    """Makes the plans of one kernel.

    Parameters
    ----------
    spec : AttentionSpec
        Of the kernel.
    params : sequence of Param
        The variant's parameters.
    inspector : Inspector
        Plans on the host.
    families : sequence of Family
        Query tiles, as the inspector has them.
    machine : Machine
        What the kernel runs on.
    on_gpu : bool
        Whether that is a GPU.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        params: Sequence[Param],
        inspector: Inspector,
        families: Sequence[Family],
        machine: Machine,
        on_gpu: bool,
    ):
        self._spec = spec
        self._params = params
        self._takes_params = any(param.at == "plan" for param in params)
        self._inspector = inspector
        self._families = families
        self._machine = machine
        self._on_gpu = on_gpu
        self._shelves: dict[tuple[torch.device, int | None], Shelf] = {}
        self._heads = {"num_qo_heads": spec.num_qo_heads, "num_kv_heads": spec.num_kv_heads}

    def plan(
        self,
        owner: object,
        arrays: Arguments,
        params: Arguments,
        limits: PlanLimits | None,
        out: Plan | None,
        workspace: torch.Tensor | None,
        fixed_split_size: int | None,
        max_qo_len: int | None,
    ) -> Plan:
        """Plan a batch; see `AttentionModule.plan`.

        `arrays` are its index arrays and `params` the variant's parameters, by name.
        """
        if not params and workspace is None and fixed_split_size is None:
            memory = None if out is None else out.placement.fixed
            if _is_usual(memory, limits, max_qo_len):
                table = plain_arrays(self._spec, arrays)
                if table is not None:
                    if out is not None and self._plan_again(table, memory, out):
                        return out
                    made = self._plan_plain(owner, table, memory, out)
                    if made is not None:
                        return made
        device, wanted = CPU, None
        if self._on_gpu:
            wanted = one_gpu(arrays) if limits is not None or _is_fixed(out) else None
            if wanted is not None:
                options = (limits, out, workspace, fixed_split_size, max_qo_len)
                return self._plan_there(owner, arrays, params, wanted, *options)
            arrays, params, wanted = _from_gpu(arrays, params)
            device = self._machine.plan_device(wanted or _gpu_of(workspace, out))
        bsr = batch_format(self._spec, arrays)
        check_on_host(bsr)
        self._machine.check_capture(device)
        terms = terms_of(limits, fixed_split_size, max_qo_len)
        split = positive("fixed_split_size", fixed_split_size)
        longest = positive("max_qo_len", max_qo_len)
        if terms is not None:
            terms.limits.check(bsr)
        memory = self._memory(terms, split, device, out, workspace)
        bind = self._binder(bsr, params)
        return self._make(owner, bsr, bind, split, longest, device, memory, workspace, out)

    def _plan_again(self, table: PageTable, memory: FixedMemory | None, out: Plan) -> bool:
        """Plan a batch like the one before, into the same memory, if it is that.

        All that is looked at is what may differ between two such calls, once for every token.
        """
        if memory is None or out.single is None or self._takes_params or not out.placement.stays():
            return False
        there = (memory, self._queues(memory.device, memory), out.placement.stream)
        return self._inspector.plan_again(out, table, self._spec.page_size, *there)

    def _plan_plain(
        self, owner: object, table: PageTable, memory: FixedMemory | None, out: Plan | None
    ) -> Plan | None:
        """Plan a batch of int32 tensors on the host in little time; None if they are no batch."""
        assert self._spec.page_size is not None
        bsr = BSR.of_plain(*table, self._spec.page_size)
        if bsr is None:
            return None
        device = CPU
        if memory is not None:
            device = memory.device
        elif self._on_gpu:
            device = self._machine.plan_device(None if out is None else _gpu_of(out))
        self._machine.check_capture(device)
        bind = self._binder(bsr, {}) if self._takes_params else None
        try:
            return self._make(owner, bsr, bind, 0, 0, device, memory, None, out)
        except OddArrays:
            return None

    def _make(
        self,
        owner: object,
        bsr: BSR,
        bind: Binder | None,
        split: int,
        longest: int,
        device: torch.device,
        memory: FixedMemory | None,
        workspace: torch.Tensor | None,
        out: Plan | None,
    ) -> Plan:
        """Plan a batch on the host for a device."""
        if memory is None:
            store: Shelf | FixedMemory = self._shelf(device)
        else:
            store, most = memory, memory.terms.max_qo_len
            longest = min(longest, most) if longest and most else longest or most
        queues = self._queues(device, memory)
        plan = self._inspector.plan(owner, bsr, bind, split, queues, store, longest)
        plan.placement = self._machine.place(plan, device, workspace, memory)
        if out is None:
            return plan
        out.replace_by(plan)
        return out

    def _plan_there(
        self,
        owner: object,
        arrays: Arguments,
        params: Arguments,
        device: torch.device,
        limits: PlanLimits | None,
        out: Plan | None,
        workspace: torch.Tensor | None,
        fixed_split_size: int | None,
        max_qo_len: int | None,
    ) -> Plan:
        """Plan a batch whose arrays are on a GPU there, without waiting for anything."""
        bsr = batch_format(self._spec, arrays)
        terms = terms_of(limits, fixed_split_size, max_qo_len)
        memory = self._memory(
            terms, positive("fixed_split_size", fixed_split_size), device, out, workspace
        )
        if memory is None:
            raise PlanError(f"this plan has limits on {_gpu_of(out)}, the batch is on {device}")
        if bsr.batch_size > memory.terms.limits.max_batch:
            raise LimitError(memory.terms.limits.excess("max_batch", bsr.batch_size))
        if max_qo_len is not None and max_qo_len != memory.terms.max_qo_len:
            raise PlanError(
                f"max_qo_len={max_qo_len}, but this plan has limits for "
                f"{memory.terms.max_qo_len or None}; keep it, or make another plan"
            )
        made = self._machine.plan_there(memory, bsr, self._params, params, owner)
        if out is None:
            return made
        out.replace_by(made)
        return out

    def _binder(self, bsr: BSR, params: Arguments) -> Binder | None:
        """Return what finds the plan-time parameters of a batch, None if there are none."""
        given = {**bsr.index_params, **params} if bsr.index_params else params
        if not given and not self._takes_params:
            return None

        def bind(plan: Plan) -> dict[str, list[Any]]:
            sizes = {**self._heads, "batch": plan.batch_size}
            return plan_values(self._params, given, plan.lengths, sizes)

        return bind

    def _shelf(self, device: torch.device) -> Shelf:
        """Return where memory for plans without limits comes from: a stream has its own.

        What a device has of it is used by one plan after the other, in the order of the stream.
        """
        on_gpu = device.type == "cuda"
        key = (device, stream_handle(device) if on_gpu else None)
        shelf = self._shelves.get(key)
        if shelf is None:
            made = Shelf(self._families, self._spec.num_kv_heads, pinned=on_gpu)
            shelf = self._shelves[key] = made
        return shelf

    def _memory(
        self,
        terms: Terms | None,
        split: int,
        device: torch.device,
        out: Plan | None,
        workspace: torch.Tensor | None,
    ) -> FixedMemory | None:
        """Return the memory of a plan with limits: that of `out`, or new one."""
        held = None if out is None else out.placement.fixed
        if held is None or held.device != device or terms not in (None, held.terms):
            return None if terms is None else self._machine.fix(terms, device, workspace)
        if split != held.terms.split:
            raise PlanError(
                f"fixed_split_size={split or None}, but this plan has limits for "
                f"{held.terms.split or None}; keep it, or make another plan"
            )
        return held

    def _queues(self, device: torch.device, memory: FixedMemory | None) -> tuple[int, ...]:
        """Return how many queues each family has: none if a plan has no room for its work."""
        if memory is not None and memory.queues is not None:
            return memory.queues
        counts = tuple(self._machine.num_ctas(device))
        if memory is None:
            return counts
        memory.queues = tuple(
            count if family in memory.counts else 0
            for family, count in zip(self._families, counts, strict=True)
        )
        return memory.queues


def terms_of(
    limits: PlanLimits | None, fixed_split_size: int | None, max_qo_len: int | None
) -> Terms | None:
    """Return the terms of a plan with limits."""
    if limits is None:
        return None
    expect("limits", limits, PlanLimits)
    split = positive("fixed_split_size", fixed_split_size)
    return Terms(limits, split, positive("max_qo_len", max_qo_len))


def positive(name: str, value: int | None) -> int:
    """Return an optional count, 0 for None."""
    if value is None:
        return 0
    number = integer(value)
    if number is None or number < 1:
        raise PlanError(f"{name}={value!r} must be an integer of at least 1, or None")
    return min(number, UNBOUNDED)


def expect(name: str, value: object, kind: type) -> None:
    """Raise `DTypeError` unless an argument has its type."""
    if not isinstance(value, kind):
        raise DTypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def _from_gpu(
    arrays: Mapping[str, Any], params: Mapping[str, Any]
) -> tuple[Arguments, Arguments, torch.device | None]:
    """Return arguments on the host, and the GPU that any of them were on."""
    moved, device = to_host({**arrays, **params})
    return {n: moved[n] for n in arrays}, {n: moved[n] for n in params}, device


def _is_usual(
    memory: FixedMemory | None, limits: PlanLimits | None, max_qo_len: int | None
) -> bool:
    """Whether nothing is asked of a plan but what its memory, if it has some, was made for."""
    if memory is None:
        return limits is None and max_qo_len is None
    terms = memory.terms
    if terms.split:
        return False
    if limits is None:
        return max_qo_len is None
    return limits is terms.limits and (
        max_qo_len == terms.max_qo_len
        if type(max_qo_len) is int
        else max_qo_len is None and not terms.max_qo_len
    )


def _is_fixed(out: Plan | None) -> bool:
    """Whether a plan has limits."""
    return out is not None and out.placement.fixed is not None


def _gpu_of(*values: torch.Tensor | Plan | None) -> torch.device | None:
    """Return the GPU that the first of some tensors and plans is on that is on one."""
    for value in values:
        if value is not None and isinstance(value, (Plan, torch.Tensor)):
            device = value.device
            if device.type == "cuda":
                return device
    return None
