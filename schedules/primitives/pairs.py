"""Hooks on a block's scores: what differs from element to element is kept apart from what does not.

A lane's keys are its first one plus constants. Hooks are traced with the constant as a variable, so
that what does not depend on it is the same expression for all of them, and is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.ir.expr import TensorLoad

from tvm_attn.variant import Expr

Trace = Callable[[Expr], Expr]
"""From a key to what a hook makes of it."""


def on_key(trace: Trace, first: Expr, offset: Expr, end: Expr) -> Expr:
    """Trace a hook for the key `offset` after a lane's first one.

    Keys from `end` on are what the hook makes of them: they are hidden. If it reads an array at the
    key, it gets one that there is.
    """
    constant = tirx.Var("offset", "int32")
    key = first + constant
    traced = trace(key)
    if _reads_at(traced, constant):
        traced = trace(tirx.max(tirx.min(key, end - 1), 0))
    traced = tvm_ffi.structural_map(traced, (tirx.Cast, lambda cast: _split(cast, constant)))
    value = tirx.const(offset, "int32") if isinstance(offset, int) else offset
    return tvm_ffi.structural_map(
        traced, (tirx.Var, lambda variable: value if variable.same_as(constant) else variable)
    )


def _reads_at(traced: Expr, variable: Any) -> bool:
    """Whether an array is read at an index that depends on a variable."""
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, tirx.Var) and value.same_as(variable):
            found.append(value)

    def walk(load: Any) -> None:
        for index in load.indices:
            tvm_ffi.structural_walk(index, (tirx.Var, look))

    tvm_ffi.structural_walk(traced, (TensorLoad, walk))
    return bool(found)


def _split(cast: Expr, variable: Any) -> Expr:
    """Turn ``float(base + c * variable)`` into ``float(base) + float(c * variable)``."""
    if str(cast.ty) != "float32" or str(cast.value.ty) != "int32":
        return cast
    terms = sym.detect_linear_equation(cast.value, [variable])
    if not terms or not isinstance(terms[0], tirx.IntImm) or not terms[0].value:
        return cast
    factor, base = terms
    return tirx.Cast("float32", base) + tirx.Cast("float32", factor * variable)
