"""Hooks divide integers by what they are given, also if that is 0: then the result is 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm import tirx

import tvm_attn as ta
from tests.batches import random_batch
from tvm_attn.tir.divisions import without_traps

SPEC = ta.AttentionSpec(2, 1, 16, q_dtype="float32", page_size=4)
LOWEST = -(2**31)
QO_LENS, KV_LENS = [3, 1], [9, 14]
KEYS = torch.arange(max(KV_LENS))


def quotient(a: torch.Tensor, n: int) -> torch.Tensor:
    return torch.zeros_like(a) if n == 0 else torch.div(a, n, rounding_mode="floor")


def remainder(a: torch.Tensor, n: int) -> torch.Tensor:
    return torch.zeros_like(a) if n == 0 else torch.remainder(a, n)


@pytest.mark.parametrize("n", [3, 1, 0, -1, -4, LOWEST])
def test_a_divisor_may_be_any_integer(n: int) -> None:
    """As if a table had all quotients."""
    divided = ta.AttentionVariant(
        logits_transform=lambda ctx, s: (
            s + ((ctx.kv_idx - 5) // ctx.n * 0.25 + (ctx.kv_idx - 5) % ctx.n * 0.125)
        ),
        mask=lambda ctx: ctx.kv_idx // ctx.n <= ctx.qo_idx // ctx.n,
        params=(ta.Param("n", dtype="int32"),),
    )
    looked_up = ta.AttentionVariant(
        logits_transform=lambda ctx, s: s + ctx.added[ctx.kv_idx],
        mask=lambda ctx: ctx.blocks[ctx.kv_idx] <= ctx.blocks[ctx.qo_idx],
        params=(
            ta.Param("added", kind="tensor", shape=("keys",)),
            ta.Param("blocks", dtype="int32", kind="tensor", shape=("keys",)),
        ),
    )
    added = quotient(KEYS - 5, n) * 0.25 + remainder(KEYS - 5, n) * 0.125
    blocks = quotient(KEYS, n).int()
    batch = random_batch(SPEC, QO_LENS, KV_LENS)
    got, want = (
        kernel.run(kernel.plan(batch.fmt), batch.q, batch.kv, **params, return_lse=True)
        for kernel, params in (
            (ta.build(SPEC, divided), {"n": n}),
            (ta.build(SPEC, looked_up), {"added": added, "blocks": blocks}),
        )
    )
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("n", [4, 0, -1])
def test_a_range_may_be_divided_by_any_integer(n: int) -> None:
    """The planner asks for it, before a kernel runs."""

    def begins(ctx: Any, position: Any) -> Any:
        return position // ctx.n * ctx.n

    chunks = ta.AttentionVariant(
        mask=lambda ctx: (ctx.kv_pos >= begins(ctx, ctx.q_pos)) & (ctx.kv_pos <= ctx.q_pos),
        kv_range=lambda ctx, lo, hi: (begins(ctx, lo), hi + 1),
        params=(ta.Param("n", dtype="int32", at="plan"),),
    )
    whole = ta.AttentionVariant(mask=chunks.mask, params=(ta.Param("n", dtype="int32"),))
    batch = random_batch(SPEC, QO_LENS, KV_LENS)
    cut, uncut = ta.build(SPEC, chunks), ta.build(SPEC, whole)
    got = cut.run(cut.plan(batch.fmt, n=n), batch.q, batch.kv)
    want = uncut.run(uncut.plan(batch.fmt), batch.q, batch.kv, n=n)
    torch.testing.assert_close(got, want)


def test_the_lowest_integer_is_divided() -> None:
    variant = ta.AttentionVariant(
        mask=lambda ctx: ctx.lowest // ctx.n + ctx.kv_idx != ctx.lowest % ctx.n,
        params=tuple(ta.Param(name, dtype="int32") for name in ("lowest", "n")),
    )
    batch = random_batch(SPEC, QO_LENS, KV_LENS)
    kernel = ta.build(SPEC, variant)
    out = kernel.run(kernel.plan(batch.fmt), batch.q, batch.kv, lowest=LOWEST, n=-1)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "float32"])
def test_what_is_known_to_be_no_zero_stays(dtype: str) -> None:
    a, b = (tirx.Var(name, dtype) for name in "ab")
    two = tirx.const(2, dtype)
    known = tirx.Div(a, two) + a
    assert without_traps(known).same_as(known)
    unknown = tirx.Div(a, b)
    assert without_traps(unknown).same_as(unknown) == (dtype == "float32")
