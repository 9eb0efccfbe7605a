"""Timing on a machine that is never quiet: interleaved rounds, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

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
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            time.sleep(PAUSE)
            work()  # refills the caches that the previous function emptied
            start = time.perf_counter()
            for _ in range(calls[name]):
                work()
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(turns) for name, turns in times.items()}


def once(work: Work, warm: int = 2) -> float:
    """Return the seconds of one call after `warm` calls."""
    for _ in range(warm):
        work()
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-7)
