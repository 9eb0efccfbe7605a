"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TVM_BACKTRACE", "1")  # without it TVMScript's parser hides its errors
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's idle threads leave the cores alone

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.gpu.report import GpuReport
from tests.machine import CPU, Machine

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile(
    "tvm_attn",
    deadline=None,  # the first example may compile
    derandomize=True,  # the same inputs in every run
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tvm_attn")

_WITHOUT_TVM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "tvm" or name.startswith("tvm."):
            raise ImportError(f"{name} is blocked by this test")

sys.meta_path.insert(0, Blocker())
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of GPU runs."""
    group = parser.getgroup("gpu")
    group.addoption("--gpu-report", type=Path, help="write a GPU run as JSON to a file or folder")
    group.addoption("--gpu-commit", help="what is tested, for the report, where git cannot say")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.path.stem != "test_shipped")


def pytest_configure(config: pytest.Config) -> None:
    """Give this run, all of its workers, a kernel cache of its own; report a GPU run."""
    report = config.getoption("--gpu-report")
    runs = not (hasattr(config, "workerinput") or config.option.collectonly)
    if report is not None and runs:
        config.pluginmanager.register(GpuReport(report, config.getoption("--gpu-commit")))
    if "TVM_ATTN_CACHE_DIR" not in os.environ:
        directory = tempfile.mkdtemp(prefix="tvm_attn-tests-")
        os.environ["TVM_ATTN_CACHE_DIR"] = directory
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def pytest_collection() -> None:
    """Collect without the garbage collector, which would look at every test again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what there is by now."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a developer's settings out of the tests."""
    for name in ("TVM_ATTN_LOG", "TVM_ATTN_DUMP"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the GPU away from a machine that has one."""
    monkeypatch.setattr("tvm_attn.runtime.cuda.has_gpu", lambda: False)


@pytest.fixture(scope="session")
def machine() -> Machine:
    """What tests that can run anywhere run on; ``tests/gpu`` overrides it."""
    return CPU


@pytest.fixture
def rng() -> torch.Generator:
    """A generator of random numbers that are the same in every run."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run a piece of code in a new process and return what it prints.

    ``run_python(code, without_tvm=True, env={...})``; a non-zero exit fails the test.
    """

    def run(code: str, *, without_tvm: bool = False, env: dict[str, str] | None = None) -> str:
        prelude = _WITHOUT_TVM if without_tvm else ""
        result = subprocess.run(
            [sys.executable, "-c", prelude + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
