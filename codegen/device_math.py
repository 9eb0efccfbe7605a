"""Elementary functions on GPUs, where the compiler's fast ones are too rough for a logit.

Fast math turns ``tanh`` into an instruction with 11 bits, and ``sin`` and ``cos`` into ones that
are good near 0 only. `precise_math` writes them with instructions that are good to the last few
bits. Largest error against the exact value: tanh 5e-7 of it, sin and cos 2e-7 for ``|x| < 1e5``, if
those instructions are exact; 2e-6 and 6e-7 with the largest errors that NVIDIA documents for its.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_attn.tir.tanh import NEAR_ZERO, tanh_near_zero

Expr = Any

LOG2E = math.log2(math.e)
TWO_PI_PARTS = (6.28125, 0.0019340515136718750, 1.2556659146986471e-06)
"""Two pi, as a sum whose first parts have so few bits that times a turn they are exact."""


def precise_math(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace calls of float32 ``tanh``, ``sin``, ``cos``, ``tan`` and ``pow``; see the module."""
    return tvm_ffi.structural_map(mod, (tvm.ir.Call, _expand), order="post")


def tanh(x: Expr) -> Expr:
    """Return the expression of ``tanh(x)``: a series near 0, else from ``e**(2 x)``."""
    far = _f32(1.0) - _f32(2.0) / (tirx.exp2(x * _f32(2.0 * LOG2E)) + _f32(1.0))
    return tirx.Select(tirx.abs(x) < _f32(NEAR_ZERO), tanh_near_zero(x), far)


def pow(x: Expr, y: Expr) -> Expr:
    """Return the expression of ``x**y``, also of a negative x: its sign is that of an odd power."""
    size = tirx.exp2(y * tirx.log2(tirx.abs(x)))
    is_whole = tirx.floor(y) == y
    is_odd = tirx.floor(y * _f32(0.5)) * _f32(2.0) != y
    signed = tirx.Select(is_whole, tirx.Select(is_odd, -size, size), _f32(math.nan))
    power = tirx.Select(x < _f32(0.0), signed, size)
    return tirx.Select(y == _f32(0.0), _f32(1.0), power)


def tan(x: Expr) -> Expr:
    """Return the expression of ``tan(x)``, of the angle less its turns."""
    return tirx.tan(_within_a_turn(x))


def sin(x: Expr) -> Expr:
    """Return the expression of ``sin(x)``, of the angle less its turns."""
    return tirx.sin(_within_a_turn(x))


def cos(x: Expr) -> Expr:
    """Return the expression of ``cos(x)``, of the angle less its turns."""
    return tirx.cos(_within_a_turn(x))


_BUILDERS = {
    f"{namespace}.{build.__name__}": build
    for namespace in ("tirx", "prim")
    for build in (tanh, sin, cos, tan, pow)
}


def _expand(call: Expr) -> Expr:
    build = _BUILDERS.get(getattr(call.op, "name", ""))
    return call if build is None or str(call.ty) != "float32" else build(*call.args)


def _within_a_turn(x: Expr) -> Expr:
    turns = tirx.floor(x * _f32(1.0 / (2.0 * math.pi)) + _f32(0.5))
    for part in TWO_PI_PARTS:
        x = x - turns * _f32(part)
    return x


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
