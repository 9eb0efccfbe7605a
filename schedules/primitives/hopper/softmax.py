"""Online softmax of a warpgroup, lazily: scores are relative to a reference that seldom moves.

A row's reference is the largest score of its first block, or where that is far from 0 some way
above it (`headroom`). Later scores are taken relative to it; only where one has outgrown it by
`slack` (a power of 2 that weights can hold) are exact maxima found, the reference moved and what
was accumulated rescaled: the result is the same. That none has is one test of a warp. As signed
integers, floats above 0 compare as they are, and none below 0 is above one of them.

The scores of a block are weighed in two parts: the first while the block before it is multiplied
with its values, the second after that, while weights are packed. The test between the two keeps the
compiler from moving the wait for the values up.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import struct
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.folded import largest_of_three
from tvm_attn.schedules.primitives.fragments import (
    ACCUMULATORS,
    HALVES,
    any_lane,
    over_row,
    pack,
)
from tvm_attn.schedules.primitives.hopper.wgmma import hold
from tvm_attn.schedules.primitives.scores import LOW, has_below, slack
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr

HIDDEN = -math.inf
LEAST_INT = -(2**31)
HEADROOM, ORDINARY = 64.0, 16.0
"""How far above the largest score a reference is at most taken, so that later scores seldom outgrow
it, and the size up to which scores have none."""
LEAST_SHRINKING = 126.0
"""As a power of 2, by how much what was accumulated can shrink in one multiplication."""


def bits_of(value: float) -> int:
    """Return a float32's bits as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@T.inline
def note_empty_rows(cta, group):
    """Note whether a row of the warp has seen no key."""
    r = T.meta_var(cta.registers)
    is_empty = T.meta_var(T.Or(r.peak[0] == f32(HIDDEN), r.peak[1] == f32(HIDDEN)))
    group.flags.set("has_empty", any_lane(is_empty))


@T.inline
def find_tops(cta, begin, end):
    """Find the largest of some scores in each row: of column tiles `begin` to `end`."""
    r = T.meta_var(cta.registers)
    for i in T.unroll(HALVES):
        r.top[i] = r.score[cta.score(0, begin, i)]
        for n in T.unroll(end - begin):
            for e in T.unroll(2):
                r.top[i] = T.max(r.top[i], r.score[cta.score(0, begin + n, i, e)])
        r.top[i] = T.max(r.top[i], over_row(r.top[i], 1))
        r.top[i] = T.max(r.top[i], over_row(r.top[i], 2))


def headroom(cta: Cta, top: Expr) -> Expr:
    """Return how far above the largest score of a row its reference is taken.

    Less than the score is from 0: what is relative is then rounded no more than scores are anyway.
    None where a hook makes logits, which are sums, or where weights are float16, which has no room.
    """
    if cta.dtype != "bfloat16" or cta.hooks.variant.logits_transform is not None:
        return f32(0.0)
    return tirx.max(f32(0.0), tirx.min(f32(HEADROOM), tirx.abs(top) - f32(ORDINARY)))


def advance_by(cta: Cta, top: Expr, reference: Expr) -> Expr:
    """Return by how much to move a reference, given the largest score relative to it.

    To some way above that, unless what was accumulated would vanish which need not.
    """
    raised = top + headroom(cta, reference + top)
    return tirx.max(top, tirx.min(raised, f32(LEAST_SHRINKING)))


@T.inline
def open_rows(cta, group, factor):
    """Open the rows of an item with the scores of its first block."""
    r = T.meta_var(cta.registers)
    find_tops(cta, 0, cta.key_tiles)
    for i in T.unroll(HALVES):
        r.peak[i] = r.top[i] * factor
        r.peak[i] = r.peak[i] + headroom(cta, r.peak[i])
        r.total[i] = f32(0.0)
    note_empty_rows(cta, group)
    for i in T.unroll(HALVES):
        r.reference[i] = cta.hooks.accumulation.reference(r.peak[i])
        for n in T.unroll(cta.key_tiles):
            for e in T.unroll(2):
                at = T.meta_var(cta.score(0, n, i, e))
                r.score[at] = r.score[at] * factor - r.reference[i]


def relate(cta: Cta, group: Any, scored: Callable[[int, int], None], begin: int, end: int) -> None:
    """Take scores relative to the reference, and note whether any has outgrown it.

    ``scored(begin, end)`` leaves scores of column tiles minus the references.
    """
    r = cta.registers
    for i in range(HALVES):
        T.buffer_store(r.bits, T.int32(LEAST_INT), [i])
    for first in range(begin, end, 2):
        scored(first, min(first + 2, end))
        for n, i in itertools.product(range(first, min(first + 2, end)), range(HALVES)):
            at = cta.score(0, n, i)
            largest = largest_of_three(r.bits[i], r.score[at], r.score[at + 1])
            T.buffer_store(r.bits, largest, [i])
    above = tirx.max(r.bits[0], r.bits[1]) > T.int32(bits_of(slack(cta)))
    group.flags.set("outgrown", any_lane(tirx.Or(group.flags.has_empty, above)))


