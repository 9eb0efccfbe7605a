"""Rows of K and V that warps gather: they land where the copy engine would have put them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.hopper.gathering import (
    ROW_BYTES,
    ROWS_OF_TURN,
    Gathered,
    swizzled,
)
from tvm_attn.schedules.primitives.hopper.shared import tile_index
from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES, LINE_CHUNKS, WARP
from tvm_attn.schedules.tiles_sm90 import COLUMN_GROUP, ELEMENT_BYTES, HopperTile, tiles_to_try
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.signature import ints

STAGE = 65536
TILES = [
    (dim, tile)
    for dim in (64, 128, 256)
    for tile in tiles_to_try(AttentionSpec(8, 2, dim, q_dtype="bfloat16", page_size=1))
]
"""Head dims, and all tiles that are tried."""


def places(tile: HopperTile, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each chunk of a stage lands, and where it belongs, in bytes."""
    rows = tile.block // tile.feeders
    turns = rows // ROWS_OF_TURN

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(lands_h: T.handle, belongs_h: T.handle) -> None:
        lands = ints(lands_h, "lands")
        belongs = ints(belongs_h, "belongs")
        for part, turn, lane, group in T.grid(tile.feeders, turns, WARP, groups):
            origin = T.meta_var(T.Cast("uint32", part * rows * ROW_BYTES + swizzled(lane)))
            source = T.meta_var(Gathered(None, rows, part * rows, origin))
            at = T.meta_var(((part * turns + turn) * WARP + lane) * groups + group)
            row = T.meta_var(part * rows + turn * ROWS_OF_TURN + lane // LINE_CHUNKS)
            chunk = T.meta_var(lane % LINE_CHUNKS * CHUNK_BYTES // ELEMENT_BYTES)
            column = T.meta_var(group * COLUMN_GROUP + chunk)
            offset = T.meta_var(group * tile.block * ROW_BYTES)
            place = T.meta_var(source.destination(T.uint32(STAGE), turn * ROWS_OF_TURN, offset))
            lands[at] = T.Cast("int32", place)
            belongs[at] = STAGE + tile_index(tile.block, row, column) * ELEMENT_BYTES

    module = tvm.IRModule({"places": definition.with_attr("global_symbol", "places")})
    lands, belongs = (np.empty(tile.block * groups * LINE_CHUNKS, np.int32) for _ in range(2))
    tvm.compile(module, target="llvm")["places"](lands, belongs)
    return lands, belongs


@pytest.mark.parametrize(("dim", "tile"), TILES, ids=lambda one: str(getattr(one, "block", one)))
def test_rows_land_where_a_box_would_have_put_them(dim: int, tile: HopperTile) -> None:
    lands, belongs = places(tile, dim // COLUMN_GROUP)
    np.testing.assert_array_equal(lands, belongs)
    chunks = np.arange(STAGE, STAGE + len(lands) * CHUNK_BYTES, CHUNK_BYTES)
    np.testing.assert_array_equal(np.sort(lands), chunks)


@pytest.mark.parametrize(("dim", "tile"), TILES, ids=lambda one: str(getattr(one, "block", one)))
def test_turns_that_begin_together_are_all_turns(dim: int, tile: HopperTile) -> None:
    source = Gathered(None, tile.block // tile.feeders, 0, None)
    assert source.turns * ROWS_OF_TURN == source.rows
    assert source.turns % source.together == 0
    assert source.shares * WARP >= source.rows
