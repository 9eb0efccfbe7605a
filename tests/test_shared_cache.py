"""Directories that others share or that cannot be written, and builds side by side."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tvm_attn as ta
from tvm_attn import env, pipeline
from tvm_attn._files import write_atomically
from tvm_attn.codegen.cache import cached
from tvm_attn.codegen.phases import dump
from tvm_attn.spec import AttentionSpec

SPECS = [AttentionSpec(1, 1, dim, q_dtype="float32", page_size=4) for dim in (16, 32)]


def test_files_are_for_those_that_the_umask_allows(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", b"x")
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("taken", ["name-key.tar", "name-key.tar.lock"])
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    monkeypatch.setenv("TVM_ATTN_CACHE_DIR", str(tmp_path))
    (tmp_path / taken).mkdir()

    def read(path: Path) -> bytes:
        if not path.is_file():
            raise ta.errors.ArtifactError("no file")
        return path.read_bytes()

    with pytest.raises(env.EnvError, match=r"TVM_ATTN_CACHE_DIR.*name-key.tar cannot be written"):
        cached("name", "key", read, lambda: b"x")


def test_dumps_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_ATTN_DUMP", os.devnull)
    with pytest.raises(env.EnvError, match=r"TVM_ATTN_DUMP.*cannot be written"):
        dump("kernel", {"tir.py": "x"})


def test_calls_of_build_many_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call begins before the first has its processes, and ends before they work."""
    begun, go_on = threading.Event(), threading.Event()
    bar, found = pipeline._progress.bar, []

    @contextlib.contextmanager
    def waiting(progress: Any, total: int) -> Iterator[Callable[[str], None]]:
        if total == len(SPECS):
            begun.set()
            assert go_on.wait(60)
        with bar(progress, total) as report:
            yield report

    def build(specs: list[AttentionSpec]) -> list[AttentionSpec]:
        return [kernel.spec for kernel in ta.build_many([(spec,) for spec in specs])]

    build(SPECS)
    monkeypatch.setattr(pipeline._progress, "bar", waiting)
    first = threading.Thread(target=lambda: found.extend(build(SPECS)))
    first.start()
    try:
        assert begun.wait(60)
        assert build(SPECS[1:]) == SPECS[1:]
    finally:
        go_on.set()
        first.join()
    assert found == SPECS
