"""Variants: how hooks compose, what they may read and return, and what the cache knows of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as ta
from tests.accuracy import assert_accurate, assert_states_accurate
from tests.batches import Batch, random_batch
from tests.cases import kernel
from tvm_attn import reference, variants
from tvm_attn.errors import CompileError, DTypeError, ShapeError
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.variant import AttentionVariant

SPEC = AttentionSpec(8, 2, 64, q_dtype="float32", page_size=4)
LENS = ([1, 7, 0, 40, 3], [200, 30, 5, 90, 0])


def text_of(variant: AttentionVariant, spec: AttentionSpec = SPEC) -> str:
    """Return the text that a cache key holds of a variant."""
    from tvm_attn.tir.fingerprint import fingerprint
    from tvm_attn.tir.hooks import Hooks

    return fingerprint(Hooks(variant), spec)


# Composition


def halved_then_shifted() -> AttentionVariant:
    """Two hooks of every kind, in an order that matters, composed with ``&``."""
    from tvm import tirx

    first = AttentionVariant(
        query_transform=lambda ctx, x, d: x(d) + 0.5,
        key_transform=lambda ctx, x, d: x(d) + ctx.kv_head,
        value_transform=lambda ctx, x, d: x((d + 1) % 64),
        logits_transform=lambda ctx, s: s / 2,
        mask=lambda ctx: ctx.kv_pos % 3 != 0,
        initial_state=lambda ctx: (ctx.first_sink[ctx.qo_head], 1.0),
        output_transform=lambda ctx, o, lse: o / (1.0 + tirx.exp2(-lse)),
        params=(Param("first_sink", kind="tensor", shape=("num_qo_heads",)),),
        name="first",
    )
    second = AttentionVariant(
        query_transform=lambda ctx, x, d: x(63 - d) * 2.0,
        key_transform=lambda ctx, x, d: x(63 - d) * 0.5,
        value_transform=lambda ctx, x, d: x(d) * (1.0 + d % 2),
        logits_transform=lambda ctx, s: s + ctx.request_bias[ctx.batch] * (ctx.qo_idx % 2),
        mask=lambda ctx: ctx.q_pos - ctx.kv_pos >= 0,
        initial_state=lambda ctx: (-1.0, 2),
        output_transform=lambda ctx, o, lse: o + 1.0 * (lse > ctx.threshold),
        params=(
            Param("request_bias", kind="tensor", shape=("batch",)),
            Param("threshold", default=-math.inf),
        ),
        name="second",
    )
    return first & second


def test_every_kind_of_hook_composes_in_order() -> None:
    module = ta.build(SPEC, halved_then_shifted())
    assert module.variant == "first & second"
    batch = random_batch(SPEC, *LENS)
    rng = torch.Generator().manual_seed(2)
    first_sink, bias = torch.randn(8, generator=rng), torch.randn(5, generator=rng)
    given = {"first_sink": first_sink, "request_bias": bias}
    for split in (None, 32):
        plan = module.plan(batch.fmt, fixed_split_size=split)
        got = module.run(plan, batch.q, batch.kv, return_lse=True, **given)
        expected = (_twin(batch, first_sink, bias, compute) for compute in ("float64", "eager"))
        assert_states_accurate(got, *expected, batch.fmt)


def _twin(
    batch: Batch, first_sink: torch.Tensor, bias: torch.Tensor, compute: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The composed variant in torch."""
    wide = torch.float64 if compute == "float64" else torch.float32
    k, v = (x.to(wide) for x in batch.kv)
    k = ((k + torch.arange(2).view(-1, 1)) * 0.5).flip(-1)
    v = v.roll(-1, dims=-1) * (1.0 + torch.arange(64) % 2)
    q = ((batch.q.to(wide) + 0.5) * 2.0).flip(-1)

    class Bias:
        def at(self, request: int) -> reference.LogitsFn:
            qo_len = int(batch.fmt.qo_len[request])
            odd = (torch.arange(qo_len) % 2).view(-1, 1)
            return lambda s, q_pos, kv_pos, head: s / 2 + bias[request].to(s) * odd

    mask = reference.Mask((lambda q_idx, kv_idx, q_pos, kv_pos: kv_pos % 3 != 0,))
    out, lse = reference.batch_attention(
        q,
        (k, v),
        batch.fmt,
        logits=Bias(),
        mask=mask & reference.causal(),
        sink=torch.logaddexp(first_sink.double(), torch.tensor(math.log(2.0) - 1.0)),
        compute=compute,
    )
    gated = out / (1.0 + torch.exp2(-lse))[..., None]
    return gated + 1.0 * (lse > -math.inf)[..., None], lse


