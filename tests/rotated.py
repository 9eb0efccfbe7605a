"""What `tvm_attn.shipped.rotary`, a variant that uses every transform, takes and should give."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch

from tests.accuracy import State
from tests.batches import Batch
from tvm_attn.bsr import BSR
from tvm_attn.reference import batch_attention, gather
from tvm_attn.spec import AttentionSpec

MAX_POSITION = 8192


def tensors(spec: AttentionSpec) -> dict[str, torch.Tensor]:
    """Return the variant's run-time tensors."""
    half = spec.head_dim_qk // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(MAX_POSITION)[:, None] * frequency
    return {
        "cosine": angle.cos(),
        "sine": angle.sin(),
        "value_gain": 0.5 + torch.arange(spec.num_kv_heads) / 4,
        "gate": 1.5 - torch.arange(spec.num_qo_heads) / 8,
    }


def states(batch: Batch, given: Mapping[str, torch.Tensor], compute: str, **variant: Any) -> State:
    """Return what a batch should give: transformed in torch, attended to as ragged K/V."""
    fmt = batch.fmt
    wide = torch.float64 if compute == "float64" else torch.float32
    stored = batch.q.dtype if compute == "eager" else wide
    table = {name: tensor.to(wide) for name, tensor in given.items()}
    lens = list(zip(fmt.qo_len.tolist(), fmt.kv_len.tolist(), strict=True))
    q_pos = torch.cat([torch.arange(qo_len) + kv_len - qo_len for qo_len, kv_len in lens])
    kv_pos = torch.cat([torch.arange(kv_len) for _, kv_len in lens])
    k, v = (x.to(stored).to(wide) for x in _dequantised(batch, wide))
    q = _rotate(batch.q.to(wide), q_pos, table)
    k = _rotate(k, kv_pos, table)
    v = (v + v.roll(-1, dims=-1)) * table["value_gain"].view(-1, 1)
    kv_indptr = torch.tensor([0, *accumulate(kv_len for _, kv_len in lens)])
    out, lse = batch_attention(
        q.to(stored),
        (k.to(stored), v.to(stored)),
        BSR.from_ragged(fmt.qo_indptr, kv_indptr),
        compute=compute,
        **variant,
    )
    gated = out.to(wide) * table["gate"].view(-1, 1)
    return gated if compute == "float64" else gated.to(out.dtype), lse


def _dequantised(batch: Batch, wide: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return K and V of all requests, ``[nnz_kv, num_kv_heads, head_dim]``, times their scales."""
    fmt, layout = batch.fmt, batch.spec.kv_layout
    dense = [gather(batch.kv, fmt, b, kv_layout=layout) for b in range(fmt.batch_size)]
    device = batch.q.device
    given = (1.0 if s is None else s for s in (batch.k_scale, batch.v_scale))
    scales = [torch.as_tensor(scale, device=device) for scale in given]
    return tuple(
        torch.cat([x.to(wide) for x in parts]) * scale.to(wide).view(-1, 1)
        for parts, scale in zip(zip(*dense, strict=True), scales, strict=True)
    )


def _rotate(x: torch.Tensor, pos: torch.Tensor, table: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Rotate rows ``[n, heads, dim]`` at positions ``[n]``."""
    at = pos.clamp(min=0)
    cosine, sine = (torch.cat([table[name][at]] * 2, -1)[:, None] for name in ("cosine", "sine"))
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-high, low], dim=-1) * sine
