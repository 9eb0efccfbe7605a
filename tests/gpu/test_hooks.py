"""Variants of a user on a GPU: arrays of a batch, biases by table, gates that read the LSE."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from tests.accuracy import State, assert_states_accurate
from tests.batches import Batch
from tests.gpu.device import ANY_GPU
from tests.machine import Machine
from tvm_attn import variants
from tvm_attn._twins import Logits, Mask, MaskFn
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.variant import AttentionVariant, Expr

import tvm_attn as ta  # isort: skip

BUCKETS = 32
SHARPNESS = 0.125
PENALTY = 1e4
MIDDLE = (200, 300)


def prefix_lm() -> AttentionVariant:
    """Causal, but for a prefix of each request that all of its queries see."""

    def mask(ctx: Any) -> Expr:
        from tvm import tirx

        return tirx.Or(ctx.kv_pos <= ctx.q_pos, ctx.kv_pos < ctx.prefix_len[ctx.batch])

    lengths = Param("prefix_len", kind="tensor", dtype="int32", shape=("batch",), at="plan")
    return AttentionVariant(mask=mask, params=(lengths,), name="prefix_lm")


def relative_bias() -> AttentionVariant:
    """Add a learned bias for each head and distance, of distances up to `BUCKETS`."""

    def bias(ctx: Any, s: Expr) -> Expr:
        from tvm import tirx

        distance = tirx.min(tirx.max(ctx.q_pos - ctx.kv_pos, 0), BUCKETS - 1)
        return s + ctx.bias[ctx.qo_head, distance]

    table = Param("bias", kind="tensor", shape=("num_qo_heads", BUCKETS))
    return AttentionVariant(logits_transform=bias, params=(table,), name="relative_bias")


def confident() -> AttentionVariant:
    """Scale each output by how large its log-sum-exp is: it must be that of all keys."""

    def gate(ctx: Any, o: Expr, lse: Expr) -> Expr:
        from tvm import tirx

        one = tirx.const(1.0, "float32")
        return o / (one + tirx.exp2(-lse * ctx.sharpness))

    return AttentionVariant(
        output_transform=gate, params=(Param("sharpness", default=SHARPNESS),), name="confident"
    )


def penalty(is_folded: bool) -> AttentionVariant:
    """Push all keys but those in the middle far down, without hiding them."""

    def push(ctx: Any, s: Expr) -> Expr:
        from tvm import tirx

        is_far = tirx.Or(ctx.kv_pos < MIDDLE[0], ctx.kv_pos >= MIDDLE[1])
        if is_folded:
            return s + tirx.Select(
                is_far, tirx.const(-PENALTY, "float32"), tirx.const(0.0, "float32")
            )
        return tirx.Select(is_far, s - tirx.const(PENALTY, "float32"), s)

    return AttentionVariant(logits_transform=push, name="penalty")


SPECS = {
    "paged": ANY_GPU.spec(num_qo_heads=6, num_kv_heads=2, head_dim_qk=96, q_dtype="bfloat16"),
    "ragged": ANY_GPU.spec(page_size=None, kv_layout="HND", kv_dtype="float8_e4m3fn"),
}
VARIANT = prefix_lm() & relative_bias() & confident()
ALL_AT_ONCE = (
    variants.causal()
    & variants.sliding_window()
    & variants.soft_cap(20.0)
    & variants.alibi()
    & variants.sink()
    & confident()
)
KERNELS = [(spec, variant) for spec in SPECS.values() for variant in (VARIANT, ALL_AT_ONCE)]
PENALISED = ANY_GPU.spec(num_qo_heads=6, num_kv_heads=2, head_dim_qk=128, q_dtype="bfloat16")
SCHEDULES = (None, "sm80")


def build_penalty(is_folded: bool, schedule: str | None, target: str) -> AttentionModule:
    """Build one of its kernels."""
    return ta.build(PENALISED, penalty(is_folded), target, schedule=schedule)


BUILDS = [
    partial(build_penalty, fold, schedule) for fold in (True, False) for schedule in SCHEDULES
]
LENS = ([1, 7, 0, 40, 3, 2], [2000, 30, 5, 90, 0, 300])
PREFIXES = (0, 11, 3, 50, 7, 301)


@dataclass(frozen=True)
class PrefixMask:
    """The torch twin of `prefix_lm`."""

    def at(self, request: int) -> MaskFn:
        prefix = PREFIXES[request]
        return lambda q_idx, kv_idx, q_pos, kv_pos: (kv_pos <= q_pos) | (kv_pos < prefix)

    def __call__(self, *indices: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("the prefix is a request's")


def gated(state: State) -> State:
    """The torch twin of `confident`."""
    out, lse = state
    assert lse is not None
    gate = 1 / (1 + torch.exp2(-lse * SHARPNESS))
    return (out.to(lse.dtype) * gate[..., None]).to(out.dtype), lse


def check(machine: Machine, batch: Batch, variant: AttentionVariant, **given: Any) -> None:
    module = ta.build(batch.spec, variant, machine.target)
    for split in (None, 64):
        plan = module.plan(batch.fmt, **given["plan"], fixed_split_size=split)
        scales = batch.scales
        got = module.run(plan, batch.q, batch.kv, return_lse=True, **given["run"], **scales)
        states = (gated(f(**given["reference"])) for f in (batch.exact, batch.eager))
        assert_states_accurate(got, *states, batch.fmt)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_user_hooks(machine: Machine, spec: AttentionSpec) -> None:
    batch = machine.batch(spec, *LENS)
    table = torch.randn(spec.num_qo_heads, BUCKETS, generator=torch.Generator().manual_seed(2))
    table = table.to(machine.device)

    def add_bias(
        s: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor, head: torch.Tensor
    ) -> torch.Tensor:
        return s + table.to(s)[head, (q_pos - kv_pos).clamp(0, BUCKETS - 1)]

    check(
        machine,
        batch,
        VARIANT,
        plan={"prefix_len": torch.tensor(PREFIXES, dtype=torch.int32)},
        run={"bias": table},
        reference={"mask": Mask((PrefixMask(),)), "logits": Logits((add_bias,))},
    )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_everything_ready_made_at_once(machine: Machine, spec: AttentionSpec) -> None:
    from tvm_attn import reference

    batch = machine.batch(spec, *LENS)
    slopes = reference.alibi_slopes(spec.num_qo_heads).to(machine.device)
    sink = torch.linspace(-2, 2, spec.num_qo_heads, device=machine.device)
    check(
        machine,
        batch,
        ALL_AT_ONCE,
        plan={"window_left": 100},
        run={"alibi_slopes": slopes, "sink": sink, "logits_soft_cap": 5.0},
        reference={
            "mask": reference.causal() & reference.sliding_window(100),
            "logits": reference.soft_cap(5.0) & reference.alibi(slopes),
            "sink": sink,
        },
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("is_folded", [True, False])
def test_scores_keep_their_digits_beside_far_lower_ones(
    machine: Machine, is_folded: bool, schedule: str | None
) -> None:
    batch = machine.batch(PENALISED, [400, 1, 20], [700, 900, 500])
    module = build_penalty(is_folded, schedule, str(machine.target))
    plan = module.plan(batch.fmt)

    def push(
        s: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor, head: torch.Tensor
    ) -> torch.Tensor:
        is_far = (kv_pos < MIDDLE[0]) | (kv_pos >= MIDDLE[1])
        return torch.where(is_far, s - PENALTY, s)

    got = module.run(plan, batch.q, batch.kv, return_lse=True)
    exact, eager = (f(logits=Logits((push,))) for f in (batch.exact, batch.eager))
    assert_states_accurate(got, exact, eager, batch.fmt)
