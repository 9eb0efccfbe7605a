"""The shared memory of a CTA: query rows, a ring of K and V blocks, and where their tokens are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.shapes import PARITIES, TASK_WORDS, TASKS
from tvm_attn.schedules.primitives.staging import SharedTile, allocate_tile
from tvm_attn.schedules.tiles_cuda import CudaTile
from tvm_attn.spec import AttentionSpec
from tvm_attn.variant import Expr

NOWHERE = -1
"""Page of a token that there is not."""


@dataclass(frozen=True)
class SharedTiles:
    """Tiles of a CTA in shared memory.

    ``q`` holds the query rows. ``k`` and ``v`` are rings of blocks as they are stored in the cache;
    ``k_operand`` and ``v_operand`` are what is multiplied: the rings themselves, or one block each
    that is made from them. ``q_place`` says where rows are in q, ``k_place`` and ``v_place`` where
    the tokens of two blocks of two items are in the cache, as addresses of rows. ``tasks``
    are words of `task.Task`, ``verdict`` is one word.
    """

    q: SharedTile
    k: SharedTile
    v: SharedTile
    k_operand: SharedTile
    v_operand: SharedTile
    q_place: Any
    k_place: Any
    v_place: Any
    tasks: Any
    verdict: Any

    @staticmethod
    def place(cta: Any, t: Expr, s: Expr) -> Expr:
        """Where the places of a block begin: the one at position `s` of the stream, of item `t`."""
        return (t % PARITIES * PARITIES + s % PARITIES) * cta.tile.block

    @property
    def are_made(self) -> bool:
        """Whether operands have to be made of what was gathered."""
        return self.k_operand is not self.k or self.v_operand is not self.v

    @staticmethod
    def allocate(spec: AttentionSpec, tile: CudaTile, transforms: tuple[bool, bool]) -> SharedTiles:
        """Allocate; `transforms` says whether keys and values are transformed."""
        pool = T.SMEMPool()
        q_dtype, kv_dtype = str(spec.q_dtype), str(spec.kv_dtype)
        q = allocate_tile(pool, tile.rows, spec.head_dim_qk, q_dtype)
        rings: list[SharedTile] = []
        operands: list[SharedTile] = []
        for dim, transformed in zip((spec.head_dim_qk, spec.dim_vo), transforms, strict=True):
            ring = allocate_tile(pool, tile.block, dim, kv_dtype, tile.stages)
            rings.append(ring)
            if transformed or kv_dtype != q_dtype:
                operands.append(allocate_tile(pool, tile.block, dim, q_dtype))
            else:
                operands.append(ring)
        keys = PARITIES * PARITIES * tile.block
        places = [pool.alloc((size,), "uint64", align=16) for size in (tile.rows, keys, keys)]
        words = [pool.alloc((size,), "int32", align=16) for size in (TASKS * TASK_WORDS, 1)]
        pool.commit()
        return SharedTiles(q, *rings, *operands, *places, *words)
