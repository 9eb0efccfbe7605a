"""Progress of builds: on a terminal, and nowhere else."""

from __future__ import annotations

import importlib.util
import io
import sys

import pytest

from tvm_attn import _progress


class Screen(io.StringIO):
    """Standard error that is a terminal, or is not."""

    def __init__(self, is_terminal: bool):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def screen(request: pytest.FixtureRequest) -> Screen:
    return Screen(request.param)


def look_at(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is written to standard error appear here (pytest sets it before each test)."""
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_stages_are_shown_on_a_terminal(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at(screen, monkeypatch)
    with _progress.stages(None) as report:
        assert not screen.getvalue(), "a build that has no stages shows nothing"
        report("source.cu")
        report("kernel.ptx")
    shown = screen.getvalue()
    assert ("building: kernel.ptx" in shown) == screen.isatty()
    assert bool(shown) == screen.isatty()
    report("late")
    with pytest.raises(RuntimeError, match="stop"), _progress.stages(None):
        raise RuntimeError("stop")


def test_several_builds_are_counted_on_a_terminal(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at(screen, monkeypatch)
    with _progress.bar(None, 3) as report:
        for number in range(3):
            report(f"kernel {number}")
    assert ("100%" in screen.getvalue()) == screen.isatty()
    assert bool(screen.getvalue()) == screen.isatty()


def test_a_callers_function_is_called_instead(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at(screen, monkeypatch)
    lines: list[str] = []
    with _progress.stages(lines.append) as report:
        report("source.cu")
    with _progress.bar(lines.append, 1) as report:
        report("1/1")
    assert lines == ["source.cu", "1/1"]
    assert not screen.getvalue()


def test_without_rich_nothing_is_shown(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at(screen, monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with _progress.stages(None) as report:
        report("source.cu")
    with _progress.bar(None, 1) as report:
        report("1/1")
    assert not screen.getvalue()
