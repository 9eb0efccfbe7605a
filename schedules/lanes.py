"""Sums across vector registers: many at once cost less than one after the other.

A register is summed by shuffling and adding its halves, of which ever fewer lanes matter. Two
registers can share the shuffles, then two pairs, and so on: a tree over as many registers as they
have lanes ends in one register with a sum in each lane.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

UNIT = 4
"""Lanes that stay together: what lies in one 128-bit part of a register shuffles fastest."""


@functools.cache
def sum_lanes(rows: int, keys: int, lanes: int) -> str:
    """Return the name of the intrinsic that sums the registers of a tile.

    It stands for ``for i in rows, j in keys: s[i, j] = 0; for l in lanes: s[i, j] += v[i, j, l]``.

    Parameters
    ----------
    rows, keys, lanes : int
        Extents: `lanes` is a power of 2 of at least 4, ``rows * keys`` at most `lanes`.
    """
    name = f"tvm_attn.sum_lanes_{rows}x{keys}x{lanes}"
    TensorIntrin.register(name, _loops(rows, keys, lanes), _tree(rows, keys, lanes), override=True)
    return name


def _loops(rows: int, keys: int, lanes: int) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def loops(v_h: T.handle, s_h: T.handle) -> None:
        v = T.match_buffer(v_h, (rows, keys, lanes), "float32", offset_factor=1)
        s = T.match_buffer(s_h, (rows, keys), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(v[0:rows, 0:keys, 0:lanes])
            T.writes(s[0:rows, 0:keys])
            for i, j, lane in T.grid(rows, keys, lanes):
                with T.sblock("sum"):
                    vl, vi, vj = T.axis.remap("RSS", [lane, i, j])
                    T.reads(s[vi, vj], v[vi, vj, vl])
                    T.writes(s[vi, vj])
                    with T.init():
                        s[vi, vj] = T.float32(0.0)
                    s[vi, vj] = s[vi, vj] + v[vi, vj, vl]

    return loops


def _tree(rows: int, keys: int, lanes: int) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True, check_well_formed=False)
    def tree(v_h: T.handle, s_h: T.handle) -> None:
        v_row, v_key, s_row = T.int32(), T.int32(), T.int32()
        v = T.match_buffer(
            v_h, (rows, keys, lanes), "float32", strides=[v_row, v_key, 1], offset_factor=1
        )
        s = T.match_buffer(s_h, (rows, keys), "float32", strides=[s_row, 1], offset_factor=1)
        with T.sblock("root"):
            T.reads(v[0:rows, 0:keys, 0:lanes])
            T.writes(s[0:rows, 0:keys])
            _sum_and_store(v, s, rows, keys, lanes)

    return tree


def _sum_and_store(v: Any, s: Any, rows: int, keys: int, lanes: int) -> None:
    """Emit the tree into the function being traced, and the store of each row's sums."""
    tile = [(i, j) for i in range(rows) for j in range(keys)]
    level = [T.Bind(v.vload([i, j, 0], f"float32x{lanes}")) for i, j in tile]
    for step in range(lanes.bit_length() - 1):
        kept, added = _halves(lanes, step)
        last = len(level) - 1
        pairs = [(level[n], level[min(n + 1, last)]) for n in range(0, last + 1, 2)]
        level = [T.Bind(tirx.Shuffle(p, kept) + tirx.Shuffle(p, added)) for p in pairs]
    for i in range(rows):
        sums = tirx.Shuffle(level, [i * keys + j for j in range(keys)])
        T.buffer_store(s, sums, [i, slice(0, keys) if keys > 1 else 0])


def _halves(lanes: int, step: int) -> tuple[list[int], list[int]]:
    """Lanes of two joined registers to add, so that the sum has both in half as many lanes.

    The first two steps work inside of units, the others on whole units, such that the sums of
    neighbouring registers end as neighbours.
    """
    both = (0, lanes)
    if step >= 2:
        evens = range(0, 2 * lanes, 2 * UNIT)
        kept = [n for unit in evens for n in range(unit, unit + UNIT)]
        return kept, [n + UNIT for n in kept]
    units = range(0, lanes, UNIT)
    if step == 0:
        kept = [unit + n + which for unit in units for n in (0, 1) for which in both]
    else:
        kept = [unit + n + which for unit in units for which in both for n in (0, 1)]
    return kept, [n + 2 for n in kept]
