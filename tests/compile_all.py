"""Compile every shipped kernel, without a GPU, and print what each uses: ``make compile-all``.

``python -m tests.compile_all [--jobs N] [--compiler nvcc] [--match REGEX]``; exits with 1 if a
kernel does not compile, spills, has a stack, or leaves no room for the CTAs its tile is for.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.compiling import FIND, Outcome, compile_kernels, kernels
from tvm_attn.shipped import Configuration, shipped

COLUMNS = "{:70} {:>9} {:>7} {:>7} {:>6} {:>5} {:>7} {:>8}"
HEAD = COLUMNS.format(
    *("kernel", "registers", "shared", "spills", "stack", "fit", "wanted", "seconds")
)


def compile_one(configuration: Configuration, kind: str) -> list[tuple[Outcome, float]]:
    """Compile each query tile of a configuration; return what came of it, and the seconds."""
    compiler = FIND[kind]()
    assert compiler is not None, f"there is no {kind}"
    results = []
    for kernel in kernels(configuration):
        start = time.perf_counter()
        [outcome] = compile_kernels([kernel], [compiler])
        results.append((outcome, time.perf_counter() - start))
    return results


def line(outcome: Outcome, seconds: float) -> str:
    """Return a kernel's line of the table."""
    r = outcome.used
    if r is None:
        return f"{outcome.kernel} failed"
    shared, spills = r.shared + r.dynamic_shared, r.spill_stores + r.spill_loads
    figures = (r.registers, shared, spills, r.stack, outcome.residents)
    wanted = outcome.tile.residents
    return COLUMNS.format(str(outcome.kernel), *figures, wanted, f"{seconds:.1f}")


def main() -> int:
    """Compile, and print the table and what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.compile_all", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at a time")
    parser.add_argument("--compiler", choices=FIND, default="nvcc")
    parser.add_argument("--match", default="", help="compile what has this regex in its name")
    options = parser.parse_args()
    chosen = [c for c in shipped() if re.search(options.match, str(c))]
    print(HEAD, flush=True)
    start, complaints = time.perf_counter(), []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        compile_with = partial(compile_one, kind=options.compiler)
        for results in pool.map(compile_with, chosen):
            print("\n".join(line(*result) for result in results), flush=True)
            complaints += [outcome.complaint for outcome, _ in results if outcome.complaint]
    print("\n".join(complaints))
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(chosen)} configurations, {len(complaints)} complaints, {minutes:.1f} minutes")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
