"""Batches that are planned into a plan with limits again and again, which takes the short way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.batches import random_batch
from tests.test_runtime_cuda import SPEC, for_gpu, plans_taken
from tvm_attn.bsr import BSR
from tvm_attn.errors import LimitError, PlanError, ShapeError
from tvm_attn.runtime import placement
from tvm_attn.runtime.buffers import Block
from tvm_attn.runtime.plan import Plan
from tvm_attn.runtime.workspace import PlanLimits

LIMITS = PlanLimits(6, 60, 9000)
SHORT = [
    ([1] * 6, [200, 30, 5, 90, 7, 3000]),
    ([1] * 6, [64] * 6),
    ([1], [8000]),
    ([0, 1, 1], [40, 2, 3]),
    ([1, 0, 1], [9, 0, 400]),
]
OTHER = [([0, 0], [0, 0]), ([1, 40], [100, 200]), ([0, 0], [7, 9])]


pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def renewed(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans that took the short way."""
    return plans_taken(monkeypatch, "plan_again")


def formats(lens: list[Any]) -> list[BSR]:
    return [random_batch(SPEC, *each, seed=seed).fmt for seed, each in enumerate(lens)]


def arrays(fmt: BSR) -> tuple[torch.Tensor, ...]:
    assert fmt.kv_indices is not None and fmt.kv_last_page_len is not None
    return fmt.qo_indptr, fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len


def described(plan: Plan) -> dict[str, Any]:
    """All that a plan says of itself, and its arrays where kernels read them."""
    fixed = plan.placement.fixed
    assert fixed is not None
    lists = [
        fixed.room.of(name).tolist() for name in fixed.pool.layout.begins if name != "kv_indices"
    ]
    names = ("batch_size", "nnz_qo", "num_kv_tokens", "max_qo_len", "max_kv_len", "max_page")
    return {
        "text": plan.to_json(),
        "families": plan.families,
        "loads": [(work.max_load, work.total_load, work.num_slots) for work in plan.work],
        "pages": fixed.room.of("kv_indices")[: plan.num_pages].tolist(),
        **{name: getattr(plan, name) for name in names},
        **({"lists": lists} if plan.families else {}),
    }


def test_it_is_the_plan_of_the_long_way(
    monkeypatch: pytest.MonkeyPatch, renewed: list[Plan]
) -> None:
    module = for_gpu("full", SPEC)
    first, *others = formats([*SHORT, *OTHER]) * 2
    short, long = (module.plan(*arrays(first), limits=LIMITS) for _ in range(2))
    placed = short.placement
    for fmt in others:
        assert module.plan(*arrays(fmt), out=short) is short
        with monkeypatch.context() as patched:
            patched.setattr(placement.Placement, "stays", lambda placement: False)
            module.plan(*arrays(fmt), out=long)
        assert described(short) == described(long)
    assert set(map(id, renewed)) == {id(short)}
    assert len(renewed) >= len(SHORT), "all but what is after a batch that was dealt otherwise"
    assert short.placement.launches is placed.launches


def test_it_keeps_its_placement_and_changes_its_block(renewed: list[Plan]) -> None:
    module = for_gpu("full", SPEC)
    given = [arrays(fmt) for fmt in formats(SHORT)]
    plan = module.plan(*given[0], limits=LIMITS)
    placed, blocks = plan.placement, []
    for each in given * 3:
        before = plan.batch[0].tolist()
        assert before and plan.work
        module.plan(*each, limits=LIMITS, out=plan)
        blocks.append(plan.block)
        assert plan.placement is placed
        assert [array.tolist() for array in plan.batch[:2]] == [each[0].tolist(), each[1].tolist()]
    assert len(renewed) == len(blocks) and len(set(map(id, blocks))) == 2
    held = plan.batch[0]
    expected = held.copy()
    for each in given * 2:
        module.plan(*each, out=plan)
    assert np.array_equal(held, expected), "nobody writes what somebody holds"


