"""Tracing a variant: contexts for its hooks, and its parameters as TIR variables."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tvm import tirx

from tvm_attn.errors import VariantError
from tvm_attn.spec import Param
from tvm_attn.tir.divisions import without_traps
from tvm_attn.tir.hook_arrays import HookArray
from tvm_attn.tir.signature import array
from tvm_attn.tir.states import LOG2E, Accumulation, OnlineSoftmax, PlainSum, f32
from tvm_attn.variant import (
    MAX_POSITION,
    AttentionVariant,
    Expr,
    as_bool,
    as_float,
    as_pair,
    as_position,
)


class Context:
    """What a hook knows: where it stands, and the variant's run-time parameters."""

    def __init__(self, fields: dict[str, Expr], params: dict[str, Callable[[Context], Expr]]):
        self._fields = fields
        self._params = params

    def __getattr__(self, name: str) -> Expr:
        """Return a field or parameter; an unknown name is an error listing the known ones."""
        if name in self._fields:
            return self._fields[name]
        if name in self._params:
            return self._params[name](self)
        known = ", ".join([*self._fields, *self._params])
        raise VariantError(f"ctx.{name} is not available here; this hook may use: {known}")


class Hooks:
    """A variant's hooks with its parameters bound to TIR variables, ready to be traced.

    Parameters
    ----------
    variant : AttentionVariant
        The variant to trace.

    Attributes
    ----------
    accumulation : Accumulation
        How the variant's scores accumulate.
    """

    def __init__(self, variant: AttentionVariant):
        self.variant = variant
        self.accumulation: Accumulation = OnlineSoftmax() if variant.use_softmax else PlainSum()
        self._variables: dict[str, list[Any]] = {}
        self._readers: dict[str, Callable[[Context], Expr]] = {}
        for param in variant.params:
            self._declare(param)

    def _declare(self, param: Param) -> None:
        name = param.name
        if param.kind == "scalar":
            variable = tirx.Var(f"{name}_", param.dtype)  # `half`, `max` mean something in CUDA
            self._variables[name] = [variable]
            self._readers[name] = lambda ctx: variable
        elif param.kind == "tensor":
            free = {s: tirx.Var(f"{name}__{s}", "int32") for s in param.shape}
            shape = [s if isinstance(s, int) else free[s] for s in param.shape]
            buffer = array(name, shape, param.dtype)
            self._variables[name] = [buffer]
            self._readers[name] = lambda ctx: HookArray(name, buffer)
        else:
            bits = array(name, [tirx.Var(f"{name}__bytes", "int64")], "uint8")
            indptr = array(f"{name}__indptr", [tirx.Var(f"{name}__rows", "int32")], "int64")
            self._variables[name] = [bits, indptr]
            self._readers[name] = lambda ctx: read_bit(bits, indptr, ctx)

    def parameters(self, *, at: str | None = None) -> list[Any]:
        """Return the TIR variables, in declaration order; `at` selects ``"plan"`` or ``"run"``."""
        return [
            variable
            for param in self.variant.params
            if at is None or param.at == at
            for variable in self._variables[param.name]
        ]

    def variables(self, *, at: str | None = None) -> list[Any]:
        """Return `parameters`, and the sizes of those that are arrays."""
        params = self.parameters(at=at)
        sizes = [size for param in params for size in getattr(param, "shape", ())]
        return [*params, *(size for size in sizes if isinstance(size, tirx.Var))]

    def bitmaps(self) -> dict[str, tuple[Any, Any]]:
        """Return the bits and the row pointers of each bitmap parameter."""
        return {
            param.name: (self._variables[param.name][0], self._variables[param.name][1])
            for param in self.variant.params
            if param.kind == "bitmap"
        }

    def reading(self, values: Mapping[str, Expr]) -> Hooks:
        """Return these hooks with the values that some parameters have where they are traced."""
        hooks = copy.copy(self)
        readers = {name: partial(_value, value) for name, value in values.items()}
        hooks._readers = {**self._readers, **readers}
        return hooks

    def context(self, **fields: Expr) -> Context:
        """Return a context with the given fields."""
        return Context(fields, self._readers)

    def range_context(self, **fields: Expr) -> Context:
        """Return the context of `kv_range`, which the planner evaluates: no run-time parameters."""
        planned = {param.name for param in self.variant.params if param.at == "plan"}
        readers = {name: reader for name, reader in self._readers.items() if name in planned}
        return Context(fields, readers)

    def row_element(self, name: str, ctx: Context, x: Callable[[Expr], Expr], d: Expr) -> Expr:
        """Element `d` of a query, key or value row, transformed if the variant has the hook."""
        hook = getattr(self.variant, name)
        return x(d) if hook is None else _number(hook(ctx, x, d))

    def logit(self, ctx: Context, s: Expr) -> Expr:
        """Return the transformed logit."""
        if self.variant.logits_transform is None:
            return s
        return _number(self.variant.logits_transform(ctx, s))

    def visible(self, ctx: Context, inside: Expr) -> Expr:
        """Whether a key is visible: `inside` the range at hand, and not masked."""
        if self.variant.mask is None:
            return inside
        return tirx.And(inside, without_traps(as_bool(self.variant.mask(ctx))))

    def kv_range(self, ctx: Context, q_lo: Expr, q_hi: Expr) -> tuple[Expr, Expr]:
        """Key positions ``[lo, hi)`` that query positions ``q_lo..q_hi`` may see."""
        lo, hi = None, None
        if self.variant.kv_range is not None:
            lo, hi = map(_position, as_pair(self.variant.kv_range(ctx, q_lo, q_hi)))
        everything = (tirx.const(-MAX_POSITION, "int32"), tirx.const(MAX_POSITION, "int32"))
        return everything[0] if lo is None else lo, everything[1] if hi is None else hi

    def seeded(self, ctx: Context, lse: Expr) -> Expr:
        """LSE (base 2) of a row with its initial state counted in; empty rows stay empty."""
        if self.variant.initial_state is None:
            return lse
        m, d = self.variant.initial_state(ctx)
        seed = _number(m) * f32(LOG2E)
        top = tirx.max(lse, seed)
        total = tirx.exp2(lse - top) + _number(d) * tirx.exp2(seed - top)
        whole = tirx.Select(top == f32(math.inf), top, top + tirx.log2(total))
        return tirx.Select(lse == f32(-math.inf), lse, whole)

    def share(self, ctx: Context, lse: Expr) -> Expr:
        """Share that the keys' output keeps once the initial state has its own."""
        if self.variant.initial_state is None:
            return f32(1.0)
        m, d = self.variant.initial_state(ctx)
        rest = _number(d) * tirx.exp2(_number(m) * f32(LOG2E) - lse)
        return tirx.Select(lse == f32(-math.inf), f32(0.0), f32(1.0) / (f32(1.0) + rest))

    def key_positions(
        self, request: Expr, qo_len: Expr, kv_len: Expr, q_lo: Expr, q_hi: Expr
    ) -> tuple[Expr, Expr]:
        """`kv_range` as the planner asks for it."""
        ctx = self.range_context(batch=request, qo_len=qo_len, kv_len=kv_len)
        return self.kv_range(ctx, q_lo, q_hi)

    def output(self, ctx: Context, o: Expr, lse: Expr) -> Expr:
        """Return an output element after the variant's last word; empty rows stay 0."""
        if self.variant.output_transform is None:
            return o
        said = _number(self.variant.output_transform(ctx, o, lse))
        if not self.variant.use_softmax:
            return said
        return tirx.Select(lse == f32(-math.inf), f32(0.0), said)


def _value(value: Expr, _: Context) -> Expr:
    return value


def _number(said: Any) -> Expr:
    """Return the number that a hook gave."""
    return without_traps(as_float(said))


def _position(said: Any) -> Expr | None:
    """Return the bound of key positions that a hook gave, None if it gave none."""
    position = as_position(said)
    return None if position is None else without_traps(position)


def read_bit(bits: Any, indptr: Any, ctx: Context) -> Expr:
    """Bit of the current (query, key) pair in a bitmap: row-major per request, little-endian."""
    bit = tirx.Cast("int64", ctx.qo_idx) * tirx.Cast("int64", ctx.kv_len) + ctx.kv_idx
    byte = bits[indptr[ctx.batch] + tirx.shift_right(bit, tirx.const(3, "int64"))]
    shift = tirx.Cast("int32", tirx.bitwise_and(bit, tirx.const(7, "int64")))
    return tirx.bitwise_and(tirx.shift_right(tirx.Cast("int32", byte), shift), 1) > 0
