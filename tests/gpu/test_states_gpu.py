"""Merging states, filling caches and packing bits on the GPU, against the same on the CPU.

What `test_rows` does not have: every alignment and stride, entries that point outside, and that the
host waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.accuracy import assert_states_accurate
from tests.gpu.row_kernels import ROW_BUILDS
from tests.machine import Machine
from tests.test_cascade import merged
from tvm_attn.cascade import merge_state, merge_state_in_place, merge_states
from tvm_attn.errors import ShapeError
from tvm_attn.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from tvm_attn.quantization import packbits, segment_packbits

BUILDS = ROW_BUILDS
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = 2**31 - 1
State = tuple[torch.Tensor, torch.Tensor]


def states(*shape: int, dim: int, dtype: torch.dtype, seed: int = 0) -> State:
    """States ``[*shape, dim]`` on the GPU, a third of them empty; all of row 0."""
    rng = torch.Generator().manual_seed(seed)
    v = torch.randn(*shape, dim, generator=rng).to(dtype)
    s = 20 * torch.randn(*shape, generator=rng)
    hidden = torch.rand(*shape, generator=rng) < 1 / 3
    hidden[:1] = True
    return v.masked_fill(hidden[..., None], 0).cuda(), s.masked_fill(hidden, -math.inf).cuda()


def view(x: torch.Tensor, shift: int, extra: int) -> torch.Tensor:
    """Return a copy that begins `shift` elements after 16 bytes, `extra` ones between its rows."""
    *sizes, heads, dim = x.shape
    wide = torch.full((*sizes, 2 * heads, dim + extra), math.nan, device=x.device).to(x.dtype)
    memory = torch.empty(wide.numel() + shift, dtype=x.dtype, device=x.device)
    shifted = memory[shift:].view_as(wide).copy_(wide)[..., ::2, :dim]
    return shifted.copy_(x)


def check(got: State, v: torch.Tensor, s: torch.Tensor) -> None:
    """Hold a merge over axis 1 against the promise; nothing is NaN, and row 0 is empty, exactly."""
    v, s = v.cpu(), s.cpu()
    eager_v, eager_s = merged(v, s, torch.float32)
    assert_states_accurate(got, merged(v, s, torch.float64), (eager_v.to(v.dtype), eager_s))
    assert not got[0][0].any()
    assert (got[1][0] == -math.inf).all()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error where torch makes the host wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Merging


@pytest.mark.parametrize(("shift", "extra"), [(0, 0), (0, 16), (1, 0), (0, 1)])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        (torch.float32, 7),
        (torch.float32, 256),
        (torch.float16, 128),
        (torch.bfloat16, 48),
        (torch.bfloat16, 128),
    ],
)
def test_rows_anywhere_are_merged(dtype: torch.dtype, dim: int, shift: int, extra: int) -> None:
    v, s = states(70, 4, 5, dim=dim, dtype=dtype)
    apart = view(v, shift, extra)
    check(merge_states(apart, s), v, s)
    pair = merge_state(apart[:, 0], s[:, 0], apart[:, 3], s[:, 3])
    check(pair, v[:, ::3], s[:, ::3])
    into, lse = view(v[:, 0], shift, extra), s[:, 0].contiguous()
    around = into._base.clone() if into._base is not None else None
    merge_state_in_place(into, lse, apart[:, 3], s[:, 3])
    assert torch.equal(into, pair[0])
    assert torch.equal(lse, pair[1])
    if around is not None:
        gaps = around.isnan()
        assert torch.equal(into._base.isnan(), gaps), "what lies between rows has changed"


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_empty_states_are_not_looked_at(dtype: torch.dtype, shift: int) -> None:
    v, s = states(70, 4, 5, dim=128, dtype=dtype)
    dead = view(v.masked_fill((s == -math.inf)[..., None], math.nan), shift, 0)
    assert all(map(torch.equal, merge_states(dead, s), merge_states(v, s)))
    expected = merge_state(v[:, 0], s[:, 0], v[:, 3], s[:, 3])
    assert not expected[0].isnan().any()
    assert all(map(torch.equal, merge_state(dead[:, 0], s[:, 0], dead[:, 3], s[:, 3]), expected))
    into, lse = view(dead[:, 0], shift, 0), s[:, 0].contiguous()
    merge_state_in_place(into, lse, dead[:, 3], s[:, 3])
    assert torch.equal(into, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_is_out_of_place(dtype: torch.dtype) -> None:
    v, s = states(4000, 33, dim=128, dtype=dtype)
    other = states(4000, 33, dim=128, dtype=dtype, seed=1)
    expected, twice = merge_state(v, s, *other), merge_state(v, s, v, s)
    for _ in range(10):  # several threads share a row: none may see the s that another has stored
        into = v.clone(), s.clone()
        merge_state_in_place(*into, *other)
        assert all(map(torch.equal, into, expected))
    into = v.clone(), s.clone()
    merge_state_in_place(*into, *into)
    assert all(map(torch.equal, into, twice))
    mask = torch.arange(4000, device="cuda") % 3 > 0
    partly = v.clone(), s.clone()
    merge_state_in_place(*partly, *other, mask)
    for got, new, old in zip(partly, expected, (v, s), strict=True):
        assert torch.equal(got[mask], new[mask])
        assert torch.equal(got[~mask], old[~mask])


def test_many_states_merge_in_their_order() -> None:
    v, s = states(3, 1000, 8, dim=128, dtype=torch.bfloat16)
    first = merge_states(v, s)
    check(first, v, s)
    assert all(map(torch.equal, merge_states(v, s), first))


def test_merging_nothing() -> None:
    v, s = states(5, 3, dim=64, dtype=torch.float16)
    assert merge_state(v[:0], s[:0], v[:0], s[:0])[0].shape == (0, 3, 64)
    out, lse = merge_states(v[:, None][:, :0], s[:, None][:, :0])
    assert not out.any()
    assert (lse == -math.inf).all()
    assert out.is_cuda
    merge_state_in_place(v[:0], s[:0], v[:0], s[:0])


def test_merging_more_than_2_31_elements() -> None:
    torch.cuda.empty_cache()
    rows, dim = 2**31 // (32 * 128) + 100, 128
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    v = torch.empty(rows, 1, 32, dim, dtype=torch.float16, device="cuda").fill_(2)
    s = torch.zeros(rows, 1, 32, device="cuda")
    v[-1], s[-1] = torch.randn(1, 32, dim).cuda(), torch.randn(1, 32).cuda()
    out, lse = merge_states(v, s)
    assert out.numel() > 2**31
    assert torch.equal(out[-1], v[-1, 0])
    assert torch.equal(lse[-1], s[-1, 0])
    assert bool((out[:-1] == 2).all())


# Filling caches

PAGES, PAGE_SIZE = 40, 4
INDPTR, LAST = [0, 9, 9, 24, 25], [4, 1, 3, 1]
INDICES = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0))[:25].int()
GOOD = [(0, p) for p in range(33)] + [(2, p) for p in range(59)] + [(3, 3)]
SKIPPED = [(-1, 0), (2, -3), (4, 0), (LARGEST, 0), (0, 36), (1, 0), (0, LARGEST), (3, 4)]


def bits(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random elements, small enough to be numbers in every dtype."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("extra", [0, 16, 1])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [1, 8, 11])
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        (torch.float32, (128, 128)),
        (torch.bfloat16, (192, 128)),
        (torch.float8_e4m3fn, (48, 256)),
    ],
)
def test_caches_are_filled_as_on_the_cpu(
    dtype: torch.dtype, heads: int, dims: tuple[int, int], kv_layout: str, extra: int
) -> None:
    entries = GOOD[::2] + SKIPPED[:4] + GOOD[1::2] + SKIPPED[4:]
    is_good = torch.tensor([entry in GOOD for entry in entries])
    requests, positions = (torch.tensor(x, dtype=torch.int64) for x in zip(*entries, strict=True))
    new = [bits(len(entries), heads, dim + extra, dtype=dtype, seed=dim) for dim in dims]
    inner = (PAGE_SIZE, heads) if kv_layout == "NHD" else (heads, PAGE_SIZE)
    here = [bits(PAGES, *inner, dim + extra, dtype=dtype, seed=dim + 1) for dim in dims]
    there = [cache.cuda() for cache in here]
    table = INDICES, torch.tensor(INDPTR), torch.tensor(LAST)
    append_paged_kv_cache(
        *(x[is_good, :, :dim] for x, dim in zip(new, dims, strict=True)),
        requests[is_good],
        positions[is_good],
        tuple(x[..., :dim] for x, dim in zip(here, dims, strict=True)),
        *table,
        kv_layout,
    )
    append_paged_kv_cache(
        *(x.cuda()[..., :dim] for x, dim in zip(new, dims, strict=True)),
        requests.cuda(),
        positions.cuda(),
        tuple(x[..., :dim] for x, dim in zip(there, dims, strict=True)),
        *(x.cuda() for x in table),
        kv_layout,
    )
    for got, expected in zip(there, here, strict=True):
        assert torch.equal(got.cpu().float(), expected.float())


def test_pages_that_are_not_there_are_left_out() -> None:
    new = bits(3, 2, 64, dtype=torch.float16, seed=0).cuda()
    k, v = (torch.zeros(2, PAGE_SIZE, 2, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    for indices, indptr in (([1, 2, -1], [0, 3]), ([1], [0, 3]), ([1, 1, 1], [-1, 2])):
        k.zero_()
        v.zero_()
        append_paged_kv_cache(new, new, [0, 0, 0], [1, 4, 8], (k, v), indices, indptr, [4])
        if indptr[0] == 0:
            assert torch.equal(k[1, 1], new[0])
            k[1, 1], v[1, 1] = 0, 0
        assert not k.any()
        assert not v.any()
    append_paged_kv_cache(new[:0], new[:0], [], [], (k, v), [1], [0, 1], [1])


def test_a_large_cache_is_filled_at_its_end() -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of free GPU memory")
    pages = 2**31 // (16 * 8 * 128) + 2
    k, v = (torch.zeros(pages, 16, 8, 128, dtype=torch.float16, device="cuda") for _ in range(2))
    new = bits(1, 8, 128, dtype=torch.float16, seed=0).cuda()
    append_paged_kv_cache(new, -new, [0], [15], (k, v), [pages - 1], [0, 1], [16])
    assert torch.equal(k[-1, 15], new[0])
    assert torch.equal(v[-1, 15], -new[0])
    assert int(k.any(-1).sum()) == int(new.any(-1).sum())


# Streams, graphs, devices


def everything(machine: Machine) -> Callable[[], list[torch.Tensor]]:
    """Return a function that calls every function of here, and returns the results."""
    v, s = states(50, 4, 3, dim=64, dtype=torch.float16)
    new = bits(8, 3, 64, dtype=torch.float16, seed=0).cuda()
    cache = torch.zeros(PAGES, 2, PAGE_SIZE, 3, 64, dtype=torch.float16, device="cuda")
    indptr, last, added = (machine.put(x).int() for x in (INDPTR, LAST, [0, 5, 5, 8, 8]))
    indices, mask = INDICES.cuda(), torch.arange(50, device="cuda") % 2 > 0
    flags, segments = torch.arange(50, device="cuda") % 3 > 0, torch.tensor([0, 5, 5, 50])
    v_0, s_0 = v[:, 0].contiguous(), s[:, 0].contiguous()

    def call() -> list[torch.Tensor]:
        lens = get_seq_lens(indptr, last, PAGE_SIZE)
        entries = get_batch_indices_positions(added, lens, 8)
        append_paged_kv_cache(new, new, *entries, cache, indices, indptr, last)
        into = v_0.clone(), s_0.clone()
        merge_state_in_place(*into, v[:, 1], s[:, 1])
        merge_state_in_place(*into, v[:, 2], s[:, 2], mask)
        pair = merge_state(*into, v[:, 3], s[:, 3])
        return [lens, *entries, cache, *into, *pair, *merge_states(v, s), packbits(flags)]

    segment_packbits(flags, segments)
    call()
    return call


def test_the_host_waits_for_nothing(machine: Machine) -> None:
    call = everything(machine)
    with no_waiting():
        call()
    flags, on_host = torch.ones(9, device="cuda"), torch.tensor([0, 3, 9])
    with no_waiting():
        packed, indptr = segment_packbits(flags, on_host, "little")
    assert packed.tolist() == [0b111, 0b111111]
    assert indptr.tolist() == [0, 1, 2]
    assert indptr.is_cuda


def test_work_is_done_on_the_current_stream_and_captured(machine: Machine) -> None:
    call = everything(machine)
    expected = [x.clone() for x in call()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        late = [x.clone() for x in call()]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    for x in replayed:
        x.zero_()
    graph.replay()
    for found in (late, replayed):
        assert all(map(torch.equal, found, expected))


def test_tensors_of_several_devices_are_named() -> None:
    v, s = states(4, 3, dim=64, dtype=torch.float16)
    with pytest.raises(ShapeError, match="s_b is on cpu, the kernel runs on cuda:0"):
        merge_state(v, s, v, s.cpu())
    with pytest.raises(ShapeError, match="v_other is on cuda:0, the kernel runs on the CPU"):
        merge_state_in_place(v.cpu(), s.cpu(), v, s)
    with pytest.raises(ShapeError, match="mask is on cpu"):
        merge_state_in_place(v, s, v, s, torch.ones(4, dtype=torch.bool))
    cache = torch.zeros(9, 2, 4, 3, 64, dtype=torch.float16)
    arrays = [0, 0, 0, 0], [0, 1, 2, 3]
    with pytest.raises(ShapeError, match="append_key is on cuda:0, the kernel runs on the CPU"):
        append_paged_kv_cache(v, v, *arrays, cache, [0], [0, 1], [4])
    with pytest.raises(ShapeError, match="kv_indptr is on cpu, the kernel runs on cuda:0"):
        append_paged_kv_cache(v, v, *arrays, cache.cuda(), [0], torch.tensor([0, 1]), [4])
    with pytest.raises(ShapeError, match="seq_lens is on cpu"):
        get_batch_indices_positions(torch.tensor([0, 1]).cuda(), torch.tensor([1]), 1)
    with pytest.raises(ShapeError, match="indptr is on cuda:0, the kernel runs on the CPU"):
        segment_packbits(torch.ones(3), torch.tensor([0, 3]).cuda())


def test_positions_past_the_end_are_left_out_on_the_gpu(machine: Machine) -> None:
    got = get_batch_indices_positions(machine.put([0, 3, 5]), machine.put([4, 9]), 4)
    assert [x.tolist() for x in got] == [[0, 0, 0, 1], [1, 2, 3, 7]]
    assert get_seq_lens(machine.put(INDPTR), LAST, PAGE_SIZE).tolist() == [36, 0, 59, 1]


def test_segments_are_checked(machine: Machine) -> None:
    for wrong in ([0, 3, 2], [-1, 4], [0, 5]):
        with pytest.raises(ShapeError, match=r"stay in 0\.\.4"):
            segment_packbits(torch.ones(4, device="cuda"), machine.put(wrong))
