"""Hopper's kernels on the host, their warps in any order: none waits for ever, none comes too late.

A warp that is starved moves only when nothing else can: it is late for all that others may do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest
import torch

from tests.cuda_threads import is_possible
from tests.hopper_runs import HopperCase, Work
from tests.hopper_threads import HopperKernel, Schedule, StuckError
from tvm_attn.schedules.tiles_sm90 import short_tiles_to_try, tiles_to_try
from tvm_attn.spec import AttentionSpec

pytestmark = pytest.mark.skipif(not is_possible(), reason="there is no g++ on x86-64")

WARPS_OF_GROUP = 4
SERVERS = (2, 3)
"""Warps that serve the slots."""
RING, SHORT_RING = 16, 8
"""Work items that shared memory holds, and too few."""


class Fault(IntEnum):
    """What can be wrong with the kernel of three warpgroups whose rows are gathered."""

    NONE = 0
    AHEAD = 1  # a warpgroup may be two phases ahead of the warp that serves its slots
    FORGOTTEN = 2  # shared memory holds too few work items
    UNSEEN = 3  # what was written is not made visible to what reads asynchronously
    EARLY = 4  # other CTAs are told of a part before all warps have stored it


def case(group: int, page: int | None, dim: int, family: str, dtype: str = "float16") -> HopperCase:
    spec = AttentionSpec(group, 1, dim, q_dtype=dtype, kv_dtype=dtype, page_size=page)
    tiles = short_tiles_to_try(spec) if family == "short" else tiles_to_try(spec)
    return HopperCase(spec, tiles[0])


FIRST = case(5, 1, 64, "long")
OTHERS = {
    "three warpgroups, boxes": case(4, 16, 64, "long", "bfloat16"),
    "two warpgroups, rows": case(8, 1, 128, "long"),
    "one warpgroup, ragged boxes": case(4, None, 64, "short"),
    "wide heads": case(2, 48, 256, "long"),
}


def with_faults(source: str) -> str:
    """Have a number that is called ``fault`` choose one."""
    fence = "tvm_builtin_ptx_fence_proxy_proxy_async_shared__cta();"
    few = f"(fault == {Fault.FORGOTTEN} ? {SHORT_RING - 1} : {RING - 1})"
    edits = {
        fence: f"if (fault != {Fault.UNSEEN}) {fence}",
        f"& {RING - 1}) * ": f"& {few}) * ",
    }
    for text, edit in edits.items():
        assert source.count(text) > 1
        source = source.replace(text, edit)
    meeting = re.compile(
        r"(\w*bar_sync\w*\(\S+ \S+\);)(?=\s+if \(\(\(int\)threadIdx\.x\) == 128\))"
    )
    source, count = meeting.subn(rf"if (fault != {Fault.EARLY}) \1", source)
    assert count == 1, "warps meet elsewhere"
    *before, last = re.split(r"(?=tvm_builtin_cuda_mbarrier_wait\()", source)
    assert re.match(r".*warp_id_in_cta >> 2\).*\^ 1\)\);", last), "it waits for something else"
    return "".join([*before, f"if (fault != {Fault.AHEAD}) {last}"])


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> HopperKernel:
    """The first kernel, whose faults can be chosen."""
    return FIRST.compile(tmp_path_factory.mktemp("kernel"), with_faults)


@pytest.fixture(params=OTHERS)
def other(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[HopperCase, HopperKernel]:
    made = OTHERS[request.param]
    return made, made.compile(tmp_path)


def starving(*warps: int, seed: int = 0) -> Schedule:
    return Schedule(seed, frozenset(warps))


def schedules(kernel: HopperKernel) -> Iterator[Schedule]:
    """Yield schedules by chance, and those that starve each warp, each warpgroup, and copies."""
    groups = [range(i, i + WARPS_OF_GROUP) for i in range(0, kernel.warps, WARPS_OF_GROUP)]
    yield from (Schedule(seed, change=change) for seed, change in enumerate((0, 20, 300)))
    yield from (starving(i, seed=i) for i in range(kernel.warps + 1))
    yield from (starving(*group) for group in groups)
    yield starving(*SERVERS)
    yield starving(kernel.warps, 0, 1)
    yield Schedule(3, favoured=frozenset(SERVERS))


def short_queues(made: HopperCase) -> Work:
    """Return queues of few items, some of which have no keys."""
    two_tiles = made.tile.rows // made.spec.group_size + 2
    return made.work(made.draw([9, 2, two_tiles, 3], [40, 1, 265, 30]), 3, made.tile.block)


def long_queue(made: HopperCase) -> Work:
    """Return a queue of items of a block or a few, more than shared memory holds.

    Where a warpgroup is alone there are more than twice as many.
    """
    block, times = made.tile.block, made.tile.tasks // 8 if made.tile.multipliers > 1 else 4
    queries = [6, 1, 0, 10, 3, 9, 2, 4, 7] * times
    keys = [block, 3, 5, 4 * block, 1, 0, 2 * block + 9, 50, 20] * times
    work = made.work(made.draw(queries, keys, seed=1), 1, 3 * block)
    assert len(work.lists["items"]) > made.tile.tasks
    return work


def check(made: HopperCase, kernel: HopperKernel) -> None:
    for work in (short_queues(made), long_queue(made)):
        work.check(kernel, schedules(kernel))


def test_warps_may_go_on_in_any_order(faulty: HopperKernel) -> None:
    faulty.have(Fault.NONE)
    check(FIRST, faulty)


def test_warps_of_other_kernels_may_go_on_in_any_order(
    other: tuple[HopperCase, HopperKernel],
) -> None:
    check(*other)


@pytest.mark.parametrize("server", SERVERS)
def test_a_phase_that_is_missed_is_found(faulty: HopperKernel, server: int) -> None:
    """A warp waits for ever if what it waits for came twice before it looked."""
    faulty.have(Fault.AHEAD)
    with pytest.raises(StuckError, match=rf"\n  warp {server}, .* phase of parity"):
        short_queues(FIRST).run(faulty, starving(server))


def test_what_is_overwritten_too_early_is_found(faulty: HopperKernel) -> None:
    faulty.have(Fault.NONE)
    work, warps = long_queue(FIRST), range(WARPS_OF_GROUP, faulty.warps, WARPS_OF_GROUP)
    expected, _ = work.run(faulty, Schedule())
    faulty.have(Fault.FORGOTTEN)
    for warp in warps:
        with pytest.raises(AssertionError):
            out, _ = work.run(faulty, starving(warp))
            assert torch.equal(out, expected)


def test_a_fence_that_is_missing_is_found(faulty: HopperKernel) -> None:
    faulty.have(Fault.UNSEEN)
    with pytest.raises(StuckError, match="is read asynchronously before a fence"):
        short_queues(FIRST).run(faulty, Schedule())


def test_a_part_that_is_told_of_too_early_is_found(faulty: HopperKernel) -> None:
    faulty.have(Fault.NONE)
    work = short_queues(FIRST)
    expected, _ = work.run(faulty, Schedule())
    faulty.have(Fault.EARLY)
    results = [work.run(faulty, starving(WARPS_OF_GROUP + 1, seed=seed))[0] for seed in range(4)]
    assert not all(torch.equal(out, expected) for out in results)
