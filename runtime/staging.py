"""Host arrays to a device: in one block, by one copy, without waiting for anything.

The copy leaves from pinned memory. Torch keeps what is given back of it until the copies that read
it are done, an event for each, so that there is a ring of buffers that grows before it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from tvm_attn.runtime.buffers import Ints

ALIGNMENT = 16
"""Arrays begin at multiples of so many bytes."""

HostArray = Ints | torch.Tensor
"""What is copied: int32 arrays of one or two axes, and tensors of any dtype; all contiguous."""


class Copies:
    """Copies of arrays on a device, queued on its current stream.

    Parameters
    ----------
    device : torch.device
        A GPU; on the CPU, the copy is immediate.
    arrays : sequence
        Arrays on the host, of at least one axis. They may change once this has returned.

    Attributes
    ----------
    block : torch.Tensor
        The memory that the copies share.
    """

    def __init__(self, device: torch.device, arrays: Sequence[HostArray]):
        contents = [_as_bytes(array) for array in arrays]
        sizes = (-(-len(content) // ALIGNMENT) * ALIGNMENT for content in contents)
        *begins, size = accumulate(sizes, initial=0)
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        host = staged.numpy()
        for content, begin in zip(contents, begins, strict=True):
            host[begin : begin + len(content)] = content
        self.block = torch.empty(size, dtype=torch.uint8, device=device)
        self.block.copy_(staged, non_blocking=True)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._copies = {
            id(array): self._view(array, begin) for array, begin in zip(arrays, begins, strict=True)
        }

    def of(self, array: HostArray) -> torch.Tensor:
        """Return the copy of one of the arrays."""
        return self._copies[id(array)]

    def _view(self, array: HostArray, begin: int) -> torch.Tensor:
        """Return the part of the block that begins at this byte, shaped like an array."""
        if isinstance(array, torch.Tensor):
            dtype, strides = array.dtype, array.stride()
        else:
            dtype, strides = torch.int32, (1,) if array.ndim == 1 else (array.shape[1], 1)
        if dtype not in self._typed:
            self._typed[dtype] = self.block.view(dtype)
        return self._typed[dtype].as_strided(array.shape, strides, begin // dtype.itemsize)


def _as_bytes(array: HostArray) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if isinstance(array, torch.Tensor):
        return array.reshape(-1).view(torch.uint8).numpy()
    return array.reshape(-1).view(np.uint8)
