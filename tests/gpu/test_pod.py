"""A prefill beside a batch of decoding, and fast plans: the tests of the CPU, and in graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tvm_attn as flashinfer
from tests.accuracy import assert_accurate
from tests.batches import Batch
from tests.facades import CAUSAL, RAGGED, SPEC, decode_batch, page_table, workspace
from tests.gpu.test_device_plan import without_waiting
from tests.gpu.test_graphs import in_graph
from tests.machine import Machine
from tests.test_pod import *  # noqa: F403
from tests.test_pod import SHAPE, prefill
from tvm_attn._flashinfer.options import Features
from tvm_attn.errors import LimitError
from tvm_attn.runtime.device_plan import DevicePlan
from tvm_attn.spec import AttentionSpec

_FULL = Features(False, False, False, False, False)
_CAUSAL = _FULL._replace(causal=True)
_USED: tuple[tuple[AttentionSpec, Features], ...] = (
    *((SPEC, features) for features in (_FULL, _CAUSAL, _FULL._replace(window=True))),
    *((RAGGED, features) for features in (_FULL, _CAUSAL, _CAUSAL._replace(window=True))),
    (RAGGED, _FULL._replace(custom_mask=True)),
    (replace(SPEC, kv_dtype="float8_e4m3fn"), _FULL),
)
KERNELS = [(spec, features.variant()) for spec, features in _USED]


def in_graph_mode(batch: Batch) -> tuple[Any, list[torch.Tensor]]:
    """A wrapper with buffers for a batch, and the page table on the GPU."""
    table = [x.to(batch.q.device) for x in page_table(batch)]
    buffers = [torch.zeros_like(x) for x in table]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(batch), *buffers)
    return wrapper, table


def test_a_graph_plans_fast_and_runs(machine: Machine) -> None:
    """Lengths change in the arrays that the graph reads, up to whole pages."""
    batch = decode_batch(SPEC).to(machine.device)
    kv = tuple(x.nan_to_num() for x in batch.kv)
    wrapper, table = in_graph_mode(batch)
    out = torch.empty_like(batch.q)

    def step() -> None:
        flashinfer.fast_decode_plan(wrapper, *table, *SHAPE)
        wrapper.run(batch.q, kv, out=out)

    step()
    with without_waiting():
        step()
    assert isinstance(wrapper._planned, DevicePlan)
    graph = in_graph(step)
    host, _ = in_graph_mode(batch)
    for last in (1, 2, 3, 4):
        table[2].fill_(last)
        out.fill_(torch.nan)
        graph.replay()
        wrapper._planned.check()
        host.plan(*table, *SHAPE)
        assert out.isfinite().all()
        assert torch.equal(out, host.run(batch.q, kv))


def test_a_fast_plan_beyond_the_buffers_is_refused(machine: Machine) -> None:
    batch = decode_batch(SPEC).to(machine.device)
    wrapper, table = in_graph_mode(batch)
    more = torch.cat([table[0], table[0][-1:]]), table[1], torch.cat([table[2], table[2][-1:]])
    with pytest.raises(LimitError, match="max_batch=6, its plan was limited to 5"):
        flashinfer.fast_decode_plan(wrapper, *more, *SHAPE)


def test_pod_in_a_graph(machine: Machine) -> None:
    """The prefill's queries and the decoding's lengths change between replays."""
    batch, long = decode_batch(SPEC).to(machine.device), prefill(machine, 19, 40)
    buffers = [torch.zeros_like(x, device=machine.device) for x in page_table(batch)]
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(batch), "NHD", True, *buffers)
    indptr, indices, last = page_table(batch)
    wrapper.plan(indptr, indices, last, *SHAPE)
    args = (long.q, *long.kv, batch.q, batch.kv)
    results: list[torch.Tensor] = []

    def run() -> None:
        results[:] = wrapper.run(*args, causal_p=True)

    graph = in_graph(run)
    for seed in range(10):
        long.q.copy_(torch.randn(long.q.shape, generator=torch.Generator().manual_seed(seed)))
        wrapper.plan(indptr, indices, last.clamp(max=1 + seed % 4), *SHAPE)
        graph.replay()
        assert_accurate(results[0], long, **CAUSAL)
        eager = wrapper.run(*args, causal_p=True)
        assert all(map(torch.equal, results, eager))
