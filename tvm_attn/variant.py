"""An attention variant: a few Python functions on TIR expressions, traced into every kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from typing import Any

import numpy as np

from tvm_attn.errors import VariantError
from tvm_attn.spec import Param

Expr = Any
Hook = Callable[..., Any]

MAX_POSITION = 2**30
"""Positions, and the windows between them, are below this: their differences fit int32."""

RESERVED_NAMES = frozenset(
    "batch qo_idx kv_idx q_pos kv_pos qo_head kv_head qo_len kv_len "
    "out lse return_lse lse_base sm_scale q_scale k_scale v_scale "
    "limits workspace fixed_split_size max_qo_len q_pos_offset kv_pos_offset "
    "self plan q kv qo_indptr kv_indptr kv_indices kv_last_page_len".split()
)
"""Names a parameter may not take: fields of the context and arguments of `plan` and `run`."""


@dataclass(frozen=True)
class AttentionVariant:
    """What distinguishes one attention from another, as hooks that are traced into the kernel.

    Every hook gets a context ``ctx`` with int32 expressions ``batch, qo_idx, kv_idx, q_pos, kv_pos,
    qo_head, kv_head, qo_len, kv_len`` and the declared parameters as attributes, and returns TIR
    expressions. Where a hook has no key at hand (`query_transform`, `initial_state`,
    `output_transform`, `kv_range`), reading ``kv_idx`` or ``kv_pos`` is an error. ``//`` and ``%``
    round down as in Python; integers divided by a parameter that is 0 are 0.

    Parameters
    ----------
    query_transform, key_transform, value_transform : callable, optional
        ``(ctx, x, d) -> expr``: element ``d`` of the transformed row; ``x(e)`` reads element ``e``
        of the row as float32. A value row has no query: only kv fields may be read.
    logits_transform : callable, optional
        ``(ctx, s) -> expr``: the logit, from ``s`` that is already times ``sm_scale``.
    mask : callable, optional
        ``(ctx) -> bool expr``: whether the key is visible to the query row. Conditions are combined
        with ``&``, ``|`` and ``~``, which bind tighter than comparisons.
    kv_range : callable, optional
        ``(ctx, q_lo, q_hi) -> (lo, hi)``: for query positions ``q_lo..q_hi`` (inclusive), key
        positions ``lo..hi`` (exclusive end) outside of which `mask` is False for all of them.
        Either may be None (unbounded). Tiles outside are skipped, not masked.
    initial_state : callable, optional
        ``(ctx) -> (m, d)``: weight ``d * exp(m)`` added to each row's denominator, once (sinks).
        A row with no visible key stays empty all the same.
    output_transform : callable, optional
        ``(ctx, o, lse) -> expr``: an element of the output row, applied once, after the last merge;
        ``lse`` is base 2. A row with no visible key stays 0 all the same; without softmax, where
        nothing tells such a row from others, it is applied to all.
    use_softmax : bool
        If False, the transformed logit itself weighs the value and there is no normalisation and
        no LSE; masked keys weigh 0.
    params : tuple of Param
        Run-time parameters the hooks read.
    name : str
        For printing only; cache keys are of what the hooks are, not of what they are called.

    Examples
    --------
    >>> from tvm_attn import AttentionVariant, variants
    >>> prefix_lm = AttentionVariant(mask=lambda ctx: ctx.kv_pos < 16, name="prefix_lm")
    >>> print(variants.causal() & prefix_lm)
    causal & prefix_lm
    """

    query_transform: Hook | None = None
    key_transform: Hook | None = None
    value_transform: Hook | None = None
    logits_transform: Hook | None = None
    mask: Hook | None = None
    kv_range: Hook | None = None
    initial_state: Hook | None = None
    output_transform: Hook | None = None
    use_softmax: bool = True
    params: tuple[Param, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        """Validate hooks and parameter names."""
        self._check_types()
        object.__setattr__(self, "params", tuple(self.params))
        for field in fields(self)[: len(HOOKS)]:
            hook = getattr(self, field.name)
            if hook is not None and not callable(hook):
                raise VariantError(f"{field.name} must be a function or None, got {hook!r}")
        names = [param.name for param in self.params]
        for name in names:
            if names.count(name) > 1:
                raise VariantError(f"parameter {name!r} is declared twice")
            if name in RESERVED_NAMES:
                raise VariantError(f"parameter name {name!r} is taken; choose another")
        if not self.use_softmax and self.initial_state is not None:
            raise VariantError("initial_state needs softmax: without it there is no denominator")

    def _check_types(self) -> None:
        params = self.params if isinstance(self.params, tuple | list) else (None,)
        if not all(isinstance(param, Param) for param in params):
            raise VariantError(f"params must be a tuple of Param, got {self.params!r}")
        for field, kind in (("use_softmax", bool), ("name", str)):
            given = getattr(self, field)
            if not isinstance(given, kind):
                raise VariantError(f"{field} must be a {kind.__name__}, got {given!r}")

    def __and__(self, other: AttentionVariant) -> AttentionVariant:
        """Compose: masks AND, ranges intersect, transforms chain in order.

        Raises
        ------
        VariantError
            If both declare a parameter of one name; the message names it.
        """
        if not isinstance(other, AttentionVariant):
            return NotImplemented
        clash = {p.name for p in self.params} & {p.name for p in other.params}
        if clash:
            raise VariantError(
                f"both variants declare the parameter {sorted(clash)[0]!r}; rename one of them"
            )
        merged = {
            hook: _compose(both, getattr(self, hook), getattr(other, hook))
            for hook, both in HOOKS.items()
        }
        return replace(
            self,
            **merged,
            use_softmax=self.use_softmax and other.use_softmax,
            params=self.params + other.params,
            name=" & ".join(filter(None, (self._label, other._label))),
        )

    @property
    def _label(self) -> str:
        """The name, if any; plain attention needs none."""
        return self.name or ("" if self == AttentionVariant() else "unnamed")

    def __str__(self) -> str:
        """Return the variant's name; ``full`` of plain attention."""
        return self._label or "full"


