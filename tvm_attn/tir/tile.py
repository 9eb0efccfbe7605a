"""The buffers of one work item, allocated by name inside a kernel that is being traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tvm_attn.tir.access import CacheAccess
from tvm_attn.variant import Expr


@dataclass(frozen=True)
class Tile:
    """On-chip state of an item: `rows` fused query rows against blocks of `block` keys, float32.

    ``q [rows, dim_qk]`` is what the item loads once; ``page, slot [block]``, int32, say where the
    tokens of a block are; ``score, weight [rows, block]`` stand between
    the two matrix products of a block; ``peak, total [rows], o [rows, dim_vo]`` are the online
    state, ``rescale [rows]`` carries it to a new peak; ``part_lse, row_lse, inverse, share [rows]``
    belong to the closed state. What a single phase needs, it allocates itself.
    """

    rows: int
    block: int
    dim_qk: int
    dim_vo: int
    q: Any
    page: Any
    slot: Any
    score: Any
    weight: Any
    peak: Any
    total: Any
    rescale: Any
    o: Any
    part_lse: Any
    row_lse: Any
    inverse: Any
    share: Any


def allocate_tile(rows: int, block: int, dim_qk: int, dim_vo: int) -> Tile:
    """Allocate an item's buffers in the sblock that is being traced."""
    shapes: dict[str, tuple[int, ...]] = {
        "q": (rows, dim_qk),
        **dict.fromkeys(("page", "slot"), (block,)),
        **dict.fromkeys(("score", "weight"), (rows, block)),
        **dict.fromkeys(("peak", "total", "rescale"), (rows,)),
        "o": (rows, dim_vo),
        **dict.fromkeys(("part_lse", "row_lse", "inverse", "share"), (rows,)),
    }
    dtypes = {"page": "int32", "slot": "int32"}
    buffers = {
        name: IRBuilder.name(
            f"{name}_tile", T.sblock_alloc_buffer(shape, dtypes.get(name, "float32"))
        )
        for name, shape in shapes.items()
    }
    return Tile(rows, block, dim_qk, dim_vo, **buffers)


@dataclass(frozen=True)
class BlockAccess(CacheAccess):
    """Access to the tokens of a block by their place in it, once `Tile` says where they are."""

    tile: Tile

    @staticmethod
    def to(cache: CacheAccess, tile: Tile) -> BlockAccess:
        """Access to the block whose tokens were located in `tile`."""
        return BlockAccess(cache.spec, cache.indptr, cache.indices, cache.page_size, tile)

    def locate(self, request: Expr, token: Expr) -> tuple[Expr, Expr]:
        """Page and slot of a token of the block."""
        return self.tile.page[token], self.tile.slot[token]
