"""Scores relative to the references of the softmax, where a hook on logits is folded into them.

What `primitives.folded` makes of a hook holds for products that are small enough, in blocks whose
keys are all seen, by rows that have seen a key. Elsewhere products become logits first, and those
scores.
"""

from __future__ import annotations

from functools import reduce

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.folded import (
    Fold,
    elements,
    is_bounded,
    is_folded,
    largest_of_three,
    register,
)
from tvm_attn.schedules.primitives.fragments import any_lane
from tvm_attn.schedules.primitives.scores import (
    Weigh,
    logits,
    mask,
    may_hide,
    move_references,
    set_limits,
    slack,
    softmax,
    weigher,
)
from tvm_attn.schedules.primitives.task import at_hand
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr

AT_ONCE = 32
"""Scores that are made at a time: half of those of 32 rows and 64 keys."""


def references(cta: Cta) -> list[Expr]:
    """Return the references of the lane's rows."""
    return [cta.registers.reference[i] for i in range(cta.rows)]


def has_empty(cta: Cta) -> Expr:
    """Whether one of the lane's rows has seen no key."""
    lowest = f32(cta.hooks.accumulation.lowest)
    return reduce(tirx.Or, [reference == lowest for reference in references(cta)])


def leaves_reach(cta: Cta, fold: Fold) -> Expr:
    """Whether a product of the block is beyond what a fold is good for."""
    some = elements(cta, 0, cta.key_tiles)
    return any_lane(fold.reaches(some, references(cta), slack(cta), has_empty(cta)))


def fold_scores(cta: Cta, fold: Fold, kv0: Expr) -> None:
    """Turn products into scores minus the references, by the hook."""
    some = elements(cta, 0, cta.key_tiles)
    for first in range(0, len(some), AT_ONCE):
        fold.score(some[first : first + AT_ONCE], kv0, references(cta))


def scale_scores(cta: Cta, factor: Expr) -> None:
    """Turn logits into scores minus the references."""
    c = cta.registers.score
    for at in elements(cta, 0, cta.key_tiles):
        place = register(cta, at)
        T.buffer_store(c, c[place] * factor - cta.registers.reference[at.i], [place])


def largest_relative(cta: Cta) -> Expr:
    """Return the largest of the lane's scores that are relative; 0 if none is above."""
    chains = [T.int32(0)] * cta.rows
    for n in range(cta.key_tiles):
        for at, other in zip(*[iter(elements(cta, n, n + 1))] * 2, strict=True):
            pair = (cta.registers.score[register(cta, one)] for one in (at, other))
            chains[at.i] = largest_of_three(chains[at.i], *pair)
    return tirx.reinterpret("float32", reduce(tirx.max, chains))


def shift_scores(cta: Cta, before: Expr) -> None:
    """Leave scores relative to the references, which were `before`."""
    r = cta.registers
    for at in elements(cta, 0, cta.key_tiles):
        place = register(cta, at)
        moved = before[at.i] - r.reference[at.i]
        T.buffer_store(r.score, r.score[place] + moved, [place])


@T.inline
def follow(cta, factor):
    """Move the references that relative scores have outgrown, and the scores with them."""
    r = T.meta_var(cta.registers)
    if any_lane(largest_relative(cta) > f32(slack(cta))):
        before = T.alloc_local((cta.rows,), "float32")
        for i in T.unroll(cta.rows):
            before[i] = r.reference[i]
        move_references(cta, lambda i, score: score + before[i], factor)
        shift_scores(cta, before)


@T.inline
def relate(cta, task, factor, kv0):
    """Turn the products of a block into scores minus the references, which move if outgrown."""
    fold = T.meta_var(Fold.prepare(cta, at_hand(cta, task), kv0))
    is_far: T.bool = may_hide(cta, task, kv0) != 0
    if T.Not(is_far):
        is_far = leaves_reach(cta, fold)
    if is_far:
        logits(cta, task, kv0, T.bool(True))
        mask(cta, task, kv0)
        set_limits(cta, factor)  # rather than keep them
        softmax(cta, factor)
        scale_scores(cta, factor)
    else:
        fold_scores(cta, fold, kv0)
        if not is_bounded(cta.hooks):
            follow(cta, factor)


def weigher_of(cta: Cta, factor: Expr) -> Weigh:
    """Return what turns what there is of a score in a row into its weight."""
    if is_folded(cta.hooks):
        return lambda i, score: tirx.exp2(score)
    return weigher(cta, factor)
