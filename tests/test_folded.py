"""Hooks as polynomials in a product: which ones are, and that their values are the hooks' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from tvm_attn import variants
from tvm_attn.schedules.primitives.folded import is_bounded, is_folded
from tvm_attn.spec import Param
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.polynomial import polynomial, steps
from tvm_attn.tir.tanh import NEAR, NEARER, Series, with_tanh_near_zero
from tvm_attn.variant import AttentionVariant

X, Y = tirx.Var("x", "float32"), tirx.Var("y", "float32")
TABLE = Param("table", kind="tensor", shape=("length",))
CAP = Param("cap", kind="tensor", shape=("num_qo_heads",))


def of_logits(hook: Callable[[Any, Any], Any], *params: Param) -> AttentionVariant:
    return AttentionVariant(logits_transform=hook, params=params)


FOLDED = {
    "soft cap": (variants.soft_cap(30.0), True),
    "alibi": (variants.alibi(), False),
    "a biased cap": (variants.soft_cap(30.0) & variants.alibi(), False),
    "two caps": (of_logits(lambda c, s: 9 * tirx.tanh(s / 9) + tirx.tanh(s)), True),
    "a cap of each head": (of_logits(lambda c, s: tirx.tanh(s * c.cap[c.qo_head]), CAP), True),
    "a bias of each key": (of_logits(lambda c, s: s + c.table[c.kv_idx], TABLE), False),
    "a factor of each query": (of_logits(lambda c, s: s * tirx.Cast("float32", c.q_pos)), False),
    "a cubic": (of_logits(lambda c, s: s - 0.1 * s * s * s), False),
}
NOT_FOLDED = {
    "no hook": variants.causal(),
    "sigmoid": variants.sigmoid(),
    "a capped bias": variants.alibi() & variants.soft_cap(30.0),
    "a factor of each key": of_logits(lambda c, s: s * c.table[c.kv_idx], TABLE),
    "a cap of each key": of_logits(lambda c, s: tirx.tanh(s * c.table[c.kv_idx]), TABLE),
    "a logarithm": of_logits(lambda c, s: tirx.log(s)),
    "a quotient": of_logits(lambda c, s: 1 / s),
    "a maximum": of_logits(lambda c, s: tirx.max(s, 0.0)),
    "a cap of a cap": variants.soft_cap(3.0) & of_logits(lambda c, s: tirx.tanh(s)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_hooks_that_are_folded(name: str) -> None:
    variant, bounded = FOLDED[name]
    assert is_folded(Hooks(variant))
    assert is_bounded(Hooks(variant)) == bounded


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_hooks_that_are_not(name: str) -> None:
    assert not is_folded(Hooks(NOT_FOLDED[name]))


def test_coefficients() -> None:
    terms = polynomial((X + Y) * (X - 2.0) / Y - X * Y, X)
    assert terms is not None and terms.keys() == {0, 1, 2}
    for y in (0.5, -3.0):
        given = {power: value(c, {"y": y}) for power, c in terms.items()}
        assert given == pytest.approx({0: -2.0, 1: 1 - 2 / y - y, 2: 1 / y})
    assert polynomial(Y / X, X) is None and polynomial(tirx.exp(X), X) is None


def test_steps() -> None:
    odd, numbers = {1: 1.0, 5: 5.0}, {0: 9.0, 1: 1.0, 2: 2.0}
    assert read(steps(constants(odd))) == (2, [5.0, 0.0, 1.0])
    assert read(steps(constants(numbers))) == (1, [2.0, 1.0])
    assert read(steps(constants({0: 9.0}))) == (2, [0.0])


@pytest.mark.parametrize("tanh", [NEAR, NEARER])
@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_a_folded_cap_is_accurate(cap: float, tanh: Series) -> None:
    """In float32, as a kernel computes it, to some units in the last place of the logit."""
    logit = tirx.const(cap, "float32") * tirx.tanh(X * tirx.const(1 / cap, "float32"))
    terms = polynomial(with_tanh_near_zero(logit, tanh), X)
    assert terms is not None
    power, series = read(steps(terms))
    assert power == 2
    x = np.linspace(-tanh.reach * cap, tanh.reach * cap, 20001).astype(np.float32)
    got = np.full_like(x, series[0])
    for coefficient in series[1:]:
        got = got * (x * x) + np.float32(coefficient)
    exact = cap * np.tanh(x.astype(np.float64) / cap)
    error = np.abs(got * x - exact)
    assert (error <= 4e-7 * np.abs(exact)).all()


def constants(numbers: dict[int, float]) -> dict[int, Any]:
    return {power: tirx.const(number, "float32") for power, number in numbers.items()}


def read(found: tuple[int, list[Any]]) -> tuple[int, list[float]]:
    return found[0], [value(c, {}) for c in found[1]]


def value(expr: Any, of: dict[str, float]) -> float:
    """Evaluate arithmetic on variables."""
    if isinstance(expr, tirx.Var):
        return of[expr.name]
    if not hasattr(expr, "a"):
        return float(expr.value)
    a, b = value(expr.a, of), value(expr.b, of)
    if isinstance(expr, tirx.Div):
        return a / b
    if isinstance(expr, tirx.Mul):
        return a * b
    return a + b if isinstance(expr, tirx.Add) else a - b


def test_values_of_expressions() -> None:
    assert value(X * 3.0 - Y / 2.0 + 1.0, {"x": 2.0, "y": 5.0}) == 4.5
    assert math.isclose(value(tirx.const(0.1, "float32"), {}), 0.1, rel_tol=1e-7)
