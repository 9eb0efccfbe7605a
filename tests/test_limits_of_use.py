"""What people run into at the edges: far positions, forks, other CPUs, sinks that are off."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tvm_attn as ta
from tvm_attn.errors import ArtifactError, PlanError, ShapeError, VariantError

TABLE: tuple[Any, ...] = ([0, 3], [0, 2], [0, 1], [2])
SPEC = ta.AttentionSpec(2, 1, 16, q_dtype="float32", page_size=4)


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def kv() -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, 5, 4, 1, 16, generator=torch.Generator().manual_seed(1))
    return k, v


@pytest.mark.parametrize(
    ("q_pos", "kv_pos", "sees"),
    [
        (-30, 2**29 - 6, False),
        (2**29 - 3, -(2**29), True),
        (-(2**29), 2**29 - 6, False),
        (0, -(2**29), True),
    ],
)
def test_positions_far_apart(q: torch.Tensor, kv: Any, q_pos: int, kv_pos: int, sees: bool) -> None:
    kernel = ta.build(SPEC, ta.variants.causal() & ta.variants.sliding_window())
    plan = kernel.plan(*TABLE, q_pos_offset=[q_pos], kv_pos_offset=[kv_pos])
    out, lse = kernel.run(plan, q, kv, return_lse=True)
    if not sees:
        assert not out.any() and (lse == -math.inf).all()
        return
    full = ta.build(SPEC)
    want, want_lse = full.run(full.plan(*TABLE), q, kv, return_lse=True)
    torch.testing.assert_close((out, lse), (want, want_lse))


@pytest.mark.parametrize("most", [2**30, 2**31 - 1])
@pytest.mark.parametrize(
    "sees",
    [
        lambda ctx: ctx.most - ctx.qo_len >= 0,
        lambda ctx: ctx.most - ctx.qo_len + ctx.qo_idx >= 0,
        lambda ctx: ctx.most - ctx.kv_len > ctx.kv_idx,
        lambda ctx: ctx.most - ctx.q_pos >= ctx.kv_pos - ctx.qo_len,
    ],
)
def test_a_parameter_may_be_the_largest_integer(sees: Callable[[Any], Any], most: int) -> None:
    """If nothing overflows in the hook, nothing does in what is made of it."""
    params = (ta.Param("most", dtype="int32"),)
    kernel, full = ta.build(SPEC, ta.AttentionVariant(mask=sees, params=params)), ta.build(SPEC)
    table = ([0, 2, 3, 6], [0, 1, 2, 4], [0, 1, 2, 3], [2, 4, 1])
    rng = torch.Generator().manual_seed(3)
    q, kv = torch.randn(6, 2, 16, generator=rng), torch.randn(4, 2, 4, 1, 16, generator=rng)
    want = full.run(full.plan(*table), q, kv)
    assert torch.equal(kernel.run(kernel.plan(*table), q, kv, most=most), want)


@pytest.mark.parametrize("split", [2**30, 2**31, 2**40])
def test_a_huge_split_is_none(split: int) -> None:
    kernel = ta.build(SPEC).with_ctas(8)
    assert kernel.plan(*TABLE, fixed_split_size=split).num_slots == 0


@pytest.mark.parametrize("name", ["sm_scale", "q_scale", "k_scale", "v_scale", "logits_soft_cap"])
def test_a_number_that_is_none_is_an_error(q: torch.Tensor, kv: Any, name: str) -> None:
    kernel = ta.build(SPEC, ta.variants.soft_cap())
    with pytest.raises(VariantError, match=f"{name} is NaN"):
        kernel.run(kernel.plan(*TABLE), q, kv, **{"logits_soft_cap": 1.0, name: math.nan})


def test_a_view_of_negated_elements_is_an_error(q: torch.Tensor, kv: Any) -> None:
    kernel = ta.build(SPEC)
    plan, negated = kernel.plan(*TABLE), torch._neg_view(q)
    with pytest.raises(ShapeError, match=r"q is .* pass q.resolve_neg\(\)"):
        kernel.run(plan, negated, kv)
    with pytest.raises(ShapeError, match="out is"):
        kernel.run(plan, q, kv, out=negated)


def test_tensors_without_memory_are_an_error(q: torch.Tensor, kv: Any) -> None:
    kernel = ta.build(SPEC)
    plan = kernel.plan(*TABLE)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = kernel.run(plan, x, kv)
        assert isinstance(out, torch.Tensor)
        return out

    with FakeTensorMode():
        fake = torch.empty(3, 2, 16)
    for attempt in (
        lambda: run(fake),
        lambda: run(q.to_mkldnn()),
        lambda: torch.vmap(run)(q[None]),
        lambda: torch.func.grad(lambda x: run(x).sum())(q),
    ):
        with pytest.raises(ShapeError, match=r"q (has no memory|is torch\._mkldnn)"):
            attempt()
    assert run(q[:3]).shape == q.shape


def test_a_page_larger_than_any_is_an_error() -> None:
    with pytest.raises(ta.errors.SpecError, match="page_size"):
        ta.AttentionSpec(1, 1, 16, page_size=2**31)


def test_a_kernel_for_another_cpu_does_not_run_here(q: torch.Tensor, kv: Any) -> None:
    kernel = ta.build(SPEC)
    plan = kernel.plan(*TABLE)
    kernel._missing = "uses an extension of the future"
    with pytest.raises(ArtifactError, match="future"):
        kernel.run(plan, q, kv)


def test_two_sinks_that_are_off_are_none(q: torch.Tensor, kv: Any) -> None:
    off = ta.AttentionVariant(initial_state=lambda ctx: (-math.inf, 1.0), name="off")
    kernel, full = ta.build(SPEC, off & off), ta.build(SPEC)
    got = kernel.run(kernel.plan(*TABLE), q, kv, return_lse=True)
    want = full.run(full.plan(*TABLE), q, kv, return_lse=True)
    torch.testing.assert_close(got, want)


def test_a_soft_cap_of_zero_is_off(q: torch.Tensor, kv: Any) -> None:
    kernel, full = ta.build(SPEC, ta.variants.soft_cap(30.0)), ta.build(SPEC)
    got = kernel.run(kernel.plan(*TABLE), q, kv, logits_soft_cap=0.0)
    torch.testing.assert_close(got, full.run(full.plan(*TABLE), q, kv))


def test_a_planned_name_cannot_be_a_parameter() -> None:
    for name in ("q", "kv", "plan", "kv_indices"):
        with pytest.raises(ta.errors.VariantError, match=name):
            ta.AttentionVariant(params=(ta.Param(name),))


def test_a_fork_after_a_run_is_told(run_python: Callable[..., Any]) -> None:
    done = run_python(
        """
        import os, torch
        import tvm_attn as ta
        spec = ta.AttentionSpec(2, 1, 16, q_dtype="float32", page_size=4)
        kernel = ta.build(spec)
        plan = kernel.plan([0, 3], [0, 2], [0, 1], [2])
        q, kv = torch.randn(3, 2, 16), tuple(torch.randn(2, 5, 4, 1, 16))
        kernel.run(plan, q, kv)
        child = os.fork()
        if child == 0:
            try:
                kernel.run(plan, q, kv)
            except ta.errors.ProcessError:
                try:
                    ta.merge_state(q, torch.zeros(3, 2), q, torch.zeros(3, 2))
                except ta.errors.ProcessError:
                    os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert done.strip() == "7"


def test_what_is_held_of_a_dead_plan_is_not_written_again() -> None:
    kernel = ta.build(SPEC)
    held = kernel.plan(*TABLE).work[0].items
    before = held.copy()
    for _ in range(4):
        kernel.plan([0, 2, 5], [0, 1, 3], [4, 2, 1], [1, 3])
    assert (held == before).all()


def test_memory_of_a_dead_plan_is_used_again() -> None:
    kernel = ta.build(SPEC)
    first = kernel.plan(*TABLE).batch[0].ctypes.data
    assert kernel.plan(*TABLE).batch[0].ctypes.data == first


def test_a_plan_out_of_range_names_the_offset() -> None:
    with pytest.raises(PlanError, match="kv_pos_offset"):
        ta.build(SPEC).plan(*TABLE, kv_pos_offset=[2**29])
