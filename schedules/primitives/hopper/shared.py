"""The shared memory of a Hopper CTA: a slot for query and output rows, rings of K and V blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.hopper.barriers import Barriers, Pipe
from tvm_attn.schedules.primitives.shapes import TASK_WORDS, WARP
from tvm_attn.schedules.tiles_sm90 import (
    COLUMN_GROUP,
    HopperTile,
    comes_in_boxes,
    padded,
)
from tvm_attn.spec import AttentionSpec

BARRIER_ALIGNMENT, TILE_ALIGNMENT = 8, 1024


@dataclass(frozen=True)
class HopperShared:
    """Tiles of a CTA in shared memory, and the barriers that say what is in them.

    Tiles are in groups of 64 columns, ``[dim / 64, rows, 64]`` elements, swizzled. ``q`` is a slot
    of queries for each warpgroup, or two, ``o`` one of outputs, or the same as ``q``. ``k, v`` are
    rings of blocks, filled and emptied as the pipes ``keys, values`` say. ``queries`` says that
    slots hold queries, ``taken`` that these are in registers, ``outputs`` that slots hold outputs,
    or nothing that is still needed, ``stored`` that slots of outputs alone may be used again.
    ``landing`` is for blocks of values that are mended before they are handed over. ``tasks`` are
    words of `task.Task`, complete where ``known`` says so; ``verdict`` is one word.
    """

    q: Any
    o: Any
    k: Any
    v: Any
    dim_slot: int
    dim_out: int
    dim_qk: int
    dim_vo: int
    keys: Pipe
    values: Pipe
    queries: Barriers
    taken: Barriers
    outputs: Barriers
    stored: Barriers
    landing: Barriers
    known: Barriers
    tasks: Any
    verdict: Any

    @staticmethod
    def allocate(spec: AttentionSpec, tile: HopperTile) -> HopperShared:
        """Allocate."""
        pool = T.SMEMPool()
        dtype = str(spec.q_dtype)
        dim_qk, dim_vo = padded(spec.head_dim_qk), padded(spec.dim_vo)
        dim_slot = max(dim_qk, dim_vo) if tile.shares_slots else dim_qk
        slots = tile.rows * tile.slots * dim_slot
        sizes = [slots, *(tile.stages * tile.block * d for d in (dim_qk, dim_vo))]
        q, k, v = (pool.alloc((size,), dtype, align=TILE_ALIGNMENT) for size in sizes)
        o = q
        if tile.holds_queries:
            o = pool.alloc((tile.rows * dim_vo,), dtype, align=TILE_ALIGNMENT)
        warps = tile.warps // tile.multipliers
        early = tile.multipliers if tile.holds_queries else 0
        fetchers = 1 if comes_in_boxes(spec) else WARP
        feeders = tile.feeders * WARP if tile.gathers else 1
        arrivals = [
            *([feeders] * tile.stages, [tile.warps] * tile.stages) * 2,
            *(
                [fetchers] * tile.multipliers,
                *([warps] * early, [warps] * tile.multipliers, [1] * early),
                [1],
                [1] * tile.tasks,
            ),
        ]
        words = pool.alloc((sum(map(len, arrivals)),), "uint64", align=BARRIER_ALIGNMENT)
        barriers, first = [], 0
        for group in arrivals:
            barriers.append(Barriers(words, first, len(group), max(group, default=0)))
            first += len(group)
        tasks, verdict = (
            pool.alloc((size,), "int32", align=16) for size in (tile.tasks * TASK_WORDS, 1)
        )
        pool.commit()
        k_full, k_empty, v_full, v_empty, queries, taken, outputs, stored, landing, known = barriers
        return HopperShared(
            q=q,
            o=o,
            k=k,
            v=v,
            dim_slot=dim_slot,
            dim_out=dim_vo if tile.holds_queries else dim_slot,
            dim_qk=dim_qk,
            dim_vo=dim_vo,
            keys=Pipe(k_full, k_empty),
            values=Pipe(v_full, v_empty),
            queries=queries,
            taken=taken,
            outputs=outputs,
            stored=stored,
            landing=landing,
            known=known,
            tasks=tasks,
            verdict=verdict,
        )

    def initialise(self) -> None:
        """Initialise all barriers: one thread does."""
        pipes = (self.keys.full, self.keys.empty, self.values.full, self.values.empty)
        slots = (self.queries, self.taken, self.outputs, self.stored)
        for group in (*pipes, *slots, self.landing, self.known):
            group.initialise()


def tile_index(rows: int, row: Any, column: Any) -> Any:
    """Index of an element of a tile of `rows`, as the copy engine places it."""
    chunk = column % COLUMN_GROUP // 8
    swizzled = T.bitwise_xor(chunk, row % 8) * 8 + column % 8
    return column // COLUMN_GROUP * (rows * COLUMN_GROUP) + row * COLUMN_GROUP + swizzled
