"""A variant as text: its hooks traced once on named variables, before any kernel is.

The text is what a cache key holds of a variant. Tracing it first also finds a hook's mistakes where
a traceback still leads to the user's own line.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvm import tirx

from tvm_attn.errors import CompileError
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.visibility import clear_bits_hide
from tvm_attn.variant import HOOKS, as_expr

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

PAIRS = ("kv_range", "initial_state")
"""Hooks that return two results."""

RESULTS = {"mask": ("bool",), "kv_range": ("int", "NoneType")}
"""Types a hook may return; every other hook returns numbers."""


def fingerprint(hooks: Hooks, spec: AttentionSpec) -> str:
    """Return the text of a variant's hooks and parameters.

    Raises
    ------
    CompileError
        If a hook raises or returns what it may not; the message shows the user's own line.
    """
    variant = hooks.variant
    lines = [_declaration(param) for param in variant.params]
    lines.append(f"use_softmax={variant.use_softmax}")
    lines += [f"{name}: {_traced(hooks, spec, name)}" for name in HOOKS if getattr(variant, name)]
    return "\n".join(lines)


def range_fingerprint(hooks: Hooks) -> str:
    """Return the text of all that a planner takes from a variant: its range, and bitmaps."""
    names = ("batch", "qo_len", "kv_len", "q_lo", "q_hi")
    lo, hi = hooks.key_positions(*(_variable(name) for name in names))
    planned = [_declaration(param) for param in hooks.variant.params if param.at == "plan"]
    hiding = [name for name in hooks.bitmaps() if clear_bits_hide(hooks, name)]
    return "\n".join([*planned, str(lo), str(hi), f"hide where clear: {hiding}"])


def _declaration(param: Param) -> str:
    """Text of a parameter without its default, which is a run-time value."""
    return repr(replace(param, default=None))


def _variable(name: str, dtype: str = "int32") -> Any:
    """Return a variable that no parameter can be taken for."""
    return tirx.Var(f"_{name}", dtype)


def _traced(hooks: Hooks, spec: AttentionSpec, name: str) -> str:
    try:
        result = getattr(hooks.variant, name)(*_arguments(hooks, spec, name))
        results = result if name in PAIRS else (result,)
        if name in PAIRS and (not isinstance(results, tuple) or len(results) != 2):
            raise TypeError(f"returned {result!r}, expected a pair")
        return " ; ".join(_checked(expr, RESULTS.get(name, ("int", "float"))) for expr in results)
    except Exception as error:
        raise CompileError(
            f"variant {str(hooks.variant)!r}: its {name} cannot be traced: "
            f"{type(error).__name__}: {error}\n{_user_line(error, getattr(hooks.variant, name))}"
        ) from error


def _arguments(hooks: Hooks, spec: AttentionSpec, name: str) -> list[Any]:
    if name == "kv_range":
        batch, qo_len, kv_len, q_lo, q_hi = (
            _variable(n) for n in ("batch", "qo_len", "kv_len", "q_lo", "q_hi")
        )
        return [hooks.range_context(batch=batch, qo_len=qo_len, kv_len=kv_len), q_lo, q_hi]
    ctx = hooks.context(**{field: _variable(field) for field in FIELDS[name]})
    if name in ("query_transform", "key_transform", "value_transform"):
        dim = spec.dim_vo if name == "value_transform" else spec.head_dim_qk
        row = tirx.decl_buffer([dim], "float32", name="_row")
        return [ctx, lambda e: row[e], _variable("d")]
    numbers = {"logits_transform": ("s",), "output_transform": ("o", "lse")}.get(name, ())
    return [ctx, *(_variable(number, "float32") for number in numbers)]


def _checked(expr: Any, allowed: tuple[str, ...]) -> str:
    expr = as_expr(expr)
    kind = str(expr.ty) if hasattr(expr, "ty") else type(expr).__name__
    if kind.rstrip("0123456789") not in allowed:
        raise TypeError(f"returned {expr} of type {kind}, expected {' or '.join(allowed)}")
    return str(expr)


def _user_line(error: Exception, hook: Any) -> str:
    """Innermost line of a traceback outside of this package and TVM, else where the hook begins."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not {"tvm_attn", "tvm"} & set(Path(f.filename).parts)]
    if own:
        frame = own[-1]
        return f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line}'
    code = getattr(hook, "__code__", None)
    return f'  File "{code.co_filename}", line {code.co_firstlineno}' if code else f"  in {hook!r}"
