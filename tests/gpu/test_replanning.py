"""Plans with limits that are replanned from arrays on the host, as for every decoded token."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.accuracy import State
from tests.batches import Batch
from tests.gpu.test_execution import CYCLES, busy, no_synchronisation
from tests.gpu.test_graphs import KERNELS, PAGES, SPEC, batch_of, cache_of, in_graph, lengths
from tests.machine import Machine
from tests.test_replanning import arrays, renewed
from tests.test_semantics import assert_same_bits
from tvm_attn.errors import PlanError
from tvm_attn.runtime import upload
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.runtime.plan import Plan
from tvm_attn.runtime.workspace import PlanLimits

__all__ = ["KERNELS", "renewed"]

SIZE = 40
LIMITS = PlanLimits(SIZE, SIZE, 16 * PAGES)


@pytest.fixture
def module(machine: Machine) -> AttentionModule:
    return machine.kernel("causal", SPEC)


@pytest.fixture
def batches(machine: Machine) -> list[Batch]:
    kv = cache_of(machine)
    q = torch.randn(SIZE, SPEC.num_qo_heads, SPEC.head_dim_qk, device=machine.device).half()
    return [batch_of(q, kv, [1] * SIZE, lengths(SIZE, seed), seed) for seed in range(6)]


def run(module: AttentionModule, plan: Plan, batch: Batch, **given: Any) -> State:
    return module.run(plan, batch.q, batch.kv, return_lse=True, **given)


def expected(module: AttentionModule, batches: list[Batch]) -> list[State]:
    states = [
        run(module, module.plan(*arrays(batch.fmt), limits=LIMITS), batch) for batch in batches
    ]
    torch.cuda.synchronize()
    return states


def test_it_never_waits_and_spares_what_is_read(
    module: AttentionModule, batches: list[Batch], renewed: list[Plan]
) -> None:
    states, got = expected(module, batches), []
    plan = module.plan(*arrays(batches[0].fmt), limits=LIMITS)
    run(module, plan, batches[0])
    torch.cuda.synchronize()
    with no_synchronisation(), busy():
        for batch in batches * 3:
            module.plan(*arrays(batch.fmt), out=plan)
            got.append(run(module, plan, batch))
    assert len(renewed) == len(got)
    for number, state in enumerate(got):
        assert_same_bits(state, states[number % len(states)])


def test_streams_and_what_was_used_on_another_one(
    module: AttentionModule, batches: list[Batch]
) -> None:
    states = expected(module, batches)
    streams = [torch.cuda.Stream() for _ in range(2)]
    plans = [module.plan(*arrays(batches[0].fmt), limits=LIMITS) for _ in streams]
    got: list[tuple[int, State]] = []
    torch.cuda.synchronize()
    for turn in range(20):
        for stream, plan, number in zip(streams, plans, (turn % 6, (turn + 2) % 6), strict=True):
            with torch.cuda.stream(stream):
                module.plan(*arrays(batches[number].fmt), out=plan)
                got.append((number, run(module, plan, batches[number])))
    torch.cuda.synchronize()
    for number, batch in enumerate(batches):
        with torch.cuda.stream(streams[0]):
            module.plan(*arrays(batch.fmt), out=plans[0])
        with torch.cuda.stream(streams[1]):
            got.append((number, run(module, plans[0], batch)))
        torch.cuda.synchronize()
    for number, state in got:
        assert_same_bits(state, states[number])


def test_a_graph_sees_it_and_cannot_capture_it(
    module: AttentionModule, batches: list[Batch], renewed: list[Plan]
) -> None:
    states = expected(module, batches)
    out, lse = (torch.empty_like(x) for x in states[0])
    plan = module.plan(*arrays(batches[0].fmt), limits=LIMITS)
    torch.cuda.synchronize()

    def captured() -> None:
        if torch.cuda.is_current_stream_capturing():
            with pytest.raises(PlanError, match="cannot capture"):
                module.plan(*arrays(batches[1].fmt), out=plan)
        run(module, plan, batches[0], out=out, lse=lse)

    graph = in_graph(captured)
    for batch, state in zip(batches, states, strict=True):
        module.plan(*arrays(batch.fmt), out=plan)
        out.fill_(torch.nan)
        graph.replay()
        assert_same_bits((out, lse), state)
    assert len(renewed) == len(batches)


def test_plans_are_collected_while_a_graph_is_captured(
    module: AttentionModule, batches: list[Batch]
) -> None:
    [state, *_] = expected(module, batches)
    out, lse = (torch.full_like(x, torch.nan) for x in state)
    plan = module.plan(*arrays(batches[0].fmt), limits=LIMITS)
    others = [module.plan(*arrays(batch.fmt), limits=LIMITS) for batch in batches]
    others += [module.plan(batch.fmt) for batch in batches]
    torch.cuda.synchronize()

    def captured() -> None:
        if torch.cuda.is_current_stream_capturing():
            others.clear()
            gc.collect()
        run(module, plan, batches[0], out=out, lse=lse)

    graph = in_graph(captured)
    assert not others
    out.fill_(torch.nan)
    graph.replay()
    assert_same_bits((out, lse), state)


def test_memory_is_kept_while_it_is_read(module: AttentionModule, batches: list[Batch]) -> None:
    plan = module.plan(*arrays(batches[0].fmt), limits=LIMITS)
    there = plan.placement.there
    assert there is not None and plan.block is not None
    room, used, size = there.room.block, there.ids + plan.num_pages, len(plan.block.memory)
    torch.cuda.synchronize()
    words = room.clone()
    room.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    module.plan(*arrays(batches[0].fmt), out=plan)
    del plan, there
    gc.collect()
    others = [torch.full((size,), -1, dtype=torch.int32, pin_memory=True) for _ in range(6)]
    assert not torch.cuda.current_stream().query(), "all of this is while the copy waits"
    torch.cuda.synchronize()
    assert torch.equal(room[:used], words[:used])
    del others
    upload.let_go()
    assert not upload._kept
