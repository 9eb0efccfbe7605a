"""The tile of Hopper kernels: for what there is one, what it is made of, and what it asks for."""

from __future__ import annotations

import re

import pytest

from tests.generating import generate_kernel
from tvm_attn import pipeline, variants
from tvm_attn.codegen import cuda
from tvm_attn.codegen.compilers import Compiled, CudaCompiler
from tvm_attn.errors import TargetError
from tvm_attn.schedules import families
from tvm_attn.schedules.families import query_tiles
from tvm_attn.schedules.tiles_sm90 import (
    HopperTile,
    padded,
    refuses,
    short_tiles_to_try,
    tiles_to_try,
)
from tvm_attn.shipped import VARIANTS
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import Arch, parse_target
from tvm_attn.variant import AttentionVariant

HOPPER = parse_target("cuda -arch=sm_90")
EIGHT = 8
"""Rows of a swizzle pattern."""
SPEC = AttentionSpec(8, 2, 128, q_dtype="bfloat16", page_size=16)


def spec(**fields: object) -> AttentionSpec:
    return AttentionSpec(
        **{"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 128, "q_dtype": "float16", **fields}
    )


@pytest.mark.parametrize(
    ("page_size", "box"), [(None, 128), (16, 16), (48, 16), (128, 128), (256, 128)]
)
def test_boxes_are_parts_of_pages_and_of_blocks(page_size: int | None, box: int) -> None:
    tile = tiles_to_try(spec(page_size=page_size))[0]
    assert (tile.box, tile.boxes * tile.box) == (box, tile.block)
    assert tile.begins_early == (page_size is not None)
    assert not tile.gathers


@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 8, 12, 20, 24, 100])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_rows_of_other_pages_are_gathered_by_halves_of_a_block(
    page_size: int, head_dim: int
) -> None:
    for tile in tiles_to_try(spec(page_size=page_size, head_dim_qk=head_dim)):
        assert (tile.gathers, tile.box, tile.begins_early) == (True, 1, False)
        assert tile.block % (tile.feeders * EIGHT) == 0, "a part is not made of swizzle patterns"


@pytest.mark.parametrize(
    ("page_size", "heads", "feeders"), [(1, 8, 2), (1, 6, 1), (16, 8, 1), (None, 6, 1)]
)
def test_warps_that_fetch_rows_of_odd_groups_feed_nothing(
    page_size: int | None, heads: int, feeders: int
) -> None:
    assert tiles_to_try(spec(num_qo_heads=heads, page_size=page_size))[0].feeders == feeders


@pytest.mark.parametrize(
    "dims",
    [
        *((16, 16), (64, 64), (96, 128), (128, 128), (192, 128), (192, 192), (256, 256)),
        *((256, 16), (16, 256), (160, 144)),
    ],
)
def test_all_that_is_tried_fits_a_multiprocessor(dims: tuple[int, int]) -> None:
    wanted = spec(head_dim_qk=dims[0], head_dim_vo=dims[1])
    assert HOPPER.arch is not None
    for tile in tiles_to_try(wanted):
        assert tile.shared_bytes(wanted) <= HOPPER.arch.shared_memory_per_block
        assert tile.threads * tile.beginning <= HOPPER.arch.registers_per_block
        left = tile.copying + tile.multipliers * tile.multiplying
        assert left <= (tile.multipliers + 1) * tile.beginning


@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (96, 96), (128, 128), (256, 256)])
def test_items_that_are_read_spare_those_at_work(dims: tuple[int, int]) -> None:
    """Three are read beyond the one to be copied, and two may not be stored whose keys were used.

    If each has one block, as many are between as there are stages.
    """
    wanted = spec(head_dim_qk=dims[0], head_dim_vo=dims[1])
    for tile in tiles_to_try(wanted) + short_tiles_to_try(wanted):
        assert tile.tasks >= 3 + tile.stages + 2 + 1
        assert tile.tasks & (tile.tasks - 1) == 0


