"""An attention kernel that is ready to use: plan, run, read, export."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import (
    ArtifactError,
    DTypeError,
    PlanError,
    ShapeError,
    SpecError,
    TargetError,
    VariantError,
)
from tvm_attn.runtime.artifact import Artifact, read_artifact
from tvm_attn.runtime.executor import Executor
from tvm_attn.runtime.host import check_process, missing_flags
from tvm_attn.runtime.inspector import Inspector
from tvm_attn.runtime.library import Library, num_threads
from tvm_attn.runtime.params import UNBOUNDED, plan_values
from tvm_attn.runtime.plan import Family, Plan
from tvm_attn.runtime.workspace import PlanLimits, partial_states, workspace_size
from tvm_attn.spec import AttentionSpec, Param


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
    """

    def __init__(
        self,
        artifact: Artifact,
        libraries: Mapping[str, Library],
        num_ctas: int | None = None,
    ):
        meta = artifact.meta
        self.spec = spec = AttentionSpec(**meta["spec"])
        self.variant: str = meta["variant"]
        self.target: str = meta["target"]
        self.params = tuple(param_from_json(p) for p in meta["params"])
        self.families = tuple(Family(**f) for f in meta["families"])
        self._artifact = artifact
        self._missing = missing_flags(meta["cpu_flags"])
        self._libraries = libraries
        self._num_ctas = num_ctas or num_threads()
        self._inspector = Inspector(
            libraries["planner"]["plan_batch"],
            libraries["planner"]["plan_work"],
            self.families,
            spec.group_size,
            spec.num_kv_heads,
            self._num_ctas,
        )
        kernels = {f.name: libraries["attention"][f"attention_{f.name}"] for f in self.families}
        self._executor = Executor(spec, self.params, meta["use_softmax"], kernels)

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
            The largest batch this plan must be able to hold.
        out : Plan, optional
            A plan of this kernel to replan into; on an error it keeps what it held.
        workspace : torch.Tensor, optional
            Memory for partial states, at least ``workspace_size(limits)[0]`` bytes; the library's
            own if not given.
        fixed_split_size : int, optional
            Cut every request at multiples of this many KV tokens, so that its bits do not depend
            on the batch it is in.
        max_qo_len : int, optional
            Longest query of the batch; checked, and otherwise only of use to device planning.
        q_pos_offset, kv_pos_offset : array, optional
            ``[batch]``: position of the first query (default kv_len - qo_len) and key (default 0).
        window_left : int, optional
            The window to plan for, of a variant with a sliding window.
        **index_params
            The variant's plan-time parameters, such as ``custom_mask``.

        Returns
        -------
        Plan
            `out`, if it was given.

        Raises
        ------
        PlanError, LimitError, ShapeError, DTypeError, VariantError, WorkspaceError
            If an argument is wrong; the message names it. Nothing has changed then.
        """
        bsr = self._format(
            qo_indptr, kv_indptr, kv_indices, kv_last_page_len, q_pos_offset, kv_pos_offset
        )
        if limits is not None:
            _expect("limits", limits, PlanLimits)
            limits.check(bsr)
        if out is not None:
            self._check_owner("out", out)
        if window_left is not None:
            index_params["window_left"] = window_left
        given = {**bsr.index_params, **index_params} if bsr.index_params else index_params

        def bind(plan: Plan) -> dict[str, list[Any]]:
            if not given and not self.params:
                return {}
            sizes = {**self._heads, "batch": plan.batch_size}
            return plan_values(self.params, given, plan.lengths, sizes)

        split = _positive("fixed_split_size", fixed_split_size)
        plan = self._inspector.plan(self, bsr, bind, split)
        if plan.max_qo_len > (_positive("max_qo_len", max_qo_len) or plan.max_qo_len):
            raise PlanError(f"max_qo_len={max_qo_len}, but a request has {plan.max_qo_len} queries")
        plan.partials = [
            partial_states(self.spec, work.family, work.num_slots, workspace) for work in plan.work
        ]
        if out is None:
            return plan
        out.replace_by(plan)
        return out

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
            Scales of keys and values: a number, or float32 ``[num_kv_heads]``.
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
        """
        self._check_owner("plan", plan)
        if self._missing:
            raise ArtifactError(f"this kernel, built for {self.target}, {self._missing}")
        check_process()
        scales = (sm_scale, q_scale, k_scale, v_scale)
        return self._executor.run(plan, q, kv, out, lse, return_lse, lse_base, scales, params)

    def launcher(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Callable[[], None]:
        """Return a function that launches this run's kernels and does nothing else, for timing."""
        return self._executor.launcher(plan, q, kv, out, lse)

    def with_ctas(self, num_ctas: int) -> AttentionModule:
        """Return this kernel planning for another number of CTAs than this machine has threads.

        It runs here all the same; use it to look at the plans of another machine.
        """
        if not isinstance(num_ctas, int) or isinstance(num_ctas, bool) or num_ctas < 1:
            raise SpecError(f"num_ctas={num_ctas!r} must be an integer of at least 1")
        return AttentionModule(self._artifact, self._libraries, num_ctas)

    def workspace_size(
        self, limits: PlanLimits, *, fixed_split_size: int | None = None
    ) -> tuple[int, int]:
        """Return the bytes of (partial states, plan arrays) of any plan within `limits`."""
        split = _positive("fixed_split_size", fixed_split_size)
        _expect("limits", limits, PlanLimits)
        return workspace_size(self.spec, self.families, limits, self._num_ctas, split)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the kernel to a file that `load` reads, without a compiler and without TVM."""
        Path(path).write_bytes(self._artifact.to_bytes())

    @property
    def tir(self) -> str:
        """The TensorIR definition, as TVMScript."""
        return self._artifact.texts["tir.py"]

    @property
    def scheduled(self) -> str:
        """The scheduled TensorIR, as TVMScript."""
        return self._artifact.texts["scheduled.py"]

    @property
    def source(self) -> str:
        """The generated source: LLVM IR for a CPU."""
        return self._artifact.texts["source.ll"]

    @property
    def ptx(self) -> str:
        """PTX, of a CUDA kernel."""
        raise TargetError(f"there is no PTX for {self.target}; look at .source")

    @property
    def sass(self) -> str:
        """SASS, of a CUDA kernel."""
        raise TargetError(f"there is no SASS for {self.target}; look at .source")

    @cached_property
    def resources(self) -> dict[str, Any]:
        """What the kernel uses: query tiles, threads, bytes of code."""
        return {
            "families": [asdict(family) for family in self.families],
            "threads": self._num_ctas,
            "library_bytes": {n: len(code) for n, code in self._artifact.libraries.items()},
        }

    def __str__(self) -> str:
        """Return what it is, in a few lines."""
        tiles = ", ".join(f"{f.name} {f.rows}x{f.block}" for f in self.families)
        return (
            f"AttentionModule: {self.variant}\n  spec    {self.spec}\n  target  {self.target}, "
            f"{self._num_ctas} threads\n  tiles   {tiles} (rows x keys)\n"
            f"  params  {', '.join(p.name for p in self.params) or 'none'}"
        )

    __repr__ = __str__

    @cached_property
    def _heads(self) -> Mapping[str, int]:
        return {"num_qo_heads": self.spec.num_qo_heads, "num_kv_heads": self.spec.num_kv_heads}

    def _check_owner(self, name: str, plan: object) -> None:
        _expect(name, plan, Plan)
        if getattr(plan, "owner", None) is not self:
            raise VariantError(f"{name} was planned by another kernel; plan with this one")

    def _format(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_last_page_len: Any,
        q_pos_offset: Any,
        kv_pos_offset: Any,
    ) -> BSR:
        offsets = {"q_pos_offset": q_pos_offset, "kv_pos_offset": kv_pos_offset}
        table = {"kv_indices": kv_indices, "kv_last_page_len": kv_last_page_len}
        if isinstance(qo_indptr, BSR):
            _expect_none({"kv_indptr": kv_indptr, **table}, "the format has it already")
            bsr = qo_indptr.with_positions(**offsets)
        elif self.spec.page_size is None:
            _expect_none(table, "the kernel was built for ragged K/V (page_size=None)")
            bsr = BSR.from_ragged(qo_indptr, kv_indptr, **offsets)
        else:
            bsr = BSR.from_page_table(
                qo_indptr, kv_indptr, kv_indices, kv_last_page_len, self.spec.page_size, **offsets
            )
        if bsr.page_size != self.spec.page_size:
            raise SpecError(
                f"the format has page_size={bsr.page_size}, the kernel's spec "
                f"{self.spec.page_size}; build with the format's"
            )
        if not bsr.qo_indptr.is_cpu:
            raise ShapeError(
                f"qo_indptr is on {bsr.qo_indptr.device}; plan on the host: pass qo_indptr.cpu()"
            )
        return bsr


def load(path: str | os.PathLike[str]) -> AttentionModule:
    """Load an exported kernel: needs torch, tvm_ffi and TVM's runtime library, no compiler.

    Raises
    ------
    ArtifactError
        If the file is no artifact, or was built for another machine.
    """
    artifact = read_artifact(Path(path))
    if "families" not in artifact.meta:
        raise ArtifactError(f"{path} is no attention kernel; export one with kernel.export(path)")
    missing = missing_flags(artifact.meta["cpu_flags"])
    if missing:
        raise ArtifactError(f"{path}, built for {artifact.meta['target']}, {missing}")
    libraries = {name: Library(content) for name, content in artifact.libraries.items()}
    return AttentionModule(artifact, libraries)


def param_from_json(fields: dict[str, Any]) -> Param:
    """Return a parameter from its JSON form."""
    return Param(**{**fields, "shape": tuple(fields["shape"])})


def _positive(name: str, value: int | None) -> int:
    """Return an optional count, 0 for None."""
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name}={value!r} must be an integer of at least 1, or None")
    return min(value, UNBOUNDED)


def _expect(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise DTypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def _expect_none(given: Mapping[str, Any], why: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise PlanError(f"{name} was given, but {why}; leave it out")