def as_expr(value: Any) -> Any:
    """Return the expression of a comparison, which TIR defers, and the number of a numpy scalar."""
    if isinstance(value, np.generic):
        return value.item()
    return value.asobject() if hasattr(value, "asobject") else value


def as_float(value: Any) -> Expr:
    """Return what a hook gave as a float32 expression, or raise `TypeError`."""
    from tvm import tirx

    value = _of_kind(value, "int", "float")
    if isinstance(value, int | float):
        return tirx.const(value, "float32")
    return value if str(value.ty) == "float32" else tirx.Cast("float32", value)


def as_bool(value: Any) -> Expr:
    """Return what a hook gave as a bool expression, or raise `TypeError`."""
    from tvm import tirx

    value = _of_kind(value, "bool")
    return tirx.const(value, "bool") if isinstance(value, bool) else value


def as_position(value: Any) -> Expr | None:
    """Return a bound of key positions as an int32 expression, None for None; far ones are bounded.

    Raises
    ------
    TypeError
        If it is no integer.
    """
    from tvm import tirx

    value = _of_kind(value, "int", "NoneType")
    if isinstance(value, int):
        return tirx.const(max(-MAX_POSITION, min(value, MAX_POSITION)), "int32")
    if value is None or str(value.ty) == "int32":
        return value
    low, high = (tirx.const(end, str(value.ty)) for end in (-MAX_POSITION, MAX_POSITION))
    return tirx.Cast("int32", tirx.max(low, tirx.min(value, high)))


def as_pair(value: Any) -> tuple[Any, Any]:
    """Return the two results of a hook, or raise `TypeError`."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"returned {value!r}, expected a pair")
    return value


def _of_kind(value: Any, *allowed: str) -> Any:
    """Return `as_expr` of a value of one of these types, whatever their width."""
    value = as_expr(value)
    kind = str(value.ty) if hasattr(value, "ty") else type(value).__name__
    if kind.rstrip("0123456789") not in allowed:
        raise TypeError(f"returned {value} of type {kind}, expected {' or '.join(allowed)}")
    return value


def _compose(both: Hook, a: Hook | None, b: Hook | None) -> Hook | None:
    if a is None or b is None:
        return a or b
    return partial(both, a, b)


def _chained_rows(first: Hook, second: Hook, ctx: Any, x: Hook, d: Expr) -> Expr:
    return second(ctx, lambda e: as_float(first(ctx, x, e)), d)


def _chained_logits(first: Hook, second: Hook, ctx: Any, s: Expr) -> Expr:
    return second(ctx, as_float(first(ctx, s)))


def _both_masks(first: Hook, second: Hook, ctx: Any) -> Expr:
    from tvm import tirx

    return tirx.And(as_bool(first(ctx)), as_bool(second(ctx)))


def _intersection(
    first: Hook, second: Hook, ctx: Any, q_lo: Expr, q_hi: Expr
) -> tuple[Expr | None, Expr | None]:
    from tvm import tirx

    bounds = [map(as_position, as_pair(hook(ctx, q_lo, q_hi))) for hook in (first, second)]
    los, his = zip(*bounds, strict=True)
    return _tightest(tirx.max, *los), _tightest(tirx.min, *his)


def _tightest(pick: Callable[[Expr, Expr], Expr], *bounds: Expr | None) -> Expr | None:
    given = [bound for bound in bounds if bound is not None]
    return reduce(pick, given) if given else None


def _sum_of_states(first: Hook, second: Hook, ctx: Any) -> tuple[Expr, Expr]:
    from tvm import tirx

    states = [map(as_float, as_pair(hook(ctx))) for hook in (first, second)]
    (m_a, d_a), (m_b, d_b) = states
    top = tirx.max(m_a, m_b)
    m = tirx.Select(top == tirx.const(-math.inf, "float32"), tirx.const(0.0, "float32"), top)
    return m, d_a * tirx.exp(m_a - m) + d_b * tirx.exp(m_b - m)


def _chained_outputs(first: Hook, second: Hook, ctx: Any, o: Expr, lse: Expr) -> Expr:
    return second(ctx, as_float(first(ctx, o, lse)), lse)


HOOKS: dict[str, Hook] = {
    "query_transform": _chained_rows,
    "key_transform": _chained_rows,
    "value_transform": _chained_rows,
    "logits_transform": _chained_logits,
    "mask": _both_masks,
    "kv_range": _intersection,
    "initial_state": _sum_of_states,
    "output_transform": _chained_outputs,
}
"""Every hook, and how two of them compose: the two, and then what a hook is given."""


def composed_of(hook: Hook) -> tuple[Hook, ...]:
    """Return the two hooks that one is composed of; none, if it is not composed."""
    if isinstance(hook, partial) and hook.func in HOOKS.values():
        return hook.args
    return ()