@pytest.mark.parametrize("split", [None, 32])
def test_rows_that_see_no_key_are_not_transformed(split: int | None) -> None:
    variant = variants.causal() & AttentionVariant(output_transform=lambda ctx, o, lse: 2 * o + 1)
    module, plain = ta.build(SPEC, variant), ta.build(SPEC, variants.causal())
    batch = random_batch(SPEC, [4, 70, 3], [2, 65, 0])
    (got, lse), (want, _) = (
        each.run(each.plan(batch.fmt, fixed_split_size=split), batch.q, batch.kv, return_lse=True)
        for each in (module, plain)
    )
    is_empty = lse == -math.inf
    assert is_empty.any() and not got[is_empty].any()
    torch.testing.assert_close(got[~is_empty], 2 * want[~is_empty] + 1)


def test_composition_is_associative_and_has_an_identity() -> None:
    a, b, c = variants.causal(), variants.alibi(), variants.soft_cap(5.0)
    assert text_of((a & b) & c) == text_of(a & (b & c))
    assert text_of(b & c) != text_of(c & b), "transforms chain in order"
    assert text_of(AttentionVariant() & a) == text_of(a & AttentionVariant()) == text_of(a)
    assert str(a & b & c) == "causal & alibi & soft_cap(5.0)"
    assert str(AttentionVariant()) == "full"
    assert not (variants.sigmoid() & a).use_softmax


def test_ranges_intersect() -> None:
    from tvm import tirx

    both = AttentionVariant(kv_range=lambda ctx, q_lo, q_hi: (q_lo - 5, q_hi + 1))
    right = AttentionVariant(kv_range=lambda ctx, q_lo, q_hi: (None, q_hi - 3))
    left = AttentionVariant(kv_range=lambda ctx, q_lo, q_hi: (q_lo - 2, None))
    queries = tirx.const(10, "int32"), tirx.const(20, "int32")
    low, high = (both & right & left).kv_range(None, *queries)
    assert (int(low), int(high)) == (8, 17)
    low, high = (right & right).kv_range(None, *queries)
    assert (low, int(high)) == (None, 17)


def test_ranges_intersect_so_that_hidden_keys_are_not_worked_on() -> None:
    batch = random_batch(SPEC, [1, 32], [400, 400])
    module = kernel("window", SPEC)

    def keys(window: int) -> list[tuple[int, int]]:
        plan = module.plan(batch.fmt, window_left=window)
        items = [item for work in plan.work for queue in work.queues() for item in queue]
        return [
            (
                min(i.kv_begin for i in items if i.request == b),
                max(i.kv_end for i in items if i.request == b),
            )
            for b in range(2)
        ]

    assert keys(-1) == [(0, 400), (0, 400)]
    for begin, end in keys(9):
        assert end == 400
        assert begin >= 400 - 32 - 9 - 64, "at most a block more than what the window shows"


def prefix_lm() -> AttentionVariant:
    """Causal, but the first keys of each request are visible to all of its queries."""
    from tvm import tirx

    return AttentionVariant(
        mask=lambda ctx: tirx.Or(ctx.kv_pos <= ctx.q_pos, ctx.kv_pos < ctx.prefix_len[ctx.batch]),
        kv_range=lambda ctx, q_lo, q_hi: (None, tirx.max(q_hi + 1, ctx.prefix_len[ctx.batch])),
        params=(Param("prefix_len", "tensor", dtype="int32", shape=("batch",), at="plan"),),
        name="prefix_lm",
    )


def test_a_range_may_depend_on_a_tensor_given_with_the_plan() -> None:
    module = ta.build(SPEC, prefix_lm())
    batch = random_batch(SPEC, [5, 60, 1, 70], [200, 100, 9, 70])
    prefix_len = torch.tensor([196, 70, 0, 33], dtype=torch.int32)

    class Prefix:
        def at(self, request: int) -> reference.MaskFn:
            return lambda q_idx, kv_idx, q_pos, kv_pos: (
                (kv_pos <= q_pos) | (kv_pos < prefix_len[request])
            )

    got = module.run(
        module.plan(batch.fmt, prefix_len=prefix_len), batch.q, batch.kv, return_lse=True
    )
    assert_accurate(got, batch, mask=Prefix())


