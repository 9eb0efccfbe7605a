"""Batches to measure on: distributions of lengths, page tables, random tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tvm_attn.spec import AttentionSpec

DISTRIBUTIONS = ("constant", "uniform", "zipf", "one giant")


def kv_lengths(distribution: str, batch: int, mean: int, seed: int = 0) -> list[int]:
    """Draw KV lengths of a batch with (about) the given mean."""
    rng = np.random.default_rng(seed)
    if distribution == "constant":
        lengths = np.full(batch, mean)
    elif distribution == "uniform":
        lengths = rng.integers(1, 2 * mean, batch)
    elif distribution == "zipf":
        draws = rng.zipf(1.5, batch).clip(max=4096).astype(float)
        lengths = np.maximum(draws * mean / draws.mean(), 1).astype(int)
    elif distribution == "one giant":
        lengths = np.full(batch, max(mean // 8, 1))
        lengths[0] = mean * batch
    else:
        raise ValueError(f"distribution {distribution!r} is not one of {DISTRIBUTIONS}")
    return [int(length) for length in lengths]


@dataclass(frozen=True)
class PagedBatch:
    """A batch over a paged cache with shuffled pages.

    Attributes
    ----------
    table : tuple of torch.Tensor
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len: what `plan` takes.
    q : torch.Tensor
        Queries.
    kv : tuple of torch.Tensor
        K and V caches.
    """

    table: tuple[torch.Tensor, ...]
    q: torch.Tensor
    kv: tuple[torch.Tensor, torch.Tensor]


def page_table(qo_lens: list[int], kv_lens: list[int], page_size: int) -> tuple[torch.Tensor, ...]:
    """Return qo_indptr, kv_indptr, kv_indices (shuffled) and kv_last_page_len."""
    pages = [-(-length // page_size) for length in kv_lens]
    total = sum(pages)
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    last = [(length - 1) % page_size + 1 if length else 0 for length in kv_lens]
    return _indptr(qo_lens), _indptr(pages), shuffled, torch.tensor(last, dtype=torch.int32)


def paged_batch(spec: AttentionSpec, qo_lens: list[int], kv_lens: list[int]) -> PagedBatch:
    """Return a batch of random values; the spec's layout must be NHD."""
    if spec.page_size is None:
        raise ValueError("a paged batch needs a spec with a page_size")
    table = page_table(qo_lens, kv_lens, spec.page_size)
    generator = torch.Generator().manual_seed(0)
    cache = (len(table[2]), spec.page_size, spec.num_kv_heads)

    def random(shape: tuple[int, ...], dtype: str | None) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, str(dtype)))

    q = random((sum(qo_lens), spec.num_qo_heads, spec.head_dim_qk), spec.q_dtype)
    k = random((*cache, spec.head_dim_qk), spec.kv_dtype)
    v = random((*cache, spec.dim_vo), spec.kv_dtype)
    return PagedBatch(table, q, (k, v))


def _indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
