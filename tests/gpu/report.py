"""A GPU run as data: ``pytest -m gpu --gpu-report docs/gpu`` writes who passed, where and when."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

GIT = ("git", "describe", "--match=NONE", "--always", "--abbrev=40", "--dirty")
PACKAGES = ("torch", "apache-tvm", "apache-tvm-ffi", "numpy")
RANK = ("passed", "xfailed", "skipped", "failed", "error")
"""Outcomes; a test has the last one of its phases."""


class GpuReport:
    """A pytest plugin that writes a run's outcomes as JSON.

    Parameters
    ----------
    path : pathlib.Path
        The file to write, or a folder, in which it is called ``<date>-<card>.json``.
    commit : str, optional
        What was tested, where git cannot say.
    """

    def __init__(self, path: Path, commit: str | None = None):
        self._path, self._commit = path, commit
        self._start = time.time()
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test's setup, call or teardown."""
        outcome: str = report.outcome
        if outcome == "failed" and report.when != "call":
            outcome = "error"
        if outcome == "skipped" and hasattr(report, "wasxfail"):
            outcome = "xfailed"
        test = self._tests.setdefault(report.nodeid, {"outcome": outcome, "seconds": 0.0})
        test["outcome"] = max(test["outcome"], outcome, key=RANK.index)
        test["seconds"] = round(test["seconds"] + report.duration, 3)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        machine = facts(self._commit)
        date, card = machine["date"][:10], re.sub(r"\W+", "-", machine["card"].lower())
        is_folder = self._path.suffix != ".json"
        path = self._path / f"{date}-{card}.json" if is_folder else self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        outcomes = Counter(test["outcome"] for test in self._tests.values())
        head = {
            **machine,
            "seconds": round(time.time() - self._start, 1),
            "outcomes": {outcome: outcomes[outcome] for outcome in RANK if outcomes[outcome]},
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(t)}" for name, t in self._tests.items()]
        tests = ",\n".join(lines)  # a line each
        opened = json.dumps(head, indent=1).removesuffix("\n}")
        path.write_text(f'{opened},\n "tests": {{\n{tests}\n }}\n}}\n')


def facts(commit: str | None = None) -> dict[str, Any]:
    """Return what was tested, on what, with what and when."""
    has_gpu = torch.cuda.is_available()
    return {
        "commit": commit or _output_of(*GIT),
        "card": torch.cuda.get_device_name() if has_gpu else "none",
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
