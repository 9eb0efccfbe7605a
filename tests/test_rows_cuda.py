"""Rows that are merged or copied: the mapping to cores and to GPU threads, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.test_cascade import states
from tvm_attn.cascade import merge_state, merge_state_in_place, merge_states
from tvm_attn.codegen.compilers import find_compiler
from tvm_attn.codegen.cuda import compile_cuda
from tvm_attn.codegen.host import compile_host
from tvm_attn.runtime.device import access_unit
from tvm_attn.runtime.library import Library
from tvm_attn.schedules.rows import CTA_THREADS, ROW_THREADS, map_rows, row_tile
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target
from tvm_attn.tir import append, states_merge

CPU, GPU = parse_target("llvm"), parse_target("sm_90")
MERGES = ("merge_state", "merge_state_in_place", "merge_states")
COPY = "append_paged_kv_cache"
LARGEST = 2**31 - 1


def merges(dtype: str, dim: int, rows: int) -> Mapping[str, Any]:
    return {name: getattr(states_merge, name)(dtype, dim, rows) for name in MERGES}


def copies(dims: tuple[int, int], storage: str) -> Mapping[str, Any]:
    return {COPY: append.append(AttentionSpec(1, 1, *dims), storage)}


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "storage", "dims", "aligned"),
    [
        ("sm_80", "float16", 128, "uint16", (128, 128), True),
        ("sm_80", "float32", 7, "uint32", (80, 48), False),
        ("sm_90", "bfloat16", 96, "uint8", (192, 128), True),
        ("sm_90", "float16", 512, "uint16", (192, 128), False),
        ("sm_120", "float32", 256, "uint32", (64, 256), True),
        ("sm_120", "bfloat16", 64, "uint8", (256, 256), False),
    ],
)
def test_kernels_live_in_registers(
    arch: str, dtype: str, dim: int, storage: str, dims: tuple[int, int], aligned: bool
) -> None:
    if find_compiler() is None:
        pytest.skip("there is no CUDA compiler")
    target = parse_target(arch)
    sizes = [getattr(torch, name).itemsize for name in (dtype, storage)]
    units = [16 // size if aligned else 1 for size in sizes]
    code = compile_cuda(
        {
            **map_rows(lambda rows: merges(dtype, dim, rows), dim, units[0], target),
            **map_rows(lambda _: copies(dims, storage), max(dims), units[1], target),
        },
        target,
        dialect="s_tir",
    )
    assert set(code.resources) == {*MERGES, COPY}
    for used in code.resources.values():
        assert not any(used[what] for what in ("stack", "spill_stores", "spill_loads"))
        assert used["registers"] <= 64, "two thousand threads do not fit a multiprocessor"
        assert used["threads"] <= max(CTA_THREADS, ROW_THREADS)
    assert ".local" not in code.ptx
    wide = sum(f".v4.{kind}" in code.ptx for kind in ("b32", "u32", "f32"))
    assert bool(wide) == aligned, "rows are read 16 bytes at a time exactly where that is safe"
    assert "merge_states_kernel" in code.source


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_tiles_of_any_number_of_rows_compute_the_same(rows: int) -> None:
    functions = merges("float32", 48, rows)
    defined = Library(compile_host(functions, CPU).library)
    (v_a, s_a), (v_b, s_b) = (states(9, 3, seed=seed) for seed in range(2))
    v_a[0], s_a[0], v_b[0], s_b[0] = 0, -math.inf, 0, -math.inf
    v, s = torch.full((9, 3, 48), math.nan), torch.full((27,), math.nan)
    defined["merge_state"](v_a, s_a.view(-1), v_b, s_b.view(-1), v, s)
    expected = merge_state(v_a, s_a, v_b, s_b)
    assert_close((v, s.view(9, 3)), expected)

    into, mask = (v_a.clone(), s_a.clone()), torch.arange(9) % 3 > 0
    changed = v_a.clone(), s_a.clone()
    defined["merge_state_in_place"](into[0], into[1].view(-1), v_b, s_b.view(-1), mask)
    merge_state_in_place(*changed, v_b, s_b, mask)
    assert_close(into, changed)

    parts = states(9, 5, 3, seed=2)
    defined["merge_states"](*parts, v, s)
    assert_close((v, s.view(9, 3)), merge_states(*parts))


@pytest.mark.parametrize("indices", [[7, 2, 0, 8, 1, 4], [7, 2, 0, 9, -1, 4]])
def test_entries_that_point_outside_are_skipped(indices: list[int]) -> None:
    """As on a GPU, where nobody looks for them first."""
    good = {(0, 0): 7, (0, 11): 0, (2, 7): indices[4], (2, 0): indices[3], (3, 3): 4}
    skipped = [(-1, 0), (2, -3), (4, 0), (LARGEST, 0), (0, 12), (1, 0), (0, LARGEST), (-LARGEST, 5)]
    entries = [entry for pair in zip(skipped, [*good, *good], strict=False) for entry in pair]
    requests, positions = torch.tensor(entries, dtype=torch.int32).t().contiguous()
    table = [torch.tensor(x, dtype=torch.int32) for x in (indices, [0, 3, 3, 5, 6])]
    k_new, v_new = (
        torch.randint(1, 99, (len(entries), 3, dim)).to(torch.uint8) for dim in (48, 32)
    )
    k, v = (torch.zeros(9, 4, 3, dim, dtype=torch.uint8) for dim in (48, 32))
    copy = Library(compile_host(copies((48, 32), "uint8"), CPU).library)[COPY]
    copy(k_new, v_new, requests, positions, *table, k, v)
    for cache, new in ((k, k_new), (v, v_new)):
        expected = torch.zeros_like(cache)
        for row, entry in zip(new, entries, strict=True):
            if 0 <= good.get(entry, -1) < 9:
                expected[good[entry], entry[1] % 4] = row
        assert torch.equal(cache, expected)


def assert_close(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Compare states: elementary functions differ by ulps where they are scheduled."""
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_a_core_takes_a_row_at_a_time_in_vectors() -> None:
    functions = {
        **map_rows(lambda rows: merges("float16", 80, rows), 80, 1, CPU),
        **map_rows(lambda _: copies((80, 48), "uint16"), 80, 1, CPU),
    }
    for name, function in functions.items():
        script = function.script()
        assert script.count("T.parallel(") == 1, name
        assert "thread_binding" not in script
        assert "T.vectorized(80)" in script, name
    assert "T.vectorized(48)" in functions[COPY].script()
    code = compile_host(functions, CPU).source
    assert "x float>" in code
    assert "AllocWorkspace" not in code, "what a row needs is on the stack, if not in registers"


