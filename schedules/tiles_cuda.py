"""Tile shapes of tensor-core kernels, from what a multiprocessor has room for.

A tile is better if a warp has more rows, since each key it loads serves all of them; then if more
rows share a multiprocessor, up to enough; then if more warps do, up to enough, to hide one
another's waiting; then if blocks are copied ahead; then if they are longer. Which one that is
follows from the card's shared memory and registers and the head dims; nothing over a card's limits
is offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tvm_attn.errors import SpecError, TargetError
from tvm_attn.schedules.primitives.shapes import (
    DEPTH,
    MERGED_ROWS,
    PARITIES,
    ROWS,
    TASK_WORDS,
    TASKS,
    WARP,
    WORD_BYTES,
    row_elements,
)
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import Arch, BuildTarget
from tvm_attn.tir.signature import itemsize

Kind = Literal["decode", "wide", "draft", "short", "long"]
FAMILIES: tuple[Kind, ...] = ("short", "long")
"""Those whose tiles are here; requests of fewer rows have tiles of their own."""
SHORT_ROWS = 64
"""Query rows of the short family: a tile for each warp."""
LONG_ROWS = 128
"""Most query rows of the long family: of more, a causal mask hides much of the last blocks."""
BLOCKS = (64, 48, 32, 16)
WIDEST_PAIR = 128
"""Largest value dim of which a warp can hold two tiles of 16 rows."""
STEPS_AHEAD = 2
"""Steps whose queries a warp has in registers: of one, and of the next."""
QUERY_REGISTERS = 4
"""Registers of a thread for the queries of a step, for each tile of 16 rows."""
OTHER_REGISTERS = 39
"""Registers of a thread besides accumulators: operands, state, addresses."""
REGISTER_LIMIT = 255
FEWER_REGISTERS = 8
TRIES = 3
ROOMY = 2
"""CTAs on a multiprocessor of a tile that is tried because another one's registers spill: few."""
ENOUGH_ROWS = 128
"""Query rows on a multiprocessor, for each tile of 16 that a warp has: more do not help."""
ENOUGH_WARPS = 8
FULL_BLOCK = 32
"""Keys of a block, fewer of which are worked on only if there is no room."""
RESERVED_BYTES = 1024
"""Shared memory that every CTA takes besides its own."""
SHARED_STEP = 128
"""Shared memory is given out in such steps."""
PLACE_BYTES = 8


class Rank(NamedTuple):
    """What makes a tile better than another, the most important first."""

    has_full_blocks: bool
    row_tiles: int
    rows: int
    warps: int
    stages: int
    block: int
    residents: int
    holds_queries: bool


