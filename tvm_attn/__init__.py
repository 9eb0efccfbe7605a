"""Attention kernels for LLM serving, generated with Apache TVM.

Build a kernel for a spec, a variant and a target; plan once per batch; run once per layer::

    import tvm_attn as ta

    kernel = ta.build(ta.AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim_qk=128))
    plan = kernel.plan(qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
    out = kernel.run(plan, q, kv_cache)

Everything is imported when it is first used; importing this package needs neither TVM nor a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "tvm_attn.spec": ("AttentionSpec", "Param"),
    "tvm_attn.variant": ("AttentionVariant",),
    "tvm_attn.bsr": ("BSR",),
    "tvm_attn.target": ("parse_target",),
    "tvm_attn.pipeline": ("build", "build_many"),
    "tvm_attn.runtime.loading": ("load",),
    "tvm_attn.runtime.module": ("AttentionModule",),
    "tvm_attn.runtime.plan": ("Plan",),
    "tvm_attn.runtime.workspace": ("PlanLimits",),
    "tvm_attn.decode": (
        "single_decode_with_kv_cache",
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
    ),
    "tvm_attn.prefill": (
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ),
    "tvm_attn.attention": ("BatchAttention",),
    "tvm_attn.pod": ("PODWithPagedKVCacheWrapper",),
    "tvm_attn.cascade": ("merge_state", "merge_state_in_place", "merge_states"),
    "tvm_attn.page": ("append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    "tvm_attn.quantization": ("packbits", "segment_packbits"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("errors", "reference", "variants", "viz", *(home.split(".")[1] for home in _HOMES))

__all__ = sorted([*_HOME_OF, "errors", "variants"])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"tvm_attn.{name}")
    else:
        raise AttributeError(f"module 'tvm_attn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, *_MODULES]
