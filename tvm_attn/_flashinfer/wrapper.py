"""What FlashInfer's wrapper classes have in common: a batch that was planned, and how it is run."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from tvm_attn._flashinfer.arguments import (
    KVCache,
    Result,
    check_backend,
    check_buffer,
    check_layout,
    check_stride_variant,
    last_page_len,
    on_host,
    paged_cache,
    schedule_of,
)
from tvm_attn._flashinfer.graph_buffers import GraphBuffers
from tvm_attn._flashinfer.options import Features, Options, kernel_for
from tvm_attn.bsr import BSR
from tvm_attn.errors import LimitError, PlanError, SpecError
from tvm_attn.runtime.device import check_writable, located, on_device
from tvm_attn.runtime.executor import check_tensor
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.runtime.plan import Plan, WorkList
from tvm_attn.runtime.workspace import PlanLimits
from tvm_attn.spec import AttentionSpec


@functools.lru_cache(maxsize=64, typed=True)
def known_spec(*fields: Any) -> AttentionSpec:
    """Return the spec of these fields, checked once."""
    return AttentionSpec(*fields)


class Wrapper:
    """A batch that was planned, and how it is run.

    Parameters
    ----------
    kv_layout, backend : str
        FlashInfer's.
    device : torch.device
        Where the tensors will be; of ``cuda`` without an index, the current GPU.

    Attributes
    ----------
    device : torch.device
        With its index.
    called : str
        What errors call it.
    """

    def __init__(self, kv_layout: str, backend: str, device: torch.device):
        self.device = located(device)
        self.called = type(self).__name__
        self._kv_layout = check_layout(kv_layout)
        self._backend = check_backend(backend)
        self._graph: GraphBuffers | None = None
        self._max_qo_tokens: int | None = None
        self._max_qo_len: int | None = None
        self._kernel: AttentionModule | None = None
        self._planned: Plan | None = None
        self._split: int | None = None
        self._options = Options()
        self._run_params: dict[str, Any] = {}
        self._known_kernel: tuple[tuple[Any, ...], AttentionModule | None] = ((), None)

    def _spec(
        self,
        heads: tuple[int, int, int, int | None],
        dtypes: tuple[Any, Any, Any],
        page_size: int | None,
    ) -> AttentionSpec:
        """Spec of (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo) and (q, kv, o) dtypes."""
        fields = (*heads, *dtypes, self._kv_layout, page_size)
        try:
            return known_spec(*fields)
        except TypeError:  # of a field that has no hash, which is none
            return AttentionSpec(*fields)

    def _kernel_of(self, spec: AttentionSpec, features: Features) -> AttentionModule:
        key, kernel = self._known_kernel
        if kernel is not None and key[0] is spec and key[1] is features:
            return kernel
        schedule = schedule_of(self._backend, self.device)
        kernel = kernel_for(spec, features, self.device, schedule)
        self._known_kernel = (spec, features), kernel
        return kernel

    def _plan_batch(
        self,
        spec: AttentionSpec,
        options: Options,
        arrays: tuple[Any, ...],
        split: int | None,
        max_qo_tokens: int,
    ) -> None:
        """Plan a batch; on an error the earlier plan stays.

        In graph mode `max_qo_tokens` bounds this batch and, if it is the first, all that follow.
        """
        kernel, graph = self._kernel_of(spec, options.features), self._graph
        given = {"fixed_split_size": split, **options.plan_params()}
        if graph is None:
            with on_device(self.device):
                planned = kernel.plan(*arrays, out=self._to_replace(kernel), **given)
        else:
            page_size = spec.page_size or 1
            if self._max_qo_tokens is not None:
                max_qo_tokens = self._max_qo_tokens
            limits = graph.limits(max_qo_tokens, page_size)
            try:
                planned = self._plan_for_graph(kernel, on_host(*arrays), limits, given)
            except LimitError as error:
                raise LimitError(
                    f"{error}; in graph mode the limits are the sizes of the constructor's buffers"
                ) from error
            graph.check_mask(planned)
            graph.store(planned, page_size)
            self._max_qo_tokens = limits.max_qo_tokens
        self._adopt(kernel, planned, options)
        self._split = split

    def _plan_for_graph(
        self,
        kernel: AttentionModule,
        arrays: tuple[Any, ...],
        limits: PlanLimits,
        given: dict[str, Any],
    ) -> Plan:
        """Plan into the plan held, on a GPU: that is what a graph has captured.

        Arrays are on the host where what they are is kept in the caller's buffers.
        """
        held = self._to_replace(kernel) if self.device.type == "cuda" else None
        with on_device(self.device):
            return kernel.plan(
                *arrays, limits=limits, max_qo_len=self._max_qo_len, out=held, **given
            )

    def _plan_there(
        self,
        spec: AttentionSpec,
        options: Options,
        arrays: tuple[Any, ...],
        split: int | None,
        max_qo_tokens: int,
    ) -> None:
        """Plan a batch in graph mode whose arrays are on the GPU there, waiting for nothing.

        The caller's buffers stay as they are.
        """
        kernel, graph = self._kernel_of(spec, options.features), self._graph
        if graph is None:
            raise PlanError("a batch is planned on its GPU in graph mode alone")
        limits = graph.limits(self._max_qo_tokens or max_qo_tokens, spec.page_size or 1)
        given = {"fixed_split_size": split, **options.plan_params()}
        planned = self._plan_for_graph(kernel, arrays, limits, given)
        self._max_qo_tokens = limits.max_qo_tokens
        self._adopt(kernel, planned, options)
        self._split = split

    def _to_replace(self, kernel: AttentionModule) -> Plan | None:
        """Return the plan held, if it is `kernel`'s: replanning in place reuses its memory."""
        planned = self._planned
        return planned if planned is not None and planned.owner is kernel else None

    def _adopt(self, kernel: AttentionModule, planned: Plan, options: Options) -> None:
        is_same = kernel is self._kernel and options is self._options
        self._kernel, self._planned, self._options = kernel, planned, options
        if not is_same:
            self._run_params = options.run_params(kernel.spec.num_qo_heads, self.device)

    def _change_options(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        causal: bool | None = None,
    ) -> None:
        """Adopt what the deprecated forward() says, planning the same batch again if need be."""
        kernel, planned = self._current()
        before = self._options
        options = replace(
            before,
            causal=before.causal if causal is None else causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale,
        )
        if (options.features, options.window_left) != (before.features, before.window_left):
            qo_indptr, kv_indptr, kv_indices, kv_len = map(torch.from_numpy, planned.batch[:4])
            batch = BSR(qo_indptr, kv_indptr)
            page_size = kernel.spec.page_size
            if page_size is not None:
                last = last_page_len(kv_len, page_size)
                batch = BSR(qo_indptr, kv_indptr, kv_indices, last, page_size)
            kernel = self._kernel_of(kernel.spec, options.features)
            given = options.plan_params()
            if "custom_mask" in given:  # the plan's own copy: the caller's may have changed
                given["custom_mask"] = planned.params["custom_mask"][0]
            with on_device(self.device):
                planned = kernel.plan(batch, fixed_split_size=self._split, **given)
        self._adopt(kernel, planned, options)

    def _current(self) -> tuple[AttentionModule, Plan]:
        if self._kernel is None or self._planned is None:
            raise PlanError(f"{self.called}: there is no plan yet; call plan() first")
        return self._kernel, self._planned

    def work_lists(self) -> list[WorkList]:
        """Return the work of the planned batch."""
        return self._current()[1].work

    def _run_batch(self, q: torch.Tensor, kv: KVCache, **given: Any) -> Result:
        """Run the planned batch; the rest are arguments of `AttentionModule.run`."""
        kernel, planned = self._current()
        return kernel.run(planned, q, kv, **self._run_params, **given)

    def _run_in_layout(
        self,
        q: torch.Tensor,
        kv: KVCache,
        lse_layout: str,
        lse: torch.Tensor | None,
        return_lse: bool,
        **given: Any,
    ) -> Result:
        """`_run_batch` with an lse of ``[nnz_qo, num_qo_heads]`` ("NH"), or transposed ("HN")."""
        if lse_layout not in ("NH", "HN"):
            raise SpecError(f'lse_layout={lse_layout!r} must be "NH" or "HN"')
        if lse_layout == "NH" or (lse is None and not return_lse):
            return self._run_batch(q, kv, lse=lse, return_lse=return_lse, **given)
        if lse is not None:
            kernel, planned = self._current()
            shape = (kernel.spec.num_qo_heads, planned.nnz_qo)
            check_tensor("lse", lse, shape, torch.float32, self.device)
            check_writable("lse", lse)
        out, by_token = self._run_batch(q, kv, return_lse=True, **given)
        by_head = by_token.T.contiguous()
        by_head = by_head if lse is None else lse.copy_(by_head)
        return (out, by_head) if return_lse else out

    def _window_params(self, window_left: int | None) -> dict[str, Any]:
        """Return what a run's own window adds to the arguments."""
        planned = self._options.window_left
        if window_left is None or window_left == planned:
            return {}
        if planned < 0 <= window_left:
            raise PlanError(
                f"window_left={window_left}, but the batch was planned without a window; "
                f"plan with window_left={window_left}"
            )
        return {"window_left": window_left}


