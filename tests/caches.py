"""A cache that holds one kernel, for tests of what is compiled again and what is not."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from filelock import FileLock

from tvm_attn import env, pipeline

Compile = Callable[..., Any]
Made = TypeVar("Made")


@dataclass
class Cache:
    """A cache, what was dumped when its kernel was built, and what is compiled since."""

    folder: Path
    dump: Path
    compiled: list[str] = field(default_factory=list)

    @property
    def kernel(self) -> Path:
        """The one file of a kernel."""
        [path] = self.folder.glob("attention-*.tar")
        return path

    def build_without_tvm(self, run_python: Callable[..., str], request: str) -> str:
        """Build in a process that has no TVM; return the variant's name, and what it imported."""
        code = f"""
        import tvm_attn as ta
        module = ta.build({request})
        print(module.variant, [name for name in sys.modules if name.split(".")[0] == "tvm"])
        """
        variables = {env.CACHE_DIR.name: str(self.folder)}
        return run_python(code, without_tvm=True, env=variables)


BUILD_WHEN_TOLD = """
import sys
import tvm_attn as ta
from tvm_attn import _compat
_compat.import_tvm()
print("ready", flush=True)
sys.stdin.readline()
"""


def built_at_once(code: str, cache: Path, root: Path, seconds: int) -> tuple[str, list[str]]:
    """Run some code in two processes at once; return what each prints, and the parts they built."""
    variables = {**os.environ, env.CACHE_DIR.name: str(cache), env.LOG.name: "info"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD_WHEN_TOLD + code],
            cwd=root,
            env=variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=seconds) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0]
    log = "".join(err for _, err in results)
    return results[0][0], re.findall(r"building (\w+)-", log)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Made]) -> Made:
    """Return what `make` makes in a folder: once in a run, whose other workers get a copy."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        kept = folder / "made.pickle"
        if not kept.exists():
            folder.mkdir()
            kept.write_bytes(pickle.dumps(make(folder)))
        made: Made = pickle.loads(kept.read_bytes())
        return made


@contextmanager
def built_in(folder: Path, module: object, name: str, compile: Compile) -> Iterator[None]:
    """Let kernels be built in a cache of their own; ``module.name`` compiles with `compile`."""
    pipeline.forget_loaded()
    with (
        pytest.MonkeyPatch.context() as patch,
        env.override(env.CACHE_DIR, folder / "cache"),
        env.override(env.DUMP, folder / "dump"),
    ):
        patch.setattr(module, name, compile)
        yield


def copied(
    built: Path, folder: Path, patch: pytest.MonkeyPatch, module: object, name: str, again: Compile
) -> Iterator[Cache]:
    """Yield a copy of such a cache, nothing of it loaded, in which kernels are then built.

    ``module.name`` notes what it is asked for, and returns what `again` gives for its arguments.
    """
    shutil.copytree(built, folder, dirs_exist_ok=True)
    cache = Cache(folder / "cache", folder / "dump")

    def compile(names: Any, *arguments: object) -> Any:
        cache.compiled += names
        return again(names, *arguments)

    patch.setattr(module, name, compile)
    patch.setenv(env.CACHE_DIR.name, str(cache.folder))
    pipeline.forget_loaded()
    yield cache
    pipeline.forget_loaded()
