"""How kernels run on a GPU: without waiting, on any stream, cut in pieces, with the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.accuracy import State, assert_accurate
from tests.batches import Batch
from tests.cases import arguments, variant
from tests.gpu.device import ANY_GPU
from tests.machine import Machine
from tests.test_semantics import assert_same_bits
from tvm_attn import reference
from tvm_attn.runtime.plan import Plan
from tvm_attn.runtime.workspace import PlanLimits

_NAMES = ("window", "custom_mask")
KERNELS = [(ANY_GPU.paged, variant(name, ANY_GPU.paged)) for name in _NAMES]

CAUSAL = {"mask": reference.causal()}
CYCLES = 2**30
"""What a GPU takes half a second or more to count."""
UNCUT = 2**30
"""A fixed split that no request is longer than."""

LENS = (
    ([1, 7, 0, 40, 3], [200, 30, 5, 90, 0]),
    ([1] * 30, [17 * n for n in range(30)]),
    ([300, 5], [300, 2000]),
    ([1], [9000]),
)


@contextmanager
def busy() -> Iterator[None]:
    """Keep the current stream busy; what is queued inside must not have waited for it."""
    torch.cuda._sleep(CYCLES)
    yield
    assert not torch.cuda.current_stream().query(), "something waited for the GPU"
    torch.cuda.synchronize()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let torch raise where it waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batches(machine: Machine) -> list[Batch]:
    return [machine.batch(machine.paged, *lens, seed=seed) for seed, lens in enumerate(LENS)]


def planned(machine: Machine, batch: Batch, out: Plan | None = None) -> Plan:
    return machine.kernel("window", batch.spec).plan(batch.fmt, out=out)


def ran(machine: Machine, batch: Batch, plan: Plan) -> State:
    module = machine.kernel("window", batch.spec)
    return module.run(plan, batch.q, batch.kv, return_lse=True)


def results(machine: Machine) -> list[State]:
    """What the batches give one at a time, each checked."""
    states = []
    for batch in batches(machine):
        state = ran(machine, batch, planned(machine, batch))
        assert_accurate(state, batch, **CAUSAL)
        states.append(state)
    torch.cuda.synchronize()
    return states


# Without waiting


@pytest.mark.parametrize("name", ["window", "custom_mask"])
def test_planning_and_running_never_wait(machine: Machine, name: str) -> None:
    batch = machine.batch(machine.paged, *LENS[0])
    module, args = machine.kernel(name, batch.spec), arguments(name, batch)

    def plan_and_run() -> State:
        plan = module.plan(batch.fmt, **args.plan)
        return module.run(plan, batch.q, batch.kv, return_lse=True, **args.run)

    expected = plan_and_run()
    torch.cuda.synchronize()
    with no_synchronisation(), busy():
        got = plan_and_run()
    assert_same_bits(got, expected)


def test_what_is_queued_is_not_touched_by_later_plans(machine: Machine) -> None:
    """Neither memory on the device nor pinned memory is used again before its reader is done."""
    expected, given = results(machine), batches(machine)
    torch.cuda.synchronize()
    got = []
    torch.cuda._sleep(CYCLES)
    for _ in range(8):
        got += [ran(machine, batch, planned(machine, batch)) for batch in given]
    plan = None
    for _ in range(8):
        for batch in given:
            plan = planned(machine, batch, out=plan)
            got.append(ran(machine, batch, plan))
    torch.cuda.synchronize()
    for number, state in enumerate(got):
        assert_same_bits(state, expected[number % len(given)])


# Streams


def test_two_streams_at_once(machine: Machine) -> None:
    expected, given = results(machine), batches(machine)
    streams = [torch.cuda.Stream() for _ in range(2)]
    got: list[list[State]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(30):
        for stream, batch, states in zip(streams, given[1:3], got, strict=True):
            with torch.cuda.stream(stream):
                states.append(ran(machine, batch, planned(machine, batch)))
    torch.cuda.synchronize()
    for states, state in zip(got, expected[1:3], strict=True):
        for other in states:
            assert_same_bits(other, state)


def test_a_run_on_another_stream_waits_for_its_plan(machine: Machine) -> None:
    [batch, *_] = batches(machine)
    [expected, *_] = results(machine)
    stream = torch.cuda.Stream()
    torch.cuda._sleep(CYCLES)
    plan = planned(machine, batch)
    with torch.cuda.stream(stream):
        got = ran(machine, batch, plan)
    torch.cuda.synchronize()
    assert_same_bits(got, expected)


def test_plans_made_on_one_stream_and_run_on_another(machine: Machine) -> None:
    """Memory of plans goes to later ones on the stream they were made for, and on no other."""
    expected, given = results(machine), batches(machine)
    streams = [torch.cuda.Stream() for _ in range(3)]
    rng = random.Random(0)
    got, plan = [], None
    torch.cuda.synchronize()
    for number in range(80):
        with torch.cuda.stream(rng.choice(streams)):
            out = plan if rng.random() < 0.5 else None
            plan = planned(machine, given[number % len(given)], out=out)
        with torch.cuda.stream(rng.choice(streams)):
            got.append(ran(machine, given[number % len(given)], plan))
    torch.cuda.synchronize()
    for number, state in enumerate(got):
        assert_same_bits(state, expected[number % len(given)])


def test_threads_plan_and_run_side_by_side(machine: Machine) -> None:
    expected, given = results(machine), batches(machine)

    def work(first: int) -> list[State]:
        got, plan = [], None
        for number in range(first, first + 40):
            batch = given[number % len(given)]
            plan = planned(machine, batch, out=plan if number % 3 else None)
            got.append(ran(machine, batch, plan))
        torch.cuda.synchronize()
        return got

    with ThreadPoolExecutor(4) as pool:
        for first, states in enumerate(pool.map(work, range(4))):
            for number, state in enumerate(states, first):
                assert_same_bits(state, expected[number % len(given)])


@pytest.mark.parametrize("limits", [None, PlanLimits(40, 400, 12_000)], ids=["free", "limits"])
def test_arrays_may_change_once_they_are_planned(
    machine: Machine, limits: PlanLimits | None
) -> None:
    given, module = batches(machine), machine.kernel("window", machine.paged)
    plans = (module.plan(*tables(batch), limits=limits) for batch in given)
    expected = [ran(machine, batch, plan) for batch, plan in zip(given, plans, strict=True)]
    got, plan = [], None
    torch.cuda._sleep(CYCLES)
    for batch in given * 4:
        arrays = [x.clone() for x in tables(batch)]
        plan = module.plan(*arrays, out=plan, limits=limits)
        for array in arrays:
            array.fill_(-1)
        got.append(ran(machine, batch, plan))
    torch.cuda.synchronize()
    for number, state in enumerate(got):
        assert_same_bits(state, expected[number % len(given)])


def tables(batch: Batch) -> list[torch.Tensor]:
    """The index arrays of a batch."""
    fmt = batch.fmt
    arrays = (fmt.qo_indptr, fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len)
    return [array for array in arrays if array is not None]


# Pieces


def split(machine: Machine, batch: Batch, name: str, size: int | None) -> tuple[int, State]:
    """Return how many partial states there are, and the result."""
    module = machine.kernel(name, batch.spec)
    plan = module.plan(batch.fmt, fixed_split_size=size)
    return plan.num_slots, module.run(plan, batch.q, batch.kv, return_lse=True)


@pytest.mark.parametrize("lens", [([1], [9000]), ([3, 1], [20_000, 70]), ([40], [5000])], ids=str)
def test_few_long_requests_are_cut_and_give_the_same(
    machine: Machine, lens: tuple[list[int], list[int]]
) -> None:
    batch = machine.batch(machine.paged, *lens)
    slots, cut = split(machine, batch, "window", None)
    none, whole = split(machine, batch, "window", UNCUT)
    assert slots > 0
    assert none == 0
    for state in (cut, whole):
        assert_accurate(state, batch, **CAUSAL)


def test_pieces_merge_in_the_same_order_in_every_run(machine: Machine) -> None:
    batch = machine.batch(machine.paged, [1, 3], [20_000, 9000])
    module = machine.kernel("window", batch.spec)
    plan = module.plan(batch.fmt)
    assert plan.num_slots > 0
    first = module.run(plan, batch.q, batch.kv, return_lse=True)
    for _ in range(200):
        assert_same_bits(module.run(plan, batch.q, batch.kv, return_lse=True), first)
    for _ in range(20):
        assert_same_bits(split(machine, batch, "window", None)[1], first)


@pytest.mark.parametrize("size", [64, 100, 1024])
def test_with_a_fixed_split_long_requests_do_not_see_their_neighbours(
    machine: Machine, size: int
) -> None:
    """Alone, first, last, and among so many that none would be cut."""
    mine = machine.batch(machine.paged, [5], [3000], seed=5)
    _, expected = split(machine, mine, "window", size)
    assert_accurate(expected, mine, **CAUSAL)
    for before, after in (([], [900]), ([17, 2500], []), ([700] * 100, [700] * 100)):
        kv_lens = [*before, 3000, *after]
        batch = machine.batch(machine.paged, [5] * len(kv_lens), kv_lens)
        rows = slice(5 * len(before), 5 * len(before) + 5)
        batch.q[rows] = mine.q
        assert batch.fmt.kv_indices is not None
        assert mine.fmt.kv_indices is not None
        begin, end = batch.fmt.kv_indptr[len(before) : len(before) + 2].tolist()
        for cache, own in zip(batch.kv, mine.kv, strict=True):
            cache[batch.fmt.kv_indices[begin:end].long()] = own[mine.fmt.kv_indices.long()]
        _, got = split(machine, batch, "window", size)
        assert_same_bits(tuple(x[rows] for x in got), expected)


def test_heads_are_a_run_time_value(machine: Machine) -> None:
    """One kernel for any number of KV heads with the same group."""
    for kv_heads in (1, 3, 16):
        spec = replace(machine.paged, num_qo_heads=4 * kv_heads, num_kv_heads=kv_heads)
        batch = machine.batch(spec, *LENS[0])
        assert_accurate(machine.run("window", batch, {"window_left": -1}), batch, **CAUSAL)
        assert (
            machine.kernel("window", spec).source == machine.kernel("window", machine.paged).source
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_index_arrays_on_the_device_are_copied_to_the_host(
    machine: Machine, dtype: torch.dtype
) -> None:
    arrays = tables(batches(machine)[0])
    on_device = (x.to(machine.device, dtype) for x in arrays)
    module = machine.kernel("window", machine.paged)
    assert module.plan(*on_device).to_json() == module.plan(*arrays).to_json()
