"""Expressions as polynomials in one of their variables."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from tvm_attn.variant import Expr

Polynomial = dict[int, Expr]
"""Coefficients by power; those that are not there are 0."""


def polynomial(expr: Expr, x: Any) -> Polynomial | None:
    """Return the polynomial in `x` that a float32 expression is, or None if it is none."""
    if expr.same_as(x):
        return {1: tirx.const(1.0, "float32")}
    if not depends_on(expr, x):
        return {0: expr}
    if not isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul | tirx.Div):
        return None
    a, b = polynomial(expr.a, x), polynomial(expr.b, x)
    if a is None or b is None:
        return None
    if isinstance(expr, tirx.Div):
        return None if b.keys() - {0} else _scaled(a, tirx.const(1.0, "float32") / b[0])
    if isinstance(expr, tirx.Mul):
        return _product(a, b)
    return _sum(a, b if isinstance(expr, tirx.Add) else _scaled(b, tirx.const(-1.0, "float32")))


def depends_on(expr: Expr, x: Any) -> bool:
    """Whether a variable is in an expression."""
    found: list[Any] = []

    def look(variable: Any) -> None:
        if variable.same_as(x):
            found.append(variable)

    tvm_ffi.structural_walk(expr, (tirx.Var, look))
    return bool(found)


def steps(terms: Polynomial) -> tuple[int, list[Expr]]:
    """Return how a polynomial without its constant is evaluated: ``x * (c0 + y * (c1 + ...))``.

    That is the power of `x` that ``y`` is, 1 or 2, and the coefficients, the last one first.
    """
    powers = terms.keys() - {0}
    step = 2 if all(power % 2 for power in powers) else 1
    zero = tirx.const(0.0, "float32")
    return step, [terms.get(power, zero) for power in range(max(powers, default=1), 0, -step)]


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    shared = {power: a[power] + b[power] for power in a.keys() & b.keys()}
    return {**a, **b, **shared}


def _scaled(terms: Polynomial, by: Expr) -> Polynomial:
    return {power: c * by for power, c in terms.items()}


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for power, coefficient in b.items():
        scaled = {power + p: c * coefficient for p, c in a.items()}
        product = _sum(product, scaled)
    return product
