"""An attention kernel that is ready to use: plan, run, read, export."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from tvm_attn.errors import ArtifactError, SpecError, TargetError, VariantError
from tvm_attn.runtime.artifact import Artifact
from tvm_attn.runtime.cuda import CudaMachine
from tvm_attn.runtime.device import CPU
from tvm_attn.runtime.disassembly import cubin_of, disassemble
from tvm_attn.runtime.executor import Executor
from tvm_attn.runtime.host import missing_flags
from tvm_attn.runtime.inspector import Inspector
from tvm_attn.runtime.later import Later
from tvm_attn.runtime.library import Library
from tvm_attn.runtime.machine import CpuMachine, Machine
from tvm_attn.runtime.params import param_from_json
from tvm_attn.runtime.plan import Family, Plan
from tvm_attn.runtime.planner import Planner, expect, positive
from tvm_attn.runtime.short import RowBytes
from tvm_attn.runtime.workspace import PlanLimits, workspace_size
from tvm_attn.spec import AttentionSpec, is_count

MULTIPROCESSORS = 132  # what plans are for without a GPU, where the artifact does not say


class AttentionModule:
    """A compiled attention kernel. Made by `build` or `load`.

    Plan once per batch, run once per layer:

    >>> plan = kernel.plan(qo_indptr, kv_indptr, kv_indices, kv_last_page_len)  # doctest: +SKIP
    >>> out = kernel.run(plan, q, kv_cache)  # doctest: +SKIP

    Attributes
    ----------
    spec : AttentionSpec
        What it was built for.
    variant : str
        The variant's name.
    params : tuple of Param
        The variant's run-time parameters.
    target : str
        What its code runs on.
    device, backend : str
        ``"cpu"`` or ``"cuda"``, and the schedule it was generated with.
    """

    def __init__(
        self,
        artifact: Artifact,
        libraries: Mapping[str, Library],
        num_ctas: int | None = None,
        later: Later | None = None,
    ):
        meta = artifact.meta
        self.spec = spec = AttentionSpec(**meta["spec"])
        self.variant: str = meta["variant"]
        self.target: str = meta["target"]
        self.device: str = meta.get("device", "cpu")
        self.backend: str = meta.get("backend", "cpu")
        self.params = tuple(map(param_from_json, meta["params"]))
        self.families = tuple(f for fields in meta["families"] for f in Family.from_json(fields))
        self._artifact, self._given_ctas, self._later = artifact, num_ctas, later
        self._missing = missing_flags(meta["cpu_flags"])
        self._libraries = libraries
        on_gpu = self.device == "cuda"
        self._machine: Machine
        if on_gpu:
            code, usual = libraries["attention"], meta.get("multiprocessors", MULTIPROCESSORS)
            planner = later or libraries.get("device_planner")
            given = (usual, code, planner, meta.get("device_rows", 0))
            self._machine = CudaMachine(spec, self.families, num_ctas, self.target, *given)
        else:
            self._machine = CpuMachine(spec, self.families, num_ctas)
        host = libraries["planner"]
        inspector = Inspector(
            *(host["plan_short"], host["plan_batch"], host["plan_work"]),
            self.families,
            spec.group_size,
            spec.num_kv_heads,
            RowBytes.of(spec),
        )
        self._planner = Planner(spec, self.params, inspector, self.families, self._machine, on_gpu)
        kernels = {f.name: libraries["attention"][f"attention_{f.name}"] for f in self.families}
        self._executor = Executor(spec, self.params, meta["use_softmax"], kernels, on_gpu)

    @staticmethod
    def of(artifact: Artifact, num_ctas: int | None = None) -> AttentionModule:
        """Return the kernel of an artifact; `num_ctas` is as for `with_ctas`."""
        libraries = {
            name: Library(content, list(artifact.devices.get(name, {}).values()))
            for name, content in artifact.libraries.items()
        }
        return AttentionModule(artifact, libraries, num_ctas)

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_last_page_len: Any = None,
        *,
        limits: PlanLimits | None = None,
        out: Plan | None = None,
        workspace: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        max_qo_len: int | None = None,
        q_pos_offset: Any = None,
        kv_pos_offset: Any = None,
        window_left: int | None = None,
        **index_params: Any,
    ) -> Plan:
        """Plan a batch: check its index arrays, cut its work, deal it to the machine.

        Arrays on the host are planned there. A kernel for a GPU has the plan copied there on the
        current stream, without waiting for anything. The plan is for the GPU that arrays are given
        on, else that of `workspace`, else of `out`, else for the current one.

        A plan with `limits` whose arrays are all on a GPU is made there, in one launch that a CUDA
        graph can capture with the runs that follow: the same plan, but that `run` then takes
        queries of ``max_qo_tokens`` rows. What is wrong with the arrays is raised by `Plan.check`,
        and until then every row is an empty state. Plan once before a capture: the planner for the
        GPU is compiled then, unless it is cached or the kernel was exported. Not planned there,
        but refused: plan-time arrays such as a custom mask, and limits that need the kernel for
        requests of many query tokens, unless `max_qo_len` says that it does not. Without `limits`,
        arrays on a GPU are copied to the host, which waits for that GPU.

        Parameters
        ----------
        qo_indptr : array or BSR
            ``[batch + 1]`` int32 or int64 (torch, numpy or list); or the whole format, in place of
            this and the next three.
        kv_indptr : array
            ``[batch + 1]``: into `kv_indices`, or, for ragged K/V, into the tokens.
        kv_indices, kv_last_page_len : array
            ``[num_pages]`` and ``[batch]``; not for ragged K/V.
        limits : PlanLimits, optional
            The largest batch this plan must be able to hold. On a GPU its memory is made for that,
            once: a CUDA graph that captured a run sees what is planned into it (`out`) later. Its
            plan-time parameters stay what they were, and cannot be arrays.
        out : Plan, optional
            A plan of this kernel to replan into; on an error it keeps what it held, and it keeps
            the limits it has.
        workspace : torch.Tensor, optional
            Memory for partial states on the plan's device, at least ``workspace_size(limits)[0]``
            bytes; the library's own if not given.
        fixed_split_size : int, optional
            Cut every request at multiples of this many KV tokens, so that its bits do not depend
            on the batch it is in.
        max_qo_len : int, optional
            Longest query of the batch; checked. With `limits`, that of all batches to come: kernels
            for longer ones are then not launched.
        q_pos_offset, kv_pos_offset : array, optional
            ``[batch]``: position of the first query (default kv_len - qo_len) and key (default 0).
        window_left : int, optional
            The window to plan for, of a variant with a sliding window.
        **index_params
            The variant's plan-time parameters, such as ``custom_mask``; on the host like index
            arrays.

        Returns
        -------
        Plan
            `out`, if it was given.

        Raises
        ------
        PlanError, LimitError, ShapeError, DTypeError, VariantError, WorkspaceError
            If an argument is wrong; the message names it. Nothing has changed then.
        """
        arrays = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_last_page_len": kv_last_page_len,
            "q_pos_offset": q_pos_offset,
            "kv_pos_offset": kv_pos_offset,
        }
        if out is not None and getattr(out, "owner", None) is not self:
            self._check_owner("out", out)
        if window_left is not None:
            index_params["window_left"] = window_left
        return self._planner.plan(
            self, arrays, index_params, limits, out, workspace, fixed_split_size, max_qo_len
        )

    def run(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        sm_scale: float | None = None,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        **params: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention for a planned batch.

        All tensors are on the plan's device. On a GPU the kernels are queued on the current stream,
        and nothing waits for them; rows of `q`, `kv` and `out` (their innermost axis) begin at
        multiples of 16 bytes. A CUDA graph can capture a run of a plan that has been run before.

        Parameters
        ----------
        plan : Plan
            From this kernel's `plan`.
        q : torch.Tensor
            ``[nnz_qo, num_qo_heads, head_dim_qk]``; any strides whose innermost is 1.
        kv : tuple of torch.Tensor, or torch.Tensor
            Paged: ``(k, v)`` of ``[num_pages, page_size, num_kv_heads, head_dim]`` (NHD) or
            ``[num_pages, num_kv_heads, page_size, head_dim]`` (HND), or both in one 5-D tensor with
            an axis of 2 after the pages. Ragged: ``(k, v)`` of ``[nnz_kv, num_kv_heads,
            head_dim]`` (NHD) or ``[num_kv_heads, nnz_kv, head_dim]`` (HND).
        out, lse : torch.Tensor, optional
            Where to put the results.
        return_lse : bool
            Return ``(out, lse)``.
        lse_base : {"log2", "ln"}
            Base of the LSE.
        sm_scale : float, optional
            Scale of the logits, ``1 / sqrt(head_dim_qk)`` by default.
        q_scale : float, optional
            Scale of the queries.
        k_scale, v_scale : float or torch.Tensor, optional
            Scales of keys and values: a number, or float32 ``[num_kv_heads]`` (or of one number).
        **params
            The variant's run-time parameters.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            ``out [nnz_qo, num_qo_heads, head_dim_vo]``, and ``lse [nnz_qo, num_qo_heads]`` float32
            with `return_lse`. A row with no visible key has out 0 and lse -inf.

        Raises
        ------
        ShapeError, DTypeError, PlanError, VariantError
            If an argument is wrong; nothing has been computed then.
        ProcessError, ArtifactError
            If the kernel cannot run here: without the GPU, the driver or the CPU it was built for.
        """
        if getattr(plan, "owner", None) is not self:
            self._check_owner("plan", plan)
        if self._missing:
            raise ArtifactError(f"this kernel, built for {self.target}, {self._missing}")
        scales = (sm_scale, q_scale, k_scale, v_scale)
        guard = self._machine.ready(plan)
        if guard is None:
            return self._executor.run(plan, q, kv, out, lse, return_lse, lse_base, scales, params)
        with guard:
            return self._executor.run(plan, q, kv, out, lse, return_lse, lse_base, scales, params)

    def launcher(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Callable[[], None]:
        """Return a function that launches this run's kernels and does nothing else, for timing.

        On a GPU, it is to be called while that is the current device.
        """
        self._machine.ready(plan)
        return self._executor.launcher(plan, q, kv, out, lse)

    def with_ctas(self, num_ctas: int) -> AttentionModule:
        """Return this kernel planning for another number of CTAs than this machine has.

        It runs here all the same; use it to look at the plans of another machine.
        """
        if not is_count(num_ctas, 1):
            raise SpecError(f"num_ctas={num_ctas!r} must be an integer of at least 1")
        return AttentionModule(self._artifact, self._libraries, int(num_ctas), self._later)

    def workspace_size(
        self, limits: PlanLimits, *, fixed_split_size: int | None = None
    ) -> tuple[int, int]:
        """Return the bytes of (partial states, plan arrays) of any plan within `limits`."""
        split = positive("fixed_split_size", fixed_split_size)
        expect("limits", limits, PlanLimits)
        num_ctas = self._machine.num_ctas(self._machine.plan_device(None))
        return workspace_size(self.spec, self.families, limits, num_ctas, split)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the kernel to a file that `load` reads without TVM, or raise `ArtifactError`.

        The planner for a GPU is in it, and compiled now if it was not needed before.
        """
        self._whole.write(path)

    def __deepcopy__(self, memo: object = None) -> AttentionModule:
        """Return the kernel itself: there is nothing in it to change."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what `pickle` keeps: what `export` writes."""
        return AttentionModule.of, (self._whole, self._given_ctas)

    @property
    def _whole(self) -> Artifact:
        """The artifact with the part that is compiled when it is needed."""
        return self._later.complete(self._artifact) if self._later else self._artifact

    @property
    def tir(self) -> str:
        """The TensorIR definition, as TVMScript."""
        return self._artifact.text("tir.py")

    @property
    def scheduled(self) -> str:
        """The scheduled TensorIR, as TVMScript."""
        return self._artifact.text("scheduled.py")

    @property
    def source(self) -> str:
        """The generated source: LLVM IR for a CPU, CUDA for a GPU."""
        return self._artifact.text("source.cu" if self.device == "cuda" else "source.ll")

    @property
    def ptx(self) -> str:
        """PTX, of a CUDA kernel."""
        if self.device != "cuda":
            raise TargetError(f"there is no PTX for {self.target}; look at .source")
        return self._artifact.text("kernel.ptx")

    @property
    def sass(self) -> str:
        """SASS, of a CUDA kernel; needs nvdisasm or cuobjdump."""
        if self.device != "cuda":
            raise TargetError(f"there is no SASS for {self.target}; look at .source")
        modules = self._artifact.devices["attention"].values()
        return "\n".join(disassemble(cubin_of(module)) for module in modules)

    @cached_property
    def resources(self) -> dict[str, Any]:
        """What the kernel uses: query tiles, threads, bytes of code.

        Of a CUDA kernel, in place of threads, ``"kernels"`` has what the assembler reports of each:
        registers, stack, spill_stores, spill_loads, shared, dynamic_shared and threads.
        """
        code = {**self._artifact.libraries, **self._artifact.devices.get("attention", {})}
        kernels = self._artifact.meta.get("resources")
        return {
            "families": [asdict(family) for family in self._distinct_families()],
            **({"kernels": kernels} if kernels else {"threads": self._machine.num_ctas(CPU)[0]}),
            "library_bytes": {name: len(content) for name, content in code.items()},
        }

    def __str__(self) -> str:
        """Return what it is, in a few lines."""
        tiles = ", ".join(family.tile for family in self._distinct_families())
        reason = self._artifact.meta.get("why")
        why = f" (not sm90: {reason})" if reason else ""
        return (
            f"AttentionModule: {self.variant}\n  spec    {self.spec}\n"
            f"  target  {self.target}, schedule {self.backend}{why}{self._machine.describe()}\n"
            f"  tiles   {tiles} (rows x keys)\n{self._uses()}"
            f"  params  {', '.join(p.name for p in self.params) or 'none'}"
        )

    __repr__ = __str__

    def _distinct_families(self) -> list[Family]:
        """Return a family for each kernel."""
        return [family for family in self.families if family.cluster < 2]

    def _uses(self) -> str:
        """Return what a CUDA kernel uses of a multiprocessor, a line for each query tile."""
        kernels = self._artifact.meta.get("resources") or {}
        return "".join(
            f"  uses    {name}: {k['registers']} registers, {k['shared'] + k['dynamic_shared']:,} "
            f"bytes shared, {k['threads']} threads, {k['spill_stores'] + k['spill_loads']} bytes "
            "spilled\n"
            for name, k in kernels.items()
        )

    def _check_owner(self, name: str, plan: object) -> None:
        expect(name, plan, Plan)
        if getattr(plan, "owner", None) is not self:
            raise VariantError(f"{name} was planned by another kernel; plan with this one")
