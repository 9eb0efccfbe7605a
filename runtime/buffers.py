"""Memory for plan arrays: named, allocated once, growing, reused by the next plan."""

from __future__ import annotations

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
