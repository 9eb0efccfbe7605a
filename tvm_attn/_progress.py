"""Progress of long compiles: on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str], None]


def unheard(stage: str) -> None:
    """Report nothing."""


@contextlib.contextmanager
def stages(given: Progress | None) -> Iterator[Progress]:
    """Yield what to call with each stage of one build.

    Parameters
    ----------
    given : callable, optional
        What the caller wants called; otherwise a line on the terminal shows the stage, until the
        build is done.
    """
    if given is not None or not _has_terminal():
        yield given or unheard
        return
    from rich.console import Console

    status = Console(stderr=True).status("building")

    def show(stage: str) -> None:
        status.update(f"building: {stage}")
        status.start()

    try:
        yield show
    finally:
        status.stop()


@contextlib.contextmanager
def bar(given: Progress | None, total: int) -> Iterator[Progress]:
    """Yield what to call with a line for each of several builds that is done.

    Parameters
    ----------
    given : callable, optional
        What the caller wants called; otherwise a bar on the terminal shows how many are done.
    total : int
        Number of builds.
    """
    if given is not None or not _has_terminal():
        yield given or unheard
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("building", total=total)
        yield lambda line: shown.update(task, advance=1, description=line)


def _has_terminal() -> bool:
    return sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
