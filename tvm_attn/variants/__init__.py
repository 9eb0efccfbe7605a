"""Ready-made variants; compose them with ``&``."""

from __future__ import annotations

from tvm_attn.variants.logits import sigmoid, soft_cap
from tvm_attn.variants.masks import causal, custom_mask, sliding_window
from tvm_attn.variants.positions import alibi
from tvm_attn.variants.sinks import sink

__all__ = ["alibi", "causal", "custom_mask", "sigmoid", "sink", "sliding_window", "soft_cap"]
