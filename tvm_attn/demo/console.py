"""The demo on a console: what it does, how far it is, what came out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tvm_attn as ta
from tvm_attn.demo.options import DemoOptions
from tvm_attn.demo.report import Summary
from tvm_attn.demo.server import Progress, serve
from tvm_attn.demo.trace import TRACE_NAME

LINES = 10
"""Progress lines where the output is no terminal."""


def run_demo(options: DemoOptions, *, as_json: bool = False) -> Summary:
    """Run the demo, print its progress and its report (or JSON alone), and return its summary."""

    def say(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    say(
        f"{options.requests} requests of the {TRACE_NAME},\n"
        f"served by {options.num_layers} layers of {options.spec}"
    )
    start = time.perf_counter()
    kernel = ta.build(options.spec, ta.variants.causal())
    say(f"kernel ready after {time.perf_counter() - start:.1f} s: {kernel.target}\n")
    start = time.perf_counter()
    with _progress(say) as observe:
        summary = serve(options, kernel, observe)
    elapsed = time.perf_counter() - start
    say(f"\nserved and checked in {elapsed:.1f} s\n\n{summary}")
    if as_json:
        print(summary.to_json())
    return summary


@contextmanager
def _progress(say: Callable[[str], None]) -> Iterator[Callable[[Progress], None]]:
    """Yield an observer that draws a progress bar on a terminal, and prints lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines(say)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("serving")

        def draw(at: Progress) -> None:
            description = f"step {at.step:>5,}, {at.running:>2} running"
            bar.update(task, total=at.all_tokens, completed=at.tokens, description=description)

        yield draw


class _Lines:
    """Says a line at every tenth of the tokens."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._said = 0

    def __call__(self, at: Progress) -> None:
        tenth = at.tokens * LINES // at.all_tokens
        if tenth > self._said:
            self._said = tenth
            self._say(
                f"{at.tokens / at.all_tokens:4.0%}  step {at.step:>5,}  clock {at.now:5.1f} s  "
                f"running {at.running:>2}  to come {at.waiting:>3}  pages {at.pages:>5,}"
            )