def test_what_is_given_with_the_plan_may_be_a_list() -> None:
    module, batch = ta.build(SPEC, prefix_lm()), random_batch(SPEC, [5, 1], [20, 10])
    want = module.run(
        module.plan(batch.fmt, prefix_len=torch.tensor([7, 3]).int()), batch.q, batch.kv
    )
    got = module.run(module.plan(batch.fmt, prefix_len=[7, 3]), batch.q, batch.kv)
    assert torch.equal(got, want)
    for wrong in ([7.5, 3], [2**40, 3]):
        with pytest.raises(DTypeError, match="prefix_len has dtype"):
            module.plan(batch.fmt, prefix_len=wrong)


def test_a_tensor_of_the_size_of_the_batch_is_held_against_it() -> None:
    module = ta.build(SPEC, prefix_lm())
    batch = random_batch(SPEC, [5, 1], [20, 10])
    with pytest.raises(ShapeError, match=r"prefix_len has shape \(1,\), expected \(2\)"):
        module.plan(batch.fmt, prefix_len=torch.zeros(1, dtype=torch.int32))


# What hooks may read and return


@pytest.mark.parametrize(
    ("hook", "function", "field", "known"),
    [
        ("mask", lambda ctx: ctx.kv_position <= ctx.q_pos, "kv_position", "kv_pos"),
        ("query_transform", lambda ctx, x, d: x(d) * ctx.kv_pos, "kv_pos", "q_pos"),
        ("key_transform", lambda ctx, x, d: x(d) * ctx.q_pos, "q_pos", "kv_pos"),
        ("value_transform", lambda ctx, x, d: x(d) * ctx.qo_head, "qo_head", "kv_head"),
        ("initial_state", lambda ctx: (ctx.kv_idx, 1.0), "kv_idx", "qo_head"),
        ("output_transform", lambda ctx, o, lse: o * ctx.kv_len * ctx.kv_idx, "kv_idx", "kv_len"),
        ("kv_range", lambda ctx, q_lo, q_hi: (ctx.q_pos, None), "q_pos", "kv_len"),
        ("kv_range", lambda ctx, q_lo, q_hi: (q_lo - ctx.reach, None), "reach", "kv_len"),
    ],
)
def test_a_field_that_a_hook_does_not_have(
    hook: str, function: Callable[..., Any], field: str, known: str
) -> None:
    params = (Param("reach", dtype="int32"),)
    variant = AttentionVariant(**{hook: function}, params=params, name="mine")
    with pytest.raises(CompileError) as raised:
        ta.build(SPEC, variant)
    message = str(raised.value)
    assert f"variant 'mine': its {hook}" in message
    assert f"ctx.{field}" in message
    assert known in message.split("may use:")[1]
    assert own_line(function) in message


@pytest.mark.parametrize(
    ("hook", "function", "returned"),
    [
        ("mask", lambda ctx: ctx.q_pos - ctx.kv_pos, "int32"),
        ("mask", lambda ctx: None, "None"),
        ("mask", lambda ctx: (True, True), "tuple"),
        ("logits_transform", lambda ctx, s: s > 0, "bool"),
        ("logits_transform", lambda ctx, s: "s", "str"),
        ("logits_transform", lambda ctx, s: None, "None"),
        ("logits_transform", lambda ctx, s: torch.ones(1), "tensor"),
        ("key_transform", lambda ctx, x, d: x, "function"),
        ("output_transform", lambda ctx, o, lse: [o], "list"),
        ("kv_range", lambda ctx, q_lo, q_hi: q_hi, "q_hi"),
        ("kv_range", lambda ctx, q_lo, q_hi: (q_hi,), "pair"),
        ("kv_range", lambda ctx, q_lo, q_hi: (q_lo, q_hi, 1), "pair"),
        ("kv_range", lambda ctx, q_lo, q_hi: (q_lo * 0.5, None), "float"),
        ("initial_state", lambda ctx: 1.0, "1.0"),
        ("initial_state", lambda ctx: (1.0,), "pair"),
        ("initial_state", lambda ctx: (1.0, None), "None"),
    ],
)
def test_a_result_that_a_hook_may_not_return(
    hook: str, function: Callable[..., Any], returned: str
) -> None:
    with pytest.raises(CompileError) as raised:
        ta.build(SPEC, AttentionVariant(**{hook: function}, name="mine"))
    message = str(raised.value)
    assert f"variant 'mine': its {hook}" in message
    assert returned in message
    assert own_line(function) in message


def own_line(function: Callable[..., Any]) -> str:
    code = function.__code__
    return f'File "{code.co_filename}", line {code.co_firstlineno}'