def test_what_has_no_rows_is_not_mapped() -> None:
    search = append.find_outside(AttentionSpec(1, 1, 64))
    [mapped] = map_rows(lambda _: {"find_outside": search}, 64, 1, CPU).values()
    assert mapped.script() == search.script()


@pytest.mark.parametrize(("dim", "unit"), [(128, 8), (64, 16), (48, 4), (7, 1), (256, 1), (512, 1)])
def test_threads_of_a_cta_share_rows_evenly(dim: int, unit: int) -> None:
    tile = row_tile(dim, unit, GPU)
    assert dim % (tile.threads * unit) == 0
    assert tile.rows * tile.threads <= max(CTA_THREADS, ROW_THREADS)
    assert tile.rows * tile.threads > CTA_THREADS // 2
    assert row_tile(dim, unit, CPU).rows == 1


def test_accesses_are_as_wide_as_addresses_allow() -> None:
    def on_gpu(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")  # as far as this can be seen

    rows = on_gpu(5, 3, 64)
    assert access_unit(rows) == 8
    assert access_unit(rows, on_gpu(5, 3, 128)[..., 64:]) == 8
    assert access_unit(on_gpu(5, 3, 64, dtype=torch.uint8)) == 16
    assert access_unit(rows[:, :2], rows[::2]) == 8
    assert access_unit(on_gpu(1, 1, 68)[..., :64]) == 8, "the only row"
    for wrong in (
        on_gpu(5, 3, 68)[..., :64],
        on_gpu(5, 3, 60),
        on_gpu(5, 196)[:, :192].view(5, 3, 64),
    ):
        assert access_unit(rows, wrong) == 1
    assert access_unit(torch.empty(5, 3, 64)) == 1
