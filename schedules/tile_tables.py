"""Why a kernel has the tiles that it has, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm_attn.schedules import families as kinds
from tvm_attn.schedules import tiles_sm90
from tvm_attn.schedules.tiles import cpu_tiles
from tvm_attn.schedules.tiles_cuda import FULL_BLOCK, REGISTER_LIMIT, Candidate, Kind
from tvm_attn.schedules.tiles_decode import FEW_ROWS
from tvm_attn.schedules.tiles_sm90 import HopperTile
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import Arch, BuildTarget
from tvm_attn.variant import AttentionVariant

WORSE = {
    "has_full_blocks": f"blocks under {FULL_BLOCK} keys",
    "row_tiles": "fewer rows of a warp",
    "rows": "fewer rows on an SM",
    "warps": "fewer warps on an SM",
    "stages": "no block copied ahead",
    "block": "shorter blocks",
    "residents": "fewer CTAs on an SM",
    "holds_queries": "queries are loaded again",
    "size": "slower size of a CTA",
    "passes": "states joined in more passes",
}
"""What to call it where a tile has less of something in its rank than the best one."""


@dataclass(frozen=True)
class TileTable:
    """A title, the names of columns, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tile_tables(
    spec: AttentionSpec, target: BuildTarget, makes: tuple[bool, bool] = (False, False)
) -> list[TileTable]:
    """Return the tiles of a CPU, or for a GPU all that were considered, and what became of each.

    Parameters
    ----------
    spec, target, makes
        As in `tvm_attn.schedules.tiles_cuda.cuda_tiles`.
    """
    if target.arch is None:
        return [_of_cpu(spec, target)]
    shown = kinds.families(spec, target, makes)
    tables = [_limits(target.arch), *(_of_family(spec, target, f, makes) for f in shown)]
    for family in FEW_ROWS:
        if reason := kinds.refuses(spec, target, family, makes):
            tables.insert(1, TileTable(f"no {family} family: {reason}", (), ()))
    return tables


def hopper_tables(
    spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget
) -> list[TileTable]:
    """Return the tiles of Hopper's own kernel for each family, or why there is none."""
    if reason := tiles_sm90.refuses(spec, variant, target):
        return [TileTable(f"no Hopper kernel: {reason}", (), ())]
    tries = (tiles_sm90.short_tiles_to_try(spec), tiles_sm90.tiles_to_try(spec))
    return [_of_hopper(spec, tiles) for tiles in tries if tiles]


def _of_hopper(spec: AttentionSpec, tiles: Sequence[HopperTile]) -> TileTable:
    columns = (
        *("rows x keys", "stages", "keys are copied in"),
        *("shared bytes", "registers", "try", ""),
    )
    rows = tuple(
        (
            *(_product((tile.rows, tile.block)), str(tile.stages)),
            "single rows" if tile.gathers else f"boxes of {tile.box}",
            *(f"{tile.shared_bytes(spec):,}", str(tile.multiplying), str(number)),
            "chosen" if number == 1 else "shorter blocks",
        )
        for number, tile in enumerate(tiles, start=1)
    )
    title = f"{tiles[0].family} family by Hopper's own kernel (schedule='sm80' takes those of the"
    return TileTable(f"{title} family's other table)", columns, rows)


def _of_cpu(spec: AttentionSpec, target: BuildTarget) -> TileTable:
    columns = (
        *("family", "query rows", "KV block", "overhead (blocks)"),
        *("vectors of", "lanes", "rows x keys in registers", "rows x dims in registers"),
    )
    rows = tuple(
        (
            *(tile.family, str(tile.rows), str(tile.block), str(tile.overhead)),
            *(tile.vector, str(tile.lanes), _product(tile.qk), _product(tile.pv)),
        )
        for tile in cpu_tiles(spec, target)
    )
    return TileTable(f"{target}", columns, rows)


def _limits(arch: Arch) -> TileTable:
    return TileTable(
        f"limits of {arch.name}",
        ("of", "shared bytes", "registers", "threads"),
        (
            ("a thread", "", str(REGISTER_LIMIT), ""),
            (
                *("a CTA", f"{arch.shared_memory_per_block:,}"),
                *(f"{arch.registers_per_block:,}", f"{arch.max_threads_per_block:,}"),
            ),
            (
                *("an SM (multiprocessor)", f"{arch.shared_memory_per_sm:,}"),
                *(f"{arch.registers_per_block:,}", f"{arch.max_threads_per_sm:,}"),
            ),
        ),
    )


def _of_family(
    spec: AttentionSpec, target: BuildTarget, family: Kind, makes: tuple[bool, bool]
) -> TileTable:
    columns = ("rows x keys", "warps", "stages", "CTAs/SM", "shared bytes", "registers", "try", "")
    tries = kinds.tiles_to_try(spec, target, family, makes)
    rows = []
    for one in kinds.candidates(spec, target, family, makes):
        number = str(tries.index(one.tile) + 1) if one.tile in tries else ""
        remark = one.excess or _worse(one.tile.rank(), tries[0].rank()) or "chosen"
        rows.append((*_figures(one), number, remark))
    title = f"{family} family, the best first (registers are estimates: should some spill, the next"
    return TileTable(f"{title} try is made)", columns, tuple(rows))


def _figures(one: Candidate) -> tuple[str, ...]:
    tile = one.tile
    return (
        *(_product((tile.rows, tile.block)), str(tile.warps), str(tile.stages)),
        *("" if one.excess else str(tile.residents), f"{one.shared_bytes:,}", str(one.registers)),
    )


def _worse(rank: Any, best: Any) -> str:
    """Name the most important thing that a tile has less of than the best; empty if nothing."""
    less = (WORSE[name] for name in best._fields if getattr(rank, name) < getattr(best, name))
    return next(less, "")


def _product(sizes: tuple[int, int]) -> str:
    return " x ".join(map(str, sizes))