@pytest.mark.parametrize(
    ("dims", "multipliers", "block", "stages", "merged"),
    [
        *(((64, 64), 3, 128, 4, 4), ((16, 48), 3, 128, 4, 4), ((64, 80), 3, 112, 3, 2)),
        *(((96, 96), 3, 96, 2, 2), ((64, 112), 2, 128, 2, 4)),
    ],
)
def test_narrow_heads_have_three_warpgroups_and_two_slots(
    dims: tuple[int, int], multipliers: int, block: int, stages: int, merged: int
) -> None:
    narrow = spec(head_dim_qk=dims[0], head_dim_vo=dims[1])
    tile = tiles_to_try(narrow)[0]
    assert (tile.block, tile.stages) == (block, stages)
    assert tile.rows_at_once == merged
    assert tile.rows == 64 * tile.multipliers == 64 * multipliers
    assert tile.slots_outputs
    assert (tile.slots == 2) == (not tile.holds_queries)


@pytest.mark.parametrize(
    ("dims", "block"), [((128, 128), 64), ((64, 64), 128), ((64, 128), 80), ((16, 16), 128)]
)
@pytest.mark.parametrize("page_size", [None, 16, 5])
def test_one_warpgroup_has_requests_of_few_rows_and_stages_of_32_kb(
    dims: tuple[int, int], block: int, page_size: int | None
) -> None:
    wanted = spec(head_dim_qk=dims[0], head_dim_vo=dims[1], page_size=page_size)
    [tile] = short_tiles_to_try(wanted)
    assert (tile.family, tile.rows, tile.threads, tile.block) == ("short", 64, 256, block)
    assert tile.parts_at_once > 1 == tiles_to_try(wanted)[0].parts_at_once, "registers are left"
    assert tile.gathers == (page_size == 5)
    assert HOPPER.arch is not None
    assert tile.shared_bytes(wanted) <= HOPPER.arch.shared_memory_per_block
    assert tile.threads * tile.beginning <= HOPPER.arch.registers_per_block
    assert tile.copying + tile.multiplying <= 2 * tile.beginning


def test_wide_heads_of_short_requests_are_left_to_other_kernels() -> None:
    for dims in ((192, 128), (256, 256)):
        wanted = spec(head_dim_qk=dims[0], head_dim_vo=dims[1])
        assert not short_tiles_to_try(wanted)
        tiles = query_tiles(wanted, AttentionVariant(), HOPPER, None)
        assert not isinstance(tiles[-2][0], HopperTile) and isinstance(tiles[-1][0], HopperTile)


@pytest.mark.parametrize(
    ("dims", "block"), [((256, 256), 80), ((192, 192), 112), ((192, 128), 128), ((144, 256), 80)]
)
def test_wide_heads_have_blocks_of_as_many_keys_as_there_is_room_for(
    dims: tuple[int, int], block: int
) -> None:
    assert tiles_to_try(spec(head_dim_qk=dims[0], head_dim_vo=dims[1]))[0].block == block


def test_dims_are_padded_to_128_bytes() -> None:
    assert [padded(dim) for dim in (16, 64, 80, 128)] == [64, 64, 128, 128]


@pytest.mark.parametrize(
    ("variant", "fields", "reason"),
    [
        ("causal", {"kv_dtype": "float8_e4m3fn"}, "K and V are float8_e4m3fn"),
        ("sigmoid", {}, "no softmax"),
        ("rotary", {}, "transformed"),
    ],
)
def test_what_it_does_not_serve_is_said(
    variant: str, fields: dict[str, object], reason: str
) -> None:
    wanted = spec(**fields)
    made = VARIANTS[variant](wanted)
    assert reason in refuses(wanted, made, HOPPER)
    assert not any(isinstance(t, HopperTile) for t in query_tiles(wanted, made, HOPPER, None)[-1])
    with pytest.raises(TargetError, match=re.escape(reason)):
        pipeline.build(wanted, made, HOPPER, schedule="sm90")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_other_cards_have_none(arch: str) -> None:
    target = parse_target(f"cuda -arch={arch}")
    assert "has no wgmma" in refuses(SPEC, AttentionVariant(), target)