class WorkspaceWrapper(Wrapper):
    """A wrapper whose constructor takes workspace memory.

    The memory is not used: a plan sizes its own exactly.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str):
        buffer = check_buffer(float_workspace_buffer, "float_workspace_buffer")
        super().__init__(kv_layout, backend, buffer.device)

    def _use_graph(self, buffers: GraphBuffers) -> None:
        """Go to graph mode."""
        self._graph = buffers

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are copied into buffers of the caller's, which bound the batch."""
        return self._graph is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Accept other workspace memory.

        Parameters
        ----------
        float_workspace_buffer, int_workspace_buffer : torch.Tensor
            Any tensors.

        Raises
        ------
        DTypeError
            If one is no tensor.
        """
        check_buffer(float_workspace_buffer, "float_workspace_buffer")
        check_buffer(int_workspace_buffer, "int_workspace_buffer")


class PagedWrapper(WorkspaceWrapper):
    """A wrapper for a paged KV cache, with workspace memory."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: every kernel takes K and V of different strides.

        Parameters
        ----------
        variant : str
            ``"independent"``.

        Raises
        ------
        SpecError
            If `variant` is another.
        PlanError
            If there is no plan.
        """
        check_stride_variant(variant)
        self._current()

    def _pages(self, cache: KVCache) -> KVCache:
        return paged_cache(cache, self._kv_layout)

    def _bytes_for(
        self,
        spec: AttentionSpec,
        options: Options,
        batch: int,
        qo_tokens: int,
        pages: int,
        split: int | None,
    ) -> tuple[int, int]:
        limits = PlanLimits(batch, qo_tokens, pages * (spec.page_size or 1))
        kernel = self._kernel_of(spec, options.features)
        with on_device(self.device):
            return kernel.workspace_size(limits, fixed_split_size=split)
