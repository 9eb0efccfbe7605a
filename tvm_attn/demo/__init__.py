"""A small LLM server that replays recorded traffic on the kernels, and checks what it computes.

It has what surrounds attention in a serving engine: requests arrive (`trace`), a scheduler mixes
prefill chunks and decodes into batches (`scheduler`), keys and values live in a paged cache
(`pages`), and every step appends to it, plans once and runs each layer (`engine`). Instead of a
model there is a table of random projections (`model`), from which a checker recomputes sampled
results in float64 without looking at the cache (`checker`).
"""

from __future__ import annotations

from tvm_attn.demo.options import DemoOptions
from tvm_attn.demo.report import Summary
from tvm_attn.demo.server import serve

__all__ = ["DemoOptions", "Summary", "serve"]
