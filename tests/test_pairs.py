"""Hooks on fragments: what does not depend on the element is the same expression for all."""

from __future__ import annotations

import math

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from tvm_attn.schedules.primitives.pairs import on_key
from tvm_attn.tir.tanh import NEAR_ZERO, tanh_arguments, tanh_near_zero, with_tanh_near_zero
from tvm_attn.variant import Expr

FIRST, ROW, END = (tirx.Var(name, "int32") for name in ("first", "row", "end"))
SCORE = tirx.Var("score", "float32")


def on_third_key(trace: object) -> Expr:
    return on_key(trace, FIRST, 3, END)  # type: ignore[arg-type]


def same(a: Expr, b: Expr) -> bool:
    return bool(tvm_ffi.structural_equal(a, b))


def test_a_distance_as_float_is_one_of_the_row_plus_a_constant() -> None:
    traced = on_third_key(lambda key: tirx.Cast("float32", key - ROW))
    assert same(traced.a, tirx.Cast("float32", FIRST - ROW))
    assert float(tvm.sym.Analyzer().simplify(traced.b)) == 3


def test_what_is_not_linear_in_the_key_stays() -> None:
    traced = on_third_key(lambda key: tirx.Cast("float32", tirx.max(key, ROW)))
    assert same(traced, tirx.Cast("float32", tirx.max(FIRST + 3, ROW)))


def test_positions_beyond_the_keys_are_not_read_at() -> None:
    array = tirx.decl_buffer([8], "float32", name="array")
    traced = on_third_key(lambda key: array[key])
    assert same(traced, array[tirx.max(tirx.min(FIRST + 3, END - 1), 0)])
    assert same(on_third_key(lambda key: array[ROW]), array[ROW])


def test_tanh_is_found_and_replaced() -> None:
    cap = 30 * tirx.tanh(SCORE * 0.5) + 1
    assert [same(x, SCORE * 0.5) for x in tanh_arguments(cap)] == [True]
    near = with_tanh_near_zero(cap)
    assert same(near, 30 * tanh_near_zero(SCORE * 0.5) + 1)
    assert not tanh_arguments(near)
    half = tirx.tanh(tirx.Var("half", "float16"))
    assert not tanh_arguments(half) and same(with_tanh_near_zero(half), half)


def test_tanh_near_zero_is_accurate() -> None:
    """As float64 the formula has no other error than that of its coefficients."""
    x = np.geomspace(1e-6, NEAR_ZERO, 1000)
    near = [evaluated(tanh_near_zero(SCORE), value) for value in x]
    assert max(abs(a / math.tanh(b) - 1) for a, b in zip(near, x, strict=True)) < 1.3e-7


def evaluated(expr: Expr, score: float) -> float:
    """Evaluate sums and products of a score."""
    if isinstance(expr, tirx.Add | tirx.Mul):
        a, b = (evaluated(operand, score) for operand in (expr.a, expr.b))
        return a + b if isinstance(expr, tirx.Add) else a * b
    return score if expr is SCORE or isinstance(expr, tirx.Var) else float(expr.value)
