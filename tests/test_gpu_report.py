"""The report of a GPU run: what it says of each test, and where it is written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import report
from tests.gpu.report import GpuReport


def phase(test: str, when: str, outcome: str, **fields: Any) -> Any:
    return SimpleNamespace(nodeid=test, when=when, outcome=outcome, duration=0.25, **fields)


def test_a_test_has_the_worst_outcome_of_its_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = {"commit": "0" * 40, "card": "NVIDIA H200", "date": "2026-11-30T10:00:00+00:00"}
    monkeypatch.setattr(report, "facts", lambda commit: {**machine, "commit": commit})
    plugin = GpuReport(tmp_path / "gpu", "abc")
    for given in (
        *(("a", "setup", "passed"), ("a", "call", "passed"), ("a", "teardown", "passed")),
        *(("b", "setup", "passed"), ("b", "call", "failed"), ("b", "teardown", "passed")),
        *(("c", "setup", "skipped"), ("d", "setup", "failed")),
        *(("e", "setup", "passed"), ("e", "call", "passed"), ("e", "teardown", "failed")),
    ):
        plugin.pytest_runtest_logreport(phase(*given))
    plugin.pytest_runtest_logreport(phase("f", "call", "skipped", wasxfail="known"))
    plugin.pytest_sessionfinish()
    [path] = (tmp_path / "gpu").iterdir()
    assert path.name == "2026-11-30-nvidia-h200.json"
    written = json.loads(path.read_text())
    assert written["commit"] == "abc"
    outcomes = {name: test["outcome"] for name, test in written["tests"].items()}
    assert outcomes == {
        **{"a": "passed", "b": "failed", "c": "skipped"},
        **{"d": "error", "e": "error", "f": "xfailed"},
    }
    counts = {"passed": 1, "xfailed": 1, "skipped": 1, "failed": 1, "error": 2}
    assert written["outcomes"] == counts
    assert written["tests"]["a"]["seconds"] == 0.75


def test_a_file_may_be_named(tmp_path: Path) -> None:
    GpuReport(tmp_path / "run.json").pytest_sessionfinish()
    written = json.loads((tmp_path / "run.json").read_text())
    assert {"commit", "card", "driver", "cuda", "torch", "apache-tvm", "date"} <= written.keys()
    assert written["tests"] == {}
