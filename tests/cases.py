"""Variants by name, with arguments for a batch and what the reference needs to know of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

import tvm_attn as ta
from tests import rotated
from tests.accuracy import State, assert_states_accurate
from tests.batches import Batch
from tvm_attn import reference
from tvm_attn._pairwise import Row
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.runtime.workspace import PlanLimits
from tvm_attn.shipped import VARIANTS
from tvm_attn.spec import AttentionSpec
from tvm_attn.variant import AttentionVariant

WINDOW, CAP, BIAS = 20, 3.0, -1.0
KV_HEADS = 2

PARTS: dict[str, tuple[str, ...]] = {
    "full": (),
    "causal": ("causal",),
    "window": ("causal", "window"),
    "soft_cap": ("causal", "soft_cap"),
    "window_soft_cap": ("causal", "window", "soft_cap"),
    "alibi": ("causal", "alibi"),
    "custom_mask": ("custom_mask",),
    "custom_mask_window": ("window", "custom_mask"),
    "sink": ("causal", "sink"),
    "window_sink": ("causal", "window", "sink"),
    "sigmoid": ("causal", "sigmoid"),
    "rotary": ("causal", "rotary"),
}
"""What the variants of `tvm_attn.shipped` are composed of."""


@dataclass(frozen=True)
class Arguments:
    """Keywords of `plan`, of `run` and of the reference."""

    plan: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)


def spec_of(row: Row) -> AttentionSpec:
    """Return the spec of a row of a grid."""
    return AttentionSpec(
        num_qo_heads=KV_HEADS * row["group"],
        num_kv_heads=KV_HEADS,
        head_dim_qk=row["dims"][0],
        head_dim_vo=row["dims"][1],
        **dict(zip(("q_dtype", "kv_dtype", "o_dtype"), row["dtypes"], strict=False)),
        kv_layout=row["layout"],
        page_size=row["page_size"],
    )


def name_of(row: Row) -> str:
    """Return the name of a row's test."""
    kv = "ragged" if row["page_size"] is None else f"page{row['page_size']}"
    dims = "x".join(map(str, dict.fromkeys(row["dims"])))
    dtypes = "-".join(dict.fromkeys(row["dtypes"]))
    return f"{row['variant']}-{dtypes}-{row['layout']}-{kv}-g{row['group']}-d{dims}"


def variant(name: str, spec: AttentionSpec) -> AttentionVariant:
    """Return a variant by name."""
    return VARIANTS[name](spec)


def arguments(name: str, batch: Batch) -> Arguments:
    """Return what a variant takes for a batch, on its device and the same in every run."""
    parts = [_part(part, batch) for part in PARTS[name]]
    keywords = [
        functools.reduce(_together, (getattr(part, stage) for part in parts), {})
        for stage in ("plan", "run", "reference")
    ]
    return Arguments(*keywords)


def _together(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Unite keywords; masks and logits of both compose."""
    return {**a, **b, **{name: a[name] & b[name] for name in a.keys() & b.keys()}}


def _part(name: str, batch: Batch) -> Arguments:
    rng = torch.Generator().manual_seed(1)
    heads, device = batch.spec.num_qo_heads, batch.q.device
    if name == "causal":
        return Arguments(reference={"mask": reference.causal()})
    if name == "window":
        mask = reference.sliding_window(WINDOW)
        return Arguments(plan={"window_left": WINDOW}, reference={"mask": mask})
    if name == "soft_cap":
        cap = {"logits": reference.soft_cap(CAP)}
        return Arguments(run={"logits_soft_cap": CAP}, reference=cap)
    if name == "alibi":
        slopes = reference.alibi_slopes(heads).to(device)
        return Arguments({}, {"alibi_slopes": slopes}, {"logits": reference.alibi(slopes)})
    if name == "custom_mask":
        bits = random_mask(batch, rng)
        mask = reference.custom_mask(bits.to(device), batch.fmt)
        return Arguments(plan={"custom_mask": bits}, reference={"mask": mask})
    if name == "sink":
        sink = torch.randn(heads, generator=rng).to(device)
        return Arguments(run={"sink": sink}, reference={"sink": sink})
    if name == "sigmoid":
        weigh = {"logits": reference.sigmoid(BIAS), "use_softmax": False}
        return Arguments(run={"sigmoid_bias": BIAS}, reference=weigh)
    assert name == "rotary"
    return Arguments(run={k: v.to(device) for k, v in rotated.tensors(batch.spec).items()})


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
def kernel(name: str, spec: AttentionSpec, target: str | None = None) -> AttentionModule:
    """Return the kernel of a variant, built when it is first asked for."""
    return ta.build(spec, variant(name, spec), target)


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
    plan = {**poisoned_workspace(module, batch, **(plan or {})), **args.plan}
    planned = module.plan(batch.fmt, **plan)
    has_lse = args.reference.get("use_softmax", True)
    out, lse = poisoned_results(batch)
    keywords = {**batch.scales, **args.run, "out": out, **({"lse": lse} if has_lse else {}), **run}
    module.run(planned, batch.q, batch.kv, **keywords)
    exact, eager = (states(name, batch, args, compute) for compute in ("float64", "eager"))
    assert_states_accurate((out, lse) if has_lse else out, exact, eager, batch.fmt)
    return out, lse


def poisoned_workspace(
    module: AttentionModule, batch: Batch, *, fixed_split_size: int | None = None, **plan: Any
) -> dict[str, Any]:
    """Return keywords of `plan` with a workspace that is exactly large enough and all NaN."""
    fmt = batch.fmt
    tokens = int(fmt.kv_indptr[-1]) * (fmt.page_size or 1)
    limits = PlanLimits(fmt.batch_size, len(batch.q), tokens)
    size, _ = module.workspace_size(limits, fixed_split_size=fixed_split_size)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=batch.q.device)
    return {"workspace": workspace, "fixed_split_size": fixed_split_size, **plan}


def poisoned_results(batch: Batch) -> State:
    """Return room for out and lse, all NaN."""
    spec, device = batch.spec, batch.q.device
    shape = (len(batch.q), spec.num_qo_heads)
    o_dtype = getattr(torch, str(spec.o_dtype))
    out = torch.full((*shape, spec.dim_vo), torch.nan, dtype=o_dtype, device=device)
    return out, torch.full(shape, torch.nan, device=device)


def states(name: str, batch: Batch, args: Arguments, compute: str) -> State:
    """Return what a batch should give, in float64 or as torch eager computes it."""
    if "rotary" in PARTS[name]:
        return rotated.states(batch, args.run, compute, **args.reference)
    return (batch.exact if compute == "float64" else batch.eager)(**args.reference)
