"""FlashInfer's plan of decoding for serving engines, made before every step."""

from __future__ import annotations

from typing import Any

import torch

from tvm_attn._flashinfer.arguments import (
    IndexArray,
    data_types,
    host_indices,
    implemented_except,
)
from tvm_attn._flashinfer.decode_paged import BatchDecodeWithPagedKVCacheWrapper
from tvm_attn._flashinfer.options import options_of, split_tokens
from tvm_attn._index_arrays import checked_size


@implemented_except("rope_scale", "rope_theta")
def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
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
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan a batch of decoding, without waiting for a GPU where that can be.

    Of a wrapper in graph mode whose index arrays are all on its GPU, the plan is made there: in one
    launch, which a CUDA graph can capture. The wrapper's own buffers are left as they are, and what
    is wrong with the arrays gives empty states. Otherwise this is ``self.plan``.

    Parameters
    ----------
    self : BatchDecodeWithPagedKVCacheWrapper
        The wrapper.
    indptr, indices, last_page_len : array
        int32 or int64 page table: ``[batch + 1]``, ``[num_pages]`` and ``[batch]``.
    num_qo_heads, num_kv_heads, head_dim, page_size : int
        Shape of the problem.
    pos_encoding_mode, window_left, logits_soft_cap, sm_scale
        As for `single_decode_with_kv_cache`.
    q_data_type, kv_data_type, data_type : torch.dtype or str, optional
        Dtypes of q (float16), and of K and V (that of q); `data_type` stands in for either.
    non_blocking : bool
        Has no effect.
    fixed_split_size, disable_split_kv, q_len_per_req
        As for ``self.plan``.
    global_override_indptr_cpu : torch.Tensor, optional
        `indptr` on the host, where that is needed.

    Raises
    ------
    PlanError, LimitError, SpecError, ShapeError, DTypeError
        If an argument is wrong; the message names it, and the earlier plan stays.
    """
    checked_size(q_len_per_req, "q_len_per_req")
    table: tuple[Any, ...] = (indptr, indices, last_page_len)
    if not (self.is_cuda_graph_enabled and all(map(_is_on_gpu, table))):
        on_cpu = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
        table = host_indices(indptr=on_cpu, indices=indices, last_page_len=last_page_len)
    options = options_of(
        q_len_per_req > 1, window_left, logits_soft_cap, pos_encoding_mode, sm_scale
    )
    self.plan_requests(
        table,
        (num_qo_heads, num_kv_heads, head_dim, page_size),
        data_types(q_data_type, kv_data_type, None, data_type),
        options,
        split_tokens(fixed_split_size, disable_split_kv, page_size),
        q_len_per_req,
    )


def _is_on_gpu(array: Any) -> bool:
    return isinstance(array, torch.Tensor) and array.is_cuda
