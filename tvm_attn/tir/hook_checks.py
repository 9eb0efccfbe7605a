"""What a hook's result may be made of: variables that it was given, elements that a row has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tvm_ffi
from tvm import DataTypeCode, ir, sym, tirx

from tvm_attn.errors import VariantError
from tvm_attn.tir.divisions import DIVISIONS
from tvm_attn.tir.hook_arrays import constant
from tvm_attn.variant import Expr


def check_variables(expr: Expr, known: Iterable[Any]) -> None:
    """Hold the variables of an expression against those that a hook was given.

    Raises
    ------
    VariantError
        If it has another one, which no kernel could give a value.
    """
    foreign = [str(variable) for variable in tirx.analysis.undefined_vars(expr, list(known))]
    if foreign:
        raise VariantError(
            f"returned {expr}, where {', '.join(foreign)} is a variable of its own; a hook reads "
            "its arguments and ctx: declare what else it needs as a Param"
        )


def check_comparisons(expr: Expr) -> None:
    """Refuse to compare truth values, which processors do not.

    Raises
    ------
    VariantError
        If an expression does.
    """
    for comparison in _found(expr, tirx.EQ, tirx.NE):
        if comparison.a.ty.matches_code(DataTypeCode.BOOL):
            raise VariantError(
                f"compares truth values in {comparison}; write (a & b) | (~a & ~b) for a == b, and "
                "(a & ~b) | (~a & b) for a != b"
            )


def check_divisions(expr: Expr) -> None:
    """Refuse to divide integers by a constant 0; see `without_traps` for those that are variable.

    Raises
    ------
    VariantError
        If an expression does.
    """
    if any(constant(division.b) == 0 for division in _found(expr, *DIVISIONS)):
        raise VariantError("divides an integer by 0")


def check_elements(expr: Expr, row: Any, d: Any) -> None:
    """Hold the elements of a row that an expression reads against those that there are.

    Indices that bounds do not settle are looked at for each element `d`, in the branch it takes.

    Raises
    ------
    VariantError
        If one is out of range.
    """
    dim = int(row.shape[0])
    analyzer = sym.Analyzer()
    analyzer.bind(d, ir.Range(0, dim))
    bounds = [analyzer.const_int_bound(index) for index in _indices(expr, row)]
    if all(bound.min_value >= 0 and bound.max_value < dim for bound in bounds):
        return
    for element in range(dim):
        taken = analyzer.simplify(_substituted(expr, d, tirx.const(element, "int32")))
        for index in map(constant, _indices(taken, row)):
            if index is not None and not 0 <= index < dim:
                raise VariantError(
                    f"reads element {index} of a row of {dim} for element {element} of the result"
                )


def _indices(expr: Expr, row: Any) -> list[Any]:
    """Return the indices at which an expression reads a row."""
    loads = _found(expr, ir.TensorLoad)
    return [load.indices[0] for load in loads if load.source.same_as(row)]


def _found(expr: Expr, *kinds: type) -> list[Any]:
    """Return the parts of an expression that are of some kinds."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, (kinds, found.append))
    return found


def _substituted(expr: Expr, variable: Any, value: Expr) -> Expr:
    def replace(found: Any) -> Any:
        return value if found.same_as(variable) else found

    return tvm_ffi.structural_map(expr, (tirx.Var, replace), order="post")