def test_an_error_inside_a_hook_shows_its_own_line() -> None:
    def helper(ctx: Any) -> int:
        return 1 // 0

    def logits(ctx: Any, s: Any) -> Any:
        return s * helper(ctx)

    with pytest.raises(CompileError, match="ZeroDivisionError") as raised:
        ta.build(SPEC, AttentionVariant(logits_transform=logits))
    line = helper.__code__.co_firstlineno + 1
    assert f'File "{__file__}", line {line}, in helper' in str(raised.value)
    assert "return 1 // 0" in str(raised.value)


@pytest.mark.parametrize(
    "mask",
    [
        lambda ctx: ctx.kv_idx == 0,
        lambda ctx: ctx.kv_idx != ctx.q_pos,
        lambda ctx: True,
        functools.partial(lambda ctx, far: ctx.kv_pos >= ctx.q_pos - far, far=5),
    ],
    ids=["equal", "different", "constant", "partial"],
)
def test_conditions_a_mask_may_return(mask: Callable[..., Any]) -> None:
    alone = text_of(AttentionVariant(mask=mask))
    both = text_of(variants.causal() & AttentionVariant(mask=mask))
    assert "mask" in alone
    assert alone != both


# What the cache knows of a variant


def scaled(factor: Any) -> AttentionVariant:
    return AttentionVariant(logits_transform=lambda ctx, s: s * factor, name=f"scaled({factor})")


def test_equal_hooks_have_one_text() -> None:
    assert text_of(scaled(0.1)) == text_of(scaled(0.1))
    renamed = replace(scaled(0.1), name="another name")
    assert text_of(renamed) == text_of(scaled(0.1))

    def elsewhere(context: Any, logit: Any) -> Any:
        return logit * 0.1

    assert text_of(AttentionVariant(logits_transform=elsewhere)) == text_of(scaled(0.1))


@pytest.mark.parametrize(
    "other",
    [0.2, 0.1 + 2**-27, float(np.nextafter(np.float32(0.1), np.float32(1))), -0.1, 1e-30, 0.0, 1],
)
def test_a_captured_constant_is_in_the_text(other: float) -> None:
    assert text_of(scaled(0.1)) != text_of(scaled(other))


@pytest.mark.parametrize("name", ["s", "d", "o", "row", "x", "q_lo", "kv_range"])
def test_a_parameter_is_not_taken_for_something_else_of_its_name(name: str) -> None:
    params = (Param(name),)

    def text(**hooks: Callable[..., Any]) -> str:
        return text_of(AttentionVariant(params=params, **hooks))

    read = lambda ctx: getattr(ctx, name)  # noqa: E731
    assert text(logits_transform=lambda ctx, s: s - read(ctx)) != text(
        logits_transform=lambda ctx, s: read(ctx) - s
    )
    assert text(output_transform=lambda ctx, o, lse: o - read(ctx)) != text(
        output_transform=lambda ctx, o, lse: read(ctx) - o
    )
    assert text(query_transform=lambda ctx, x, d: x(d) * (d - read(ctx))) != text(
        query_transform=lambda ctx, x, d: x(d) * (read(ctx) - d)
    )


def test_declarations_are_in_the_text() -> None:
    def text(**declared: Any) -> str:
        param = Param("bias", **{"kind": "tensor", "shape": (8,), **declared})
        add = lambda ctx, s: s + ctx.bias[0]  # noqa: E731
        return text_of(AttentionVariant(logits_transform=add, params=(param,)))

    assert len({text(), text(shape=("heads",)), text(dtype="float16"), text(at="plan")}) == 4


def test_the_spec_is_compiled_in_but_for_what_is_a_run_time_value() -> None:
    assert (
        SPEC.compiled() == replace(SPEC, num_qo_heads=32, num_kv_heads=8, page_size=64).compiled()
    )
    for change in (
        {"num_qo_heads": 4},
        {"page_size": None},
        {"kv_layout": "HND"},
        {"head_dim_vo": 32},
    ):
        assert SPEC.compiled() != replace(SPEC, **change).compiled()


def test_defaults_of_parameters_are_run_time_values() -> None:
    batch = random_batch(SPEC, *LENS)
    causal = variants.causal()
    windows = [ta.build(SPEC, causal & variants.sliding_window(n)) for n in (-1, 3, 50)]
    results = [run_plain(module, batch) for module in windows]
    for window, result in zip((-1, 3, 50), results, strict=True):
        mask = reference.causal() & reference.sliding_window(window)
        assert_accurate(result, batch, mask=mask)
    assert len({text_of(causal & variants.sliding_window(n)) for n in (-1, 3, 50)}) == 1


def run_plain(module: AttentionModule, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return module.run(module.plan(batch.fmt), batch.q, batch.kv, return_lse=True)
