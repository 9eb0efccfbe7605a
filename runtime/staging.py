"""Host arrays to a device: in one block, by one copy, without waiting for anything.

The copy leaves from pinned memory. Torch keeps what is given back of it until the copies that read
it are done, an event for each, so that there is a ring of buffers that grows before it waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tvm_attn.runtime.buffers import Ints
from tvm_attn.worklist import READ_BEYOND

ALIGNMENT = 16
"""Arrays begin at multiples of so many bytes."""
WORDS = ALIGNMENT // 4

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
        self.block = torch.empty(size + READ_BEYOND, dtype=torch.uint8, device=device)
        self.block[:size].copy_(staged, non_blocking=True)
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


class Room:
    """Room on a device for int32 arrays, into which they are copied again and again.

    Parameters
    ----------
    device : torch.device
        A GPU; on the CPU, copies are immediate.
    shapes : mapping
        The largest shape of each array; of the last one, only what is used is copied.

    Attributes
    ----------
    block : torch.Tensor
        The memory, zero at first.
    """

    def __init__(self, device: torch.device, shapes: Mapping[Any, tuple[int, ...]]):
        sizes = (-(-math.prod(shape) // WORDS) * WORDS for shape in shapes.values())
        *begins, size = accumulate(sizes, initial=0)
        self._begins: dict[Any, int] = dict(zip(shapes, begins, strict=True))
        self.block = torch.zeros(max(size, 1), dtype=torch.int32, device=device)
        self._views = {
            name: self.block[begin : begin + math.prod(shapes[name])].view(shapes[name])
            for name, begin in self._begins.items()
        }

    def of(self, name: Any) -> torch.Tensor:
        """Return an array, in its largest shape."""
        return self._views[name]

    def begin(self, name: Any) -> int:
        """Return the word at which an array begins."""
        return self._begins[name]

    def fill(self, arrays: Mapping[Any, Ints]) -> None:
        """Copy arrays here, on the current stream; they may change once this has returned."""
        end = max((self._begins[name] + array.size for name, array in arrays.items()), default=0)
        staged = torch.empty(end, dtype=torch.int32, pin_memory=self.block.device.type == "cuda")
        host = staged.numpy()
        for name, array in arrays.items():
            begin = self._begins[name]
            host[begin : begin + array.size] = array.reshape(-1)
        self.block[:end].copy_(staged, non_blocking=True)


def _as_bytes(array: HostArray) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if isinstance(array, torch.Tensor):
        return array.reshape(-1).view(torch.uint8).numpy()
    return array.reshape(-1).view(np.uint8)
