"""Host arrays to a device: in one block, by one copy, without waiting for anything.

The copy leaves from pinned memory. Torch keeps what is given back of it until the copies that read
it are done, an event for each, so that there is a ring of buffers that grows before it waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tvm_attn.runtime.buffers import ALIGNMENT, Ints, Layout
from tvm_attn.worklist import READ_BEYOND

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
        staged = torch.empty(
            size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
        )
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
    layout : Layout
        Where the arrays are.

    Attributes
    ----------
    block : torch.Tensor
        The memory, zero at first.
    """

    def __init__(self, device: torch.device, layout: Layout):
        self.layout = layout
        with torch.inference_mode(mode=False):  # else plans outside of that mode could not write it
            self.block = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self._views: dict[Any, torch.Tensor] = {}

    def of(self, name: Any) -> torch.Tensor:
        """Return an array, in its largest shape."""
        if name not in self._views:
            begin, shape = self.layout.begins[name], self.layout.shapes[name]
            self._views[name] = self.block[begin : begin + math.prod(shape)].view(shape)
        return self._views[name]

    def begin(self, name: Any) -> int:
        """Return the word at which an array begins."""
        return self.layout.begins[name]


def copy_there(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor on its device's current stream, without waiting; it may then change.

    What is on the host already leaves from a pinned copy.
    """
    if values.is_cpu and target.is_cuda:
        pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        values = pinned.copy_(values)
    target.copy_(values, non_blocking=True)


def _as_bytes(array: HostArray) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if isinstance(array, torch.Tensor):
        return array.reshape(-1).view(torch.uint8).numpy()
    return array.reshape(-1).view(np.uint8)
