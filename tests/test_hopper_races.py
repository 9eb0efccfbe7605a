"""Hopper's kernels on the host, watched for races: what others do to a word is known by barriers.

Who waits names the phase of a barrier: where one schedule shows no race, none has one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.cuda_threads import is_possible
from tests.hopper_runs import HopperCase, Work
from tests.hopper_threads import HopperKernel, Schedule, StuckError
from tests.test_hopper_threads import (
    FIRST,
    OTHERS,
    Fault,
    case,
    long_queue,
    short_queues,
    with_faults,
)
from tests.watched_threads import WatchedKernel

pytestmark = pytest.mark.skipif(not is_possible(), reason="there is no g++ on x86-64")

RAGGED = OTHERS["one warpgroup, ragged boxes"]
WIDE = case(2, 1, 256, "long")
WAIT = re.compile(r"tvm_builtin_cuda_(?:mbarrier_wait|warp_sync)\([^;]*\);")
NEEDLESS = 4
"""Waits that others make needless: lanes meet twice after they copied an item, and warps that serve
slots know what to fetch for the second item since the first one was known."""


def with_waits_by_number(source: str) -> str:
    """Let each wait of a kernel be left out by its number, in their order, from 1 on."""
    before, body = re.split(r'(?=extern "C" __global__)', source, maxsplit=1)
    pieces = re.split(rf"({WAIT.pattern})", body)
    pieces[1::2] = (f"if (fault != {i}) {wait}" for i, wait in enumerate(pieces[1::2], 1))
    return before + "".join(pieces)


def whole_blocks(made: HopperCase) -> Work:
    """Return a queue of items of a whole block each: none of what is fed is mended."""
    count = made.tile.tasks + 4
    return made.work(made.draw([1] * count, [made.tile.block] * count), 1, made.tile.block)


def works(made: HopperCase) -> list[Work]:
    return [short_queues(made), whole_blocks(made), long_queue(made)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> HopperKernel:
    return FIRST.compile(tmp_path_factory.mktemp("first"), with_faults, WatchedKernel)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> HopperKernel:
    folder = tmp_path_factory.mktemp("ragged")
    return RAGGED.compile(folder, with_waits_by_number, WatchedKernel)


def check(made: HopperCase, kernel: HopperKernel) -> None:
    kernel.have(Fault.NONE)
    for work in works(made):
        work.check(kernel, [Schedule()])


def test_gathered_rows_come_and_go_without_races(first: HopperKernel) -> None:
    check(FIRST, first)


def test_ragged_boxes_come_and_go_without_races(ragged: HopperKernel) -> None:
    check(RAGGED, ragged)


def test_wide_heads_come_and_go_without_races(tmp_path: Path) -> None:
    check(WIDE, WIDE.compile(tmp_path, kind=WatchedKernel))


@pytest.mark.parametrize("fault", [Fault.FORGOTTEN, Fault.EARLY])
def test_faults_are_found_without_starving_anybody(first: HopperKernel, fault: Fault) -> None:
    first.have(fault)
    work = short_queues(FIRST) if fault == Fault.EARLY else long_queue(FIRST)
    with pytest.raises(StuckError, match=r"may be (reading|writing) it"):
        work.run(first, Schedule())


def is_found(kernel: HopperKernel, fault: int, expected: list[tuple[Work, torch.Tensor]]) -> bool:
    """Whether one of some queues shows a fault: by a race, or by what was read before it came."""
    kernel.have(fault)
    try:
        return not all(torch.equal(work.run(kernel, Schedule())[0], out) for work, out in expected)
    except StuckError:
        return True


def test_what_nobody_waits_for_is_found(ragged: HopperKernel) -> None:
    ragged.have(Fault.NONE)
    expected = [(work, work.run(ragged, Schedule())[0]) for work in works(RAGGED)]
    waits = len(WAIT.findall(RAGGED.generate().body))
    missed = [i for i in range(1, waits + 1) if not is_found(ragged, i, expected)]
    assert waits > 30
    assert len(missed) == NEEDLESS
