"""FlashInfer's wrapper for prefill attention with a paged KV cache; see `tvm_attn.prefill`."""

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
    host_indices,
    implemented_except,
    kv_lengths,
)
from tvm_attn._flashinfer.graph_buffers import GraphBuffers
from tvm_attn._flashinfer.options import Options, mask_of, split_tokens
from tvm_attn._flashinfer.wrapper import PagedWrapper
from tvm_attn.errors import SpecError

NOT_PLANNED = (
    "use_fp16_qk_reduction",
    "rope_scale",
    "rope_theta",
    "prefix_len_ptr",
    "token_pos_in_items_ptr",
    "token_pos_in_items_len",
    "max_item_len_ptr",
    "block_tables",
)
"""Arguments of a plan that are not implemented."""


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Prefill or append attention of a batch with a paged KV cache: plan once, run once a layer.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Not used, but on the device of the tensors.
    kv_layout : {"NHD", "HND"}
        Layout of the pages.
    use_cuda_graph : bool
        Copy every plan into the buffers below, which bound the batch.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        int32 ``[max_batch + 1]``, ``[max_batch + 1]``, ``[max_pages]`` and ``[max_batch]``, with
        `use_cuda_graph`.
    custom_mask_buf, mask_indptr_buf : torch.Tensor, optional
        uint8 bits of the custom masks and where each request's begin, with `use_cuda_graph`.
    backend : str
        One of FlashInfer's: ``"fa2"`` is the schedule ``"sm80"`` on a GPU, others have no effect.
    max_total_num_rows : int, optional
        Most query tokens of a batch, with `use_cuda_graph`; by default those of the first plan.

    Raises
    ------
    DTypeError, ShapeError, SpecError
        If an argument is wrong; the message names it.
    """

    @implemented_except("jit_args", "jit_kwargs", "variant_owns_mask")
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        if max_total_num_rows is not None and not use_cuda_graph:
            raise SpecError("max_total_num_rows bounds graph mode; give use_cuda_graph=True too")
        self._max_qo_tokens = max_total_num_rows
        if use_cuda_graph:
            self._use_graph(
                GraphBuffers.of(
                    custom_mask_buf,
                    mask_indptr_buf,
                    qo_indptr=("qo_indptr_buf", qo_indptr_buf),
                    kv_indptr=("paged_kv_indptr_buf", paged_kv_indptr_buf),
                    kv_indices=("paged_kv_indices_buf", paged_kv_indices_buf),
                    last_page_len=("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf),
                )
            )

    @implemented_except(*NOT_PLANNED)
    def workspace_size(
        self,
        qo_indptr: IndexArray,
        paged_kv_indptr: IndexArray,
        paged_kv_indices: IndexArray,
        paged_kv_last_page_len: IndexArray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: IndexArray | None = None,
        seq_lens_q: IndexArray | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> tuple[int, int]:
        """Return the bytes of (partial states, plan arrays) that a batch of this size takes.

        Parameters are those of `plan`.
        """
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        spec = self._spec(heads, (q_data_type, kv_data_type, o_data_type), page_size)
        mask = mask_of(custom_mask, packed_custom_mask)
        options = Options(causal, window_left, logits_soft_cap, pos_encoding_mode, sm_scale, mask)
        qo_indptr, paged_kv_indptr = host_indices(
            qo_indptr=qo_indptr, paged_kv_indptr=paged_kv_indptr
        )
        batch, qo_tokens, pages = len(qo_indptr) - 1, int(qo_indptr[-1]), int(paged_kv_indptr[-1])
        split = split_tokens(fixed_split_size, disable_split_kv, page_size)
        return self._bytes_for(spec, options, batch, qo_tokens, pages, split)

    @implemented_except(*NOT_PLANNED, "use_token_head_sf")
    def plan(
        self,
        qo_indptr: IndexArray,
        paged_kv_indptr: IndexArray,
        paged_kv_indices: IndexArray,
        paged_kv_last_page_len: IndexArray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: IndexArray | None = None,
        seq_lens_q: IndexArray | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Plan a batch.

        Parameters
        ----------
        qo_indptr : array
            int32 or int64 ``[batch + 1]``, first query token of each request, and their number.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : array
            int32 or int64 page table: ``[batch + 1]``, ``[num_pages]`` and ``[batch]``. Of all
            arrays, what is on a GPU is copied to the host, which waits for the GPU.
        num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo : int
            Shape of the problem; `head_dim_vo` is `head_dim_qk` by default.
        custom_mask, packed_custom_mask : torch.Tensor, optional
            The ``[qo_len, kv_len]`` masks of all requests, flattened one after the other: bool
            (True keeps), or uint8 little-endian bits, each request starting at a byte. Bits win
            over bools, and either replaces `causal`.
        causal : bool
            Whether a token sees no later one; the queries are the last tokens of a request.
        pos_encoding_mode, sm_scale, window_left, logits_soft_cap
            As for `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type, o_data_type : str or torch.dtype
            Dtypes; K, V and out have that of q by default.
        seq_lens, seq_lens_q : array, optional
            int32 or int64 ``[batch]``, KV and query lengths; checked.
        fixed_split_size : int, optional
            Cut requests at multiples of this many pages, whatever else is in the batch.
        disable_split_kv : bool
            Cut no request.
        non_blocking, max_token_per_sequence, max_sequence_kv, uniform_q_len
            Have no effect.

        Raises
        ------
        PlanError, LimitError, SpecError, ShapeError, DTypeError
            If an argument is wrong; the message names it, and the earlier plan stays.
        """
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len = host_indices(
            qo_indptr=qo_indptr,
            paged_kv_indptr=paged_kv_indptr,
            paged_kv_indices=paged_kv_indices,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        if seq_lens_q is not None:
            check_lengths("seq_lens_q", seq_lens_q, qo_indptr.diff())
        if seq_lens is not None:
            given = kv_lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)
            check_lengths("seq_lens", seq_lens, given)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        spec = self._spec(heads, (q_data_type, kv_data_type, o_data_type), page_size)
        mask = mask_of(custom_mask, packed_custom_mask)
        self._plan_batch(
            spec,
            Options(causal, window_left, logits_soft_cap, pos_encoding_mode, sm_scale, mask),
            (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            split_tokens(fixed_split_size, disable_split_kv, page_size),
            int(qo_indptr[-1]),
        )

    begin_forward = plan

    @implemented_except("use_fp16_qk_reduction", "rope_scale", "rope_theta")
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """Run with options in place of the plan's; deprecated by FlashInfer, use `run`."""
        self._change_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    @implemented_except("use_fp16_qk_reduction", "rope_scale", "rope_theta")
    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """`forward` that returns ``(out, lse)``; deprecated by FlashInfer, use `run`."""
        self._change_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    @implemented_except(
        "args",
        "sinks",
        "kv_cache_sf",
        "skip_softmax_threshold_scale_factor",
        "use_fp16_softmax",
        "uses_spcompress",
    )
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: KVCache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Compute attention for the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            ``[nnz_qo, num_qo_heads, head_dim_qk]``.
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
        lse_base : {"log2", "ln"}
            Base of the lse.
        lse_layout : {"NH", "HN"}
            Whether the lse is ``[nnz_qo, num_qo_heads]`` or its transpose.
        enable_pdl : bool, optional
            Has no effect.
        window_left : int, optional
            A window within the plan's, which is the default.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            out ``[nnz_qo, num_qo_heads, head_dim_vo]``, and lse, float32.

        Raises
        ------
        ShapeError, DTypeError, PlanError
            If an argument does not fit the plan; the message names it.
        """
        return self._run_in_layout(
            q,
            self._pages(paged_kv_cache),
            lse_layout,
            lse,
            return_lse,
            out=out,
            lse_base=lse_base,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            **self._window_params(window_left),
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)
