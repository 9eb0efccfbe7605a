"""Copies from pinned memory to a GPU by direct calls of the driver: torch's take longer.

Torch does not know of them. So memory that is still being read must not go back to it: what is let
go meanwhile is kept here until it is not.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

DRIVER = "libcuda.so.1"
RELAXED = 2
"""The mode of a thread in which what it asks does not end a capture, its own or another's."""
NOT_READY = 600


class Driver(NamedTuple):
    """Functions of the driver; each returns 0 if it succeeds."""

    copy: Callable[..., int]
    record: Callable[..., int]
    query: Callable[..., int]
    exchange_mode: Callable[..., int]


@functools.cache
def driver() -> Driver | None:
    """Return the driver, which torch has loaded where there is a GPU; None if it is not found."""
    try:
        library = ctypes.CDLL(DRIVER)
        return Driver(
            library.cuMemcpyHtoDAsync_v2,
            library.cuEventRecord,
            library.cuEventQuery,
            library.cuThreadExchangeStreamCaptureMode,
        )
    except (OSError, AttributeError):
        return None


class Upload:
    """Copies from pinned memory to a GPU, on one stream, and the event that says they are made.

    Parameters
    ----------
    source : torch.Tensor
        Pinned memory: int32, contiguous.
    target : torch.Tensor
        A GPU's, at least as large.
    stream : torch.cuda.Stream
        Of that GPU.

    Attributes
    ----------
    target, stream
        As given.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor, stream: Any):
        self.target, self.stream = target, stream
        self._source = source
        let_go()
        event: Any = torch.cuda.Event
        self._event = event()
        self._event.record(stream)  # there is none before
        self._driver = driver()
        self._size = ctypes.c_size_t()
        queue, made = (ctypes.c_void_p(x) for x in (stream.cuda_stream, self._event.cuda_event))
        ends = (ctypes.c_void_p(x.data_ptr()) for x in (target, source))
        self._copy = (*ends, self._size, queue)
        self._mark = (made, queue)

    def start(self, words: int) -> None:
        """Queue a copy of the first words, that GPU being the current one; nothing waits."""
        library = self._driver
        self._size.value = words * 4
        if library is None or library.copy(*self._copy) or library.record(*self._mark):
            self.target[:words].copy_(self._source[:words], non_blocking=True)
            self._event.record(self.stream)

    def is_over(self) -> bool:
        """Whether the last copy has been made; while a graph is captured as well.

        This is asked whenever a plan is collected, and torch's question would end the capture.
        """
        library = self._driver
        if library is None:
            return bool(self._event.query())
        mode = ctypes.c_int(RELAXED)
        library.exchange_mode(ctypes.byref(mode))
        answer = library.query(self._mark[0])
        library.exchange_mode(ctypes.byref(mode))
        return answer != NOT_READY

    def __del__(self) -> None:
        """Keep the memory while it is read."""
        if not (sys.is_finalizing() or self.is_over()):
            _kept.append(self)


_kept: deque[Upload] = deque()
"""Uploads that nobody had any more before they were over."""


def let_go() -> None:
    """Let go of what was kept, as far as it has been read."""
    while _kept and _kept[0].is_over():
        _kept.popleft()
