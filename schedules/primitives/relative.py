"""Scores relative to the references of the softmax, where a hook on logits is folded into them.

What `primitives.folded` makes of a hook holds for products that are small enough, in blocks whose
keys are all seen, by rows that have seen a key. Elsewhere products become logits first, and those
scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.folded import (
    Fold,
    elements,
    is_bounded,
    is_folded,
    largest_of_three,
    last_offset,
    register,
)
from tvm_attn.schedules.primitives.fragments import any_lane, over_row
from tvm_attn.schedules.primitives.scores import (
    LOW,
    Weigh,
    has_below,
    logits,
    mask,
    may_hide,
    move_references,
    rescale_row,
    slack,
    softmax,
    weigher,
)
from tvm_attn.schedules.primitives.task import Task, at_hand
from tvm_attn.tir.states import f32
from tvm_attn.tir.tanh import NEAR, NEARER
from tvm_attn.variant import Expr

NO_WEIGHT = -1000.0
"""A score so far below its reference weighs nothing."""
AT_ONCE = 32
"""Scores that are made at a time: half of those of 32 rows and 64 keys."""
AHEAD = {"bfloat16": 24.0, "float16": 0.0}
"""How far references are raised beyond the largest bias, which may grow that much more until they
are raised again: weights are still normal."""
CLOSE = 8.0
"""How far from the largest score a reference may be taken: weights are still normal in float16."""


def references(cta: Cta) -> list[Expr]:
    """Return the references of the lane's rows."""
    return [cta.registers.reference[i] for i in range(cta.rows)]


def is_foretold(cta: Cta, fold: Fold) -> bool:
    """Whether the largest product, and biases, tell how large scores may be."""
    return is_bounded(cta.hooks) or fold.biases is not None


def leaves_reach(cta: Cta, fold: Fold) -> Expr:
    """Whether a product of the lane is beyond what a fold is good for.

    That is also in rows that have seen no key, and in those with references so low that scores
    relative to them would lose digits, if nothing foretells how large scores are.
    """
    some = elements(cta, 0, cta.key_tiles)
    if is_bounded(cta.hooks):  # whose scores are far above the references of rows without keys
        return fold.reaches(some, references(cta), slack(cta), T.bool(False))
    lowest = cta.hooks.accumulation.lowest if is_foretold(cta, fold) else LOW
    return fold.reaches(some, references(cta), slack(cta), has_below(cta, lowest))


def note_last(cta: Cta, fold: Fold, last: Any) -> None:
    """Note the biases of the lane's last key minus the references."""
    assert fold.biases is not None
    for i, (bias, reference) in enumerate(zip(fold.biases, references(cta), strict=True)):
        T.buffer_store(last, bias.minus(reference).last, [i])


def settled(fold: Fold, last: Any) -> Fold:
    """Return a hook whose biases are relative to the references, noted ones."""
    assert fold.biases is not None
    return replace(fold, biases=[b.settled(last[i]) for i, b in enumerate(fold.biases)])


def note_largest(cta: Cta, fold: Fold) -> None:
    """Note the largest biases of the lane's rows."""
    assert fold.biases is not None
    for i, bias in enumerate(fold.biases):
        T.buffer_store(cta.registers.best, bias.largest(last_offset(cta)), [i])


def may_outgrow(cta: Cta, relative: Fold, bounds: Sequence[Expr]) -> Expr:
    """Whether linear biases may take a score of the lane too far above its reference."""
    assert relative.biases is not None
    largest = (bias.largest(last_offset(cta)) for bias in relative.biases)
    sizes = [bound + bias for bound, bias in zip(bounds, largest, strict=True)]
    return reduce(tirx.max, sizes) > f32(slack(cta))


@T.inline
def raise_references(cta):
    """Raise references to the noted biases: products are small, and scores nearly as large."""
    r, state = T.meta_var((cta.registers, cta.hooks.accumulation))
    for i in T.unroll(cta.rows):
        r.best[i] = T.max(r.best[i], over_row(r.best[i], 1))
        r.best[i] = T.max(r.best[i], over_row(r.best[i], 2))
        r.best[i] = T.max(r.best[i] + f32(AHEAD[cta.dtype]), r.reference[i])
        r.scale[i] = state.rescale(r.reference[i], r.best[i])
        r.reference[i] = r.best[i]
        rescale_row(cta, i)


def fold_scores(cta: Cta, fold: Fold, kv0: Expr, less: Sequence[Expr]) -> None:
    """Turn products into scores minus what `less` has for each row, by the hook."""
    some = elements(cta, 0, cta.key_tiles)
    for first in range(0, len(some), AT_ONCE):
        fold.score(some[first : first + AT_ONCE], kv0, less)


def score_bounded(cta: Cta, fold: Fold) -> None:
    """Turn products into scores minus the references, if nothing else is in scores."""
    r = cta.registers
    for at in elements(cta, 0, cta.key_tiles):
        place = register(cta, at)
        score = fold.scored(at.i, r.score[place]) - r.reference[at.i]
        T.buffer_store(r.score, score, [place])


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


