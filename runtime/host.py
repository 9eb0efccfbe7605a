"""Whether kernels can run here: on this CPU, and in this process."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tvm_attn.errors import ProcessError

CPUINFO = Path("/proc/cpuinfo")
CPUS = Path("/sys/devices/system/cpu")


def missing_flags(flags: Sequence[str]) -> str:
    """Say which of these extensions this CPU lacks, by the names of ``/proc/cpuinfo``.

    Returns
    -------
    str
        Empty if it lacks none, or the system does not tell; else the end of a sentence.
    """
    offered = _offered_flags()
    missing = set(flags) - offered if offered else set()
    if not missing:
        return ""
    return (
        f"uses {', '.join(sorted(missing))}, which this CPU lacks; build for "
        'target="llvm -mcpu=x86-64-v2", or on this machine'
    )


@functools.cache
def _offered_flags() -> frozenset[str]:
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def fastest_cores(cores: int) -> int:
    """Return how many of this machine's cores have the highest frequency: those that TVM uses."""
    frequencies = [_frequency(f"cpu{index}") for index in range(cores)]
    return frequencies.count(max(frequencies))


def _frequency(core: str) -> int:
    """Return a core's highest frequency; 0 if the system does not tell."""
    try:
        return int((CPUS / core / "cpufreq/cpuinfo_max_freq").read_text())
    except (OSError, ValueError):
        return 0


def check_process() -> None:
    """Raise `ProcessError` in a process that was forked off after a kernel had run.

    Threads do not survive a fork: the pool that kernels run on would wait for ever.
    """
    if not _users:
        _users.append(os.getpid())
    elif _users[0] != os.getpid():
        raise ProcessError(
            "this process was forked off after a kernel had run, and the threads kernels need are "
            "not in it; start workers before the first run (kernels may be built, loaded and "
            "planned for), or with the start method 'spawn'"
        )


_users: list[int] = []
"""The process that ran the first kernel."""
