"""A cache that holds one kernel, for tests of what is compiled again and what is not."""

from __future__ import annotations

import os
import pickle
import shutil
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
