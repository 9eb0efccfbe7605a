"""What goes through memory row by row, on GPU tensors: merging states, filling caches, packing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests import test_cascade, test_page
from tests.gpu.row_kernels import ROW_BUILDS
from tests.machine import Machine
from tvm_attn.cascade import merge_state, merge_state_in_place, merge_states
from tvm_attn.errors import TvmAttnError
from tvm_attn.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from tvm_attn.quantization import packbits, segment_packbits

BUILDS = ROW_BUILDS
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
State = tuple[torch.Tensor, torch.Tensor]


def states(machine: Machine, *shape: int, dim: int, dtype: torch.dtype, seed: int = 0) -> State:
    """States ``[*shape, dim]``, a fifth of them empty, with lse of very different sizes."""
    rng = torch.Generator(machine.device).manual_seed(seed)
    v = torch.randn(*shape, dim, generator=rng, device=machine.device).to(dtype)
    s = 20 * torch.randn(*shape, generator=rng, device=machine.device)
    hidden = torch.rand(*shape, generator=rng, device=machine.device) < 0.2
    return v.masked_fill(hidden[..., None], 0), s.masked_fill(hidden, -math.inf)


# Merging


@pytest.mark.parametrize("dim", [16, 64, 112, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging(machine: Machine, dtype: torch.dtype, dim: int) -> None:
    for rows, parts, heads in ((1, 1, 1), (40, 5, 3), (3000, 2, 32), (2, 300, 8)):
        v, s = states(machine, rows, parts, heads, dim=dim, dtype=dtype)
        test_cascade.check_merge(merge_states(v, s), v, s)
        v, s = v[:, :2], s[:, :2]
        pair = merge_state(v[:, 0], s[:, 0], v[:, -1], s[:, -1])
        both = torch.stack([v[:, 0], v[:, -1]], 1), torch.stack([s[:, 0], s[:, -1]], 1)
        test_cascade.check_merge(pair, *both)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging_in_place_where_a_mask_says_so(machine: Machine, dtype: torch.dtype) -> None:
    v, s = states(machine, 500, 3, dim=48, dtype=dtype)
    other = states(machine, 500, 3, dim=48, dtype=dtype, seed=1)
    merged = merge_state(v, s, *other)
    mask = torch.rand(500, device=machine.device) < 0.5
    into = v.clone(), s.clone()
    merge_state_in_place(*into, *other, mask)
    for got, new, old in zip(into, merged, (v, s), strict=True):
        assert torch.equal(got[mask], new[mask])
        assert torch.equal(got[~mask], old[~mask])
    merge_state_in_place(v, s, *other)
    assert torch.equal(v, merged[0])
    assert torch.equal(s, merged[1])


def test_empty_states_are_the_identity(machine: Machine) -> None:
    v, s = states(machine, 40, 3, dim=64, dtype=torch.float16)
    nothing = torch.zeros_like(v), torch.full_like(s, -math.inf)
    for got in (merge_state(v, s, *nothing), merge_state(*nothing, v, s)):
        assert torch.equal(got[0], v)
        assert torch.equal(got[1], s)
    out, lse = merge_state(*nothing, *nothing)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_merging_mixed_devices(machine: Machine) -> None:
    v, s = states(machine, 40, 3, dim=64, dtype=torch.float16)
    for wrong in ((v.cpu(), s, v, s), (v, s.cpu(), v, s), (v, s, v, s.cpu())):
        with pytest.raises(TvmAttnError, match=r"(?i)cpu"):
            merge_state(*wrong)


# Filling caches


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_appending(machine: Machine, dtype: torch.dtype, kv_layout: str, fused: bool) -> None:
    requests, positions = test_page.appended()
    requests, positions = [*requests, -1, 2], [*positions, 0, -3]  # the last two are skipped
    dims = (test_page.DIM_QK, test_page.DIM_QK if fused else test_page.DIM_VO)
    news = [test_page.new_tokens(len(requests), dtype, dim, dim + i) for i, dim in enumerate(dims)]
    caches = [test_page.empty_cache(dtype, kv_layout, dim).to(machine.device) for dim in dims]
    cache: Any = tuple(caches)
    if fused:
        wide = torch.stack([cache.float() for cache in caches], dim=1)
        cache = wide.to(dtype)
        caches = list(cache.unbind(1))
    table = (test_page.INDICES, test_page.INDPTR, test_page.LAST_PAGE_LEN)
    on_device = [machine.put(x).int() for x in (requests, positions)]
    append_paged_kv_cache(
        *(new.to(machine.device) for new in news),
        *on_device,
        cache,
        *(x.to(machine.device) for x in table),
        kv_layout,
    )
    for cache, new in zip(caches, news, strict=True):
        expected = test_page.expected_cache(new, requests, positions)
        assert torch.equal(test_page.by_token(cache, kv_layout).cpu(), expected)


def test_positions_of_new_tokens(machine: Machine) -> None:
    on_device = [x.to(machine.device) for x in (test_page.INDPTR, test_page.LAST_PAGE_LEN)]
    lens = get_seq_lens(*on_device, test_page.PAGE_SIZE)
    assert lens.tolist() == test_page.SEQ_LENS
    indptr = machine.put([0, *torch.tensor(test_page.NEW).cumsum(0).tolist()]).int()
    requests, positions = test_page.appended()
    got = get_batch_indices_positions(indptr, lens, len(requests))
    assert [x.tolist() for x in got] == [requests, positions]
    assert all(x.device.type == machine.device for x in got)


# Packing


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packing(machine: Machine, bitorder: str) -> None:
    bits = torch.rand(1001, generator=torch.Generator().manual_seed(0)) < 0.5
    there = bits.to(machine.device)
    assert torch.equal(packbits(there, bitorder).cpu(), packbits(bits, bitorder))
    indptr = torch.tensor([0, 5, 5, 400, 1001])
    got = segment_packbits(there, indptr.to(machine.device), bitorder)
    for x, expected in zip(got, segment_packbits(bits, indptr, bitorder), strict=True):
        assert x.device.type == machine.device
        assert torch.equal(x.cpu(), expected)
