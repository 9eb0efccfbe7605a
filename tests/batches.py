"""Random ragged batches, with NaN wherever a kernel has no business reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tvm_attn.bsr import BSR
from tvm_attn.reference import KVCache, Scale, batch_attention
from tvm_attn.spec import FP8_DTYPES, AttentionSpec


@dataclass(frozen=True)
class Batch:
    """A batch: tensors on a device, the format on the host that indexes them, what they give."""

    spec: AttentionSpec
    fmt: BSR
    q: torch.Tensor
    kv: KVCache
    k_scale: Scale = None
    v_scale: Scale = None

    @property
    def scales(self) -> dict[str, Scale]:
        """Keyword arguments of `run` and of the reference; empty for unquantised K/V."""
        if self.k_scale is None:
            return {}
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on a device."""

        def moved(x: Any) -> Any:
            return x.to(device) if isinstance(x, torch.Tensor) else x

        kv = moved(self.kv) if isinstance(self.kv, torch.Tensor) else tuple(map(moved, self.kv))
        scales = map(moved, (self.k_scale, self.v_scale))
        return Batch(self.spec, self.fmt, moved(self.q), kv, *scales)

    def exact(self, **variant: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return out and lse in float64; `variant` are keywords of `batch_attention`."""
        return self._reference("float64", **variant)

    def eager(self, **variant: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return out and lse as torch eager computes them."""
        return self._reference("eager", **variant)

    def _reference(self, compute: str, **variant: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return batch_attention(
            self.q,
            self.kv,
            self.fmt,
            kv_layout=self.spec.kv_layout,
            compute=compute,
            out_dtype=getattr(torch, str(self.spec.o_dtype)),
            **{**self.scales, **variant},
        )


def random_batch(
    spec: AttentionSpec,
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    seed: int = 0,
    fused: bool = False,
    spare: int = 3,
) -> Batch:
    """Return a batch of the given lengths: paged or ragged, layout and dtypes as `spec` says.

    Page ids are shuffled. The unused slots of pages, `spare` pages (tokens, where ragged) that no
    request refers to, and with them everything that must not be read, hold NaN. FP8 caches come
    with a scale per KV head. ``fused=True`` gives one 5-D cache, for which K and V are as wide.
    """
    rng = torch.Generator().manual_seed(seed)
    qo_indptr = _indptr(qo_lens)
    if spec.page_size is None:
        fmt = BSR.from_ragged(qo_indptr, _indptr(kv_lens))
        slots = sum(kv_lens) + spare
        tokens = torch.arange(sum(kv_lens))
    else:
        fmt = _page_table(qo_indptr, kv_lens, spec.page_size, spare, rng)
        slots = (fmt.num_blocks + spare) * spec.page_size
        tokens = _used_slots(fmt, spec.page_size)
    q = torch.randn(sum(qo_lens), spec.num_qo_heads, spec.head_dim_qk, generator=rng)
    k = _cache(spec, spec.head_dim_qk, slots, tokens, rng)
    v = _cache(spec, spec.dim_vo, slots, tokens, rng)
    scales: list[Scale] = [None, None]
    if spec.kv_dtype in FP8_DTYPES:
        scales = [0.5 + torch.rand(spec.num_kv_heads, generator=rng) for _ in range(2)]
    return Batch(
        spec,
        fmt,
        q.to(getattr(torch, spec.q_dtype)),
        torch.stack([k.float(), v.float()], dim=1).to(k.dtype) if fused else (k, v),
        *scales,
    )


def random_lens(
    batch_size: int, max_qo_len: int, max_kv_len: int, *, seed: int = 0, zeros: bool = True
) -> tuple[list[int], list[int]]:
    """Return query and KV lengths, skewed as in serving: mostly short, some long, a few 0.

    ``kv_len`` may be below ``qo_len``, so that causal rows without any key occur.
    """
    rng = np.random.default_rng(seed)
    low = 0 if zeros else 1

    def lengths(longest: int) -> list[int]:
        skewed = np.floor(rng.random(batch_size) ** 2 * (longest + 1 - low)).astype(int) + low
        return [int(length) for length in skewed]

    return lengths(max_qo_len), lengths(max_kv_len)


def _indptr(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32)


def _page_table(
    qo_indptr: torch.Tensor,
    kv_lens: Sequence[int],
    page_size: int,
    spare: int,
    rng: torch.Generator,
) -> BSR:
    pages = [-(-kv_len // page_size) for kv_len in kv_lens]
    ids = torch.randperm(sum(pages) + spare, generator=rng)[: sum(pages)]
    last_page_len = [(kv_len - 1) % page_size + 1 for kv_len in kv_lens]
    return BSR.from_page_table(qo_indptr, _indptr(pages), ids, last_page_len, page_size)


def _used_slots(fmt: BSR, page_size: int) -> torch.Tensor:
    """Return the slot, ``page * page_size + entry``, of every token of the batch."""
    assert fmt.kv_indices is not None
    slots = fmt.kv_indices.long()[:, None] * page_size + torch.arange(page_size)
    used = [
        slots[begin:end].ravel()[:kv_len]
        for begin, end, kv_len in zip(
            fmt.kv_indptr[:-1], fmt.kv_indptr[1:], fmt.kv_len.tolist(), strict=True
        )
    ]
    return torch.cat([slots.new_zeros(0), *used])


def _cache(
    spec: AttentionSpec, dim: int, slots: int, used: torch.Tensor, rng: torch.Generator
) -> torch.Tensor:
    """Return a cache of `slots` tokens, random where `used` and NaN elsewhere, in its layout."""
    cache = torch.full((slots, spec.num_kv_heads, dim), torch.nan)
    cache[used] = torch.randn(len(used), spec.num_kv_heads, dim, generator=rng)
    if spec.page_size is not None:
        cache = cache.view(-1, spec.page_size, spec.num_kv_heads, dim)
    if spec.kv_layout == "HND":
        cache = cache.transpose(-3, -2)
    return cache.contiguous().to(getattr(torch, str(spec.kv_dtype)))