def test_the_library_chooses_and_a_schedule_overrides() -> None:
    chosen = query_tiles(SPEC, AttentionVariant(), HOPPER, None)[-1]
    assert all(isinstance(tile, HopperTile) for tile in chosen)
    portable = query_tiles(SPEC, AttentionVariant(), HOPPER, "sm80")[-1]
    assert not any(isinstance(tile, HopperTile) for tile in portable)


def test_a_kernel_asks_for_as_much_as_its_tile_says() -> None:
    tile = tiles_to_try(SPEC)[0]
    kernel = generate_kernel(SPEC, variants.causal(), tile, HOPPER)
    assert kernel.threads == tile.threads
    assert 0 <= tile.shared_bytes(SPEC) - kernel.shared_bytes < 256


def test_tables_have_it_or_say_why_not() -> None:
    titles = [table.title for table in pipeline.tile_tables(SPEC, None, HOPPER)]
    for family in ("short", "long"):
        assert any(title.startswith(f"{family} family by Hopper's own kernel") for title in titles)
    widened = spec(kv_dtype="float8_e4m3fn")
    titles = [table.title for table in pipeline.tile_tables(widened, None, HOPPER)]
    assert "no Hopper kernel: K and V are float8_e4m3fn, queries float16" in titles
    titles = [table.title for table in pipeline.tile_tables(SPEC, None, "cuda -arch=sm_80")]
    assert not any("Hopper" in title for title in titles)


@pytest.mark.parametrize(
    ("page_size", "copies"), [(None, "boxes of 128"), (48, "boxes of 16"), (8, "single rows")]
)
def test_the_table_says_how_keys_are_copied(page_size: int | None, copies: str) -> None:
    tables = pipeline.tile_tables(spec(page_size=page_size), None, HOPPER)
    [short, table] = [table for table in tables if "Hopper's own kernel" in table.title]
    assert short.rows[0][2:3] == (copies.replace("128", "64"),)
    assert table.rows[0][table.columns.index("keys are copied in")] == copies


REPORT = """\
ptxas info    : Compiling entry function '{}' for '{}'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers
"""


@pytest.fixture
def only_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build kernels of long requests alone, unknown to other builds: they tell what is asked."""
    chosen = families.query_tiles
    monkeypatch.setattr(families, "query_tiles", lambda *given: chosen(*given)[-1:])
    monkeypatch.setattr(pipeline, "request_key", lambda *_: None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what CUDA compilers make without them: the sample of shipped kernels compiles."""

    def compile_source(_: CudaCompiler, name: str, source: str, arch: Arch) -> Compiled:
        return Compiled(b"no code", "", REPORT.format(f"{name}_kernel", arch.code))

    monkeypatch.setattr(cuda, "compile_source", compile_source)
    monkeypatch.setattr(cuda, "require_compiler", lambda: None)


@pytest.mark.usefixtures("only_long", "no_compiler")
@pytest.mark.parametrize(
    ("fields", "schedule", "said"),
    [
        ({}, None, "schedule sm90"),
        (
            {"kv_dtype": "float8_e4m3fn"},
            None,
            "schedule sm80 (not sm90: K and V are float8_e4m3fn, queries float16)",
        ),
        ({}, "sm80", "schedule sm80"),
    ],
)
def test_a_kernel_says_what_made_it_and_why(
    fields: dict[str, object], schedule: str | None, said: str
) -> None:
    module = pipeline.build(spec(page_size=16, **fields), None, HOPPER, schedule=schedule)
    assert said in str(module)
    assert ("(not sm90" in str(module)) == ("(not sm90" in said)
    assert module.backend == module.families[-1].schedule == said.split()[1]
    assert f"by {module.backend}" in str(module)
