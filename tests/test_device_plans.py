"""Plans made on a GPU that is not there: what `plan` does with arrays there, and runs of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.device_planning import serial
from tests.test_fixed_plans import DECODING, LIMITS, MIXED, batch_of, cache, captured
from tests.test_runtime_cuda import SPEC, for_gpu, runs
from tvm_attn.bsr import BSR
from tvm_attn.errors import ArtifactError, LimitError, PlanError
from tvm_attn.runtime import planner
from tvm_attn.runtime.device import CPU
from tvm_attn.runtime.device_plan import DevicePlan
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.runtime.workspace import PlanLimits

__all__ = ["cache", "runs"]

pytestmark = pytest.mark.usefixtures("no_gpu")


class Launcher:
    """In place of the library with the device's planner."""

    @staticmethod
    def launch(name: str, *arguments: Any) -> None:
        assert name == "plan_on_device"
        serial("causal", True)(*arguments, False)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> AttentionModule:
    """Return a kernel to which arrays that are given one by one are on its device."""
    made = for_gpu("causal", SPEC)
    made._machine._planner, made._machine._rows = Launcher(), 700  # type: ignore[attr-defined]
    monkeypatch.setattr(planner, "plain_arrays", lambda spec, given: None)
    monkeypatch.setattr(
        planner, "one_gpu", lambda given: None if isinstance(given["qo_indptr"], BSR) else CPU
    )
    return made


def arrays(fmt: BSR) -> tuple[Any, ...]:
    return fmt.qo_indptr, fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("lens", [[([1] * 5, kv) for kv in DECODING], MIXED])
def test_a_captured_run_sees_what_is_planned_there(
    module: AttentionModule,
    cache: tuple[torch.Tensor, torch.Tensor],
    lens: list[Any],
    split: int | None,
) -> None:
    q = torch.randn(LIMITS.max_qo_tokens, SPEC.num_qo_heads, SPEC.head_dim_qk)
    batches = [batch_of(q, cache, *each) for each in lens]
    plan = module.plan(*arrays(batches[0].fmt), limits=LIMITS, fixed_split_size=split)
    replay, results = captured(module, plan, batches[0])
    for number, batch in enumerate(batches * 2):
        given = arrays(batch.fmt) if number % 3 else (batch.fmt,)
        assert module.plan(*given, out=plan, fixed_split_size=split) is plan
        assert isinstance(plan, DevicePlan) == bool(number % 3)
        host = module.plan(batch.fmt, limits=LIMITS, fixed_split_size=split)
        assert plan.to_json() == host.to_json()
        assert str(plan) == str(host)
        replay()
        rows = host.nnz_qo
        expected = module.run(host, q[:rows], cache, return_lse=True)
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result[:rows], wanted)


@pytest.mark.usefixtures("runs")
def test_a_batch_that_is_wrong_gives_empty_states_until_it_is_checked(
    module: AttentionModule, cache: tuple[torch.Tensor, torch.Tensor]
) -> None:
    q = torch.randn(LIMITS.max_qo_tokens, SPEC.num_qo_heads, SPEC.head_dim_qk)
    good = batch_of(q, cache, [1, 0, 4], [3, 0, 300]).fmt
    plan = module.plan(*arrays(good), limits=LIMITS)
    qo_indptr, *table = arrays(good)
    module.plan(qo_indptr + torch.tensor([0, 0, 0, 1], dtype=torch.int32), *table, out=plan)
    out, lse = module.run(plan, q, cache, return_lse=True)  # type: ignore[misc]
    assert not out.any()
    assert (lse == -torch.inf).all()
    for look in (plan.check, plan.to_json, plan.__str__):
        with pytest.raises(LimitError, match="max_qo_tokens=6, its plan was limited to 5"):
            look()
    module.plan(*arrays(good), out=plan)
    plan.check()


def test_what_is_said_at_once(
    module: AttentionModule, cache: tuple[torch.Tensor, torch.Tensor]
) -> None:
    q = torch.randn(5, SPEC.num_qo_heads, SPEC.head_dim_qk)
    given = arrays(batch_of(q, cache, [1] * 5, [9] * 5).fmt)
    with pytest.raises(LimitError, match="max_batch=5, its plan was limited to 4"):
        module.plan(*given, limits=PlanLimits(4, 5, 100))
    plan = module.plan(*given, limits=LIMITS, max_qo_len=2)
    with pytest.raises(PlanError, match="max_qo_len=1, but this plan has limits for 2"):
        module.plan(*given, out=plan, max_qo_len=1)
    with pytest.raises(PlanError, match="fixed_split_size=64, but this plan has limits for None"):
        module.plan(*given, out=plan, fixed_split_size=64)
    large = PlanLimits(1000, 1000, 3600)
    with pytest.raises(PlanError, match="cannot be planned there: its limits are for 1"):
        module.plan(*given, limits=large)
    module._machine._planner = None  # type: ignore[attr-defined]
    with pytest.raises(ArtifactError, match="without a planner for GPUs"):
        module.plan(*given, out=plan)
