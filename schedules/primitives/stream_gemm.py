"""Queries times keys and weights times values of a warp's own block, with ``mma.sync``.

float8 operands are widened between shared memory and the multiplication. ``ldmatrix`` moves pairs
of bytes, so a lane gets four neighbouring elements of a key, or two of two values: the sum over
elements of a key may take them in that order, and so may the columns of the output.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import (
    LEFT,
    RIGHT,
    load_matrices,
    multiply,
)
from tvm_attn.schedules.primitives.gemm import PAIR, weigh
from tvm_attn.schedules.primitives.queries import hold_step
from tvm_attn.schedules.primitives.shapes import COLUMNS, DEPTH, ROWS
from tvm_attn.schedules.primitives.streams import StreamingCta
from tvm_attn.schedules.primitives.widened import swap_inner, widen
from tvm_attn.tir.states import f32

INDEPENDENT = 4
"""Tiles of sums that a warp multiplies in turns."""


def chains(cta: StreamingCta) -> int:
    """Return how many sums a score is made of: a multiplication waits for the one before it."""
    is_deep = cta.spec.head_dim_qk > DEPTH
    return 2 if is_deep and cta.row_tiles * cta.key_tiles < INDEPENDENT else 1


@T.inline
def load_keys(cta, s, n, step, register):
    """Load 16 keys of a block, 32 bytes of each, into four registers."""
    k = T.meta_var(cta.shared.k)
    at = T.meta_var(cta.lane.right_address())
    pointer = T.meta_var(k.chunk_pointer(cta.stage(s), n * ROWS + at[0], at[1] // COLUMNS, step))
    load_matrices(cta.registers.right, register, pointer)


@T.inline
def load_values(cta, s, j, n, register):
    """Load 32 bytes of 16 values of a block, transposed, into four registers."""
    v = T.meta_var(cta.shared.v)
    at = T.meta_var(cta.lane.left_address())
    pointer = T.meta_var(v.chunk_pointer(cta.stage(s), j * DEPTH + at[0], at[1] // COLUMNS, n))
    load_matrices(cta.registers.right, register, pointer, transposed=True)


@T.inline
def load_queries(cta, t, n, step):
    """Load the queries of the step after `step` once those before it are used, if none are held.

    Steps come one by one, or a pair of them for each 16 keys.
    """
    last = T.meta_var(cta.key_tiles // 2 - 1)
    if not cta.tile.holds_queries:
        if T.And(n == step % 2 * last, step + 1 < cta.spec.head_dim_qk // DEPTH):
            hold_step(cta, t, step + 1)


@T.inline
def multiply_keys(cta, t, n, step, register, sums):
    """Multiply the queries of a step with 16 keys."""
    r = T.meta_var(cta.registers)
    chain = T.meta_var(step % chains(cta) * cta.scores)
    load_queries(cta, t, n, step)
    for m in T.unroll(cta.row_tiles):
        for h in T.unroll(2):
            at = T.meta_var(chain + cta.score(m, n * 2 + h))
            right = T.meta_var(register + h * RIGHT)
            multiply(cta.dtype, sums, at, r.left, cta.query(step, m), r.right, right)


@T.inline
def multiply_wide_keys(cta, t, n, pair, register, sums):
    """Multiply the queries of a pair of steps with 16 keys that are widened for it."""
    r = T.meta_var(cta.registers)
    wide = T.alloc_local((RIGHT,), "uint32")
    for i in T.unroll(2):
        step = T.meta_var(pair * 2 + i)
        if step < cta.spec.head_dim_qk // DEPTH:
            chain = T.meta_var(step % chains(cta) * cta.scores)
            load_queries(cta, t, n, step)
            for h in T.unroll(2):
                word = T.meta_var(r.right[register + h * RIGHT + i])
                widen(str(cta.spec.kv_dtype), word, wide[0], wide[1])
                for m in T.unroll(cta.row_tiles):
                    at = T.meta_var(chain + cta.score(m, n * 2 + h))
                    multiply(cta.dtype, sums, at, r.left, cta.query(step, m), wide, 0)


@T.inline
def qk(cta, t, s):
    """Multiply the queries of item `t` with the keys of a block."""
    width = T.meta_var(DEPTH * (2 if cta.is_widened else 1))
    steps = T.meta_var(-(-cta.spec.head_dim_qk // width))
    tiles = T.meta_var(cta.tile.block // ROWS)
    sums = T.alloc_local((chains(cta) * cta.scores,), "float32")
    for i in T.unroll(chains(cta) * cta.scores):
        sums[i] = f32(0.0)
    if not cta.tile.holds_queries:
        hold_step(cta, t, 0)
    load_keys(cta, s, 0, 0, 0)
    for i in T.unroll(steps * tiles):
        register = T.meta_var(i % 2 * PAIR)
        if i + 1 < steps * tiles:
            load_keys(cta, s, (i + 1) % tiles, (i + 1) // tiles, (i + 1) % 2 * PAIR)
        if cta.is_widened:
            multiply_wide_keys(cta, t, i % tiles, i // tiles, register, sums)
        else:
            multiply_keys(cta, t, i % tiles, i // tiles, register, sums)
    for i in T.unroll(cta.scores):
        cta.registers.score[i] = sums[i]
        if chains(cta) == 2:
            cta.registers.score[i] = sums[i] + sums[cta.scores + i]


@T.inline
def multiply_values(cta, n, register):
    """Multiply weights with 16 elements of 16 values."""
    r = T.meta_var(cta.registers)
    for m in T.unroll(cta.row_tiles):
        for h in T.unroll(2):
            at = T.meta_var(cta.out(m, n * 2 + h))
            multiply(cta.dtype, r.out, at, r.weight, m * LEFT, r.right, register + h * RIGHT)


@T.inline
def multiply_wide_values(cta, n, register):
    """Multiply weights with 32 elements of 16 values that are widened for it.

    Of 16 neighbouring elements, the even ones are the columns of one tile, the odd ones another's.
    """
    r = T.meta_var(cta.registers)
    wide = T.alloc_local((2 * RIGHT,), "uint32")
    for i in T.unroll(2):
        if n * 2 + i < cta.spec.dim_vo // ROWS:
            for j in T.unroll(2):
                word = T.meta_var(swap_inner(r.right[register + i * RIGHT + j]))
                widen(str(cta.spec.kv_dtype), word, wide[j], wide[RIGHT + j])
            for m in T.unroll(cta.row_tiles):
                for h in T.unroll(2):
                    at = T.meta_var(cta.out(m, (n * 2 + i) * 2 + h))
                    multiply(cta.dtype, r.out, at, r.weight, m * LEFT, wide, h * RIGHT)


@T.inline
def pv(cta, weight, s):
    """Weigh the scores, and multiply them with the values of a block."""
    width = T.meta_var(ROWS * (2 if cta.is_widened else 1))
    tiles = T.meta_var(-(-cta.spec.dim_vo // width))
    steps = T.meta_var(cta.tile.block // DEPTH)
    load_values(cta, s, 0, 0, 0)
    for i in T.unroll(steps * tiles):
        register = T.meta_var(i % 2 * PAIR)
        if i % tiles == 0:
            weigh(cta, weight, i // tiles)
        if i + 1 < steps * tiles:
            load_values(cta, s, (i + 1) // tiles, (i + 1) % tiles, (i + 1) % 2 * PAIR)
        if cta.is_widened:
            multiply_wide_values(cta, i % tiles, register)
        else:
            multiply_values(cta, i % tiles, register)
