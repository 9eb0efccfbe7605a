"""Plans with limits on a GPU that is not there: what a captured run reads stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

from tests.accuracy import assert_accurate
from tests.batches import Batch
from tests.test_runtime_cuda import SPEC, for_gpu, runs
from tvm_attn import reference
from tvm_attn.bsr import BSR
from tvm_attn.errors import LimitError, PlanError
from tvm_attn.runtime.fixed import Terms, families_of
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.runtime.plan import Family, Plan
from tvm_attn.runtime.workspace import PlanLimits

__all__ = ["runs"]

pytestmark = pytest.mark.usefixtures("no_gpu")

PAGES = 900
LIMITS = PlanLimits(max_batch=5, max_qo_tokens=5, max_kv_tokens=4 * PAGES)
DECODING = [
    [40, 0, 300, 7, 1],
    [3000, 1, 2, 3, 4],
    [0, 0, 0, 0, 0],
    [1, 1, 1, 1, 1],
    [600, 600, 600, 600, 600],
    [5, 0, 0, 2000, 0],
]
MIXED = [([5], [900]), ([1, 0, 4], [3, 0, 300]), ([2, 3], [2, 3]), ([1] * 5, [80] * 5)]


@pytest.fixture
def cache() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    shape = (PAGES, 4, SPEC.num_kv_heads, SPEC.head_dim_qk)
    return torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def batch_of(q: torch.Tensor, kv: Any, qo_lens: list[int], kv_lens: list[int]) -> Batch:
    pages = [-(-length // 4) for length in kv_lens]
    ids = torch.randperm(PAGES, generator=torch.Generator().manual_seed(len(kv_lens)))
    last = [(length - 1) % 4 + 1 for length in kv_lens]
    indptrs = ([0, *accumulate(lens)] for lens in (qo_lens, pages))
    return Batch(SPEC, BSR.from_page_table(*indptrs, ids[: sum(pages)], last, 4), q, kv)


def captured(
    module: AttentionModule, plan: Plan, batch: Batch
) -> tuple[Callable[[], None], tuple[torch.Tensor, torch.Tensor]]:
    """Return what replays a run with the arguments it has now, and where its results go."""
    out = torch.full_like(batch.q, torch.nan)
    lse = torch.full(batch.q.shape[:2], torch.nan)
    assert isinstance(batch.kv, tuple)
    return module.launcher(plan, batch.q, batch.kv, out, lse), (out, lse)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("lens", [[([1] * 5, kv) for kv in DECODING], MIXED])
def test_a_captured_run_sees_what_is_planned_later(
    cache: tuple[torch.Tensor, torch.Tensor], lens: list[Any], split: int | None
) -> None:
    module = for_gpu("causal", SPEC)
    q = torch.randn(5, SPEC.num_qo_heads, SPEC.head_dim_qk)
    batches = [batch_of(q, cache, *each) for each in lens]
    plan = module.plan(batches[0].fmt, limits=LIMITS, fixed_split_size=split)
    replay, results = captured(module, plan, batches[0])
    for batch in batches * 3:
        assert module.plan(batch.fmt, out=plan, fixed_split_size=split) is plan
        for result in results:
            result.fill_(torch.nan)
        replay()
        assert_accurate(results, batch, mask=reference.causal())


def test_arrays_stay_where_they_are(cache: tuple[torch.Tensor, torch.Tensor]) -> None:
    module = for_gpu("causal", SPEC)
    q = torch.randn(5, SPEC.num_qo_heads, SPEC.head_dim_qk)
    first, *others = [batch_of(q, cache, [1] * 5, lens) for lens in DECODING]
    plan = module.plan(first.fmt, limits=LIMITS, max_qo_len=1)

    def places() -> list[tuple[str, list[Any]]]:
        return [
            (launch.family, [(x.data_ptr(), x.shape) for x in (*launch.indices, *launch.partials)])
            for launch in plan.placement.launches
        ]

    before = places()
    for batch in others:
        module.plan(batch.fmt, out=plan)
        assert places() == before
        assert plan.to_json() == module.plan(batch.fmt).to_json()
    module.plan(first.fmt, out=plan, limits=PlanLimits(6, 6, 4 * PAGES))
    assert places() != before, "other limits take other memory"


def test_what_is_fixed_cannot_change(cache: tuple[torch.Tensor, torch.Tensor]) -> None:
    q = torch.randn(5, SPEC.num_qo_heads, SPEC.head_dim_qk)
    small, large = (batch_of(q, cache, [1] * n, [30] * n) for n in (5, 6))
    window = for_gpu("window", SPEC)
    plan = window.plan(small.fmt, limits=LIMITS, max_qo_len=1, window_left=20)
    before = plan.to_json()
    with pytest.raises(LimitError, match="max_batch=6"):
        window.plan(large.fmt, out=plan, window_left=20)
    with pytest.raises(PlanError, match=r"window_left=21, but .* window_left=20"):
        window.plan(small.fmt, out=plan, window_left=21)
    with pytest.raises(PlanError, match="fixed_split_size=64, but this plan has limits for None"):
        window.plan(small.fmt, out=plan, window_left=20, fixed_split_size=64)
    with pytest.raises(PlanError, match="max_qo_len=1, but a request has 2 queries"):
        draft = batch_of(q, cache, [2, 1], [30, 30])
        window.plan(draft.fmt, out=plan, window_left=20)
    assert plan.to_json() == before
    masked = for_gpu("custom_mask", SPEC)
    bits = torch.ones(5 * 30, dtype=torch.bool)
    with pytest.raises(PlanError, match="custom_mask: a plan with limits has no arrays"):
        masked.plan(small.fmt, limits=LIMITS, custom_mask=bits)


EIGHT, TWO, DECODE, SHORT, LONG = NARROW = (
    Family("decode", 16, 64, 1, 2, cluster=8),
    Family("decode", 16, 64, 1, 2, cluster=2),
    Family("decode", 16, 64, 1, 2, cluster=1),
    Family("short", 64, 64, 1, 2),
    Family("long", 128, 64, 1, 2),
)


WIDE = {size: Family("wide", 16, 64, 1, 1, "decode", 0, size, "decode") for size in (8, 4, 2, 1)}
QUEUES = dict(
    zip((*NARROW, *WIDE.values()), (29, 132, 264, 264, 264, 14, 29, 66, 132), strict=True)
)


@pytest.mark.parametrize(
    ("max_batch", "max_qo_tokens", "max_qo_len", "expected"),
    [
        (3, 3, 1, [EIGHT]),
        (4, 4, 1, [TWO]),
        (17, 17, 1, [DECODE]),
        (3, 12, 4, [EIGHT]),
        (3, 15, 5, [DECODE, SHORT]),
        (3, 100, 17, [DECODE, SHORT, LONG]),
        (3, 3, 0, [EIGHT]),
        (3, 30, 0, [DECODE, SHORT, LONG]),
    ],
)
def test_kernels_are_launched_that_may_have_work(
    max_batch: int, max_qo_tokens: int, max_qo_len: int, expected: list[Family]
) -> None:
    terms = Terms(PlanLimits(max_batch, max_qo_tokens, 1000), 0, max_qo_len)
    assert families_of(NARROW, terms, 4, 8, [QUEUES[each] for each in NARROW]) == expected


@pytest.mark.parametrize(
    ("max_batch", "split", "expected"),
    [
        (1, 0, WIDE[4]),
        (29, 0, WIDE[4]),
        (30, 0, WIDE[2]),
        (66, 0, WIDE[2]),
        (67, 0, WIDE[1]),
        (132, 0, WIDE[1]),
        (133, 0, DECODE),
        (1, 64, DECODE),
    ],
)
def test_few_units_have_one_launch(max_batch: int, split: int, expected: Family) -> None:
    """In the largest clusters of wide CTAs of which there are enough, up to four."""
    families = (EIGHT, TWO, *WIDE.values(), DECODE, SHORT, LONG)
    terms = Terms(PlanLimits(max_batch, max_batch, 1000), split, 1)
    assert families_of(families, terms, 4, 1, [QUEUES[each] for each in families]) == [expected]