def test_while_copies_are_made_a_plan_takes_one_more_block(
    monkeypatch: pytest.MonkeyPatch, renewed: list[Plan]
) -> None:
    module = for_gpu("full", SPEC)
    given = arrays(formats(SHORT)[0])
    plan = module.plan(*given, limits=LIMITS)
    monkeypatch.setattr(Block, "is_sent", lambda block: False)
    for _ in range(5):
        module.plan(*given, out=plan)
    assert plan.block is not None
    assert len(renewed) == len(plan.block.pool._idle) == 5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, kv, ids, last: (q.flip(0), kv, ids, last), PlanError, r"qo_indptr\["),
        (lambda q, kv, ids, last: (q, kv - 1, ids, last), PlanError, r"kv_indptr\[0\]"),
        (lambda q, kv, ids, last: (q, kv, ids[1:], last), PlanError, "kv_indices has"),
        (lambda q, kv, ids, last: (q, kv, -ids - 1, last), PlanError, r"kv_indices\[0\]"),
        (lambda q, kv, ids, last: (q, kv, ids, 0 * last), PlanError, r"kv_last_page_len\[0\]"),
        (lambda q, kv, ids, last: (q, kv, ids, last[1:]), ShapeError, "kv_last_page_len has 5"),
        (lambda q, kv, ids, last: (q, kv[1:], ids, last), ShapeError, "kv_indptr has 6"),
        (lambda q, kv, ids, last: (q * 20, kv, ids, last), LimitError, "max_qo_tokens"),
        (lambda q, kv, ids, last: (q[:0], kv, ids, last), ShapeError, "qo_indptr is empty"),
        (lambda q, kv, ids, last: (q, kv, ids.to("meta"), last), ShapeError, "one device"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(change: Any, error: Any, message: str) -> None:
    module = for_gpu("full", SPEC)
    good = arrays(formats(SHORT)[0])
    plan = module.plan(*good, limits=LIMITS)
    before = described(plan)
    for _ in range(3):
        with pytest.raises(error, match=message):
            module.plan(*change(*good), out=plan)
        assert described(plan) == before
    module.plan(*good, out=plan)
    assert described(plan) == before


def test_queries_that_are_too_long_are_refused(renewed: list[Plan]) -> None:
    module = for_gpu("full", SPEC)
    short, longer = (arrays(fmt) for fmt in formats([([1, 1], [5, 70]), ([2, 1], [5, 70])]))
    plan = module.plan(*short, limits=LIMITS, max_qo_len=1)
    module.plan(*short, limits=LIMITS, max_qo_len=1, out=plan)
    assert len(renewed) == 1
    with pytest.raises(PlanError, match="max_qo_len=1, but a request has 2 queries"):
        module.plan(*longer, out=plan)
    assert len(renewed) == 1


def constant(array: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(array, requires_grad=False)


@pytest.mark.parametrize("kind", [list, np.asarray, torch.Tensor.long, constant])
def test_arrays_of_other_kinds_take_the_long_way(renewed: list[Plan], kind: Any) -> None:
    module = for_gpu("full", SPEC)
    given = arrays(formats(SHORT)[0])
    plan = module.plan(*given, limits=LIMITS)
    text = plan.to_json()
    module.plan(*map(kind, given), out=plan)
    assert plan.to_json() == text and not renewed
    strided = given[2].repeat_interleave(2)[::2]
    module.plan(*given[:2], strided, given[3], out=plan)
    assert plan.to_json() == text and not renewed


class Now:
    """What there is of a GPU now: the current one, its stream, and whether a graph is captured."""

    index, stream, captures = 0, 7, False


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ({}, True),
        ({"index": 1}, False),
        ({"stream": 0}, False),
        ({"captures": True}, False),
    ],
)
def test_a_placement_stays_on_its_stream(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], stays: bool
) -> None:
    now = Now()
    monkeypatch.setattr(placement, "current_index", lambda: now.index)
    monkeypatch.setattr(placement, "raw_stream", lambda index: now.stream)
    monkeypatch.setattr(placement, "is_capturing_here", lambda: now.captures)
    stream: Any = SimpleNamespace(cuda_stream=7)
    placed = placement.Placement(torch.device("cuda", 0), [], {}, torch.ones(1), stream)
    vars(now).update(change)
    assert placed.stays() is stays
    placed.moved = True
    assert not placed.stays()
