"""Everything here needs a GPU, and its kernels are built before the first test, in parallel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import torch

from tests.gpu.device import gpu
from tests.machine import Machine
from tvm_attn import env

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests, and skip them where there is no GPU."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def prebuilt(
    request: pytest.FixtureRequest, testrun_uid: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Build what the tests of this run need: one of its workers does, the others wait.

    That is in a process that has not touched the GPU.
    """
    modules = sorted({item.path.stem for item in request.session.items if item.path.parent == HERE})
    command = [sys.executable, "-m", "tests.gpu.prebuild", "--target", str(gpu().target), *modules]
    is_built = tmp_path_factory.getbasetemp().parent / f"prebuilt-{testrun_uid}"
    env.cache_dir().mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(env.cache_dir() / "prebuild.lock"):
        if not is_built.exists():
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            print(done.stdout, done.stderr)  # a test whose kernel cannot be built says why itself
            is_built.touch()


@pytest.fixture(scope="session")
def machine() -> Machine:
    """What tests that can run anywhere run on, here."""
    return gpu()
