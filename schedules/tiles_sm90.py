"""The tile of Hopper kernels: what a CTA of a copying and some multiplying warpgroups works on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from tvm_attn.schedules.primitives.shapes import MERGED_ROWS, TASK_WORDS, WORD_BYTES
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget
from tvm_attn.variant import AttentionVariant

WARPGROUP_ROWS = 64
WARPGROUP_THREADS = 128
COLUMN_GROUP = 64
"""Elements of 128 bytes: dims are padded to multiples of them in shared memory."""
WIDEST_HELD = 128
"""Largest head dim of queries that a warpgroup holds in registers, besides all else."""
WIDEST_NARROW = 96
"""Largest head dim that has three multiplying warpgroups: weights take longer than products."""
BLOCKS, WIDE_BLOCKS = (128, 112, 96), (128, 112, 96, 80, 64)
"""Keys of a block that are tried, in this order, where queries are held in registers and not."""
ROOM, NARROW_ROOM = 188, 128
"""Registers of a lane of two or three multiplying warpgroups for outputs, scores and weights, where
queries are not held."""
AHEAD, BEHIND = 3, 2
"""Work items that are read beyond the one whose first block is to be copied, and those before the
one whose keys were used last of which outputs may not be stored yet."""
REGISTERS, REGISTER_STEP, MOST_REGISTERS = 65536, 8, 240
"""Registers of a multiprocessor, steps in which threads have them, and as many as they may need."""
STAGE_BYTES = 2**15
"""Bytes of a stage where memory is the limit, three of which keep it busy."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a CTA can have."""
BARRIER_BYTES = 8
ELEMENT_BYTES = 2
BOX_UNIT = 16
"""Keys that a box has a multiple of: boxes of 8, which there could be, are slower than rows."""


