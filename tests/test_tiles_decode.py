"""Tiles of the decode kernel: within the limits of every card, there where they can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.generating import generate_kernel
from tvm_attn import pipeline
from tvm_attn.errors import SpecError
from tvm_attn.schedules.families import families, query_tiles, refuses, tiles_to_try
from tvm_attn.schedules.primitives.parts import PART_WORDS
from tvm_attn.schedules.tiles_cuda import FAMILIES, Kind
from tvm_attn.schedules.tiles_decode import ENOUGH_WARPS, FEW_ROWS, DecodeTile, candidates
from tvm_attn.shipped import VARIANTS
from tvm_attn.spec import FP8_DTYPES, AttentionSpec
from tvm_attn.target import ARCHS, BuildTarget, parse_target

DIMS = (*((dim, dim) for dim in range(16, 257, 16)), (192, 128))
STORED = (None, *FP8_DTYPES)
HOPPER = parse_target("sm_90")
PLAIN = (False, False)


def spec(dims: tuple[int, int] = (128, 128), kv_dtype: str | None = None, group: int = 4) -> Any:
    return AttentionSpec(2 * group, 2, *dims, kv_dtype=kv_dtype)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_dtype", STORED)
def test_every_card_has_a_tile_within_its_limits(arch: str, kv_dtype: str | None) -> None:
    target = parse_target(arch)
    card = target.arch
    assert card is not None
    for dims, group, family in product(DIMS, (4, 20), FEW_ROWS):
        problem = spec(dims, kv_dtype, group)
        if refuses(problem, target, family, PLAIN):
            continue
        tile, *_ = tiles_to_try(problem, target, family, PLAIN)
        shared = tile.shared_bytes(problem)
        assert shared <= card.shared_memory_per_block
        assert tile.residents * (shared + 1024) <= card.shared_memory_per_sm
        assert tile.residents * tile.threads * tile.registers(problem) <= card.registers_per_block
        assert tile.residents * tile.warps <= ENOUGH_WARPS


def test_two_ctas_of_four_warps_are_what_hopper_has_room_for() -> None:
    tile, *_ = tiles_to_try(spec(), HOPPER, "decode", PLAIN)
    assert (tile.warps, tile.residents, tile.block, tile.passes) == (4, 2, 16, 1)
    quantised, *_ = tiles_to_try(spec(kv_dtype="float8_e4m3fn"), HOPPER, "decode", PLAIN)
    assert (quantised.block, quantised.warps, quantised.residents) == (32, 4, 2)


def test_32_rows_are_joined_in_parts_and_their_queries_loaded_again() -> None:
    tile, *_ = tiles_to_try(spec(), HOPPER, "draft", PLAIN)
    assert isinstance(tile, DecodeTile)
    assert (tile.rows, tile.row_tiles, tile.warps, tile.residents) == (32, 2, 4, 2)
    assert tile.passes > 1 and not tile.holds_queries and not tile.clusters
    narrow, *_ = tiles_to_try(spec((64, 64)), HOPPER, "draft", PLAIN)
    assert narrow.holds_queries


@pytest.mark.parametrize(
    ("variant", "dims", "kv_dtype", "family"),
    [
        ("causal", (128, 128), None, "decode"),
        ("window_soft_cap", (80, 112), "float8_e5m2", "decode"),
        ("custom_mask", (256, 256), "float8_e4m3fn", "decode"),
        ("causal", (128, 128), "float8_e4m3fn", "draft"),
    ],
)
def test_a_kernel_asks_for_as_much_shared_memory_as_its_tile_says(
    variant: str, dims: tuple[int, int], kv_dtype: str | None, family: Kind
) -> None:
    problem = spec(dims, kv_dtype)
    tile, *_ = tiles_to_try(problem, HOPPER, family, PLAIN)
    kernel = generate_kernel(problem, VARIANTS[variant](problem), tile, HOPPER)
    assert kernel.shared_bytes == tile.shared_bytes(problem)
    assert kernel.threads == tile.threads


@pytest.mark.parametrize("makes", [*product((False, True), repeat=2)])
def test_there_is_no_family_of_few_rows_for_transformed_keys_or_values(
    makes: tuple[bool, bool],
) -> None:
    expected = FAMILIES if any(makes) else (*FEW_ROWS, *FAMILIES)
    assert families(spec(), HOPPER, makes) == expected
    for family in FEW_ROWS:
        assert refuses(spec(), HOPPER, family, makes) == (
            "keys or values are transformed" if any(makes) else ""
        )


@pytest.mark.parametrize(
    ("group", "dims", "rows"),
    [
        *((group, (128, 128), {"decode": 16, "wide": 16, "draft": 32}) for group in (1, 3, 16)),
        *((group, (192, 128), {"decode": 32}) for group in (17, 32)),
        (4, (256, 256), {"decode": 16}),
        (17, (256, 256), {}),
        (33, (128, 128), {}),
    ],
)
def test_tiles_have_the_rows_of_a_token_at_least(
    group: int, dims: tuple[int, int], rows: dict[Kind, int]
) -> None:
    problem = spec(dims, group=group)
    there = [family for family in families(problem, HOPPER, PLAIN) if family in FEW_ROWS]
    assert there == list(rows)
    for family in there:
        assert tiles_to_try(problem, HOPPER, family, PLAIN)[0].rows == rows[family] >= group
    tables = pipeline.tile_tables(problem, None, "sm_90")
    for family in FEW_ROWS:
        says_why = [one for one in tables if one.title.startswith(f"no {family} family: ")]
        assert len(says_why) == (family not in rows)


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "schedule", "expected"),
    [
        ("sm_90", None, None, ["decode", "wide", "short", "long"]),
        ("sm_90", None, "sm80", ["decode", "wide", "draft", "short", "long"]),
        ("sm_90", "float8_e4m3fn", None, ["decode", "wide", "draft", "short", "long"]),
        ("sm_80", None, None, ["decode", "draft", "short", "long"]),
    ],
)
def test_drafts_are_short_requests_where_hopper_has_a_kernel_for_these(
    arch: str, kv_dtype: str | None, schedule: str | None, expected: list[Kind]
) -> None:
    problem = spec(kv_dtype=kv_dtype)
    made = VARIANTS["causal"](problem)
    tiles = query_tiles(problem, made, parse_target(arch), schedule)
    assert [ranked[0].family for ranked in tiles] == expected
    rows = [ranked[0].rows for ranked in tiles]
    assert rows == sorted(rows)


def test_wide_ctas_are_there_where_two_share_a_multiprocessor() -> None:
    [wide, *_] = tiles_to_try(spec(), HOPPER, "wide", PLAIN)
    assert (wide.warps, wide.residents, wide.block, wide.passes) == (8, 1, 16, 1)
    for dims in DIMS:
        problem = spec(dims)
        usual, *_ = tiles_to_try(problem, HOPPER, "decode", PLAIN)
        tiles = tiles_to_try(problem, HOPPER, "wide", PLAIN)
        assert bool(tiles) == ("wide" in families(problem, HOPPER, PLAIN))
        assert not tiles or usual.residents > 1
        for tile in tiles:
            assert HOPPER.arch is not None
            assert tile.shared_bytes(problem) <= HOPPER.arch.shared_memory_per_block
    for arch in ("sm_80", "sm_120"):
        assert not tiles_to_try(spec(), parse_target(arch), "wide", PLAIN)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_dtype", STORED)
def test_there_is_room_to_merge_parts(arch: str, kv_dtype: str | None) -> None:
    for dims in DIMS:
        problem = spec(dims, kv_dtype)
        for family in ("decode", "wide"):
            for tile in tiles_to_try(problem, parse_target(arch), family, PLAIN):
                assert isinstance(tile, DecodeTile)
                part = PART_WORDS * tile.threads
                assert tile.part_words(problem) - tile.ring_words(problem) >= part


def test_fewer_queries_are_held_and_clusters_left_out_if_registers_spill() -> None:
    first, second, last = tiles_to_try(spec(), HOPPER, "decode", PLAIN)
    assert first.registers(spec()) > second.registers(spec())
    assert isinstance(second, DecodeTile) and second.clusters
    assert last == replace(second, clusters=())
    wide, alone = tiles_to_try(spec((256, 256)), HOPPER, "decode", PLAIN)
    assert isinstance(wide, DecodeTile) and not wide.holds_queries
    assert alone == replace(wide, clusters=())
    [only] = tiles_to_try(spec((256, 256)), parse_target("cuda -arch=sm_80"), "decode", PLAIN)
    assert isinstance(only, DecodeTile) and not only.clusters


@pytest.mark.parametrize("arch", ARCHS)
def test_clusters_are_there_where_they_can_have_eight_ctas(arch: str) -> None:
    tile, *_ = tiles_to_try(spec(), parse_target(arch), "decode", PLAIN)
    assert tile.clusters == ((8, 4, 2) if arch in ("sm_90", "sm_100") else ())
    wider, *_ = tiles_to_try(spec(group=32), parse_target(arch), "decode", PLAIN)
    assert (wider.rows, wider.clusters) == (32, tile.clusters[-1:])


def test_blocks_have_fewer_keys_if_registers_spill_still() -> None:
    first, *_, last = tiles_to_try(spec(kv_dtype=FP8_DTYPES[0]), HOPPER, "draft", PLAIN)
    assert isinstance(last, DecodeTile) and not last.clusters and not last.holds_queries
    assert (first.block, last.block) == (32, 16)


def test_a_card_without_room_has_no_decode_family() -> None:
    small = replace(ARCHS["sm_80"], shared_memory_per_block=16384, shared_memory_per_sm=17408)
    target = BuildTarget("cuda", small)
    assert refuses(spec((256, 256)), target, "decode", PLAIN) == "no tile fits"
    assert all(one.excess for one in candidates(spec((256, 256)), target))


@pytest.mark.parametrize(
    "change",
    [{"family": "short"}, {"rows": 64}, {"block": 64}, {"stages": 1}, {"warps": 0}, {"passes": 0}],
)
def test_a_tile_that_cannot_be_is_an_error(change: dict[str, Any]) -> None:
    tile = DecodeTile("decode", 16, 16, 4, 2, 2)
    with pytest.raises(SpecError, match=f"{next(iter(change))}={next(iter(change.values()))!r}"):
        replace(tile, **change)
