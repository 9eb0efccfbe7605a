"""Memory for plan arrays: named, growing, and handed on from a dead plan to the next."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
"""Plan arrays live on the host, where numpy allocates and slices fastest."""


class Buffers:
    """Named int32 arrays whose memory is kept from one plan to the next."""

    def __init__(self) -> None:
        self._memory: dict[str, Ints] = {}

    def take(self, name: str, length: int, *row: int) -> Ints:
        """Return an array of `length` rows, with undefined content.

        What was taken under this name before shares the memory.
        """
        memory = self._memory.get(name)
        if memory is None or memory.shape[0] < length:
            memory = self._memory[name] = np.empty((length or 1, *row), np.int32)
        return memory[:length]

    def is_idle(self) -> bool:
        """Whether nobody holds an array that was taken."""
        return all(holders == HOLDERS_OF_IDLE for holders in self._holders())

    def _holders(self) -> list[int]:
        return [sys.getrefcount(memory) for memory in self._memory.values()]


def _holders_of_idle() -> int:
    """Count the references to memory that only its `Buffers` hold, as this Python counts them."""
    probe = Buffers()
    probe.take("probe", 1)
    return probe._holders()[0]


HOLDERS_OF_IDLE = _holders_of_idle()


class BufferPool:
    """Buffers of dead plans, for plans to come: fresh memory is slow at its first touch."""

    def __init__(self) -> None:
        self._idle: deque[Buffers] = deque(maxlen=2)

    def take(self) -> Buffers:
        """Return buffers that nobody uses."""
        while True:
            try:
                buffers = self._idle.pop()
            except IndexError:
                return Buffers()
            if buffers.is_idle():
                return buffers

    def give(self, buffers: Buffers) -> None:
        """Hand in the buffers of a plan that is no more."""
        self._idle.append(buffers)