@dataclass(frozen=True)
class CudaTile:
    """A kernel's tile: `rows` fused query rows against blocks of `block` keys.

    Parameters
    ----------
    family : {"short", "long"}
        Which requests the kernel serves.
    rows, block : int
        Fused query rows of an item; keys of a block.
    warps : int
        Warps of a CTA; each has ``rows / warps`` rows.
    stages : int
        Blocks of K and V in shared memory: with 2 the next block is copied while one is worked on;
        with 1 its values during queries times keys, and the next keys during weights times values.
    residents : int
        CTAs that share a multiprocessor.
    overhead : int
        What an item costs besides its keys, in blocks: for the planner's cost model.
    holds_queries : bool
        Whether a warp keeps all of its queries in registers, rather than load them for each block.

    Raises
    ------
    SpecError
        If the sizes do not go together.
    """

    family: Kind
    rows: int
    block: int
    warps: int
    stages: int
    residents: int
    overhead: int = 1
    holds_queries: bool = False

    def __post_init__(self) -> None:
        """Validate."""
        sizes = (self.rows, self.block, self.warps, self.residents)
        if self.family not in FAMILIES or min(sizes) < 1 or self.stages not in (1, 2):
            raise SpecError(f"{self}: sizes are at least 1, stages 1 or 2, families {FAMILIES}")
        if self.rows % (ROWS * self.warps) or self.block % ROWS:
            raise SpecError(f"{self}: rows of a warp, and keys, come in tiles of {ROWS}")

    @property
    def schedule(self) -> str:
        """Return the schedule that makes its kernel."""
        return "sm80"

    @property
    def granule(self) -> int:
        """Keys that plans count, and cut between."""
        return self.block

    @property
    def clusters(self) -> tuple[int, ...] | None:
        """How many CTAs can share each item, besides one; None if the kernel knows of none."""
        return None

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP * self.warps

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows that a warp has."""
        return self.rows // (ROWS * self.warps)

    @property
    def tasks(self) -> int:
        """Work items that shared memory holds."""
        return TASKS

    @property
    def begins_early(self) -> bool:
        """Whether an item's first block may begin with keys before its first."""
        return False

    @property
    def parts_at_once(self) -> int:
        """Parts of a unit that are loaded at once where they are merged, if registers are left."""
        return 1

    @property
    def rows_at_once(self) -> int:
        """Rows of a unit that a warp merges side by side."""
        return MERGED_ROWS

    def shared_bytes(self, spec: AttentionSpec, makes: tuple[bool, bool] = (False, False)) -> int:
        """Return the shared memory that a CTA asks for; `makes`: K or V are transformed."""
        q_dtype, kv_dtype = str(spec.q_dtype), str(spec.kv_dtype)
        sizes = [self.rows * row_elements(spec.head_dim_qk, q_dtype) * itemsize(q_dtype)]
        for dim, made in zip((spec.head_dim_qk, spec.dim_vo), makes, strict=True):
            row = row_elements(dim, kv_dtype) * itemsize(kv_dtype)
            sizes.append(self.stages * self.block * row)
            if made or kv_dtype != q_dtype:
                sizes.append(self.block * row_elements(dim, q_dtype) * itemsize(q_dtype))
        places = self.rows + 2 * PARITIES * PARITIES * self.block
        sizes.append(places * PLACE_BYTES)
        sizes.append((TASKS * TASK_WORDS + 1) * WORD_BYTES)
        return sum(sizes)

    def query_steps(self, spec: AttentionSpec) -> int:
        """Return how many steps of `DEPTH` elements there are in registers, of queries."""
        return spec.head_dim_qk // DEPTH if self.holds_queries else STEPS_AHEAD

    def registers(self, spec: AttentionSpec) -> int:
        """Estimate the registers of a thread."""
        accumulators = self.row_tiles * (spec.dim_vo + self.block) // 2
        queries = self.row_tiles * QUERY_REGISTERS * (self.query_steps(spec) - STEPS_AHEAD)
        return accumulators + queries + OTHER_REGISTERS

    def rank(self) -> tuple[int, ...]:
        """Return how good it is."""
        return Rank(
            has_full_blocks=self.block >= FULL_BLOCK,
            row_tiles=self.row_tiles,
            rows=min(self.residents * self.rows, ENOUGH_ROWS * self.row_tiles),
            warps=min(self.residents * self.warps, ENOUGH_WARPS),
            stages=self.stages,
            block=self.block,
            residents=self.residents,
            holds_queries=self.holds_queries,
        )


@dataclass(frozen=True)
class Candidate:
    """A tile that was considered for a GPU, with as many CTAs on a multiprocessor as fit.

    Parameters
    ----------
    tile : CudaTile
        The tile.
    shared_bytes, registers : int
        Shared memory of a CTA; registers of a thread, estimated.
    excess : str
        What a CTA has too much of for the GPU, in words; empty if it fits.
    """

    tile: CudaTile
    shared_bytes: int
    registers: int
    excess: str


def cuda_tiles(
    spec: AttentionSpec, target: BuildTarget, makes: tuple[bool, bool] = (False, False)
) -> tuple[CudaTile, CudaTile]:
    """Return the best short and the best long tile for a GPU.

    Parameters
    ----------
    spec : AttentionSpec
        Head dims and dtypes decide.
    target : BuildTarget
        Its architecture's shared memory and registers do.
    makes : tuple of bool
        Whether keys and values are transformed, which takes room.

    Raises
    ------
    SpecError
        If not even the smallest tile fits; the message has both sizes.
    TargetError
        If it is a CPU.
    """
    short, long = (ranked_tiles(spec, target, family, makes)[0] for family in FAMILIES)
    return short, long


