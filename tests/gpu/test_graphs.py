"""CUDA graphs: a captured run sees what is planned later, and gives the bits of an eager one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as ta
from tests.accuracy import assert_accurate
from tests.batches import Batch
from tests.cases import variant
from tests.gpu.device import ANY_GPU
from tests.machine import Machine
from tests.test_semantics import assert_same_bits
from tvm_attn import reference
from tvm_attn.bsr import BSR
from tvm_attn.runtime.workspace import PlanLimits

SPEC = ANY_GPU.spec(head_dim_qk=128, page_size=16)
KERNELS = [(SPEC, variant("causal", SPEC))]
PAGES = 4096
REPLANS = 100


def cache_of(machine: Machine) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator(machine.device).manual_seed(0)
    shape = (PAGES, 16, SPEC.num_kv_heads, SPEC.head_dim_qk)

    def random() -> torch.Tensor:
        return torch.randn(shape, generator=rng, device=machine.device).half()

    return random(), random()


def batch_of(q: torch.Tensor, kv: Any, qo_lens: list[int], kv_lens: list[int], seed: int) -> Batch:
    pages = [-(-length // 16) for length in kv_lens]
    ids = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))[: sum(pages)]
    last = [(length - 1) % 16 + 1 for length in kv_lens]
    indptrs = ([0, *accumulate(lens)] for lens in (qo_lens, pages))
    return Batch(SPEC, BSR.from_page_table(*indptrs, ids, last, 16), q, kv)


def lengths(batch_size: int, seed: int) -> list[int]:
    """Lengths that fit the cache: alike, skewed, or mostly empty, in turns."""
    rng = np.random.default_rng(seed)
    most = 16 * PAGES // batch_size - 16
    kinds = (
        np.full(batch_size, rng.integers(1, most)),
        np.floor(rng.random(batch_size) ** 8 * most),
        rng.integers(0, 2, batch_size) * rng.integers(0, 40, batch_size),
    )
    return [int(length) for length in kinds[seed % len(kinds)]]


def in_graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("qo_lens", [[1] * 3, [1] * 40, [3, 1, 70, 0, 20]])
def test_a_graph_sees_what_is_planned_later(machine: Machine, qo_lens: list[int]) -> None:
    module, kv = machine.kernel("causal", SPEC), cache_of(machine)
    shape = (sum(qo_lens), SPEC.num_qo_heads, SPEC.head_dim_qk)
    q = torch.randn(shape, device=machine.device).half()
    limits = PlanLimits(len(qo_lens), sum(qo_lens), 16 * PAGES)
    batches = [
        batch_of(q, kv, qo_lens, lengths(len(qo_lens), seed), seed) for seed in range(REPLANS)
    ]
    plan = module.plan(batches[0].fmt, limits=limits, max_qo_len=max(qo_lens))
    out, lse = torch.empty_like(q), torch.empty(shape[:2], device=machine.device)
    graph = in_graph(lambda: module.run(plan, q, kv, out=out, lse=lse))
    for i, batch in enumerate(batches):
        module.plan(batch.fmt, out=plan)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        if i % 10 == 0:
            assert_accurate((out, lse), batch, mask=reference.causal())
        assert_same_bits((out, lse), module.run(plan, q, kv, return_lse=True))


def test_a_wrapper_with_buffers_of_the_caller_s(machine: Machine) -> None:
    """As serving engines use it: one for a batch size, and padded requests without keys."""
    buffers = [torch.zeros(n, dtype=torch.int32, device=machine.device) for n in (9, PAGES, 8)]
    workspace = torch.empty(1, dtype=torch.uint8, device=machine.device)
    wrapper = ta.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    kv = cache_of(machine)
    q = torch.randn(8, SPEC.num_qo_heads, SPEC.head_dim_qk, device=machine.device).half()
    out = torch.empty_like(q)

    def plan(seed: int) -> Batch:
        batch = batch_of(q, kv, [1] * 8, [*lengths(6, seed), 0, 0], seed)
        table = (batch.fmt.kv_indptr, batch.fmt.kv_indices, batch.fmt.kv_last_page_len)
        wrapper.plan(*table, SPEC.num_qo_heads, SPEC.num_kv_heads, SPEC.head_dim_qk, 16)
        return batch

    plan(0)
    graph = in_graph(lambda: wrapper.run(q, kv, out=out))
    for seed in range(20):
        batch = plan(seed)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wrapper.run(q, kv))
        assert not out[6:].any()
        assert torch.equal(buffers[0], batch.fmt.kv_indptr.to(machine.device))
