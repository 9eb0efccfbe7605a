"""Prefill and append attention, under FlashInfer's names: many query tokens a request.

See ``docs/flashinfer.md`` for what differs from flashinfer-python 0.7.4.
"""

from __future__ import annotations

import functools

import torch

from tvm_attn._flashinfer.arguments import (
    Result,
    Scale,
    check_backend,
    implemented_except,
)
from tvm_attn._flashinfer.options import Options, attend_once, mask_of
from tvm_attn._flashinfer.prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from tvm_attn._flashinfer.prefill_ragged import BatchPrefillWithRaggedKVCacheWrapper

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


@implemented_except(
    "scale_q", "scale_k", "scale_v", "use_fp16_qk_reduction", "rope_scale", "rope_theta",
    "kv_cache_sf",
)  # fmt: skip
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Result:
    """Compute attention of the last tokens of one request over all of its keys.

    Parameters
    ----------
    q : torch.Tensor
        ``[qo_len, num_qo_heads, head_dim_qk]``.
    k, v : torch.Tensor
        ``[kv_len, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, kv_len, head_dim]`` (HND).
    o_dtype : torch.dtype, optional
        Dtype of out, that of `q` by default.
    custom_mask, packed_custom_mask : torch.Tensor, optional
        bool ``[qo_len, kv_len]`` (True keeps), or uint8 ``[ceil(qo_len * kv_len / 8)]``: the same
        as little-endian bits, which win over bools. Either replaces `causal`.
    causal : bool
        Whether a token sees no later one.
    kv_layout : {"NHD", "HND"}
        Layout of `k` and `v`.
    pos_encoding_mode : {"NONE", "ALIBI"}
        ALiBi with FlashInfer's slopes.
    sm_scale : float, optional
        Scale of the logits, ``1 / sqrt(head_dim_qk)`` by default.
    window_left : int
        Tokens before itself that a query sees; -1 is all.
    logits_soft_cap : float, optional
        Bound of the logits; None and 0 are none.
    backend : str
        One of FlashInfer's: ``"fa2"`` is the schedule ``"sm80"`` on a GPU, others have no effect.
    return_lse : bool
        Return ``(out, lse)``.
    k_scale, v_scale : float or torch.Tensor, optional
        What k and v are multiplied by: a number, or ``[num_kv_heads]``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        out ``[qo_len, num_qo_heads, head_dim_vo]``, and lse ``[qo_len, num_qo_heads]`` float32,
        base 2.

    Raises
    ------
    ShapeError, DTypeError, SpecError, PlanError
        If an argument is wrong; the message names it.
    """
    check_backend(backend)
    mask = mask_of(custom_mask, packed_custom_mask)
    options = Options(causal, window_left, logits_soft_cap, pos_encoding_mode, sm_scale, mask)
    return attend_once(
        q,
        k,
        v,
        kv_layout,
        options,
        o_dtype,
        backend,
        return_lse=return_lse,
        k_scale=k_scale,
        v_scale=v_scale,
    )


single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)
"""`single_prefill_with_kv_cache` that returns ``(out, lse)``."""
