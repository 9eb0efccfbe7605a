"""Decode attention, under FlashInfer's names: few query tokens a request, against a long KV cache.

See ``docs/flashinfer.md`` for what differs from flashinfer-python 0.7.4.
"""

from __future__ import annotations

import torch

from tvm_attn._flashinfer.arguments import Result, check_buffer, implemented_except
from tvm_attn._flashinfer.decode_paged import BatchDecodeWithPagedKVCacheWrapper
from tvm_attn._flashinfer.fast_plan import fast_decode_plan
from tvm_attn._flashinfer.options import Options, attend_once
from tvm_attn.errors import ShapeError

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]


@implemented_except("rope_scale", "rope_theta")
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Result:
    """Compute attention of one query token over the keys of its request.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_qo_heads, head_dim]``.
    k, v : torch.Tensor
        ``[kv_len, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, kv_len, head_dim]`` (HND).
    kv_layout : {"NHD", "HND"}
        Layout of `k` and `v`.
    pos_encoding_mode : {"NONE", "ALIBI"}
        ALiBi with FlashInfer's slopes.
    use_tensor_cores : bool
        Has no effect.
    q_scale, k_scale, v_scale : float, optional
        What q, k and v are multiplied by.
    window_left : int
        Tokens before the query that it sees; -1 is all.
    logits_soft_cap : float, optional
        Bound of the logits; None and 0 are none.
    sm_scale : float, optional
        Scale of the logits, ``1 / sqrt(head_dim)`` by default.
    return_lse : bool
        Return ``(out, lse)``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        out ``[num_qo_heads, head_dim]``, and lse ``[num_qo_heads]`` float32, base 2.

    Raises
    ------
    ShapeError, DTypeError, SpecError
        If an argument is wrong; the message names it.
    """
    if check_buffer(q, "q").ndim != 2:
        raise ShapeError(f"q has shape {tuple(q.shape)}, expected [num_qo_heads, head_dim]")
    options = Options(
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale,
    )
    out, lse = attend_once(
        q.unsqueeze(0),
        k,
        v,
        kv_layout,
        options,
        return_lse=True,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return (out[0], lse[0]) if return_lse else out[0]


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` in graph mode.

    Parameters
    ----------
    workspace_buffer : torch.Tensor
        Not used, but on the device of the tensors.
    indptr_buffer, indices_buffer, last_page_len_buffer : torch.Tensor
        int32 ``[max_batch + 1]``, ``[max_pages]`` and ``[max_batch]``: every plan is copied into
        them, and they bound the batch.
    kv_layout, use_tensor_cores
        As for the base class.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )
