"""From the products of a block to weights of its first part and scores of the rest, by the hook.

A hook that is folded (`primitives.folded`) costs a few multiplications on the way from products to
scores, where all keys are seen; else products become logits first, in place, and are masked.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.folded import (
    SIDE_BY_SIDE,
    Fold,
    elements,
    is_bounded,
    is_folded,
    register,
)
from tvm_attn.schedules.primitives.fragments import any_lane
from tvm_attn.schedules.primitives.hopper.softmax import (
    lift_references,
    move_references,
    relate,
    weigh,
)
from tvm_attn.schedules.primitives.hopper.wgmma import hold
from tvm_attn.schedules.primitives.scores import LOW, has_below, hide, logits, slack
from tvm_attn.schedules.primitives.task import Task, at_hand
from tvm_attn.variant import Expr

STEP = 4
"""Tiles of 8 keys that are weighed while the next ones become scores."""


def has_rows(task: Task) -> Expr:
    """Whether an item has rows: it has, but the compiler does not know."""
    return task.row_end > 0


@T.inline
def score(cta, group, task, hides):
    """Turn products into scores, where a hook does that, and hide keys, if some may be hidden."""
    logits(cta, task, group.kv0, has_rows(task))
    if hides != 0:
        hide(cta, task, group.kv0)


def scale(cta: Cta, factor: Expr, begin: int, end: int) -> None:
    """Leave scores of column tiles relative to the references: what is there, times a factor."""
    r = cta.registers
    for at in elements(cta, begin, end):
        place = register(cta, at)
        T.buffer_store(r.score, r.score[place] * factor - r.reference[at.i], [place])


def apply_fold(fold: Fold, group: Any, begin: int, end: int) -> None:
    """Leave scores of column tiles relative to the references: made of products by a hook."""
    some, reference = elements(fold.cta, begin, end), fold.cta.registers.reference
    for first in range(0, len(some), SIDE_BY_SIDE):
        fold.score(some[first : first + SIDE_BY_SIDE], group.kv0, (reference[0], reference[1]))


def weigh_products(cta: Cta, group: Any, task: Task, fold: Fold) -> None:
    """Weigh the products of the first part of a block, and make scores of the rest.

    Products become scores while those before them are weighed: in steps that the compiler cannot
    move anything between, for it does not know that all are taken.
    """
    split, tiles = cta.tile.split, cta.key_tiles
    goes = T.alloc_local((1,), "int32")
    T.buffer_store(goes, T.Cast("int32", any_lane(has_rows(task))), [0])
    cuts = [*range(0, split, STEP), split]
    apply_fold(fold, group, *cuts[:2])
    for here, following in itertools.pairwise(itertools.pairwise(cuts)):
        hold(goes)
        with T.If(goes[0] != 0), T.Then():
            weigh(cta, *here)
            apply_fold(fold, group, *following)
    hold(goes)
    with T.If(goes[0] != 0), T.Then():
        weigh(cta, *cuts[-2:])
        relate_part(cta, group, partial(apply_fold, fold, group), split, tiles)


def lifts(cta: Cta) -> bool:
    """Whether later scores may be far above those of a hook that can be very low."""
    return cta.hooks.variant.logits_transform is not None and not is_bounded(cta.hooks)


def leaves_reach(fold: Fold, has_empty: Expr) -> Expr:
    """Whether a product of the block is beyond what a fold is good for, or a reference too low."""
    cta, reference = fold.cta, fold.cta.registers.reference
    some = elements(cta, 0, cta.key_tiles)
    is_far = tirx.Or(has_empty, has_below(cta, LOW)) if lifts(cta) else has_empty
    return any_lane(fold.reaches(some, (reference[0], reference[1]), slack(cta), is_far))


def prepare_bias(cta: Cta, task: Task, kv0: Expr) -> Fold | None:
    """Load what a folded hook with biases needs for a block, early; None if there is none."""
    if not is_folded(cta.hooks) or is_bounded(cta.hooks):
        return None
    return Fold.prepare(cta, at_hand(cta, task), kv0)


@T.inline
def relate_part(cta, group, scored, begin, end):
    """Make scores of column tiles relative; move references that they have outgrown."""
    relate(cta, group, scored, begin, end)
    if group.flags.outgrown:
        move_references(cta, group, begin, end)


@T.inline
def relate_parts(cta, group, scored):
    """Weigh the scores of the first part of a block, and make those of the rest relative."""
    split = T.meta_var(cta.tile.split)
    relate_part(cta, group, scored, 0, split)
    weigh(cta, 0, split)
    relate_part(cta, group, scored, split, cta.key_tiles)


@T.inline
def relate_absolute(cta, group, factor):
    """Weigh scores, which times `factor` are not relative to references yet."""
    if lifts(cta):
        lift_references(cta, group, factor)
    relate_parts(cta, group, partial(scale, cta, factor))


@T.inline
def weigh_part(cta, group, task, factor, hides, biased):
    """Make scores of the products at hand; weigh the first part, and make the rest relative.

    ``hides`` is not 0 if keys may be hidden, ``biased`` a fold that has been prepared.
    """
    if is_folded(cta.hooks):
        fold = T.meta_var(biased or Fold.prepare(cta, at_hand(cta, task), group.kv0))
        is_far: T.bool = hides != 0
        if T.Not(is_far):
            is_far = leaves_reach(fold, group.flags.has_empty)
        if is_far:
            score(cta, group, task, hides)
            relate_absolute(cta, group, factor)
        elif is_bounded(cta.hooks):
            weigh_products(cta, group, task, fold)
        else:
            relate_parts(cta, group, partial(apply_fold, fold, group))
    else:
        score(cta, group, task, hides)
        relate_absolute(cta, group, factor)
