"""Timing on a machine that is never quiet: interleaved rounds, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Work = Callable[[], object]

PAUSE = 0.02
"""Seconds between turns: a library's idle threads spin for a while and would slow the next one."""


def interleaved(
    works: Mapping[str, Work], *, rounds: int = 15, seconds: float = 0.05
) -> dict[str, float]:
    """Time several functions side by side.

    Every round times each function once, over as many calls as fill `seconds`, so that whatever
    slows the machine down meets all of them.

    Parameters
    ----------
    works : mapping of str to callable
        What to time, by name.
    rounds : int
        Rounds.
    seconds : float
        Duration of one function's turn.

    Returns
    -------
    dict of str to float
        Median seconds of a call, by name.
    """
    calls = {name: max(1, int(seconds / once(work))) for name, work in works.items()}

    def turn(name: str) -> float:
        time.sleep(PAUSE)
        work = works[name]
        work()  # refills the caches that the previous function emptied
        start = time.perf_counter()
        for _ in range(calls[name]):
            work()
        return (time.perf_counter() - start) / calls[name]

    return _medians(works, turn, rounds)


def _medians(names: Iterable[str], turn: Callable[[str], float], rounds: int) -> dict[str, float]:
    """Take turns for some rounds; return each name's median."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, turns in times.items():
            turns.append(turn(name))
    return {name: statistics.median(turns) for name, turns in times.items()}


def call_time(call: Work, calls: int = 200) -> float:
    """Return the median seconds of the host for a call, the GPU being idle before each."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def once(work: Work, warm: int = 2) -> float:
    """Return the seconds of one call after `warm` calls."""
    for _ in range(warm):
        work()
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-7)


def bursts(
    works: Mapping[str, Work], *, rounds: int = 7, seconds: float = 0.012
) -> dict[str, float]:
    """Time several functions that launch GPU work, side by side.

    As `interleaved`, on the GPU's clock: a turn is a burst of back-to-back calls after a pause as
    long, which keeps the card from its power limit.

    Parameters
    ----------
    works : mapping of str to callable
        What to time, by name.
    rounds : int
        Rounds.
    seconds : float
        Duration of one function's turn, and of the pause before it.

    Returns
    -------
    dict of str to float
        Median seconds of a call, by name.
    """
    calls = {}
    for name, work in works.items():
        _on_gpu(work, 3)
        calls[name] = max(1, int(seconds / _on_gpu(work, 3)))

    def turn(name: str) -> float:
        time.sleep(seconds)
        return _on_gpu(works[name], calls[name])

    return _medians(works, turn, rounds)


def _on_gpu(work: Work, calls: int) -> float:
    """Return the seconds of a call, of `calls` back to back."""
    event: Any = torch.cuda.Event
    begin, end = (event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return max(float(begin.elapsed_time(end)) / 1e3 / calls, 1e-7)