@T.inline
def carry_over(cta, group, begin, end):
    """Carry rows whose largest scores, in `top`, have outgrown their references over to new ones.

    That is what was accumulated, weights of tiles up to `begin`, and scores from there to `end`.
    """
    r = T.meta_var(cta.registers)
    for i in T.unroll(HALVES):
        is_empty: T.let[T.bool] = r.peak[i] == f32(HIDDEN)
        moves: T.let[T.bool] = T.Or(
            r.top[i] > f32(slack(cta)), T.And(is_empty, r.top[i] > f32(HIDDEN))
        )
        far: T.let[T.float32] = advance_by(cta, r.top[i], r.reference[i])
        by: T.let[T.float32] = T.Select(moves, far, f32(0.0))
        shrinks: T.let[T.float32] = T.Select(is_empty, f32(0.0), T.exp2(f32(0.0) - by))
        before = T.meta_var(T.Select(group.flags.moved, r.scale[i], f32(1.0)))
        r.scale[i] = before * shrinks
        r.total[i] = r.total[i] * shrinks
        for n in T.unroll(begin):
            for e in T.unroll(2):
                at = T.meta_var(cta.score(0, n, i, e))
                r.score[at] = r.score[at] * shrinks
        for n in T.unroll(end - begin):
            for e in T.unroll(2):
                at = T.meta_var(cta.score(0, begin + n, i, e))
                r.score[at] = r.score[at] - by
        r.reference[i] = r.reference[i] + by
        r.peak[i] = T.Select(moves, r.reference[i], r.peak[i])
    note_empty_rows(cta, group)
    group.flags.set("moved", T.bool(True))


@T.inline
def move_references(cta, group, begin, end):
    """Move the references of a warp, which scores of column tiles `begin` to `end` have outgrown.

    Tiles before those are weights by now.
    """
    find_tops(cta, begin, end)
    carry_over(cta, group, begin, end)


@T.inline
def lift_references(cta, group, factor):
    """Move low references to the largest scores of a block while these are not relative yet."""
    r = T.meta_var(cta.registers)
    if any_lane(has_below(cta, LOW)):
        find_tops(cta, 0, cta.key_tiles)
        for i in T.unroll(HALVES):
            r.top[i] = r.top[i] * factor - r.reference[i]
        carry_over(cta, group, 0, 0)


@T.inline
def weigh_one_by_one(cta, begin, end):
    """Turn scores into weights, and add each to the total of its row."""
    r = T.meta_var(cta.registers)
    for n in T.unroll(end - begin):
        for i in T.unroll(HALVES):
            for e in T.unroll(2):
                at = T.meta_var(cta.score(0, begin + n, i, e))
                r.score[at] = T.exp2(r.score[at])
                r.total[i] = r.total[i] + r.score[at]


def weigh_by_pairs(cta: Cta, begin: int, end: int) -> None:
    """Turn scores of a few column tiles into weights, add them up by pairs, and to the totals."""
    r = cta.registers
    for n, i, e in itertools.product(range(begin, end), range(HALVES), range(2)):
        at = cta.score(0, n, i, e)
        T.buffer_store(r.score, T.exp2(r.score[at]), [at])
    for i in range(HALVES):
        rows = (cta.score(0, n, i) for n in range(begin, end))
        pairs = [r.score[at] + r.score[at + 1] for at in rows]
        T.buffer_store(r.total, r.total[i] + functools.reduce(operator.add, pairs), [i])


def weigh(cta: Cta, begin: int, end: int) -> None:
    """Turn scores into weights, and sum them."""
    r, step = cta.registers, cta.tile.paired
    if step:
        for first in range(begin, end, step):
            weigh_by_pairs(cta, first, min(first + step, end))
    else:
        weigh_one_by_one(cta, begin, end)
    hold(r.score, cta.score(0, begin, 0), cta.score(0, end, 0))
    hold(r.total)


@T.inline
def pack_weights(cta):
    """Pack the weights as a left operand."""
    r = T.meta_var(cta.registers)
    for i in T.unroll(cta.key_tiles * ACCUMULATORS // 2):
        pack(cta.dtype, r.weight[i], r.score[2 * i], r.score[2 * i + 1])


@T.inline
def rescale(cta):
    """Carry what was accumulated over to references that have moved."""
    r = T.meta_var(cta.registers)
    for n in T.unroll(cta.spec.dim_vo // COLUMNS):
        for i in T.unroll(HALVES):
            for e in T.unroll(2):
                at = T.meta_var(cta.out(0, n, i, e))
                r.out[at] = r.out[at] * r.scale[i]
