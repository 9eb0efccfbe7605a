"""Work in forked processes: TVM and NVRTC do one thing at a time in a process, and can crash it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NoReturn, TypeVar

from tvm_attn import env
from tvm_attn.errors import CompileError

Result = TypeVar("Result")
Progress = Callable[[str], None]

PATIENCE = 600.0
"""Seconds after which work is given up."""
PR_SET_PDEATHSIG = 1
"""Of ``prctl``: the signal that a process gets when its parent dies (linux/prctl.h)."""


def unheard(stage: str) -> None:
    """Report nothing."""


class Child(Generic[Result]):
    """A forked process that does one piece of work. A context manager, which ends it.

    The child is not a `multiprocessing.Process`, since workers of a serving engine, daemonic
    processes, may not have any. It must not run kernels, and need not be careful with the
    environment: it is its own, and TVM is told there to leave CUDA source as it is.

    Parameters
    ----------
    name : str
        What the work is, for messages.
    work : callable
        Takes a function to call with the name of each stage, and returns what can be pickled.
    """

    def __init__(self, name: str, work: Callable[[Progress], Result]):
        self._name = name
        self.receiver, sender = multiprocessing.Pipe(duplex=False)
        parent = os.getpid()
        with warnings.catch_warnings():
            # Threads that a fork loses: the work needs none, nor what they might hold locked.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            _end_with(parent)
            _work(sender, work)
        sender.close()

    def result(self, progress: Progress = unheard, patience: float = PATIENCE) -> Result:
        """Wait for the work and return its result; what it raised is raised here.

        Parameters
        ----------
        progress : callable
            Called with what the work reports.
        patience : float
            Seconds to wait.

        Raises
        ------
        CompileError
            If the process dies or takes too long.
        """
        deadline = time.monotonic() + patience
        while self.receiver.poll(max(0.0, deadline - time.monotonic())):
            for result in self.receive(progress):
                return result
        raise _too_late(self._name, patience)

    def receive(self, progress: Progress) -> list[Result]:
        """Take what the child says next: report it, raise it, or return the result in a list."""
        try:
            kind, content = self.receiver.recv()
        except EOFError:
            raise CompileError(
                f"the process that makes {self._name} died ({self._status()}); build with "
                f"{env.DUMP.name}=DIR to see how far it came"
            ) from None
        if kind == "error":
            error, trace = content
            raise error from ChildTraceback(trace)
        if kind == "result":
            return [content]
        progress(content)
        return []

    def __enter__(self) -> Child[Result]:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._status()
        self.receiver.close()

    def _status(self) -> str:
        pid, self._pid = self._pid, 0
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:  # the program has the system forget about its children
            return "nobody knows why"
        return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


class ChildTraceback(Exception):
    """Where in a child an error was raised."""


def in_children(
    works: Mapping[str, Callable[[Progress], Result]], progress: Progress
) -> dict[str, Result]:
    """Do pieces of work side by side, as many at a time as there are cores, and return results.

    Parameters
    ----------
    works : mapping of str to callable
        As in `Child`, by name. They are begun in this order: the longest should be the first.
    progress : callable
        Called with what they report.
    """
    left, done = deque(works.items()), {}
    running: dict[Connection, tuple[str, Child[Result]]] = {}
    with contextlib.ExitStack() as stack:
        while left or running:
            while left and len(running) < len(os.sched_getaffinity(0)):
                name, work = left.popleft()
                child = stack.enter_context(Child(name, work))
                running[child.receiver] = name, child
            ready = wait(list(running), PATIENCE)
            if not ready:
                raise _too_late(", ".join(name for name, _ in running.values()), PATIENCE)
            for receiver in ready:
                assert isinstance(receiver, Connection)
                name, child = running[receiver]
                for result in child.receive(progress):
                    done[name] = result
                    del running[receiver]
    return {name: done[name] for name in works}


@contextlib.contextmanager
def meanwhile(works: Mapping[str, Callable[[Progress], object]], patience: float) -> Iterator[None]:
    """Do pieces of work in children beside what is done here; what fails there is let be."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(name, work)) for name, work in works.items()]
        yield
        for child in children:
            with contextlib.suppress(Exception):
                child.result(patience=patience)


def _too_late(name: str, patience: float) -> CompileError:
    return CompileError(f"{name} was not made within {patience:.0f} s; build it again")


def _end_with(parent: int) -> None:
    """Have this process end when its parent does: nobody waits for its work then."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _work(sender: Connection, work: Callable[[Progress], Any]) -> NoReturn:
    """Do the work and send its result; ends the process."""
    try:
        gc.disable()  # the parent's garbage, such as GPU memory, is for the parent to free
        env.keep_cuda_source()
        message = pickle.dumps(("result", work(lambda stage: sender.send(("progress", stage)))))
    except BaseException as error:
        message = pickle.dumps(("error", (_portable(error), traceback.format_exc())))
    try:
        sender.send_bytes(message)
    finally:
        os._exit(0)


def _portable(error: BaseException) -> BaseException:
    """Return an error that can be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return CompileError(f"{type(error).__name__}: {error}")
    return error
