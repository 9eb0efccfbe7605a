"""Variants by name, with arguments for a batch and what the reference needs to know of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import tvm_attn as ta
from tests import rotated
from tests.accuracy import State, assert_states_accurate
from tests.batches import Batch
from tvm_attn import reference, variants
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.spec import AttentionSpec
from tvm_attn.variant import AttentionVariant

WINDOW, CAP, BIAS = 20, 3.0, -1.0


@dataclass(frozen=True)
class Arguments:
    """Keywords of `plan`, of `run` and of the reference."""

    plan: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)


def variant(name: str, spec: AttentionSpec) -> AttentionVariant:
    """Return a variant by name."""
    causal = variants.causal()
    made: dict[str, Callable[[], AttentionVariant]] = {
        "full": AttentionVariant,
        "causal": lambda: causal,
        "window": lambda: causal & variants.sliding_window(),
        "soft_cap": lambda: causal & variants.soft_cap(30.0),
        "alibi": lambda: causal & variants.alibi(),
        "custom_mask": variants.custom_mask,
        "sink": lambda: causal & variants.sink(),
        "sigmoid": lambda: causal & variants.sigmoid(),
        "rotated": lambda: causal & rotated.variant(spec),
    }
    return made[name]()


def arguments(name: str, batch: Batch) -> Arguments:
    """Return what a variant takes for a batch, the same in every run."""
    rng = torch.Generator().manual_seed(1)
    heads = batch.spec.num_qo_heads
    causal = reference.causal()
    if name == "full":
        return Arguments()
    if name == "causal":
        return Arguments(reference={"mask": causal})
    if name == "window":
        mask = causal & reference.sliding_window(WINDOW)
        return Arguments(plan={"window_left": WINDOW}, reference={"mask": mask})
    if name == "soft_cap":
        cap = {"logits": reference.soft_cap(CAP), "mask": causal}
        return Arguments(run={"logits_soft_cap": CAP}, reference=cap)
    if name == "alibi":
        slopes = reference.alibi_slopes(heads)
        bias = {"logits": reference.alibi(slopes), "mask": causal}
        return Arguments(run={"alibi_slopes": slopes}, reference=bias)
    if name == "custom_mask":
        bits = random_mask(batch, rng)
        mask = reference.custom_mask(bits, batch.fmt)
        return Arguments(plan={"custom_mask": bits}, reference={"mask": mask})
    if name == "sink":
        sink = torch.randn(heads, generator=rng)
        return Arguments(run={"sink": sink}, reference={"sink": sink, "mask": causal})
    if name == "sigmoid":
        weigh = {"logits": reference.sigmoid(BIAS), "mask": causal, "use_softmax": False}
        return Arguments(run={"sigmoid_bias": BIAS}, reference=weigh)
    return Arguments(run=rotated.tensors(batch.spec), reference={"mask": causal})


def random_mask(batch: Batch, rng: torch.Generator) -> torch.Tensor:
    """Return a custom mask of a batch: random, a tenth of its rows without any visible key."""
    fmt = batch.fmt
    rows = []
    for qo_len, kv_len in zip(fmt.qo_len.tolist(), fmt.kv_len.tolist(), strict=True):
        kept = torch.rand(qo_len, kv_len, generator=rng) < 0.5
        kept &= torch.rand(qo_len, 1, generator=rng) < 0.9
        rows.append(kept.flatten())
    return torch.cat([torch.zeros(0, dtype=torch.bool), *rows])


@functools.cache
def kernel(name: str, spec: AttentionSpec) -> AttentionModule:
    """Return the kernel of a variant, built when it is first asked for."""
    return ta.build(spec, variant(name, spec))


def check(
    name: str,
    batch: Batch,
    *,
    module: AttentionModule | None = None,
    plan: dict[str, Any] | None = None,
    **run: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Plan and run a batch, hold the result against the promise, and return out and lse.

    `plan` and `run` are keywords besides those of the variant.
    """
    module = module or kernel(name, batch.spec)
    args = arguments(name, batch)
    planned = module.plan(batch.fmt, **args.plan, **(plan or {}))
    has_lse = args.reference.get("use_softmax", True)
    keywords = {**batch.scales, **args.run, **run, "return_lse": has_lse}
    result = module.run(planned, batch.q, batch.kv, **keywords)
    out, lse = result if has_lse else (result, None)
    exact, eager = (states(name, batch, args, compute) for compute in ("float64", "eager"))
    assert_states_accurate((out, lse) if has_lse else out, exact, eager, batch.fmt)
    return out, lse


def states(name: str, batch: Batch, args: Arguments, compute: str) -> State:
    """Return what a batch should give, in float64 or as torch eager computes it."""
    if name == "rotated":
        return rotated.states(batch, args.run, compute, **args.reference)
    return (batch.exact if compute == "float64" else batch.eager)(**args.reference)
