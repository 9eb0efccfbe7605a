"""Which schedule makes the kernel of which family of query tiles: the one place that chooses.

A request belongs to the first family whose tile holds all of its rows, else to the last one. Those
of few rows are there where their kernel can be, whose warps stream keys.
"""

from __future__ import annotations

from typing import Any

from tvm_attn.errors import TargetError
from tvm_attn.schedules import decode, sm80, sm90, tiles_cuda, tiles_decode, tiles_sm90
from tvm_attn.schedules.tiles_cuda import Candidate, CudaTile, Kind
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget
from tvm_attn.tir.hooks import Hooks
from tvm_attn.variant import AttentionVariant

Makes = tuple[bool, bool]
"""Whether keys, and values, are transformed."""
SCHEDULES: dict[str, Any] = {"sm80": sm80, "sm90": sm90, "decode": decode}
"""Where kernels are generated, by the schedule of their tile."""


def families(spec: AttentionSpec, target: BuildTarget, makes: Makes) -> tuple[Kind, ...]:
    """Return the families of a GPU's kernel, those of fewest rows first."""
    few = (f for f in tiles_decode.FEW_ROWS if not refuses(spec, target, f, makes))
    return *few, *tiles_cuda.FAMILIES


def refuses(spec: AttentionSpec, target: BuildTarget, family: Kind, makes: Makes) -> str:
    """Say why there is no such family of few rows; empty if there is one."""
    if reason := tiles_decode.refuses(spec, makes, family):
        return reason
    if family == "wide":
        return "" if tiles_decode.wide_tiles(spec, target) else "the first one's tile is as good"
    fits = any(not one.excess for one in tiles_decode.candidates(spec, target, family))
    return "" if fits else "no tile fits"


def candidates(
    spec: AttentionSpec, target: BuildTarget, family: Kind, makes: Makes
) -> list[Candidate]:
    """Return all tiles of a family, the best first and at the end those that do not fit a GPU."""
    if family in tiles_decode.FEW_ROWS:
        return tiles_decode.candidates(spec, target, family)
    return tiles_cuda.candidates(spec, target, family, makes)


def tiles_to_try(
    spec: AttentionSpec, target: BuildTarget, family: Kind, makes: Makes
) -> list[CudaTile]:
    """Return the best tile of a family, and after it some to try if its registers spill."""
    if family == "wide":
        return tiles_decode.wide_tiles(spec, target)
    if family in tiles_decode.FEW_ROWS:
        return tiles_decode.tiles_to_try(spec, target, family)
    return tiles_cuda.tiles_to_try(spec, target, family, makes)


def makes_of(variant: AttentionVariant) -> Makes:
    """Whether a variant transforms keys, and values."""
    return variant.key_transform is not None, variant.value_transform is not None


def query_tiles(
    spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget, schedule: str | None
) -> list[list[Any]]:
    """Return the tiles to try of each family of a GPU's kernel, those of fewest rows first.

    Raises
    ------
    TargetError
        If `schedule` asks for a kernel that there is not; the message says why.
    """
    makes = makes_of(variant)
    ranked: list[list[Any]] = [
        list(tiles_to_try(spec, target, family, makes)) for family in families(spec, target, makes)
    ]
    reason = tiles_sm90.refuses(spec, variant, target)
    if schedule == "sm90" and reason:
        raise TargetError(f"schedule='sm90' cannot be used: {reason}")
    if schedule != "sm80" and not reason:
        return [*_before_hopper(spec, ranked), tiles_sm90.tiles_to_try(spec)]
    return ranked


def _before_hopper(spec: AttentionSpec, ranked: list[list[Any]]) -> list[list[Any]]:
    """Return the tiles of all families but the last, where Hopper has a kernel of its own.

    It serves short requests as well, those that are drafts among them, if heads are not wide.
    """
    short = tiles_sm90.short_tiles_to_try(spec)
    if not short:
        return ranked[:-1]
    return [*(tiles for tiles in ranked[:-2] if tiles[0].family != "draft"), short]


def attention(spec: AttentionSpec, hooks: Hooks, tile: Any, name: str = "attention") -> Any:
    """Generate the kernel of a tile."""
    return SCHEDULES[tile.schedule].attention(spec, hooks, tile, name)
