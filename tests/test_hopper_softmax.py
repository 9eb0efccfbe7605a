"""Where Hopper's softmax takes the references of its rows: some way above large scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tvm_attn import variants
from tvm_attn.schedules.primitives.hopper.softmax import HEADROOM, ORDINARY, advance_by, headroom
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.states import f32
from tvm_attn.variant import AttentionVariant


def cta(dtype: str = "bfloat16", variant: AttentionVariant | None = None) -> Any:
    return SimpleNamespace(dtype=dtype, hooks=Hooks(variant or variants.causal()))


def room(top: float, of: Any = None) -> float:
    return float(headroom(of or cta(), f32(top)).value)


def test_ordinary_scores_have_no_headroom_and_large_ones_have() -> None:
    assert [room(top) for top in (0.0, 3.0, -ORDINARY, ORDINARY)] == [0.0] * 4
    assert [room(top) for top in (ORDINARY + 8, -ORDINARY - 8)] == [8.0, 8.0]
    assert [room(top) for top in (1e3, -1e3, float("inf"), float("-inf"))] == [HEADROOM] * 4


@pytest.mark.parametrize("top", [17.0, 20.0, 33.3, -50.0, 79.9, 90.0, -300.0, 1e5])
def test_relative_scores_are_rounded_no_more_than_scores(top: float) -> None:
    assert np.spacing(np.float32(room(top))) <= np.spacing(np.float32(abs(top)))


def test_there_is_none_where_weights_are_float16_or_logits_are_sums() -> None:
    assert room(1e3, cta("float16")) == room(1e3, cta(variant=variants.soft_cap(30.0))) == 0.0


@pytest.mark.parametrize(
    ("top", "reference", "by"),
    [(65.0, 100.0, 126.0), (65.0, -45.0, 69.0), (70.0, 0.0, 124.0), (300.0, 0.0, 300.0)],
)
def test_references_move_above_what_outgrew_them(top: float, reference: float, by: float) -> None:
    """By what shrinks what was accumulated to a normal number, if it weighs anything after that."""
    assert float(advance_by(cta(), f32(top), f32(reference)).value) == by
