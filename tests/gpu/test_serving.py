"""Batches as serving engines make them: mixed, on several streams, padded, in one graph a size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as ta
from tests.accuracy import assert_accurate
from tests.batches import Batch
from tests.cases import variant
from tests.gpu.test_device_plan import on_gpu
from tests.gpu.test_graphs import PAGES, SPEC, batch_of, cache_of, in_graph, lengths
from tests.machine import Machine
from tests.test_semantics import assert_same_bits
from tvm_attn import reference
from tvm_attn.errors import LimitError
from tvm_attn.runtime.workspace import PlanLimits

KERNELS = [(SPEC, variant(name, SPEC)) for name in ("causal", "full")]
CAUSAL: dict[str, Any] = {"mask": reference.causal()}
DECODING = [1] * 40
MIXED = (
    ([*DECODING, 512], [*range(1, 1201, 30), 512]),
    ([200, *DECODING, 3], [5000, *[700] * 40, 9]),
    ([30, 70, 1, 0, 1, 900], [30, 900, 2000, 5, 0, 900]),
    ([1, 2000], [9000, 2000]),
)
"""Query and KV tokens of batches for kernels of more than one kind."""


def queries(machine: Machine, rows: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator(machine.device).manual_seed(seed)
    shape = (rows, SPEC.num_qo_heads, SPEC.head_dim_qk)
    return torch.randn(shape, generator=rng, device=machine.device).half()


def mixed(machine: Machine, kv: Any, number: int) -> Batch:
    qo_lens, kv_lens = MIXED[number]
    return batch_of(queries(machine, sum(qo_lens), number), kv, qo_lens, kv_lens, number)


@pytest.mark.parametrize("number", range(len(MIXED)))
def test_what_comes_before_and_after_a_mixed_batch_is_apart(machine: Machine, number: int) -> None:
    """Its kernels overlap; queries are written before them, results read after them."""
    module, kv = machine.kernel("causal", SPEC), cache_of(machine)
    batch = mixed(machine, kv, number)
    plan = module.plan(batch.fmt)
    assert len(plan.work) > 1
    given = [queries(machine, len(batch.q), seed) for seed in range(4)]
    expected = []
    for q in given:
        batch.q.copy_(q)
        expected.append(module.run(plan, batch.q, kv, return_lse=True))
        torch.cuda.synchronize()
        assert_accurate(expected[-1], batch, **CAUSAL)
    out, lse = (torch.empty_like(x) for x in expected[0])
    got = [tuple(map(torch.empty_like, state)) for state in expected]

    def chain() -> None:
        for q, state in zip(given, got, strict=True):
            batch.q.copy_(q)
            module.run(plan, batch.q, kv, out=out, lse=lse)
            for result, place in zip((out, lse), state, strict=True):
                place.copy_(result)

    graph = in_graph(chain)
    for turn in range(40):
        for state in got:
            for place in state:
                place.fill_(torch.nan)
        (graph.replay if turn % 2 else chain)()
        torch.cuda.synchronize()
        for state, other in zip(got, expected, strict=True):
            assert_same_bits(state, other)


def test_a_mixed_batch_with_limits_and_a_workspace(machine: Machine) -> None:
    """Kernels that run at the same time have partial states of their own."""
    module, kv = machine.kernel("causal", SPEC), cache_of(machine)
    limits = PlanLimits(64, 4096, 16 * PAGES)
    size, _ = module.workspace_size(limits, fixed_split_size=256)
    workspace = torch.empty(size, dtype=torch.uint8, device=machine.device)
    given = {"limits": limits, "workspace": workspace, "fixed_split_size": 256}
    q = queries(machine, 4096)

    def batch(number: int) -> Batch:
        qo_lens, kv_lens = MIXED[number]
        return batch_of(q[: sum(qo_lens)], kv, qo_lens, kv_lens, number)

    first = batch(0)
    plan = module.plan(first.fmt, **given)
    out = torch.empty_like(first.q)
    graph = in_graph(lambda: module.run(plan, first.q, kv, out=out))
    for number in (1, 2, 3, 0):
        each = batch(number)
        module.plan(each.fmt, out=plan, **given)
        state = module.run(plan, each.q, kv, return_lse=True)
        assert_accurate(state, each, **CAUSAL)
        free = module.plan(each.fmt, fixed_split_size=256)
        assert_same_bits(state, module.run(free, each.q, kv, return_lse=True))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, state[0])


def test_four_streams_at_once(machine: Machine) -> None:
    module, kv = machine.kernel("causal", SPEC), cache_of(machine)
    given = [mixed(machine, kv, number) for number in range(4)]

    def run(batch: Batch) -> Any:
        return module.run(module.plan(batch.fmt), batch.q, kv, return_lse=True)

    expected = [run(batch) for batch in given]
    streams = [torch.cuda.Stream() for _ in given]
    got: list[list[Any]] = [[] for _ in given]
    torch.cuda.synchronize()
    for _ in range(25):
        for stream, batch, states in zip(streams, given, got, strict=True):
            with torch.cuda.stream(stream):
                states.append(run(batch))
    torch.cuda.synchronize()
    for states, state in zip(got, expected, strict=True):
        for other in states:
            assert_same_bits(other, state)


@pytest.mark.parametrize("split", [128, 1000])
def test_bits_of_a_request_are_its_own_in_50_batches(machine: Machine, split: int) -> None:
    """A request that decodes and a chunk of a prefill, among others at random places."""
    module, kv = machine.kernel("causal", SPEC), cache_of(machine)
    rng = np.random.default_rng(split)
    mine = [([1], [3000]), ([150], [1500])]
    alone = [batch_of(queries(machine, *qo, 7), kv, qo, kv_lens, 0) for qo, kv_lens in mine]

    def run(batch: Batch) -> Any:
        plan = module.plan(batch.fmt, fixed_split_size=split)
        return module.run(plan, batch.q, kv, return_lse=True)

    expected = [run(batch) for batch in alone]
    for number in range(50):
        own = alone[number % 2]
        size = int(rng.integers(1, 30))
        qo_lens = [int(n) for n in rng.choice([1, 1, 1, 5, 30, 200], size)]
        kv_lens = [n + int(rng.integers(0, 1500)) for n in qo_lens]
        place = int(rng.integers(0, size))
        qo_lens[place], kv_lens[place] = len(own.q), mine[number % 2][1][0]
        batch = batch_of(queries(machine, sum(qo_lens), number), kv, qo_lens, kv_lens, number)
        rows = slice(sum(qo_lens[:place]), sum(qo_lens[: place + 1]))
        batch.q[rows] = own.q
        begin, end = batch.fmt.kv_indptr[place : place + 2].tolist()
        indices = batch.fmt.kv_indices.clone()
        indices[begin:end] = own.fmt.kv_indices
        got = run(replace(batch, fmt=replace(batch.fmt, kv_indices=indices)))
        assert_same_bits(tuple(x[rows] for x in got), expected[number % 2])


def test_a_wrapper_for_each_batch_size_on_shared_buffers(machine: Machine) -> None:
    """A graph for each size; batches between two sizes are padded with requests without keys."""
    sizes = (1, 2, 4, 8)
    int32 = {"dtype": torch.int32, "device": machine.device}
    indptr, indices, last = (torch.zeros(n, **int32) for n in (sizes[-1] + 1, PAGES, sizes[-1]))
    workspace = torch.empty(1, dtype=torch.uint8, device=machine.device)
    kv, q = cache_of(machine), queries(machine, sizes[-1])
    out = torch.empty_like(q)
    shape = (SPEC.num_qo_heads, SPEC.num_kv_heads, SPEC.head_dim_qk, 16)
    wrappers = {
        size: ta.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace, indptr[: size + 1], indices, last[:size]
        )
        for size in sizes
    }

    def table(size: int, used: int, seed: int) -> tuple[Any, Any, Any]:
        kv_lens = [max(n, 1) for n in lengths(used, seed)] + [0] * (size - used)
        fmt = batch_of(q[:size], kv, [1] * size, kv_lens, seed).fmt
        return fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len

    def call(size: int) -> Callable[[], Any]:
        return lambda: wrappers[size].run(q[:size], kv, out=out[:size])

    graphs = {}
    for size in sizes:
        wrappers[size].plan(*table(size, size, 0), *shape)
        graphs[size] = in_graph(call(size))
    for step in range(60):
        used = 1 + step % sizes[-1]
        size = next(each for each in sizes if each >= used)
        given = table(size, used, step)
        wrappers[size].plan(*given, *shape)
        out.fill_(torch.nan)
        graphs[size].replay()
        assert torch.equal(out[:size], wrappers[size].run(q[:size], kv))
        assert not out[used:size].any()
        assert out[size:].isnan().all()
        assert torch.equal(indptr[: size + 1].cpu(), given[0])
        if step % 6 == 0:
            kv_lens = [int(n) for n in ta.get_seq_lens(given[0], given[2], 16)]
            batch = batch_of(q[:size], kv, [1] * size, kv_lens, step)
            assert_accurate(out[:size], batch)


def test_a_batch_over_the_limits_is_refused_on_the_host_and_noted_on_the_device(
    machine: Machine,
) -> None:
    module, kv = machine.kernel("causal", SPEC), cache_of(machine)
    fits, wide, long = (
        batch_of(queries(machine, n), kv, [1] * n, [tokens] * n, 0).fmt
        for n, tokens in ((4, 100), (5, 100), (4, 2000))
    )
    limits = PlanLimits(4, 4, 16 * 40)
    for over, message in ((wide, "max_batch=5"), (long, "max_kv_tokens=8000")):
        host = module.plan(fits, limits=limits, max_qo_len=1)
        with pytest.raises(LimitError, match=message):
            module.plan(over, out=host)
        assert host.to_json() == module.plan(fits, limits=limits, max_qo_len=1).to_json()
    there = module.plan(on_gpu(fits), limits=limits, max_qo_len=1)
    module.plan(on_gpu(long), out=there)
    out, lse = module.run(there, queries(machine, 4), kv, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    with pytest.raises(LimitError, match="max_kv_tokens=8000"):
        there.check()
    module.plan(on_gpu(fits), out=there)
    there.check()
