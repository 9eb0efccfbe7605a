"""Batches, and the facades planned for them."""

from __future__ import annotations

from typing import Any

import torch

import tvm_attn as flashinfer
from tests.batches import Batch, random_batch
from tvm_attn import reference
from tvm_attn.spec import AttentionSpec

SPEC = AttentionSpec(6, 2, 32, page_size=4)
HND = AttentionSpec(6, 2, 32, 48, q_dtype="bfloat16", kv_layout="HND", page_size=4)
RAGGED = AttentionSpec(6, 2, 32, page_size=None)
RAGGED_HND = AttentionSpec(6, 2, 32, 48, o_dtype="float32", kv_layout="HND", page_size=None)
WORKSPACE = torch.empty(16, dtype=torch.uint8)
CAUSAL = {"mask": reference.causal()}
WINDOW, CAP = 9, 2.0
ALL_OPTIONS = {
    "logits": reference.soft_cap(CAP) & reference.alibi(reference.alibi_slopes(6)),
    "mask": reference.sliding_window(WINDOW),
}
QO_LENS, KV_LENS = [3, 0, 1, 19, 5], [17, 6, 0, 40, 2]


def decode_batch(spec: AttentionSpec, q_len: int = 1, **options: Any) -> Batch:
    kv_lens = [9, 1, 0, 33, 4]
    return random_batch(spec, [q_len] * len(kv_lens), kv_lens, **options)


def prefill_batch(spec: AttentionSpec, **options: Any) -> Batch:
    return random_batch(spec, QO_LENS, KV_LENS, **options)


def workspace(batch: Batch) -> torch.Tensor:
    return WORKSPACE.to(batch.q.device)


def page_table(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fmt = batch.fmt
    assert fmt.kv_indices is not None
    assert fmt.kv_last_page_len is not None
    return fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len


def dtypes(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "q_data_type": getattr(torch, spec.q_dtype),
        "kv_data_type": spec.kv_dtype,
        "o_data_type": spec.o_dtype,
    }


def plan_decode(batch: Batch, **options: Any) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    spec = batch.spec
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(batch), spec.kv_layout)
    shape = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, spec.page_size)
    wrapper.plan(*page_table(batch), *shape, **dtypes(spec), **options)
    return wrapper


def plan_paged(batch: Batch, **options: Any) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    spec = batch.spec
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(batch), spec.kv_layout)
    shape = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, spec.page_size, spec.dim_vo)
    wrapper.plan(batch.fmt.qo_indptr, *page_table(batch), *shape, **dtypes(spec), **options)
    return wrapper


def plan_ragged(batch: Batch, **options: Any) -> flashinfer.BatchPrefillWithRaggedKVCacheWrapper:
    spec = batch.spec
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(batch), spec.kv_layout)
    shape = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, spec.dim_vo)
    fmt = batch.fmt
    wrapper.plan(fmt.qo_indptr, fmt.kv_indptr, *shape, **dtypes(spec), **options)
    return wrapper


def plan_mixed(batch: Batch, **options: Any) -> flashinfer.BatchAttention:
    spec = batch.spec
    attention = flashinfer.BatchAttention(spec.kv_layout, device=str(batch.q.device))
    attention.plan(
        batch.fmt.qo_indptr,
        batch.fmt.kv_indptr,
        batch.fmt.kv_indices,
        batch.fmt.kv_len,
        spec.num_qo_heads,
        spec.num_kv_heads,
        spec.head_dim_qk,
        spec.dim_vo,
        spec.page_size,
        **options,
    )
    return attention


def random_mask(batch: Batch) -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    return torch.rand(int((batch.fmt.qo_len * batch.fmt.kv_len).sum()), generator=rng) < 0.4
