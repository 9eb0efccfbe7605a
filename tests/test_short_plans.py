"""Batches of short requests, which are planned in one call, and all others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.batches import random_batch
from tests.test_runtime_cuda import SPEC, for_gpu, plans_taken
from tvm_attn.errors import LimitError, PlanError
from tvm_attn.runtime.plan import Plan
from tvm_attn.runtime.shelf import Shelf
from tvm_attn.runtime.workspace import PlanLimits

LIMITS = PlanLimits(6, 60, 4000)


pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans whose families were dealt one after another."""
    return plans_taken(monkeypatch, "_deal_all")


@pytest.mark.parametrize("name", ["full", "window"])
@pytest.mark.parametrize("kv_lens", [[200, 30, 5, 90, 0, 3000], [64] * 6, [0] * 6, [9000, 1, 1]])
def test_it_is_the_plan_of_one_family_after_another(
    monkeypatch: pytest.MonkeyPatch, dealt: list[Plan], name: str, kv_lens: list[int]
) -> None:
    module, fmt = for_gpu(name, SPEC), random_batch(SPEC, [1] * len(kv_lens), kv_lens).fmt
    given = {"window_left": 50} if name == "window" else {}
    at_once = module.plan(fmt, **given)
    assert not dealt
    monkeypatch.setattr(Shelf, "is_for_short", lambda shelf, block: False)
    one_by_one = for_gpu(name, SPEC).plan(fmt, **given)
    assert len(dealt) == 1
    assert at_once.to_json() == one_by_one.to_json()
    for mine, other in zip(at_once.work, one_by_one.work, strict=True):
        assert mine.max_load == other.max_load and mine.total_load == other.total_load
        assert all(map(np.array_equal, mine.arrays, other.arrays))


@pytest.mark.parametrize("limits", [None, LIMITS], ids=["free", "limits"])
def test_longer_requests_and_fixed_splits_are_not_dealt_at_once(
    dealt: list[Plan], limits: PlanLimits | None
) -> None:
    module = for_gpu("full", SPEC)
    short, mixed = (random_batch(SPEC, [1, length], [100, 200]).fmt for length in (1, 40))
    plan = module.plan(mixed, limits=limits)
    assert len(dealt) == 1 and len(plan.work) == 2
    module.plan(short, limits=limits, out=plan)
    assert len(dealt) == 1 and len(plan.work) == 1
    module.plan(mixed, limits=limits, out=plan)
    assert len(dealt) == 2 and len(plan.work) == 2
    module.plan(short, limits=limits, fixed_split_size=64)
    assert len(dealt) == 3


def test_families_without_work_have_none_in_memory_that_stays() -> None:
    module = for_gpu("full", SPEC)
    short, mixed = (random_batch(SPEC, [1, length], [100, 200]).fmt for length in (1, 40))
    plan = module.plan(mixed, limits=LIMITS)
    memory = plan.placement.fixed
    assert memory is not None
    _, long = memory.counts
    assert memory.room.of((long, "cta_indptr")).any()
    module.plan(short, out=plan)
    assert not memory.room.of((long, "cta_indptr")).any()


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "name"),
    [
        ([1] * 7, [1] * 7, "max_batch"),
        ([61], [5], "max_qo_tokens"),
        ([1], [4001], "max_kv_tokens"),
    ],
)
def test_limits_hold_for_what_is_planned_later(
    qo_lens: list[int], kv_lens: list[int], name: str
) -> None:
    module = for_gpu("full", SPEC)
    first = random_batch(SPEC, [1, 3], [7, 9]).fmt
    plan = module.plan(first, limits=LIMITS)
    text = plan.to_json()
    with pytest.raises(LimitError, match=name):
        module.plan(random_batch(SPEC, qo_lens, kv_lens).fmt, out=plan)
    assert plan.to_json() == text


def test_limits_without_queries_have_no_family() -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(random_batch(SPEC, [0, 0], [7, 9]).fmt, limits=PlanLimits(2, 0, 100))
    assert not plan.work and plan.batch_size == 2
    with pytest.raises(PlanError, match="qo_indptr"):
        module.plan([1, 0, 0], [0, 1, 2], [0, 1], [1, 1], out=plan)
