"""Elementary functions as float32 arithmetic, which LLVM vectorises.

LLVM turns ``exp2``, ``exp``, ``tanh`` and ``sigmoid`` into a call of the scalar C library for each
element. `vectorize_math` replaces them by polynomials in the same IR. Largest error against the
exact value: exp2 and exp 2 ulp, sigmoid 3, tanh 4, also near 0. NaN stays NaN; exp2 and exp
overflow to inf where float32 ends, and what is below 2**-125.5 becomes exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

Expr = Any

EXP2 = (  # 2**f = 1 + f * (...) for |f| <= 1/2: relative error 3e-9
    0.693147214968039,
    0.24022652782875867,
    0.05550310550996862,
    0.00961769297492433,
    0.0013406643904691092,
    0.00015594677538982658,
)
EXPM1 = (  # e**g - 1 = g * (1 + g * (...)) for |g| <= ln(2)/2: relative error 1.2e-7
    0.4999982101760638,
    0.16666577249704195,
    0.04172630868196364,
    0.008363148181246406,
    0.000994134367839823,
)
LOG2E = 1.4426950408889634
LN2_HIGH = float.fromhex("0x1.62e8p-1")  # short: times an exponent it is exact in float32
LN2_LOW = 0.6931471805599453 - LN2_HIGH
ROUND = 1.5 * 2**23 + 126
"""Added to a float32 ``x``, leaves ``round(x) + 126`` in the low bits of the sum."""


def vectorize_math(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace calls of float32 elementary functions by arithmetic.

    Before: ``w[i] = T.exp2(s[i])``. After: ``w[i] = T.Let(..., where={x: s[i]})``, the expression
    that `exp2` builds. Other dtypes and functions stay as they are.

    Parameters
    ----------
    mod : tvm.IRModule
        Any functions, scheduled but not lowered.

    Returns
    -------
    tvm.IRModule
        The module, rewritten.
    """
    return tvm_ffi.structural_map(mod, (tvm.ir.Call, _expand), order="post")


def _expand(call: Expr) -> Expr:
    build = _BUILDERS.get(getattr(call.op, "name", ""))
    if build is None or str(call.ty) != "float32":
        return call
    return build(call.args[0])


def exp2(x: Expr) -> Expr:
    """Return the expression of ``2**x``."""
    return _let(
        _clamp(x, -126.0, 128.0),
        lambda x: _let(
            x + _f32(ROUND),
            lambda rounded: _let(
                x - (rounded - _f32(ROUND)),
                lambda f: _horner(f, (2.0, *(2.0 * c for c in EXP2))) * _half_power(rounded),
            ),
        ),
    )


def exp(x: Expr) -> Expr:
    """Return the expression of ``e**x``."""
    return _reduced(
        _clamp(x, -87.5, 89.0),
        lambda expm1, half: (_f32(2.0) * expm1 + _f32(2.0)) * half,
    )


def tanh(x: Expr) -> Expr:
    """Return the expression of ``tanh(x)``, from ``e**(-2|x|) - 1``; small ones keep all digits."""

    def negative(x: Expr) -> Expr:
        minus_twice = _clamp(tirx.abs(x) * _f32(-2.0), -20.0, 0.0)
        expm1 = _reduced(
            minus_twice,
            lambda expm1, half: _f32(2.0) * half * expm1 + (_f32(2.0) * half - _f32(1.0)),
        )
        return _let(expm1, lambda e: e / (e + _f32(2.0)))

    return _let(x, lambda x: _let(negative(x), lambda t: tirx.Select(x > _f32(0.0), -t, t)))


def sigmoid(x: Expr) -> Expr:
    """Return the expression of ``1 / (1 + e**-x)``."""
    return _f32(1.0) / (_f32(1.0) + exp(-x))


_BUILDERS: dict[str, Callable[[Expr], Expr]] = {
    f"{namespace}.{name}": build
    for namespace in ("tirx", "prim")
    for name, build in (("exp2", exp2), ("exp", exp), ("tanh", tanh), ("sigmoid", sigmoid))
}


def _reduced(x: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Write ``x = n ln2 + g`` and return ``combine(e**g - 1, 2**(n - 1))``."""
    return _let(
        x,
        lambda x: _let(
            x * _f32(LOG2E) + _f32(ROUND),
            lambda rounded: _let(
                rounded - _f32(ROUND),
                lambda n: _let(
                    x - n * _f32(LN2_HIGH) - n * _f32(LN2_LOW),
                    lambda g: _let(
                        g * _horner(g, (1.0, *EXPM1)),
                        lambda expm1: _let(_half_power(rounded), lambda half: combine(expm1, half)),
                    ),
                ),
            ),
        ),
    )


def _half_power(rounded: Expr) -> Expr:
    """``2**(n - 1)`` from ``n + ROUND``, ``-126 <= n <= 128``; 0 for n = -126.

    Half of ``2**n``, so that n = 128 has an exponent too, and -126 the one of zero.
    """
    bits = tirx.shift_left(tirx.reinterpret("int32", rounded), tirx.const(23, "int32"))
    return tirx.reinterpret("float32", bits)


def _clamp(x: Expr, low: float, high: float) -> Expr:
    """Return `x` within bounds; of an unordered pair min and max return the second: NaN stays."""
    return tirx.min(_f32(high), tirx.max(_f32(low), x))


def _horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Return the polynomial with `coefficients`, lowest power first."""
    value = _f32(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + _f32(coefficient)
    return value


def _let(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """Return ``body(value)`` with `value` computed once."""
    variable = tirx.Var("x", "float32")
    return tirx.Let(variable, value, body(variable))


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
