"""Variants that change the logits."""

from __future__ import annotations

import math
from typing import Any

from tvm_attn.spec import Param
from tvm_attn.variant import AttentionVariant, Expr

OFF = 2.0**64
"""A cap that no logit feels: near 0, tanh(x) is x, and a power of 2 changes no digit of it."""


def soft_cap(cap: float | None = None) -> AttentionVariant:
    """Bound the logits: ``cap * tanh(s / cap)``, as in Gemma 2 (arXiv 2408.00118, section 2).

    Parameters
    ----------
    cap : float, optional
        Default of the run-time scalar ``logits_soft_cap``; 0 and inf are off. None makes it a
        required argument.
    """
    return AttentionVariant(
        logits_transform=_capped,
        params=(Param("logits_soft_cap", default=0.0 if cap == math.inf else cap, largest=OFF),),
        name=f"soft_cap({cap})",
    )


def sigmoid(bias: float = 0.0) -> AttentionVariant:
    """Weigh values by ``sigmoid(s + bias)`` instead of softmax (arXiv 2409.04431, equation 3).

    Parameters
    ----------
    bias : float
        Default of the run-time scalar ``sigmoid_bias``.
    """
    return AttentionVariant(
        logits_transform=_sigmoid_of,
        use_softmax=False,
        params=(Param("sigmoid_bias", default=bias),),
        name=f"sigmoid({bias})",
    )


def _capped(ctx: Any, s: Expr) -> Expr:
    from tvm import tirx

    given, one = ctx.logits_soft_cap, tirx.const(1.0, "float32")
    cap = tirx.Select(given > tirx.const(0.0, "float32"), given, tirx.const(OFF, "float32"))
    return cap * tirx.tanh(s * (one / cap))


def _sigmoid_of(ctx: Any, s: Expr) -> Expr:
    from tvm import tirx

    one = tirx.const(1.0, "float32")
    return one / (one + tirx.exp(-(s + ctx.sigmoid_bias)))