def padded(dim: int) -> int:
    """Columns of a tile for rows of `dim` elements."""
    return -(-dim // COLUMN_GROUP) * COLUMN_GROUP


@dataclass(frozen=True)
class HopperTile:
    """A kernel's tile: 64 fused query rows for each multiplying warpgroup, blocks of `block` keys.

    Parameters
    ----------
    block : int
        Keys of a block.
    stages : int
        Blocks of K and of V in shared memory.
    box : int
        Keys that are copied at a time: of pages, as many as divide a page and a block, or one where
        these are no multiple of 16; of ragged K and V, all of a block.
    page : int
        Slots of a page; 0 of ragged K and V.
    holds_queries : bool
        Whether queries are held in registers.
    slots : int
        Places in shared memory for the rows of a warpgroup: two where an item's queries stay in one
        while the next ones come to the other.
    feeders : int
        Warps that feed a block: two share rows that are gathered, if those that serve the slots
        copy boxes there, and so have registers to spare; else one.
    split : int
        Of the scores of a block, tiles of 8 keys that are weighed before the values are waited for.
    multipliers : int
        Warpgroups that multiply: one where few rows make memory the limit.
    copying : int
        Registers of a thread that copies.
    paired : int
        Tiles of 8 keys whose weights are added up by pairs before they come to a row's total, which
        waits less; 0 where they come to it one after the other.
    rows_at_once : int
        Rows of a unit that a warp merges side by side.
    """

    block: int
    stages: int
    box: int
    page: int
    holds_queries: bool
    slots: int
    feeders: int
    split: int
    multipliers: int = 2
    copying: int = 40
    paired: int = 0
    rows_at_once: int = MERGED_ROWS
    family: Literal["short", "long"] = "long"
    overhead: int = 1
    residents: int = 1

    @property
    def schedule(self) -> str:
        """Return the schedule that makes its kernel."""
        return "sm90"

    @property
    def granule(self) -> int:
        """Keys in which the planner counts and cuts."""
        return self.block

    @property
    def clusters(self) -> None:
        """Sizes of clusters: items are not shared."""
        return None

    @property
    def overlaps(self) -> bool:
        """Whether kernels may begin before it ends."""
        return True

    @property
    def waits(self) -> bool:
        """Whether it begins before the kernel before it ends, and waits for that one."""
        return self.family == "short"

    @property
    def rows(self) -> int:
        """Fused query rows of an item."""
        return self.multipliers * WARPGROUP_ROWS

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows that a warp has."""
        return 1

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.multipliers * 4

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return (self.multipliers + 1) * WARPGROUP_THREADS

    @property
    def tasks(self) -> int:
        """Work items that shared memory holds, a power of two.

        The first block of an item is copied once keys of the one `stages` blocks before it were
        used, and an item may have a single block.
        """
        alive = AHEAD + self.stages + BEHIND + 1
        return 1 << (alive - 1).bit_length()

    @property
    def barriers(self) -> int:
        """Barriers that there is room for: of the rings, the slots and the work items."""
        return 4 * self.stages + 4 * self.multipliers + 2 + self.tasks

    @property
    def begins_early(self) -> bool:
        """Whether an item's first block may begin with keys before its first."""
        return self.page > 0 and not self.gathers

    @property
    def gathers(self) -> bool:
        """Whether rows of K and V are copied one by one, and not boxes by the copy engine."""
        return self.box == 1

    @property
    def beginning(self) -> int:
        """Registers of a thread when the CTA begins."""
        even = REGISTERS // self.threads // REGISTER_STEP * REGISTER_STEP
        return min(even, MOST_REGISTERS)

    @property
    def multiplying(self) -> int:
        """Registers of a thread that multiplies: what those that copy leave, in steps of 8."""
        left = self.threads * self.beginning // WARPGROUP_THREADS - self.copying
        return min(left // self.multipliers // REGISTER_STEP * REGISTER_STEP, MOST_REGISTERS)

    @property
    def parts_at_once(self) -> int:
        """Parts of a unit that are loaded at once where they are merged, if registers are left."""
        return 2 if self.multipliers == 1 else 1

    @property
    def slots_outputs(self) -> bool:
        """Whether outputs leave through slots."""
        return self.holds_queries or self.shares_slots

    @property
    def shares_slots(self) -> bool:
        """Whether they leave through those of their queries, which are not needed any more."""
        return self.slots > 1

    @property
    def boxes(self) -> int:
        """Boxes of a block."""
        return self.block // self.box

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Return the shared memory that a CTA asks for."""
        dim_qk, dim_vo = padded(spec.head_dim_qk), padded(spec.dim_vo)
        slot = max(dim_qk, dim_vo) if self.shares_slots else dim_qk
        outputs = dim_vo if self.holds_queries else 0
        elements = self.rows * (self.slots * slot + outputs) + self.stages * self.block * (
            dim_qk + dim_vo
        )
        words = self.tasks * TASK_WORDS + 1
        return elements * ELEMENT_BYTES + self.barriers * BARRIER_BYTES + words * WORD_BYTES


def comes_in_boxes(spec: AttentionSpec) -> bool:
    """Whether the fused rows of a slot are whole tokens, and can be copied as boxes."""
    return WARPGROUP_ROWS % spec.group_size == 0


def widest(spec: AttentionSpec) -> int:
    """Return the larger one of the head dims."""
    return max(spec.head_dim_qk, spec.dim_vo)


def box_of(block: int, page_size: int | None) -> int:
    """Return how many keys of a block are copied at a time."""
    box = gcd(block, page_size or block)
    return 1 if box % BOX_UNIT else box


def tiles_to_try(spec: AttentionSpec) -> list[HopperTile]:
    """Return the tile of a Hopper kernel, and after it some with fewer registers.

    Parameters
    ----------
    spec : AttentionSpec
        Head dims and page size decide.
    """
    holds = widest(spec) <= WIDEST_HELD
    tiles = _narrow(spec) + [
        _tile(
            spec,
            block=block,
            stages=2,
            holds_queries=holds,
            slots=1,
            split=_split(spec, block),
        )
        for block in (BLOCKS if holds else WIDE_BLOCKS)
    ]
    return tiles if holds else [tile for tile in tiles if has_room(tile, spec)]


def short_tiles_to_try(spec: AttentionSpec) -> list[HopperTile]:
    """Return the tile of a Hopper kernel for requests of few rows; none for wide heads.

    One warpgroup multiplies, in a CTA that has a multiprocessor for itself.
    """
    row = (padded(spec.head_dim_qk) + padded(spec.dim_vo)) * ELEMENT_BYTES
    block = min(STAGE_BYTES // row // BOX_UNIT * BOX_UNIT, BLOCKS[0])
    if widest(spec) > WIDEST_HELD:
        return []
    return [
        _tile(
            spec,
            block=block,
            stages=3,
            holds_queries=True,
            slots=1,
            split=_split(spec, block),
            multipliers=1,
            copying=MOST_REGISTERS // 2,
            family="short",
        )
    ]


def has_room(tile: HopperTile, spec: AttentionSpec) -> bool:
    """Whether a tile that does not hold queries fits registers and shared memory."""
    registers = spec.dim_vo // 2 + tile.block // 2 + tile.block // 4
    room = ROOM if tile.multipliers == 2 else NARROW_ROOM
    return registers <= room and tile.shared_bytes(spec) <= SHARED_BYTES


def _split(spec: AttentionSpec, block: int) -> int:
    """Return how many column tiles of a block are weighed before its values are waited for."""
    return block // 16 if spec.dim_vo <= COLUMN_GROUP else block * 5 // 64


def _narrow(spec: AttentionSpec) -> list[HopperTile]:
    """Return tiles for narrow heads, whose weights take longer than their products; none for wide.

    So two warpgroups weigh scores while one multiplies. Queries stay in shared memory. Blocks are
    as large as registers allow, then stages as many as there is room for. What merging takes of
    the registers decides whether some spill: above 64 columns there are never enough for all rows.
    """
    if widest(spec) > WIDEST_NARROW:
        return []
    tiles = (
        _tile(
            spec,
            block=block,
            stages=stages,
            holds_queries=False,
            slots=2,
            split=block // 16,
            multipliers=3,
            copying=32,
            paired=2,
        )
        for block in BLOCKS
        for stages in (4, 3, 2)
    )
    tile = next(tile for tile in tiles if has_room(tile, spec))
    fewer = replace(tile, rows_at_once=MERGED_ROWS // 2)
    return [tile, fewer] if widest(spec) <= COLUMN_GROUP else [fewer]


def _tile(spec: AttentionSpec, *, block: int, **rest: Any) -> HopperTile:
    """Return a tile whose blocks are copied as the pages of a spec have it."""
    box = box_of(block, spec.page_size)
    page, feeders = spec.page_size or 0, _feeders(spec, box)
    return HopperTile(block=block, box=box, page=page, feeders=feeders, **rest)


def _feeders(spec: AttentionSpec, box: int) -> int:
    """Return how many warps feed a block."""
    return 2 if box == 1 and comes_in_boxes(spec) else 1


def refuses(spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget) -> str:
    """Return why Hopper's own kernel does not serve something; empty if it does."""
    transforms = (variant.query_transform, variant.key_transform, variant.value_transform)
    if target.arch is None or "wgmma" not in target.arch.features:
        return f"{target} has no wgmma"
    if spec.kv_dtype != spec.q_dtype:
        return f"K and V are {spec.kv_dtype}, queries {spec.q_dtype}"
    if any(hook is not None for hook in transforms):
        return "rows are transformed"
    if not variant.use_softmax:
        return "there is no softmax"
    return ""
