"""Build the kernels of the GPU tests in parallel, into the cache.

``python -m tests.gpu.prebuild [--target TARGET] [MODULE ...]``: all test modules, if none is named.
A module lists what it runs as ``KERNELS``, a spec and a variant each, and as ``BUILDS``, functions
of a target.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tvm_attn as ta
from tests.gpu.device import gpu
from tvm_attn._compat import import_tvm
from tvm_attn.runtime.module import AttentionModule

Build = Callable[[str], Any]

_jobs: list[tuple[str, Build]] = []
"""What is built: processes inherit it, since hooks cannot be pickled."""


def modules() -> list[str]:
    """Return the names of the modules that need kernels."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return [name for name in names if name.startswith("test_") or name == "sanitize"]


def builds(names: Iterable[str]) -> dict[str, Build]:
    """Return what some modules need, by what tells them apart."""
    distinct: dict[str, Build] = {}
    for name in names:
        module = importlib.import_module(f"tests.gpu.{name}")
        for spec, variant in getattr(module, "KERNELS", ()):
            distinct[f"{variant} of {spec.compiled()}"] = partial(ta.build, spec, variant)
        for build in getattr(module, "BUILDS", ()):
            distinct[str(build)] = build
    return distinct


def main() -> int:
    """Build, and say how long it took; exits with 1 if a kernel cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.prebuild", description=__doc__)
    parser.add_argument("--target", help="such as 'cuda -arch=sm_90'; by default this GPU")
    parser.add_argument("modules", nargs="*", help="of tests/gpu, without .py")
    options = parser.parse_args()
    target = options.target or _target_of_this_gpu()
    _jobs.extend(builds(options.modules or modules()).items())
    start = time.perf_counter()
    import_tvm()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        results = pool.map(partial(_build, target=target), range(len(_jobs)))
        failures = [line for line in results if line]
    print("\n".join(failures))
    seconds = time.perf_counter() - start
    print(f"{len(_jobs)} kernels, {len(failures)} of them failed, in {seconds:.0f} s")
    return int(bool(failures))


def _build(index: int, target: str) -> str:
    """Build a kernel, and return what is wrong with it."""
    name, build = _jobs[index]
    try:
        made = build(target)
        if isinstance(made, AttentionModule):
            made.export(os.devnull)  # with the planner for GPUs
    except Exception as error:
        return f"{name} for {target}: {error}"
    return ""


def _target_of_this_gpu() -> str:
    """Ask another process: kernels are built in forks of this one, which must not own a GPU."""
    code = f"from {gpu.__module__} import gpu; print(gpu().target)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
