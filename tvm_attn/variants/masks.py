"""Variants that decide which keys a query sees."""

from __future__ import annotations

from typing import Any

from tvm_attn.errors import VariantError
from tvm_attn.spec import Param, is_count
from tvm_attn.variant import AttentionVariant, Expr


def causal() -> AttentionVariant:
    """Hide keys after the query: visible when ``kv_pos <= q_pos``."""
    return AttentionVariant(mask=_is_no_later, kv_range=_up_to_the_last, name="causal")


def _is_no_later(ctx: Any) -> Expr:
    return ctx.kv_pos <= ctx.q_pos


def _up_to_the_last(ctx: Any, q_lo: Expr, q_hi: Expr) -> tuple[None, Expr]:
    return None, q_hi + 1


def sliding_window(window_left: int = -1) -> AttentionVariant:
    """Hide keys far before the query: visible when ``kv_pos >= q_pos - window_left``.

    There is no right bound by itself; with `causal` a row sees at most ``window_left + 1`` keys.

    Parameters
    ----------
    window_left : int
        Default of the run-time scalar ``window_left``, in tokens; -1 is off. A plan is cut for its
        own window: at run a smaller one clips, a larger one is an error.
    """
    if not is_count(window_left, -1):
        raise VariantError(f"window_left={window_left!r} must be an integer of at least -1")
    return AttentionVariant(
        mask=_is_in_window,
        kv_range=_from_the_window_of_the_first,
        params=(Param("window_left", dtype="int32", default=window_left, at="plan", narrows=True),),
        name=f"sliding_window({window_left})",
    )


def _is_in_window(ctx: Any) -> Expr:
    return ctx.kv_pos >= ctx.q_pos - ctx.window_left


def _from_the_window_of_the_first(ctx: Any, q_lo: Expr, q_hi: Expr) -> tuple[Expr, None]:
    return q_lo - ctx.window_left, None


def custom_mask() -> AttentionVariant:
    """Keep the (query, key) pairs whose bit is set in ``custom_mask``, given with the plan.

    ``plan(..., custom_mask=m)`` takes a bool array (True keeps) of all requests' ``[qo_len,
    kv_len]`` masks flattened row-major one after the other, or the same as uint8 with
    little-endian bits, each request starting at a byte.
    """
    return AttentionVariant(
        mask=_is_set,
        params=(Param("custom_mask", kind="bitmap", at="plan"),),
        name="custom_mask",
    )


def _is_set(ctx: Any) -> Expr:
    return ctx.custom_mask
