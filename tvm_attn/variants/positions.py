"""Variants that encode positions."""

from __future__ import annotations

from typing import Any

from tvm_attn.spec import Param
from tvm_attn.variant import AttentionVariant, Expr


def alibi() -> AttentionVariant:
    """Add ``slope[head] * (kv_pos - q_pos)`` to the logits (arXiv 2108.12409, section 3).

    The slopes are the run-time tensor ``alibi_slopes``, float32 ``[num_qo_heads]``.
    """
    return AttentionVariant(
        logits_transform=_biased,
        params=(Param("alibi_slopes", kind="tensor", shape=("num_qo_heads",)),),
        name="alibi",
    )


def _biased(ctx: Any, s: Expr) -> Expr:
    from tvm import tirx

    distance = tirx.Cast("float32", ctx.kv_pos - ctx.q_pos)
    return s + ctx.alibi_slopes[ctx.qo_head] * distance
