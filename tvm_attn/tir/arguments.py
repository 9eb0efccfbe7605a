"""The arguments of an attention kernel, bound to buffers: the same ones for every schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.outputs import Outputs
from tvm_attn.tir.rows import Batch
from tvm_attn.tir.scales import Scales
from tvm_attn.tir.signature import dense, ints
from tvm_attn.worklist import ITEM_WORDS, MERGE_WORDS

GIVEN = ("q", "k", "v", "out", "lse")
"""Arguments of a kernel that may be a caller's, beside a variant's."""

Strided = Callable[[Any, str, Sequence[int | None], str], Any]
"""How tensors with free strides are bound: `signature.strided` or `signature.strided_rows`."""


@dataclass(frozen=True)
class Work:
    """The work list as the planner wrote it, int32.

    ``items [num_items, ITEM_WORDS]``, ``cta_indptr [num_ctas + 1]``, ``merge_items [num_merges,
    MERGE_WORDS]``, ``merge_indptr [num_merges + 1]``.
    """

    items: Any
    cta_indptr: Any
    merge_items: Any
    merge_indptr: Any


@dataclass(frozen=True)
class Arguments:
    """What a kernel reads and writes: q, k and v, the work list, the batch, scales, outputs."""

    q: Any
    k: Any
    v: Any
    work: Work
    batch: Batch
    scales: Scales
    outputs: Outputs


def bind(
    spec: AttentionSpec,
    hooks: Hooks,
    rows: int,
    strided: Strided,
    *,
    qkv: Sequence[Any],
    work: Sequence[Any],
    batch: Sequence[Any],
    scales: Sequence[Any],
    outputs: Sequence[Any],
) -> Arguments:
    """Bind the parameters of a kernel, given in the groups and the order of its signature.

    Parameters
    ----------
    spec : AttentionSpec
        Gives shapes and dtypes.
    hooks : Hooks
        The variant.
    rows : int
        Fused query rows of an item.
    strided : callable
        Binds tensors whose strides are free.
    qkv : sequence of handle
        q, k, v.
    work, batch : sequence of handle
        The fields of `Work` and of `Batch`.
    scales : sequence
        k_scale, v_scale (handles), sm_scale, q_scale (float32).
    outputs : sequence
        lse_scale (float32), partial_o, partial_lse, out, lse (handles).
    """
    dim_qk, dim_vo, kv_dtype = spec.head_dim_qk, spec.dim_vo, str(spec.kv_dtype)
    q, k, v = qkv
    k_scale, v_scale, sm_scale, q_scale = scales
    lse_scale, partial_o, partial_lse, out, lse = outputs
    bound_scales = Scales(
        hooks,
        sm_scale,
        q_scale,
        dense(k_scale, "k_scale", (None,), "float32"),
        dense(v_scale, "v_scale", (None,), "float32"),
    )
    return Arguments(
        strided(q, "q", (None, None, dim_qk), str(spec.q_dtype)),
        strided(k, "k", (None, None, None, dim_qk), kv_dtype),
        strided(v, "v", (None, None, None, dim_vo), kv_dtype),
        _bind_work(*work),
        _bind_batch(*batch),
        bound_scales,
        Outputs(
            hooks,
            bound_scales,
            dense(partial_o, "partial_o", (None, rows, dim_vo), "float32"),
            dense(partial_lse, "partial_lse", (None, rows), "float32"),
            strided(out, "out", (None, None, dim_vo), str(spec.o_dtype)),
            strided(lse, "lse", (None, None), "float32"),
            lse_scale,
        ),
    )


def _bind_work(items: Any, cta_indptr: Any, merge_items: Any, merge_indptr: Any) -> Work:
    return Work(
        ints(items, "items", ITEM_WORDS),
        ints(cta_indptr, "cta_indptr"),
        ints(merge_items, "merge_items", MERGE_WORDS),
        ints(merge_indptr, "merge_indptr"),
    )


def _bind_batch(*handles: Any) -> Batch:
    names = Batch.__dataclass_fields__
    return Batch(*(ints(handle, name) for handle, name in zip(handles, names, strict=True)))
