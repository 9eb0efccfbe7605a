"""A variant as text: its hooks traced once on named variables, before any kernel is.

The text is what a cache key holds of a variant. Tracing it first also finds a hook's mistakes where
a traceback still leads to the user's own line.
"""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

from tvm import tirx

from tvm_attn._hook_code import declaration
from tvm_attn.errors import CompileError
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.hook_arrays import integer
from tvm_attn.tir.hook_checks import (
    check_comparisons,
    check_divisions,
    check_elements,
    check_variables,
)
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.truth import is_library, undecided
from tvm_attn.tir.visibility import clear_bits_hide
from tvm_attn.variant import (
    HOOKS,
    Expr,
    as_bool,
    as_expr,
    as_float,
    as_pair,
    as_position,
    composed_of,
)

QUERY = ("batch", "kv_head", "qo_len", "kv_len", "qo_idx", "q_pos", "qo_head")
KEY = ("batch", "kv_head", "qo_len", "kv_len", "kv_idx", "kv_pos")
FIELDS = {
    "query_transform": QUERY,
    "key_transform": KEY,
    "value_transform": KEY,
    "logits_transform": tuple(dict.fromkeys(QUERY + KEY)),
    "mask": tuple(dict.fromkeys(QUERY + KEY)),
    "initial_state": QUERY,
    "output_transform": QUERY,
}
"""What each hook's context holds besides the parameters; `Hooks.range_context` has kv_range's."""

ROWS = ("query_transform", "key_transform", "value_transform")
"""Hooks that get a row, and the number of an element."""

PAIRS = ("kv_range", "initial_state")
"""Hooks that return two results."""

RESULTS = {"mask": as_bool, "kv_range": as_position}
"""What makes an expression of a hook's result; of every other hook, `as_float`."""

NO_SOURCE = ("<unknown", "<frozen")
"""Names of files that frames have which are not Python's, or nobody's."""


def fingerprint(hooks: Hooks, spec: AttentionSpec) -> str:
    """Return the text of a variant's hooks and parameters.

    Raises
    ------
    CompileError
        If a hook raises or returns what it may not; the message shows the user's own line.
    """
    variant = hooks.variant
    lines = [declaration(param) for param in variant.params]
    lines.append(f"use_softmax={variant.use_softmax}")
    lines += [f"{name}: {_traced(hooks, spec, name)}" for name in HOOKS if getattr(variant, name)]
    return "\n".join(lines)


def range_fingerprint(hooks: Hooks) -> str:
    """Return the text of all that a planner takes from a variant: its range, and bitmaps."""
    names = ("batch", "qo_len", "kv_len", "q_lo", "q_hi")
    lo, hi = hooks.key_positions(*(_variable(name) for name in names))
    planned = [declaration(param) for param in hooks.variant.params if param.at == "plan"]
    hiding = [name for name in hooks.bitmaps() if clear_bits_hide(hooks, name)]
    return "\n".join([*planned, str(lo), str(hi), f"hide where clear: {hiding}"])


def _variable(name: str, dtype: str = "int32") -> Any:
    """Return a variable that no parameter can be taken for."""
    return tirx.Var(f"_{name}", dtype)


def _traced(hooks: Hooks, spec: AttentionSpec, name: str) -> str:
    try:
        given = _given(hooks, spec, name)
        with undecided():
            result = getattr(hooks.variant, name)(*given.arguments)
        results = as_pair(result) if name in PAIRS else (result,)
        return " ; ".join(_checked(RESULTS.get(name, as_float)(one), given) for one in results)
    except Exception as error:
        raise CompileError(
            f"variant {str(hooks.variant)!r}: its {name} cannot be traced: "
            f"{type(error).__name__}: {error}\n{_user_line(error, getattr(hooks.variant, name))}"
        ) from error


class _Given(NamedTuple):
    """The arguments of a hook, the variables that they are made of, and its row if it has one."""

    arguments: list[Any]
    variables: list[Any]
    row: Any = None


def _given(hooks: Hooks, spec: AttentionSpec, name: str) -> _Given:
    if name == "kv_range":
        batch, qo_len, kv_len, *ends = map(_variable, ("batch", "qo_len", "kv_len", "q_lo", "q_hi"))
        ctx = hooks.range_context(batch=batch, qo_len=qo_len, kv_len=kv_len)
        return _Given([ctx, *ends], [batch, qo_len, kv_len, *ends, *hooks.variables(at="plan")])
    fields = {field: _variable(field) for field in FIELDS[name]}
    ctx, variables = hooks.context(**fields), [*fields.values(), *hooks.variables()]
    if name in ROWS:
        dim = spec.dim_vo if name == "value_transform" else spec.head_dim_qk
        row, d = tirx.decl_buffer([dim], "float32", name="_row"), _variable("d")

        def element(e: Any) -> Expr:
            return row[integer(as_expr(e), "x(e): e")]

        return _Given([ctx, element, d], [*variables, row, d], row)
    numbers = {"logits_transform": ("s",), "output_transform": ("o", "lse")}.get(name, ())
    arguments = [_variable(number, "float32") for number in numbers]
    return _Given([ctx, *arguments], [*variables, *arguments])


def _checked(expr: Expr | None, given: _Given) -> str:
    if expr is not None:
        check_variables(expr, given.variables)
        check_comparisons(expr)
        check_divisions(expr)
        if given.row is not None:
            check_elements(expr, given.row, given.arguments[-1])
    return str(expr)


def _user_line(error: Exception, hook: Any) -> str:
    """Innermost line of a traceback outside of this package and TVM, else where the hook begins."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if _has_source(f) and not is_library(f.filename)]
    if own:
        frame = own[-1]
        place = f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        return f"{place}\n    {frame.line}" if frame.line else place
    return "\n".join(_beginnings(hook))


def _has_source(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of Python code, be it typed in or made by ``exec``."""
    name = frame.filename
    return bool(frame.line) or (name.startswith("<") and not name.startswith(NO_SOURCE))


def _beginnings(hook: Any) -> list[str]:
    """Where a hook begins, or each of the hooks that it is composed of."""
    parts = composed_of(hook)
    if parts:
        return [line for part in parts for line in _beginnings(part)]
    code = getattr(hook, "__code__", None)
    if code is None:
        return [f"  in {hook!r}"]
    return [f'  File "{code.co_filename}", line {code.co_firstlineno}']
