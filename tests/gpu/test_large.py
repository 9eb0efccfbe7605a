"""Tensors of more than 2**31 elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.batches import Batch
from tests.cases import variant
from tests.machine import Machine
from tests.test_semantics import assert_same_bits
from tvm_attn.bsr import BSR
from tvm_attn.reference import attention, causal, check_accuracy
from tvm_attn.spec import AttentionSpec

PAGED = AttentionSpec(32, 8, 128, q_dtype="bfloat16", page_size=16)
RAGGED = replace(PAGED, page_size=None)
KERNELS = [(spec, variant("causal", spec)) for spec in (PAGED, RAGGED)]
MANY = 2**31 + 2**24


def needs_gib(gib: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def test_a_large_paged_cache(machine: Machine) -> None:
    needs_gib(12)
    batch = machine.batch(PAGED, [1, 7, 200], [900, 30, 250])
    pages = MANY // (PAGED.page_size * 8 * 128)
    used = batch.fmt.kv_indices.long()
    moved = torch.linspace(0, pages - 1, len(used)).long()

    def spread(cache: torch.Tensor) -> torch.Tensor:
        large = torch.full((pages, *cache.shape[1:]), torch.nan, dtype=cache.dtype, device="cuda")
        large[moved.cuda()] = cache[used.cuda()]
        return large

    fmt = replace(batch.fmt, kv_indices=moved.int())
    large = replace(batch, fmt=fmt, kv=tuple(map(spread, batch.kv)))
    assert all(cache.numel() > 2**31 for cache in large.kv)
    assert_same_bits(machine.run("causal", large), machine.run("causal", batch))


def test_large_queries_outputs_and_ragged_keys(machine: Machine) -> None:
    needs_gib(40)
    qo_len, kv_len = 65, 264
    requests = max(MANY // (qo_len * 32 * 128), MANY // (kv_len * 8 * 128)) + 1
    indptr = torch.arange(requests + 1, dtype=torch.int32)
    fmt = BSR.from_ragged(indptr * qo_len, indptr * kv_len)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(tokens: int, heads: int) -> torch.Tensor:
        x = torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device="cuda")
        return x.normal_(generator=generator)

    q = random(requests * qo_len, 32)
    kv = random(requests * kv_len, 8), random(requests * kv_len, 8)
    out = torch.full_like(q, torch.nan)
    assert min(x.numel() for x in (q, out, *kv)) > 2**31
    batch = Batch(RAGGED, fmt, q, kv)
    _, lse = machine.run("causal", batch, out=out)
    assert lse.isfinite().all()
    assert not any(part.isnan().any() for part in out.chunk(16))
    for request in (0, requests // 2, requests - 1):
        rows, keys = (slice(request * n, (request + 1) * n) for n in (qo_len, kv_len))
        given = (q[rows], kv[0][keys], kv[1][keys])
        exact, eager = (
            attention(*given, mask=causal(), compute=compute) for compute in ("float64", "eager")
        )
        check_accuracy(out[rows], exact[0], eager[0])
        check_accuracy(lse[rows], exact[1], eager[1], name="lse")
