"""Work in forked processes: results, progress, errors, and how processes end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tvm_attn.codegen.children import Child, ChildTraceback, Progress, in_children
from tvm_attn.errors import CompileError, TargetError


def forked(work: Callable[[Progress], object]) -> object:
    with Child("something", work) as child:
        return child.result()


def test_results_come_in_order_and_stages_as_they_are_done() -> None:
    stages: list[str] = []

    def work(name: str, report: Progress) -> tuple[str, int]:
        report(f"{name} begins")
        return name, os.getpid()

    works = {name: lambda report, name=name: work(name, report) for name in ("first", "second")}
    done = in_children(works, stages.append)
    assert [name for name, _ in done.values()] == list(done) == ["first", "second"]
    assert len({os.getpid(), *(pid for _, pid in done.values())}) == 3
    assert sorted(stages) == ["first begins", "second begins"], "in whatever order they begin"


def test_large_results() -> None:
    content = os.urandom(3_000_000)
    assert in_children({n: lambda _: content for n in "abc"}, print) == dict.fromkeys(
        "abc", content
    )


def test_a_child_has_an_environment_of_its_own() -> None:
    before = dict(os.environ)
    assert forked(lambda _: os.environ["TVM_COMPILE_FORCE_FALLBACK"]) == "1"
    assert dict(os.environ) == before


def test_errors_are_raised_here_and_say_where_they_were_raised() -> None:
    def fail() -> NoReturn:
        raise TargetError("no such target")

    with pytest.raises(TargetError, match="no such target") as raised:
        forked(lambda _: fail())
    assert isinstance(raised.value.__cause__, ChildTraceback)
    assert "in fail" in str(raised.value.__cause__)


def test_an_error_that_cannot_be_sent() -> None:
    class LocalError(Exception):
        pass

    def fail() -> NoReturn:
        raise LocalError("something went wrong")

    with pytest.raises(CompileError, match="LocalError: something went wrong"):
        forked(lambda _: fail())


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="generator"):
        forked(lambda _: (i for i in range(3)))


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), "signal SIGKILL"),
        (lambda _: os._exit(7), "exit status 7"),
    ],
)
def test_a_process_that_dies(end: Callable[[Progress], object], words: str) -> None:
    with pytest.raises(CompileError, match=rf"makes something died \({words}\)"):
        forked(end)


def test_patience_ends() -> None:
    begun = time.monotonic()
    with (
        Child("something", lambda _: time.sleep(60)) as child,
        pytest.raises(CompileError, match="not made within 0 s"),
    ):
        child.result(patience=0.1)
    assert time.monotonic() - begun < 10


def test_no_process_outlives_the_block() -> None:
    with pytest.raises(TargetError), Child("something", lambda _: time.sleep(60)) as child:
        pid = child._pid
        raise TargetError("no such target")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_failure_ends_the_others() -> None:
    def fail() -> NoReturn:
        raise TargetError("no such target")

    begun = time.monotonic()
    with pytest.raises(TargetError):
        in_children({"quick": lambda _: fail(), "slow": lambda _: time.sleep(60)}, print)
    assert time.monotonic() - begun < 10


def test_children_of_a_child_end_with_it() -> None:
    reader, writer = os.pipe()

    def work(_: Progress) -> object:
        return forked(lambda _: (os.write(writer, str(os.getpid()).encode()), time.sleep(60)))

    with Child("something", work):
        grandchild = int(os.read(reader, 20))
        os.kill(grandchild, 0)
    deadline = time.monotonic() + 10
    while _runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(grandchild)


def _runs(process: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def test_daemons_have_children_too() -> None:
    def daemon(queue: multiprocessing.SimpleQueue[object]) -> None:
        queue.put(forked(lambda _: "done"))

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=daemon, args=(queue,), daemon=True)
    process.start()
    assert queue.get() == "done"
    process.join()


def test_a_program_that_forgets_its_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert forked(lambda _: 3) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)
