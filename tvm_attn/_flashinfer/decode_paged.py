"""FlashInfer's wrapper for decode attention with a paged KV cache; see `tvm_attn.decode`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tvm_attn._flashinfer.arguments import (
    IndexArray,
    KVCache,
    Result,
    Scale,
    check_lengths,
    data_types,
    host_indices,
    implemented_except,
    kv_lengths,
)
from tvm_attn._flashinfer.decode_positional import with_positional
from tvm_attn._flashinfer.graph_buffers import GraphBuffers
from tvm_attn._flashinfer.options import Options, options_of, split_tokens
from tvm_attn._flashinfer.wrapper import PagedWrapper
from tvm_attn._index_arrays import checked_size
from tvm_attn.errors import PlanError
from tvm_attn.runtime.device import CPU


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Decode attention of a batch with a paged KV cache: plan once a batch, run once a layer.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Not used, but on the device of the tensors.
    kv_layout : {"NHD", "HND"}
        Layout of the pages.
    use_cuda_graph : bool
        Copy every plan into the buffers below, which bound the batch.
    use_tensor_cores : bool
        Has no effect.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : torch.Tensor
        int32 ``[max_batch + 1]``, ``[max_pages]`` and ``[max_batch]``, with `use_cuda_graph`.
    backend : str
        One of FlashInfer's: ``"fa2"`` is the schedule ``"sm80"`` on a GPU, others have no effect.

    Raises
    ------
    DTypeError, ShapeError, SpecError
        If an argument is wrong; the message names it.
    """

    @implemented_except("jit_args", "jit_kwargs")
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req = 1
        if use_cuda_graph:
            self._use_graph(
                GraphBuffers.of(
                    kv_indptr=("paged_kv_indptr_buffer", paged_kv_indptr_buffer),
                    kv_indices=("paged_kv_indices_buffer", paged_kv_indices_buffer),
                    last_page_len=("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer),
                )
            )

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was given."""
        return self._use_tensor_cores

    @property
    def resolved_backend(self) -> str:
        """The backend asked for; ``"tvm"`` where that was left to the library."""
        return "tvm" if self._backend == "auto" else self._backend

    @implemented_except("rope_scale", "rope_theta", "block_tables")
    def workspace_size(
        self,
        indptr: IndexArray,
        indices: IndexArray,
        last_page_len: IndexArray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: IndexArray | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> tuple[int, int]:
        """Return the bytes of (partial states, plan arrays) that a batch of this size takes.

        Parameters are those of `plan`.
        """
        dtypes = data_types(q_data_type, kv_data_type, o_data_type, data_type)
        spec = self._spec((num_qo_heads, num_kv_heads, head_dim, None), dtypes, page_size)
        options = options_of(
            q_len_per_req > 1, window_left, logits_soft_cap, pos_encoding_mode, sm_scale
        )
        indptr, last_page_len = host_indices(indptr=indptr, last_page_len=last_page_len)
        batch, pages = len(last_page_len), int(indptr[-1])
        split = split_tokens(fixed_split_size, disable_split_kv, page_size)
        return self._bytes_for(spec, options, batch, batch * q_len_per_req, pages, split)

    def plan(
        self,
        indptr: IndexArray,
        indices: IndexArray,
        last_page_len: IndexArray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        """Plan a batch.

        Parameters
        ----------
        indptr, indices, last_page_len : array
            int32 or int64 page table: ``[batch + 1]``, ``[num_pages]`` and ``[batch]``. What is on
            a GPU is copied to the host, which waits for the GPU.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Shape of the problem.
        **kwargs
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale: as for
            `single_decode_with_kv_cache`. q_data_type (float16), kv_data_type, o_data_type (those
            of q): dtypes or their names. fixed_split_size (pages) and disable_split_kv: cut long
            requests at fixed places, or not at all. q_len_per_req (1): query tokens of each
            request, its last ones, causal among themselves unless is_causal says otherwise.
            seq_lens: KV lengths, checked. non_blocking has no effect.

        Raises
        ------
        PlanError, LimitError, SpecError, ShapeError, DTypeError
            If an argument is wrong; the message names it, and the earlier plan stays.
        """
        if deprecated_positional_args:
            kwargs = with_positional(deprecated_positional_args, kwargs)
        self._plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **kwargs,
        )

    begin_forward = plan

    @implemented_except(
        "window_right", "rope_scale", "rope_theta", "block_tables", "use_token_head_sf"
    )
    def _plan(
        self,
        indptr: IndexArray,
        indices: IndexArray,
        last_page_len: IndexArray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: IndexArray | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        checked_size(q_len_per_req, "q_len_per_req")
        indptr, indices, last_page_len = host_indices(
            indptr=indptr, indices=indices, last_page_len=last_page_len
        )
        if seq_lens is not None:
            check_lengths("seq_lens", seq_lens, kv_lengths(indptr, last_page_len, page_size))
        causal = q_len_per_req > 1 if is_causal is None else is_causal
        options = options_of(causal, window_left, logits_soft_cap, pos_encoding_mode, sm_scale)
        self.plan_requests(
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            data_types(q_data_type, kv_data_type, o_data_type, data_type),
            options,
            split_tokens(fixed_split_size, disable_split_kv, page_size),
            q_len_per_req,
        )

    def plan_requests(
        self,
        table: tuple[Any, ...],
        shape: tuple[int, int, int, int],
        dtypes: tuple[Any, Any, Any],
        options: Options,
        split: int | None,
        q_len: int,
    ) -> None:
        """Plan requests of so many query tokens each, there where their page table is.

        `shape` is (num_qo_heads, num_kv_heads, head_dim, page_size), `dtypes` those of q, kv and o.
        """
        num_qo_heads, num_kv_heads, head_dim, page_size = shape
        spec = self._spec((num_qo_heads, num_kv_heads, head_dim, None), dtypes, page_size)
        batch, graph = len(table[2]), self._graph
        indptr = table[0]
        there = isinstance(indptr, torch.Tensor) and indptr.is_cuda
        qo_indptr = query_indptr(batch, q_len, indptr.device if there else CPU)
        largest = batch if graph is None else graph.max_batch
        if graph is not None:
            self._max_qo_len = self._max_qo_len or q_len
        plan = self._plan_there if there else self._plan_batch
        plan(spec, options, (qo_indptr, *table), split, largest * q_len)
        self._q_len_per_req = q_len

    @implemented_except("rope_scale", "rope_theta")
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """Run with options in place of the plan's; deprecated by FlashInfer, use `run`."""
        self._change_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    @implemented_except("rope_scale", "rope_theta")
    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """`forward` that returns ``(out, lse)``; deprecated by FlashInfer, use `run`."""
        self._change_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True
        )

    @implemented_except("args", "sinks", "skip_softmax_threshold_scale_factor", "kv_cache_sf")
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: KVCache | None = None,
    ) -> Result:
        """Compute attention for the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            ``[batch * q_len_per_req, num_qo_heads, head_dim]``.
        paged_kv_cache : tuple of torch.Tensor, or torch.Tensor
            ``(k, v)`` of ``[num_pages, page_size, num_kv_heads, head_dim]`` (NHD) or ``[num_pages,
            num_kv_heads, page_size, head_dim]`` (HND), or both in one 5-D tensor with an axis of 2
            after the pages. Pages of one token may be without their axis.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            What q, k and v are multiplied by; those of k and v also ``[num_kv_heads]``.
        out, lse : torch.Tensor, optional
            Where to put the results.
        return_lse : bool
            Return ``(out, lse)``.
        enable_pdl : bool, optional
            Has no effect.
        window_left : int, optional
            A window within the plan's, which is the default.
        q_len_per_req : int, optional
            The plan's.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            out, shaped like `q`, and lse ``[batch * q_len_per_req, num_qo_heads]`` float32, base 2.

        Raises
        ------
        ShapeError, DTypeError, PlanError
            If an argument does not fit the plan; the message names it.
        """
        if q_len_per_req is not None and q_len_per_req != self._q_len_per_req:
            raise PlanError(
                f"q_len_per_req={q_len_per_req}, but the batch was planned with "
                f"{self._q_len_per_req}; give it to plan()"
            )
        return self._run_batch(
            q,
            self._pages(paged_kv_cache),
            out=out,
            lse=lse,
            return_lse=return_lse,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            **self._window_params(window_left),
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)


@functools.cache
def query_indptr(batch: int, q_len: int, device: torch.device) -> torch.Tensor:
    """Return the row pointer of requests of so many query tokens each; graphs may read it."""
    return torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=device)
