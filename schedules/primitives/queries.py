"""Query rows of an item that all warps of a CTA work on: copied together, held by each."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import HALVES, load_matrices, pack
from tvm_attn.schedules.primitives.gather import offset
from tvm_attn.schedules.primitives.shapes import DEPTH, ROWS
from tvm_attn.schedules.primitives.staging import Copy, copy_rows
from tvm_attn.tir.access import to_float
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr

HALF_MAX = 65504.0
"""Largest float16."""


@T.inline
def load_q(cta, task, q, t):
    """Begin to load the query rows of item `t`, as they are or transformed."""
    tile = T.meta_var(cta.shared.q)
    if cta.hooks.variant.query_transform is None:
        where = T.meta_var(lambda i: offset(q, (*task.index(task.row(i)), 0)))
        copy_rows(Copy(tile, t % 2, q, where, cta.thread, cta.tile.threads))
    else:
        for i in T.serial(-(-tile.rows * tile.columns // cta.tile.threads)):
            place: T.let[T.int32] = (i * cta.tile.threads + cta.thread) // tile.columns
            d: T.let[T.int32] = (i * cta.tile.threads + cta.thread) % tile.columns
            if place < tile.rows:
                row = T.meta_var(task.row(place))
                at = T.meta_var(task.index(row))
                x = T.meta_var(lambda e: to_float(q[at[0], at[1], e]))
                element = T.meta_var(cta.scales.query_row(task.query(row), x, d))
                tile.buffer[tile.index(t % 2, place, d)] = T.Cast(tile.dtype, element)


def halves_of(pair: Expr) -> list[Expr]:
    """Return two bfloat16 as float32 that float16 can hold: those too large become its largest."""
    low = tirx.shift_left(pair, T.uint32(16))
    high = tirx.bitwise_and(pair, T.uint32(0xFFFF0000))
    values = [tirx.reinterpret("float32", bits) for bits in (low, high)]
    return [tirx.max(tirx.min(x, f32(HALF_MAX)), f32(-HALF_MAX)) for x in values]


@T.inline
def hold_quads(cta, t, d, m):
    """Load the left operand of a step in the order in which float8 keys are widened.

    The lane's columns of a step are four neighbours: two as its first pair, two as its second.
    """
    pair = T.alloc_local((2,), "uint32")
    for half in T.unroll(HALVES):
        column = T.meta_var(d * DEPTH + 2 * cta.lane.column(0))
        row = T.meta_var(cta.place(m * HALVES + half))
        pointer = T.meta_var(cta.shared.q.pointer(t % 2, row, column))
        T.ptx["ld.shared.v2.b32"](pair[0], pair[1], pointer)
        for i in T.unroll(2):
            at = T.meta_var(cta.query(d, m) + 2 * i + half)
            if str(cta.spec.q_dtype) == "float16":
                cta.registers.left[at] = pair[i]
            else:
                pack("float16", cta.registers.left[at], *halves_of(pair[i]))


@T.inline
def hold_step(cta, t, d):
    """Load the left operands of a step into registers."""
    for m in T.unroll(cta.row_tiles):
        if cta.is_widened:
            hold_quads(cta, t, d, m)
        else:
            at = T.meta_var(cta.lane.left_address())
            pointer = T.meta_var(cta.shared.q.pointer(t % 2, m * ROWS + at[0], d * DEPTH + at[1]))
            load_matrices(cta.registers.left, cta.query(d, m), pointer)


@T.inline
def hold_queries(cta, t):
    """Load the left operands of all steps into registers, if there are as many."""
    if cta.tile.holds_queries:
        for d in T.unroll(cta.spec.head_dim_qk // DEPTH):
            hold_step(cta, t, d)
