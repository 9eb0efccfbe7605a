"""An attention variant: a few Python functions on TIR expressions, traced into every kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

from tvm_attn.errors import VariantError
from tvm_attn.spec import Param

Expr = Any
Hook = Callable[..., Any]

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
    `output_transform`, `kv_range`), reading ``kv_idx`` or ``kv_pos`` is an error.

    Parameters
    ----------
    query_transform, key_transform, value_transform : callable, optional
        ``(ctx, x, d) -> expr``: element ``d`` of the transformed row; ``x(e)`` reads element ``e``
        of the row as float32. A value row has no query: only kv fields may be read.
    logits_transform : callable, optional
        ``(ctx, s) -> expr``: the logit, from ``s`` that is already times ``sm_scale``.
    mask : callable, optional
        ``(ctx) -> bool expr``: whether the key is visible to the query row.
    kv_range : callable, optional
        ``(ctx, q_lo, q_hi) -> (lo, hi)``: for query positions ``q_lo..q_hi`` (inclusive), key
        positions ``lo..hi`` (exclusive end) outside of which `mask` is False for all of them.
        Either may be None (unbounded). Tiles outside are skipped, not masked.
    initial_state : callable, optional
        ``(ctx) -> (m, d)``: weight ``d * exp(m)`` added to each row's denominator, once (sinks).
        A row with no visible key stays empty all the same.
    output_transform : callable, optional
        ``(ctx, o, lse) -> expr``: an element of the output row, applied once, after the last merge;
        ``lse`` is base 2.
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
            hook: _compose(compose, getattr(self, hook), getattr(other, hook))
            for hook, compose in HOOKS.items()
        }
        return replace(
            self,
            **merged,
            use_softmax=self.use_softmax and other.use_softmax,
            params=self.params + other.params,
            name=" & ".join(v.name for v in (self, other) if v.name),
        )

    def __str__(self) -> str:
        """Return the variant's name."""
        return self.name or "full"


def as_expr(value: Any) -> Any:
    """Return the expression of a comparison: TIR defers what ``==`` and ``!=`` give."""
    return value.asobject() if hasattr(value, "asobject") else value


def _compose(both: Callable[[Hook, Hook], Hook], a: Hook | None, b: Hook | None) -> Hook | None:
    if a is None or b is None:
        return a or b
    return both(a, b)


def _chain_rows(first: Hook, second: Hook) -> Hook:
    return lambda ctx, x, d: second(ctx, lambda e: first(ctx, x, e), d)


def _chain_logits(first: Hook, second: Hook) -> Hook:
    return lambda ctx, s: second(ctx, first(ctx, s))


def _both_masks(first: Hook, second: Hook) -> Hook:
    def mask(ctx: Any) -> Expr:
        from tvm import tirx

        return tirx.And(as_expr(first(ctx)), as_expr(second(ctx)))

    return mask


def _intersect(first: Hook, second: Hook) -> Hook:
    def kv_range(ctx: Any, q_lo: Expr, q_hi: Expr) -> tuple[Expr, Expr]:
        from tvm import tirx

        (lo_a, hi_a), (lo_b, hi_b) = first(ctx, q_lo, q_hi), second(ctx, q_lo, q_hi)
        return _tightest(tirx.max, lo_a, lo_b), _tightest(tirx.min, hi_a, hi_b)

    return kv_range


def _tightest(pick: Callable[[Expr, Expr], Expr], *bounds: Expr | None) -> Expr | None:
    given = [bound for bound in bounds if bound is not None]
    return reduce(pick, given) if given else None


def _add_states(first: Hook, second: Hook) -> Hook:
    def initial_state(ctx: Any) -> tuple[Expr, Expr]:
        from tvm import tirx

        (m_a, d_a), (m_b, d_b) = first(ctx), second(ctx)
        top = tirx.max(m_a, m_b)
        m = tirx.Select(top == tirx.const(-math.inf, "float32"), tirx.const(0.0, "float32"), top)
        return m, d_a * tirx.exp(m_a - m) + d_b * tirx.exp(m_b - m)

    return initial_state


def _chain_outputs(first: Hook, second: Hook) -> Hook:
    return lambda ctx, o, lse: second(ctx, first(ctx, o, lse), lse)


HOOKS: dict[str, Callable[[Hook, Hook], Hook]] = {
    "query_transform": _chain_rows,
    "key_transform": _chain_rows,
    "value_transform": _chain_rows,
    "logits_transform": _chain_logits,
    "mask": _both_masks,
    "kv_range": _intersect,
    "initial_state": _add_states,
    "output_transform": _chain_outputs,
}
"""Every hook, and how two of them compose."""
