"""``tanh`` near 0, where a polynomial is all it takes: hooks of blocks of small logits use that."""

from __future__ import annotations

from typing import NamedTuple

import tvm_ffi
from tvm import ir

from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr


class Series(NamedTuple):
    """tanh(x) = x + x**3 * (...) of x**2, fitted to the least relative error up to `reach`."""

    reach: float
    coefficients: tuple[float, ...]


NEAR = Series(0.4, (-0.333318823, 0.13277629, -0.047794221))
"""Its error is 1.2e-7."""
NEARER = Series(0.2, (-0.33329698, 0.13038027))
"""Its error is 1.3e-7."""
NEAR_ZERO = NEAR.reach
"""Largest argument of `tanh_near_zero`, if it is not said which."""


def tanh_near_zero(x: Expr, series: Series = NEAR) -> Expr:
    """Return ``tanh(x)`` where ``|x|`` is within the reach of a series."""
    square = x * x
    *others, last = series.coefficients
    sum_ = f32(last)
    for coefficient in reversed(others):
        sum_ = sum_ * square + f32(coefficient)
    return x + x * square * sum_


def tanh_arguments(expr: Expr) -> list[Expr]:
    """Return what float32 ``tanh`` is called with in an expression."""
    found: list[Expr] = []

    def note(call: Expr) -> None:
        if _is_tanh(call):
            found.append(call.args[0])

    tvm_ffi.structural_walk(expr, (ir.Call, note))
    return found


def with_tanh_near_zero(expr: Expr, series: Series = NEAR) -> Expr:
    """Return an expression whose calls of ``tanh`` have arguments near 0."""

    def replace(call: Expr) -> Expr:
        return tanh_near_zero(call.args[0], series) if _is_tanh(call) else call

    return tvm_ffi.structural_map(expr, (ir.Call, replace), order="post")


def _is_tanh(call: Expr) -> bool:
    is_tanh = getattr(call.op, "name", "") in ("tirx.tanh", "prim.tanh")
    return is_tanh and str(call.ty) == "float32"
