"""Tiles of tensor-core kernels: within the limits of every card, and those that were measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from tests.generating import generate_kernel
from tvm_attn import pipeline
from tvm_attn.errors import DTypeError, SpecError, TargetError
from tvm_attn.schedules import tiles_cuda
from tvm_attn.schedules.tile_tables import WORSE, tile_tables
from tvm_attn.schedules.tiles_cuda import (
    FAMILIES,
    REGISTER_LIMIT,
    RESERVED_BYTES,
    SHARED_STEP,
    CudaTile,
    Kind,
    Rank,
    candidates,
    cuda_tiles,
    ranked_tiles,
    tiles_to_try,
)
from tvm_attn.schedules.tiles_decode import DecodeRank
from tvm_attn.shipped import VARIANTS
from tvm_attn.spec import FP8_DTYPES, AttentionSpec
from tvm_attn.target import ARCHS, BuildTarget, parse_target
from tvm_attn.variants import causal

DIMS = (*((dim, dim) for dim in range(16, 257, 16)), (192, 128))
STORED = (None, *FP8_DTYPES)
MAKES = tuple(product((False, True), repeat=2))
HOPPER = parse_target("sm_90")


def spec(dims: tuple[int, int], kv_dtype: str | None = None) -> AttentionSpec:
    return AttentionSpec(8, 2, *dims, kv_dtype=kv_dtype)


def tile(**changes: Any) -> CudaTile:
    return replace(CudaTile("long", 128, 64, 4, 2, 2), **changes)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_dtype", STORED)
def test_nothing_is_over_a_card_s_limits(arch: str, kv_dtype: str | None) -> None:
    target = parse_target(arch)
    card = target.arch
    assert card is not None
    for dims, makes, family in product(DIMS, MAKES, FAMILIES):
        problem = spec(dims, kv_dtype)
        tiles = ranked_tiles(problem, target, family, makes)
        assert cuda_tiles(problem, target, makes)[FAMILIES.index(family)] == tiles[0]
        for each in tiles:
            shared, threads = each.shared_bytes(problem, makes), each.residents * each.threads
            taken = -(-shared // SHARED_STEP) * SHARED_STEP + RESERVED_BYTES
            assert each.family == family
            assert shared <= card.shared_memory_per_block
            assert each.residents * taken <= card.shared_memory_per_sm
            assert each.registers(problem) <= REGISTER_LIMIT
            assert threads * each.registers(problem) <= card.registers_per_block
            assert threads <= card.max_threads_per_sm
            assert each.threads <= card.max_threads_per_block


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_tried_after_spills_needs_fewer_registers(arch: str) -> None:
    target = parse_target(arch)
    for dims, kv_dtype, family in product(DIMS, STORED, FAMILIES):
        problem = spec(dims, kv_dtype)
        tries = tiles_to_try(problem, target, family)
        assert tries[0] == ranked_tiles(problem, target, family)[0]
        registers = [each.registers(problem) for each in tries]
        assert len(tries) > 1
        assert all(after < before for before, after in pairwise(registers))


def test_no_other_number_of_ctas_would_fit_better() -> None:
    problem = spec((64, 64))
    for each in ranked_tiles(problem, HOPPER, "long"):
        count = each.residents + 1
        assert (
            count * (each.shared_bytes(problem) + SHARED_STEP + RESERVED_BYTES) > 228 * 1024
            or count * each.threads * each.registers(problem) > 65536
            or count * each.threads > 2048
        )


@pytest.mark.parametrize(
    ("dims", "rows", "block", "warps", "residents"),
    [((64, 64), 128, 64, 4, 3), ((128, 128), 128, 64, 4, 2), ((256, 256), 128, 64, 8, 1)],
)
def test_tiles_that_were_measured_on_hopper(
    dims: tuple[int, int], rows: int, block: int, warps: int, residents: int
) -> None:
    _, long = cuda_tiles(spec(dims), HOPPER)
    assert replace(long, holds_queries=False) == CudaTile("long", rows, block, warps, 2, residents)
    assert long.holds_queries == (dims == (256, 256))


def test_rows_of_a_warp_come_first_unless_blocks_are_too_short() -> None:
    good, better = tile(warps=8), tile(block=32)
    assert better.rank() > good.rank() > tile(block=16).rank()
    assert tile().rank() > better.rank() and tile().rank() > tile(stages=1).rank()
    assert tile(residents=3).rank() > tile().rank() > tile(residents=1).rank()


KERNELS: dict[str, tuple[str, Kind, str, tuple[int, int], str | None]] = {
    "pages of float16": ("sm_90", "long", "soft_cap", (128, 128), None),
    "widened keys and values": ("sm_86", "short", "causal", (192, 128), "float8_e4m3fn"),
    "transformed keys and values": ("sm_89", "long", "rotary", (64, 32), None),
    "both, one stage": ("sm_86", "short", "rotary", (256, 256), "float8_e5m2"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_asks_for_as_much_shared_memory_as_its_tile_says(name: str) -> None:
    arch, family, variant_name, dims, kv_dtype = KERNELS[name]
    problem, target = spec(dims, kv_dtype), parse_target(arch)
    variant = VARIANTS[variant_name](problem)
    makes = (variant.key_transform is not None, variant.value_transform is not None)
    chosen = cuda_tiles(problem, target, makes)[FAMILIES.index(family)]
    kernel = generate_kernel(problem, variant, chosen, target)
    assert kernel.shared_bytes == chosen.shared_bytes(problem, makes)
    assert kernel.threads == chosen.threads


@pytest.mark.parametrize(
    "change",
    [
        *({"rows": 120}, {"block": 40}, {"stages": 3}, {"stages": 0}, {"warps": 0}, {"rows": 0}),
        *({"block": 0}, {"residents": 0}, {"warps": -4}, {"family": "medium"}, {"warps": 3}),
    ],
)
def test_a_tile_that_cannot_be_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(change))}={next(iter(change.values()))!r}"):
        tile(**change)


def test_a_card_on_which_nothing_fits_is_an_error() -> None:
    small = replace(ARCHS["sm_80"], shared_memory_per_block=16384, shared_memory_per_sm=17408)
    problem = spec((256, 256))
    with pytest.raises(SpecError, match=r"smallest one takes 51012 bytes .* at most 16384"):
        cuda_tiles(problem, BuildTarget("cuda", small))
    assert all(one.excess for one in candidates(problem, BuildTarget("cuda", small), "short"))


def test_tiles_of_a_gpu_are_not_for_a_cpu() -> None:
    with pytest.raises(TargetError, match="llvm -mcpu=znver4 is no GPU"):
        cuda_tiles(spec((64, 64)), parse_target("llvm -mcpu=znver4"))


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_are_all_that_fit_and_what_does_not(
    family: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, target = spec((256, 256)), parse_target("sm_86")
    found = candidates(problem, target, family)
    fitting = [one.tile for one in found if not one.excess]
    assert (
        fitting == ranked_tiles(problem, target, family) == [c.tile for c in found[: len(fitting)]]
    )
    assert {one.excess for one in found[len(fitting) :]} == {"too much shared memory"}
    assert all(one.shared_bytes > 99 * 1024 for one in found[len(fitting) :])
    monkeypatch.setattr(tiles_cuda, "REGISTER_LIMIT", 180)
    few = candidates(problem, target, family)
    assert {one.registers > 180 for one in few if one.excess == "too many registers"} == {True}
    assert all(one.registers <= 180 for one in few if not one.excess)


def test_tables_say_what_became_of_each_tile() -> None:
    assert set(WORSE) == {*Rank._fields, *DecodeRank._fields}
    problem, target = spec((128, 128)), parse_target("sm_86")
    limits, no_wide, decode, draft, *others = tile_tables(problem, target)
    assert no_wide.title.startswith("no wide family: ")
    assert ("a CTA", "101,376", "65,536", "1,024") in limits.rows
    for family, table in (("decode", decode), ("draft", draft)):
        assert table.title.startswith(family) and table.rows[0][-1] == "chosen"
    for family, table in zip(FAMILIES, others, strict=True):
        found = candidates(problem, target, family)
        assert table.title.startswith(family) and len(table.rows) == len(found)
        *_, tries, remarks = zip(*table.rows, strict=True)
        assert remarks[0] == "chosen" and remarks.count("chosen") == 1 and all(remarks)
        assert [number for number in tries if number] == ["1", "2", "3"]
        for one, row in zip(found, table.rows, strict=True):
            assert row[0] == f"{one.tile.rows} x {one.tile.block}"
            assert (row[-1] == one.excess) == (row[3] == "") == bool(one.excess)


def test_tables_need_no_compiler_and_check_what_they_are_given() -> None:
    problem = spec((64, 64))
    assert len(pipeline.tile_tables(problem, causal(), "sm_90")) == 6 + len(FAMILIES)
    [cpu] = pipeline.tile_tables(problem)
    assert [row[0] for row in cpu.rows] == list(FAMILIES)
    with pytest.raises(TargetError, match="q_dtype=float32"):
        pipeline.tile_tables(AttentionSpec(8, 2, 64, q_dtype="float32"), None, "sm_90")
    with pytest.raises(DTypeError, match="variant"):
        pipeline.tile_tables(problem, "causal", "sm_90")  # type: ignore[arg-type]
