"""FlashInfer's wrapper for prefill attention with ragged K/V; see `tvm_attn.prefill`."""

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
)
from tvm_attn._flashinfer.graph_buffers import GraphBuffers
from tvm_attn._flashinfer.options import Options, mask_of, split_tokens
from tvm_attn._flashinfer.wrapper import WorkspaceWrapper


class BatchPrefillWithRaggedKVCacheWrapper(WorkspaceWrapper):
    """Prefill attention of a batch whose keys and values follow one another: plan once, then run.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Not used, but on the device of the tensors.
    kv_layout : {"NHD", "HND"}
        Layout of K and V.
    use_cuda_graph : bool
        Copy every plan into the buffers below, which bound the batch.
    qo_indptr_buf, kv_indptr_buf : torch.Tensor
        int32 ``[max_batch + 1]``, with `use_cuda_graph`.
    custom_mask_buf, mask_indptr_buf : torch.Tensor, optional
        uint8 bits of the custom masks and where each request's begin, with `use_cuda_graph`.
    backend : str
        One of FlashInfer's: ``"fa2"`` is the schedule ``"sm80"`` on a GPU, others have no effect.

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
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        if use_cuda_graph:
            self._use_graph(
                GraphBuffers.of(
                    custom_mask_buf,
                    mask_indptr_buf,
                    qo_indptr=("qo_indptr_buf", qo_indptr_buf),
                    kv_indptr=("kv_indptr_buf", kv_indptr_buf),
                )
            )

    @implemented_except(
        "use_fp16_qk_reduction",
        "rope_scale",
        "rope_theta",
        "prefix_len_ptr",
        "token_pos_in_items_ptr",
        "token_pos_in_items_len",
        "max_item_len_ptr",
        "v_indptr",
        "o_indptr",
        "use_token_head_sf",
    )
    def plan(
        self,
        qo_indptr: IndexArray,
        kv_indptr: IndexArray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: IndexArray | None = None,
        seq_lens_q: IndexArray | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: IndexArray | None = None,
        o_indptr: IndexArray | None = None,
        qo_indptr_cpu: IndexArray | None = None,
        kv_indptr_cpu: IndexArray | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Plan a batch.

        Parameters
        ----------
        qo_indptr, kv_indptr : array
            int32 or int64 ``[batch + 1]``, first query and key of each request, and their number.
            What is on a GPU is copied to the host, which waits for the GPU.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo : int
            Shape of the problem; `head_dim_vo` is `head_dim_qk` by default.
        custom_mask, packed_custom_mask : torch.Tensor, optional
            The ``[qo_len, kv_len]`` masks of all requests, flattened one after the other: bool
            (True keeps), or uint8 little-endian bits, each request starting at a byte. Bits win
            over bools, and either replaces `causal`.
        causal : bool
            Whether a token sees no later one; the queries are the last tokens of a request.
        pos_encoding_mode, window_left, logits_soft_cap, sm_scale
            As for `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type, o_data_type : str or torch.dtype
            Dtypes; K, V and out have that of q by default.
        fixed_split_size : int, optional
            Cut requests at multiples of this many tokens, whatever else is in the batch.
        disable_split_kv : bool
            Cut no request.
        seq_lens, seq_lens_q : array, optional
            int32 or int64 ``[batch]``, KV and query lengths; checked.
        non_blocking, max_token_per_sequence, max_sequence_kv, uniform_q_len
            Have no effect.
        qo_indptr_cpu, kv_indptr_cpu : array, optional
            Have no effect.

        Raises
        ------
        PlanError, LimitError, SpecError, ShapeError, DTypeError
            If an argument is wrong; the message names it, and the earlier plan stays.
        """
        qo_indptr, kv_indptr = host_indices(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        if seq_lens_q is not None:
            check_lengths("seq_lens_q", seq_lens_q, qo_indptr.diff())
        if seq_lens is not None:
            check_lengths("seq_lens", seq_lens, kv_indptr.diff())
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        spec = self._spec(heads, (q_data_type, kv_data_type, o_data_type), None)
        mask = mask_of(custom_mask, packed_custom_mask)
        self._plan_batch(
            spec,
            Options(causal, window_left, logits_soft_cap, pos_encoding_mode, sm_scale, mask),
            (qo_indptr, kv_indptr),
            split_tokens(fixed_split_size, disable_split_kv, 1),
            int(qo_indptr[-1]),
        )

    begin_forward = plan

    @implemented_except("use_fp16_qk_reduction", "rope_scale", "rope_theta")
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """Run with options in place of the plan's; deprecated by FlashInfer, use `run`."""
        self._change_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal)
        return self.run(q, k, v)

    @implemented_except("use_fp16_qk_reduction", "rope_scale", "rope_theta")
    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """`forward` that returns ``(out, lse)``; deprecated by FlashInfer, use `run`."""
        self._change_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal)
        return self.run(q, k, v, return_lse=True)

    @implemented_except("args", "o_scale", "kv_cache_sf")
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: KVCache | None = None,
    ) -> Result:
        """Compute attention for the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            ``[nnz_qo, num_qo_heads, head_dim_qk]``.
        k, v : torch.Tensor
            ``[nnz_kv, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, nnz_kv, head_dim]``
            (HND).
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
            (k, v),
            lse_layout,
            lse,
            return_lse,
            out=out,
            lse_base=lse_base,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)
