"""Tiles of the decode kernel: how many warps stream keys, and how far each of them runs ahead.

Decoding lives on memory bandwidth: every warp has copies of its own under way, enough of them to
keep a multiprocessor's share of the memory busy. Eight warps of two stages each are that, as one
CTA or as two; what a card has no room for is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from tvm_attn.errors import SpecError
from tvm_attn.schedules.primitives.shapes import (
    COLUMNS,
    DEPTH,
    ROWS,
    TASK_WORDS,
    TASKS,
    WARP,
    WORD_BYTES,
    pitch,
)
from tvm_attn.schedules.tiles_cuda import (
    WIDEST_PAIR,
    Candidate,
    CudaTile,
    Kind,
    arch_of,
    with_residents,
)
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget
from tvm_attn.tir.signature import itemsize

FEW_ROWS: tuple[Kind, ...] = ("decode", "wide", "draft")
"""Families whose tiles are here: of requests with few rows, and with some more.

"wide" is the first one's of a CTA that has a multiprocessor for itself.
"""
TILE_ROWS = (ROWS, 2 * ROWS)
"""Fused rows of a tile, which all warps have in registers."""
CLUSTERS = {ROWS: (8, 4, 2), 2 * ROWS: (2,)}
"""CTAs that may share each item of a plan with few units, most first, by the rows of a tile."""
HAVE_CLUSTERS = {"wgmma", "tcgen05"}
"""Features of cards whose clusters have as many CTAs."""
GRANULE = 64
"""Keys of a granule: a piece of a cut unit has at least four."""
STAGES = 2
ENOUGH_WARPS = 8
"""Warps of a multiprocessor; more of them brought nothing."""
WARPS = (4, 8, 2)
"""Of a CTA, the best first."""
PASSES = range(1, 6)
BLOCKS = (2 * ROWS, ROWS)
STAGE_BYTES = 8192
"""Of K and V that a warp copies at a time, if that is 16 or 32 tokens."""
SHARED_COLUMNS = 16
"""Columns that are dealt to a CTA of a cluster at a time."""
RECEIVED_ROWS = 64
"""Rows that a CTA has room for, of all CTAs of a cluster, where they join them at a time."""
LEFT = 4
"""Registers of the queries of a step."""
MOST_HELD = 144
"""Registers of outputs and queries that may leave enough of them."""
OTHER_REGISTERS = 56
"""Registers of a thread besides outputs, queries and scores."""


class DecodeRank(NamedTuple):
    """What makes a tile better than another, the most important first."""

    warps: int
    block: int
    size: int
    passes: int


@dataclass(frozen=True)
class DecodeTile(CudaTile):
    """A tile of the decode kernel: 16 or 32 fused rows, and warps that each have keys of their own.

    Parameters
    ----------
    family, rows, residents, overhead, holds_queries
        As of `CudaTile`.
    warps : int
        Warps of a CTA; each has all rows.
    block : int
        Keys of a stage of a warp.
    stages : int
        Of each warp.
    passes : int
        Times that the warps' states are brought together in shared memory: a part of the value
        dim each.
    overlaps : bool
        Whether CTAs begin while the kernel before ends.
    clusters : tuple of int
        How many CTAs can share each item, besides one alone.
    """

    passes: int = 1
    overlaps: bool = False
    clusters: tuple[int, ...] = ()

    @property
    def schedule(self) -> str:
        """Return the schedule that makes its kernel."""
        return "decode"

    @property
    def granule(self) -> int:
        """Keys that plans count, and cut between."""
        return GRANULE

    @property
    def begins_early(self) -> bool:
        """Whether an item's first block may begin with keys before its first: with a page's."""
        return True

    def __post_init__(self) -> None:
        """Validate."""
        sizes = (self.warps, self.residents, self.passes)
        if self.family not in FEW_ROWS or min(sizes) < 1 or self.stages != STAGES:
            raise SpecError(f"{self}: sizes are at least 1, stages {STAGES}, families {FEW_ROWS}")
        if self.rows not in TILE_ROWS or self.block not in BLOCKS:
            raise SpecError(f"{self}: rows are one of {TILE_ROWS}, keys of a block of {BLOCKS}")

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows that a warp has: the item's."""
        return self.rows // ROWS

    @property
    def state_rows(self) -> int:
        """Rows whose peaks and totals a CTA has room for: each warp's."""
        return self.rows * self.warps

    @property
    def received_rows(self) -> int:
        """Rows that the CTAs of a cluster join at a time: fewer, the more CTAs there are."""
        return RECEIVED_ROWS // max(self.clusters)

    @property
    def bound_words(self) -> int:
        """Peaks and totals that a CTA has room for of the CTAs of a cluster."""
        return 2 * self.received_rows * max(self.clusters) if self.clusters else 0

    def part(self, dim: int) -> int:
        """Elements of a row of values that are brought together in a pass."""
        return dim // self.passes

    def state_words(self, dim: int) -> int:
        """Elements of outputs that a CTA has room for: the part of its warps."""
        return self.rows * self.warps * state_pitch(self.part(dim))

    def received_words(self, dim: int) -> int:
        """Elements of outputs that a CTA has room for of a cluster: each CTA's of its share."""
        columns = self.part(dim)
        shares = (
            size * share_columns(columns, size, size.bit_length() - 1) for size in self.clusters
        )
        return self.received_rows * max(shares) if self.clusters else 0

    def ring_words(self, spec: AttentionSpec) -> int:
        """Words of the rings of all warps."""
        row = (spec.head_dim_qk + spec.dim_vo) * itemsize(str(spec.kv_dtype))
        return self.warps * self.stages * self.block * row // WORD_BYTES

    def part_words(self, spec: AttentionSpec) -> int:
        """Words of the rings and of the states behind them, where parts are merged."""
        return self.ring_words(spec) + self.state_words(spec.dim_vo)

    def shared_bytes(self, spec: AttentionSpec, makes: tuple[bool, bool] = (False, False)) -> int:
        """Return the shared memory that a CTA asks for."""
        q_dtype = str(spec.q_dtype)
        queries = 2 * self.rows * pitch(spec.head_dim_qk, q_dtype) * itemsize(q_dtype)
        rings = self.ring_words(spec) * WORD_BYTES
        state = self.state_words(spec.dim_vo) * WORD_BYTES
        closed = 2 * self.state_rows * WORD_BYTES
        received = (self.received_words(spec.dim_vo) + self.bound_words) * WORD_BYTES
        tasks = TASKS * TASK_WORDS * WORD_BYTES
        words = (2 + 2 * bool(self.clusters)) * WORD_BYTES
        return queries + rings + self.warps * tasks + state + closed + received + words

    def registers(self, spec: AttentionSpec) -> int:
        """Estimate the registers of a thread."""
        queries = LEFT * self.query_steps(spec)
        return self.row_tiles * ((spec.dim_vo + self.block) // 2 + queries) + OTHER_REGISTERS

    def rank(self) -> DecodeRank:
        """Return how good it is."""
        size = -WARPS.index(self.warps) if self.warps in WARPS else -len(WARPS)
        return DecodeRank(self.residents * self.warps, self.block, size, -self.passes)


def state_pitch(columns: int) -> int:
    """Elements from one row of a warp's state in shared memory to the next.

    Four neighbouring rows then begin in different groups of eight banks.
    """
    return columns + COLUMNS + (-columns) % WARP


def share_columns(columns: int, size: Any, bits: Any) -> Any:
    """Most columns of a part that a CTA of a cluster of ``size == 2**bits`` has a share of."""
    return ((columns // SHARED_COLUMNS + size - 1) >> bits) * SHARED_COLUMNS


def candidates(
    spec: AttentionSpec, target: BuildTarget, family: Kind = "decode"
) -> list[Candidate]:
    """Return all tiles of a family, the best first and at the end those that do not fit a GPU.

    CTAs of clusters do not share items of drafts.
    """
    arch = arch_of(target)
    found = []
    has_clusters = family != "draft" and HAVE_CLUSTERS & arch.features
    for tile in _tiles(spec, family):
        tile = replace(
            tile,
            overlaps="tma" in arch.features,
            clusters=CLUSTERS[tile.rows] if has_clusters else (),
            holds_queries=_can_hold(spec, tile.row_tiles),
        )
        one = with_residents(tile, spec, arch, (False, False))
        residents = min(one.tile.residents, max(ENOUGH_WARPS // tile.warps, 1))
        found.append(replace(one, tile=replace(one.tile, residents=residents)))
    return sorted(found, key=lambda one: (not one.excess, one.tile.rank()), reverse=True)


def rows_of(spec: AttentionSpec, family: Kind) -> int:
    """Return the fused rows of a family's tile: those of a token at least, if it is decoding."""
    return ROWS if family != "draft" and spec.group_size <= ROWS else 2 * ROWS


def _tiles(spec: AttentionSpec, family: Kind) -> Iterator[DecodeTile]:
    """Yield the tiles that may be considered."""
    row = (spec.head_dim_qk + spec.dim_vo) * itemsize(str(spec.kv_dtype))
    rows = rows_of(spec, family)
    blocks = [block for block in BLOCKS if block == ROWS or block * row <= STAGE_BYTES]
    sizes = (ENOUGH_WARPS,) if family == "wide" else WARPS
    for block, warps, passes in product(blocks, sizes, PASSES):
        if spec.dim_vo % (passes * ROWS) == 0:
            yield DecodeTile(family, rows, block, warps, STAGES, 1, 1, passes=passes)


def _can_hold(spec: AttentionSpec, row_tiles: int) -> bool:
    return row_tiles * (spec.dim_vo // 2 + LEFT * spec.head_dim_qk // DEPTH) <= MOST_HELD


def tiles_to_try(
    spec: AttentionSpec, target: BuildTarget, family: Kind = "decode"
) -> list[CudaTile]:
    """Return the best tile, and the same with fewer registers, should they spill.

    First with fewer queries in them, then without clusters, whose CTAs keep what they share, then
    with fewer keys.
    """
    return _with_fewer_registers(candidates(spec, target, family)[0])


def wide_tiles(spec: AttentionSpec, target: BuildTarget) -> list[CudaTile]:
    """Return the same of one CTA that has a multiprocessor for itself, for few units.

    There is none where the tile for many units is that, has more rows, or CTAs do not share items.
    """
    usual = candidates(spec, target)[0].tile
    best = candidates(spec, target, "wide")[0]
    assert isinstance(usual, DecodeTile)
    if best.excess or usual.rows > ROWS or usual.residents == 1 or not usual.clusters:
        return []
    return _with_fewer_registers(best)


def _with_fewer_registers(best: Candidate) -> list[CudaTile]:
    """Return a tile, and what to try if its registers spill."""
    tile = best.tile
    assert isinstance(tile, DecodeTile)
    tiles = [tile, replace(tile, holds_queries=False)] if tile.holds_queries else [tile]
    tiles += [replace(tiles[-1], clusters=())] if tile.clusters else []
    shorter = [replace(tiles[-1], block=ROWS)] if tile.block > ROWS else []
    return [*tiles, *shorter]


def refuses(spec: AttentionSpec, makes: tuple[bool, bool], family: Kind = "decode") -> str:
    """Say why there is no kernel of a family here; empty if there is one."""
    if any(makes):
        return "keys or values are transformed"
    if spec.group_size > TILE_ROWS[-1]:
        return f"a token has {spec.group_size} rows, more than {TILE_ROWS[-1]}"
    if rows_of(spec, family) > ROWS and spec.dim_vo > WIDEST_PAIR:
        return f"registers do not hold {2 * ROWS} rows of {spec.dim_vo} elements"
    if family == "draft" and spec.group_size > ROWS:
        return "decoding has as many rows"
    return ""
