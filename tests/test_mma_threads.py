"""Kernels with ``mma.sync`` on the host: warps in any order, copies as late as can be, no races."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.cuda_threads import is_possible
from tests.hopper_threads import Schedule, StuckError
from tests.mma_runs import MmaCase, MmaWork
from tests.watched_threads import WatchedKernel
from tvm_attn.spec import AttentionSpec

pytestmark = pytest.mark.skipif(not is_possible(), reason="threads are fibers of x86-64")

DECODE = MmaCase(AttentionSpec(8, 2, 64, page_size=16), "decode")
CLUSTERS = MmaCase(AttentionSpec(8, 2, 64, page_size=16), "decode", arch="sm_90", cluster=2)
SHORT = MmaCase(AttentionSpec(8, 2, 64, page_size=16), "short")
WARPS = 4
SCHEDULES = [
    *(Schedule(i, starved=frozenset([i])) for i in range(WARPS + 1)),
    Schedule(change=100),
]
"""Each warp last, and what copies."""
LEFT_OUT = [r"(__syncwarp\(\);)", r"(\w+_wait_group_1\(\);)", r"(\w+_cta_sync\(\);)"]
"""Waiting for lanes, for copies, for warps."""


def with_faults(source: str) -> str:
    """Let each way of waiting be left out of a kernel by its number, from 1 on."""
    for number, pattern in enumerate(LEFT_OUT, 1):
        source = re.sub(pattern, rf"if (fault != {number}) \1", source)
    return source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mma")


@pytest.fixture(scope="module")
def decode(folder: Path) -> WatchedKernel:
    return DECODE.compile(folder, with_faults)


@pytest.fixture(scope="module")
def short(folder: Path) -> WatchedKernel:
    return SHORT.compile(folder)


@cache
def decoded() -> list[MmaWork]:
    """Short items, some without keys, in one queue; a request in pieces, beside others."""
    items = DECODE.draw([1, 0, 2, 1, 1, 1], [3, 30, 0, 17, 70, 1])
    pieces = DECODE.draw([1, 2], [400, 66])
    return [DECODE.work(items, 1, 64), DECODE.work(pieces, 3, 64)]


@cache
def attended() -> list[MmaWork]:
    """The same of more rows."""
    items = SHORT.draw([3, 0, 1, 17, 5], [3, 30, 1, 40, 70])
    return [SHORT.work(items, 1, 64), SHORT.work(SHORT.draw([9], [300]), 2, 64)]


@pytest.mark.parametrize("works", [decoded, attended])
def test_no_order_of_warps_changes_anything(
    works: Callable[[], list[MmaWork]], decode: WatchedKernel, short: WatchedKernel
) -> None:
    kernel = decode if works is decoded else short
    assert kernel.warps == WARPS
    for work in works():
        work.check(kernel, SCHEDULES)


def test_a_plan_can_be_run_again(decode: WatchedKernel) -> None:
    """Counters are 0 again, and whichever CTA comes last merges the parts."""
    *_, pieces = decoded()
    pieces.check(decode, map(Schedule, range(6)))


def test_ctas_of_a_cluster_wait_for_one_another(folder: Path) -> None:
    kernel, batch = CLUSTERS.compile(folder), CLUSTERS.draw([4, 1, 1], [200, 2, 30])
    warps = frozenset(range(kernel.warps))
    starved = ({kernel.warps}, range(WARPS), warps - frozenset(range(WARPS)))
    schedules = [Schedule(2, starved=frozenset(some)) for some in starved]
    CLUSTERS.work(batch, 1, 128).check(kernel, schedules)


@pytest.mark.parametrize("fault", range(1, len(LEFT_OUT) + 1))
def test_what_nobody_waits_for_is_found(fault: int, decode: WatchedKernel) -> None:
    items, _ = decoded()
    decode.have(fault)
    with pytest.raises(StuckError, match=r"may be (reading|writing)|not waited for"):
        items.check(decode, [Schedule()])
    decode.have(0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_widened_without_instructions_for_that(dtype: str, folder: Path) -> None:
    case = MmaCase(replace(SHORT.spec, kv_dtype=dtype), "short")
    case.work(case.draw([3], [40]), 1, 0).check(case.compile(folder), [Schedule()])