def ranked_tiles(
    spec: AttentionSpec,
    target: BuildTarget,
    family: Kind,
    makes: tuple[bool, bool] = (False, False),
) -> list[CudaTile]:
    """Return all tiles of a family that fit a GPU, the best first."""
    considered = candidates(spec, target, family, makes)
    tiles = [candidate.tile for candidate in considered if not candidate.excess]
    if not tiles:
        least = min(candidate.shared_bytes for candidate in considered)
        raise SpecError(
            f"no tile of {spec} fits {target}: the smallest one takes {least} bytes of shared "
            f"memory, but a CTA has at most {arch_of(target).shared_memory_per_block}"
        )
    return tiles


def candidates(
    spec: AttentionSpec,
    target: BuildTarget,
    family: Kind,
    makes: tuple[bool, bool] = (False, False),
) -> list[Candidate]:
    """Return all tiles of a family, the best first and at the end those that do not fit a GPU."""
    arch = arch_of(target)
    found = [with_residents(tile, spec, arch, makes) for tile in _tiles(spec, family)]
    return sorted(found, key=lambda one: (not one.excess, one.tile.rank()), reverse=True)


def tiles_to_try(
    spec: AttentionSpec,
    target: BuildTarget,
    family: Kind,
    makes: tuple[bool, bool] = (False, False),
) -> list[CudaTile]:
    """Return the best tile, and after it some that need fewer registers, should they spill."""
    tiles: list[CudaTile] = []
    for tile in ranked_tiles(spec, target, family, makes):
        if not tiles or tile.registers(spec) <= tiles[-1].registers(spec) - FEWER_REGISTERS:
            tiles.append(replace(tile, residents=min(tile.residents, ROOMY)) if tiles else tile)
    return tiles[:TRIES]


def _tiles(spec: AttentionSpec, family: Kind) -> Iterator[CudaTile]:
    """Yield the tiles that may be considered."""
    for tile in _shapes(spec, family):
        yield tile
        if family == "long" and tile.row_tiles == 1:
            yield replace(tile, holds_queries=True)


def _shapes(spec: AttentionSpec, family: Kind) -> Iterator[CudaTile]:
    for block in BLOCKS:
        for stages in (2, 1):
            if family == "short":
                yield CudaTile(family, SHORT_ROWS, block, SHORT_ROWS // ROWS, stages, residents=1)
                continue
            for warps in (4, 8):
                for row_tiles in (2, 1):
                    rows = ROWS * row_tiles * warps
                    if rows <= LONG_ROWS and (row_tiles == 1 or spec.dim_vo <= WIDEST_PAIR):
                        yield CudaTile(family, rows, block, warps, stages, residents=1)


def with_residents(
    tile: CudaTile, spec: AttentionSpec, arch: Arch, makes: tuple[bool, bool]
) -> Candidate:
    """Put as many CTAs on a multiprocessor as fit."""
    shared, registers = tile.shared_bytes(spec, makes), tile.registers(spec)
    excess = ""
    if shared > arch.shared_memory_per_block:
        excess = "too much shared memory"
    elif registers > REGISTER_LIMIT:
        excess = "too many registers"
    taken = -(-shared // SHARED_STEP) * SHARED_STEP + RESERVED_BYTES
    residents = min(
        arch.shared_memory_per_sm // taken,
        arch.registers_per_block // (registers * tile.threads),
        arch.max_threads_per_sm // tile.threads,
    )
    return Candidate(replace(tile, residents=max(residents, 1)), shared, registers, excess)


def arch_of(target: BuildTarget) -> Arch:
    """Return the architecture of a GPU.

    Raises
    ------
    TargetError
        If it is a CPU.
    """
    if target.arch is None:
        raise TargetError(f"{target} is no GPU; use a cuda target")
    return target.arch
