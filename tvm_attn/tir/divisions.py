"""Integer divisions that hooks make: a divisor that is only known when a kernel runs may be 0."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from tvm_attn.tir.hook_arrays import constant
from tvm_attn.variant import Expr

QUOTIENTS = (tirx.Div, tirx.FloorDiv)
DIVISIONS = (*QUOTIENTS, tirx.Mod, tirx.FloorMod)


def without_traps(expr: Expr) -> Expr:
    """Return an expression in which integers divided by 0 are 0, and so are the remainders.

    A CPU would end the process, for the lowest number divided by -1 too; a GPU gives anything.
    """
    return tvm_ffi.structural_map(expr, (DIVISIONS, _without_trap), order="post")


def _without_trap(division: Any) -> Expr:
    dtype, divisor = str(division.ty), division.b
    if not dtype.startswith(("int", "uint")) or constant(divisor) not in (None, -1):
        return division
    zero = tirx.const(0, dtype)
    divided = type(division)(division.a, _safe(divisor))
    if isinstance(division, QUOTIENTS) and dtype.startswith("int"):
        opposite = divisor == tirx.const(-1, dtype)
        divided = tirx.Select(opposite, zero - division.a, divided)
    return tirx.Select(divisor == zero, zero, divided)


def _safe(divisor: Expr) -> Expr:
    """Return a divisor, or 1 if it is 0 or -1: by bits, so that no pass of TVM takes that back.

    Where it is known not to be 0 a `Select` would become the divisor, and what is divided by it be
    moved to where that is not known.
    """
    safe = divisor + _is_zero(divisor)
    return safe + 2 * _is_zero(divisor + 1) if str(divisor.ty).startswith("int") else safe


def _is_zero(number: Expr) -> Expr:
    """Return 1 if a number is 0, else 0: a number or its opposite has the sign, if it is not 0."""
    dtype = str(number.ty)
    one, sign = tirx.const(1, dtype), tirx.const(int(number.ty.dtype.bits) - 1, dtype)
    either = tirx.bitwise_or(number, tirx.const(0, dtype) - number)
    has_sign = tirx.bitwise_and(tirx.shift_right(either, sign), one)
    return tirx.bitwise_xor(has_sign, one)
