"""Queries times keys and weights times values, with ``mma.sync`` on fragments.

Operands are loaded one step ahead of the multiplications that need them.
"""

from __future__ import annotations

import itertools
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import (
    ACCUMULATORS,
    HALVES,
    LEFT,
    RIGHT,
    load_matrices,
    multiply,
    pack,
)
from tvm_attn.schedules.primitives.scores import Weigh
from tvm_attn.schedules.primitives.shapes import DEPTH, ROWS
from tvm_attn.schedules.primitives.staging import copy_found, copy_rows, find_rows
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr

PAIR = 2 * RIGHT
"""Registers of the right operands that one load brings: for two tiles of 8 columns."""


def query_corner(cta: Cta) -> Expr:
    """Address of what the lane shows ``ldmatrix`` of the warp's first queries."""
    row, column = cta.lane.left_address()
    return cta.shared.q.pointer(0, cta.first_place + row, column)


def key_corner(cta: Cta, s: Expr) -> Expr:
    """Address of what the lane shows ``ldmatrix`` of the first keys of a block."""
    k = cta.shared.k_operand
    return k.pointer(s % k.stages, *cta.lane.right_address())


def value_corner(cta: Cta, s: Expr) -> Expr:
    """Address of what the lane shows ``ldmatrix`` of the first values of a block."""
    v = cta.shared.v_operand
    return v.pointer(s % v.stages, *cta.lane.left_address())


@T.inline
def load_queries(cta, corner, d):
    """Load the warp's queries of step `d`."""
    for m in T.unroll(cta.row_tiles):
        pointer = T.meta_var(cta.shared.q.corner_pointer(corner, m * ROWS, d * DEPTH))
        load_matrices(cta.registers.left, cta.query(d, m), pointer)


@T.inline
def hold_queries(cta):
    """Load the warp's queries of all steps."""
    corner: T.uint32 = query_corner(cta)
    for d in T.unroll(cta.spec.head_dim_qk // DEPTH):
        load_queries(cta, corner, d)


@T.inline
def load_keys(cta, corner, step, tiles):
    """Load 16 keys of a block, of the step and tile that `step` counts."""
    k = T.meta_var(cta.shared.k_operand)
    pointer = T.meta_var(k.corner_pointer(corner, step % tiles * ROWS, step // tiles * DEPTH))
    load_matrices(cta.registers.right, step % 2 * PAIR, pointer)


@T.inline
def load_values(cta, corner, step, tiles):
    """Load 16 elements of 16 values of a block, of the step and tile that `step` counts."""
    v = T.meta_var(cta.shared.v_operand)
    pointer = T.meta_var(v.corner_pointer(corner, step // tiles * DEPTH, step % tiles * ROWS))
    load_matrices(cta.registers.right, step % 2 * PAIR, pointer, transposed=True)


@T.inline
def qk(cta, s, first, second):
    """Multiply the warp's queries with the keys of a block; begin up to two copies meanwhile.

    In the first step, if the warp has two tiles of rows: it has no registers for addresses later.
    """
    r = T.meta_var(cta.registers)
    steps = T.meta_var(cta.spec.head_dim_qk // DEPTH)
    tiles = T.meta_var(cta.key_tiles // 2)
    early = T.meta_var(min(1, steps - 1))
    late = T.meta_var(max(steps // 2, early))
    has_room = T.meta_var(cta.row_tiles == 1)
    for i in T.unroll(cta.row_tiles * cta.key_tiles * ACCUMULATORS):
        r.score[i] = f32(0.0)
    queries: T.uint32 = query_corner(cta)
    keys: T.uint32 = key_corner(cta, s)
    if not cta.tile.holds_queries:
        load_queries(cta, queries, 0)
    load_keys(cta, keys, 0, tiles)
    if not has_room:
        places = T.meta_var(first.room())
        others = T.meta_var(None if second is None else second.room())
        find_rows(first, places)
        if second is not None:
            find_rows(second, others)
    for d in T.unroll(steps):
        if has_room:
            if d == early:
                copy_rows(first)
            if second is not None:
                if d == late:
                    copy_rows(second)
        for n in T.unroll(tiles):
            step = T.meta_var(d * tiles + n)
            if not has_room:
                if d == 0:
                    copy_found(first, places, n, tiles)
                    if second is not None:
                        copy_found(second, others, n, tiles)
            if step + 1 < steps * tiles:
                load_keys(cta, keys, step + 1, tiles)
            if not cta.tile.holds_queries:
                if T.And(n == max(tiles - 2, 0), d + 1 < steps):
                    load_queries(cta, queries, d + 1)
            for m in T.unroll(cta.row_tiles):
                for h in T.unroll(2):
                    at = T.meta_var(cta.score(m, n * 2 + h))
                    right = T.meta_var(step % 2 * PAIR + h * RIGHT)
                    multiply(cta.dtype, r.score, at, r.left, cta.query(d, m), r.right, right)


def weigh(cta: Cta, weight: Weigh, j: Any) -> None:
    """Turn the scores of 16 keys into weights, as a left operand, and sum them before rounding."""
    r = cta.registers
    for m, n, h in itertools.product(range(cta.row_tiles), range(2), range(HALVES)):
        i, at = m * HALVES + h, cta.score(m, j * 2 + n, h)
        for e in range(2):
            T.buffer_store(r.score, weight(i, r.score[at + e]), [at + e])
            T.buffer_store(r.total, r.total[i] + r.score[at + e], [i])
        register = r.weight[m * LEFT + n * 2 + h]
        T.evaluate(pack(cta.dtype, register, r.score[at], r.score[at + 1]))


@T.inline
def multiply_values(cta, values, step):
    """Multiply weights with 16 elements of 16 values, of the step and tile that `step` counts."""
    r = T.meta_var(cta.registers)
    tiles = T.meta_var(cta.value_tiles // 2)
    if step + 1 < cta.tile.block // DEPTH * tiles:
        load_values(cta, values, step + 1, tiles)
    for m in T.unroll(cta.row_tiles):
        for h in T.unroll(2):
            at = T.meta_var(cta.out(m, step % tiles * 2 + h))
            right = T.meta_var(step % 2 * PAIR + h * RIGHT)
            multiply(cta.dtype, r.out, at, r.weight, m * LEFT, r.right, right)


@T.inline
def pv(cta, weight, s):
    """Weigh the scores, and multiply them with the values of a block."""
    tiles = T.meta_var(cta.value_tiles // 2)
    values: T.uint32 = value_corner(cta, s)
    load_values(cta, values, 0, tiles)
    for j in T.unroll(cta.tile.block // DEPTH):
        weigh(cta, weight, j)
        for n in T.unroll(tiles):
            multiply_values(cta, values, j * tiles + n)