def keep_finite(cta: Cta) -> None:
    """Leave scores of hidden keys that have powers, too: those relative to references."""
    c, hidden = cta.registers.score, f32(cta.hooks.accumulation.hidden)
    for at in elements(cta, 0, cta.key_tiles):
        place = register(cta, at)
        shown = tirx.Select(c[place] == hidden, f32(NO_WEIGHT), c[place])
        T.buffer_store(c, shown, [place])


@T.inline
def follow(cta, factor):
    """Move the references that relative scores have outgrown, and the scores with them."""
    r = T.meta_var(cta.registers)
    if any_lane(largest_relative(cta) > f32(slack(cta))):
        before = T.alloc_local((cta.rows,), "float32")
        for i in T.unroll(cta.rows):
            before[i] = r.reference[i]
        move_references(cta, lambda i, score: score + before[i])
        shift_scores(cta, before)


@T.inline
def foresee(cta, fold, last, is_far):
    """Raise the references that biases take scores beyond, or note that it takes exact maxima."""
    bounds = T.meta_var(fold.bounds(fold.largest_product(elements(cta, 0, cta.key_tiles))))
    is_empty = T.meta_var(has_below(cta, cta.hooks.accumulation.lowest))
    note_last(cta, fold, last)
    if any_lane(may_outgrow(cta, settled(fold, last), bounds)):
        if any_lane(T.Or(is_empty, reduce(T.max, bounds) > f32(CLOSE))):
            is_far[0] = 1
        else:
            note_largest(cta, fold)
            raise_references(cta)
            note_last(cta, fold, last)


@T.inline
def ask_whether_far(cta, task, fold, kv0, is_far):
    """Note whether keys of a block may be hidden, or products beyond the reach of a series."""
    is_far[0] = may_hide(cta, task, kv0)
    if fold.biases is None or fold.steepest is not None:
        if is_far[0] == 0:
            is_far[0] = T.Cast("int32", any_lane(leaves_reach(cta, fold)))


@T.inline
def relate_logits(cta, task, factor, kv0):
    """Turn the products of a block into scores minus the references, by way of logits."""
    logits(cta, task, kv0, T.bool(True))
    mask(cta, task, kv0)
    softmax(cta, factor)
    scale_scores(cta, factor)


@T.inline
def relate_farther(cta, task, factor, kv0):
    """Turn products into finite scores minus the references: if they are in reach, by a series."""
    fold = T.meta_var(Fold.prepare(cta, at_hand(cta, task), kv0, NEAR))
    is_far = T.alloc_local((1,), "int32")
    ask_whether_far(cta, task, fold, kv0, is_far)
    if is_far[0] != 0:
        relate_logits(cta, task, factor, kv0)
        keep_finite(cta)
    else:
        score_bounded(cta, fold)


@T.inline
def relate_bounded(cta, task, factor, kv0, fold):
    """Leave products that are near 0: they become scores where they are weighed.

    Others become scores minus the references, of which weighing then makes the same ones.
    """
    is_far = T.alloc_local((1,), "int32")
    ask_whether_far(cta, task, fold, kv0, is_far)
    fold.begin_at(references(cta))
    if is_far[0] != 0:
        relate_farther(cta, task, factor, kv0)
        fold.become_identity()


@T.inline
def relate_unbounded(cta, task, factor, kv0, fold):
    """Turn the products of a block into scores minus the references, which move if outgrown."""
    last = T.alloc_local((cta.rows,), "float32")
    is_far = T.alloc_local((1,), "int32")
    ask_whether_far(cta, task, fold, kv0, is_far)
    if fold.biases is not None:
        if is_far[0] == 0:
            foresee(cta, fold, last, is_far)
    if is_far[0] != 0:
        relate_logits(cta, task, factor, kv0)
    elif fold.biases is not None:
        fold_scores(cta, settled(fold, last), kv0, [f32(0.0)] * cta.rows)
    else:
        fold_scores(cta, fold, kv0, references(cta))
        follow(cta, factor)


@T.inline
def relate(cta, task, factor, kv0, fold):
    """Make of the products of a block what `weigher_of` weighs, and move outgrown references."""
    if is_bounded(cta.hooks):
        relate_bounded(cta, task, factor, kv0, fold)
    else:
        relate_unbounded(cta, task, factor, kv0, fold)


def prepare_fold(cta: Cta, task: Task, kv0: Expr) -> Fold | None:
    """Compute the coefficients of a folded hook for a block; None if none is folded."""
    if not is_folded(cta.hooks):
        return None
    return Fold.prepare(cta, at_hand(cta, task), kv0, NEARER if is_bounded(cta.hooks) else NEAR)


def weigher_of(cta: Cta, factor: Expr, fold: Fold | None) -> Weigh:
    """Return what turns what there is of a score in a row into its weight."""
    if fold is None:
        return weigher(cta, factor)
    if is_bounded(cta.hooks):
        return lambda i, product: tirx.exp2(fold.relative(i, product))
    return lambda i, score: tirx.exp2(score)
