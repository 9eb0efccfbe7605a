"""Variants with attention sinks."""

from __future__ import annotations

from typing import Any

from tvm_attn.spec import Param
from tvm_attn.variant import AttentionVariant, Expr


def sink() -> AttentionVariant:
    """Add a learned logit per head to the denominator: ``exp(sink[head])``, once per row.

    The logits are the run-time tensor ``sink``, float32 ``[num_qo_heads]`` (arXiv 2508.10925,
    section 2.2). A row with no visible key stays an empty state.
    """
    return AttentionVariant(
        initial_state=_state,
        params=(Param("sink", kind="tensor", shape=("num_qo_heads",)),),
        name="sink",
    )


def _state(ctx: Any) -> tuple[Expr, Expr]:
    from tvm import tirx

    return ctx.sink[ctx.qo_head], tirx.const(1.0, "float32")
