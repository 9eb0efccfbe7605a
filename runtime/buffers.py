"""Memory of the host for the arrays of plans: laid out once, handed on from dead plans to the next.

The planner writes there what a device then has by one copy. Memory is handed on once nobody holds
an array of it and its copy has been made: nothing ever waits for a copy, there is more memory then.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tvm_attn.runtime.upload import Upload
from tvm_attn.worklist import HEADER_WORDS

ALIGNMENT = 16
"""Arrays begin at multiples of so many bytes."""
WORDS = ALIGNMENT // 4
KEPT = 4
"""Idle blocks of a layout that are kept; one, if they are large."""
LARGE = 1 << 22
"""Words of a large block."""

Ints = npt.NDArray[np.int32]
"""Plan arrays live on the host, where numpy slices fastest."""


class Layout:
    """Where int32 arrays are in a block of memory.

    Parameters
    ----------
    shapes : mapping
        Of each array, by name.
    lists : mapping, optional
        Names of arrays that are used together, by what they are.

    Attributes
    ----------
    shapes, lists : dict
        As given.
    begins : dict
        The word at which each array begins.
    size : int
        Words of the block, at least 1.
    """

    def __init__(
        self,
        shapes: Mapping[Any, tuple[int, ...]],
        lists: Mapping[Any, tuple[Any, ...]] | None = None,
    ):
        sizes = (-(-math.prod(shape) // WORDS) * WORDS for shape in shapes.values())
        *begins, size = accumulate(sizes, initial=0)
        self.shapes, self.lists = dict(shapes), dict(lists or {})
        self.begins: dict[Any, int] = dict(zip(shapes, begins, strict=True))
        self.size = max(size, 1)


class Block:
    """A block of the host's memory, zero at first, for the arrays of one plan.

    Parameters
    ----------
    layout : Layout
        Where the arrays are.
    pool : Pool
        Where it goes back to.
    pinned : bool
        Whether a GPU is to copy it.

    Attributes
    ----------
    memory : torch.Tensor
        All of it.
    arrays : dict of np.ndarray
        The arrays, by name. What a plan holds of them are slices.
    packed : dict
        The same, as compiled functions take them fastest.
    lists : dict
        Those of each of the layout's lists, and the same packed.
    header : np.ndarray
        What the planner reports; `packed_header` is the same.
    used : frozenset
        Lists that the planner wrote.
    orders : dict
        What the planner is told of the block, by whoever tells it.
    device_memory : object, optional
        Memory of a device that goes with it.
    """

    def __init__(self, layout: Layout, pool: Pool, pinned: bool):
        self.layout, self.pool = layout, pool
        self.memory = torch.zeros(layout.size, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._words: Ints = self.memory.numpy()
        self.arrays: dict[Any, Ints] = {
            name: self._words[begin : begin + math.prod(shape)].reshape(shape)
            for (name, begin), shape in zip(
                layout.begins.items(), layout.shapes.values(), strict=True
            )
        }
        self.packed = {name: pack_host(array) for name, array in self.arrays.items()}
        self.lists = {
            key: (
                tuple(self.arrays[name] for name in names),
                tuple(self.packed[name] for name in names),
            )
            for key, names in layout.lists.items()
        }
        self.header: Ints = np.zeros(HEADER_WORDS, np.int32)
        self.packed_header = pack_host(self.header)
        self.used: frozenset[Any] = frozenset()
        self.orders: dict[Any, tuple[Any, ...]] = {}
        self.device_memory: Any = None
        self._scratch, self._scratch_words = self.packed_header, 0
        self._upload: Upload | None = None
        self._holders = sys.getrefcount(self._words)

    def scratch(self, words: int) -> Any:
        """Return room of at least so many words, of any content."""
        if words > self._scratch_words:
            self._scratch, self._scratch_words = pack_host(np.empty(words, np.int32)), words
        return self._scratch

    def is_held(self) -> bool:
        """Whether somebody holds a slice of an array."""
        return sys.getrefcount(self._words) != self._holders

    def is_sent(self) -> bool:
        """Whether no copy is under way."""
        return self._upload is None or self._upload.is_over()

    def send(self, target: torch.Tensor, words: int, stream: Any = None) -> None:
        """Copy the first words to a device: of a GPU, the current one, on its current `stream`."""
        if stream is None:
            target[:words].copy_(self.memory[:words])
            return
        upload = self._upload
        if upload is None or upload.target is not target or upload.stream is not stream:
            upload = self._upload = Upload(self.memory, target, stream)
        upload.start(words)

    def give_back(self) -> None:
        """Leave it to plans to come."""
        self.pool.give(self)


class Pool:
    """Blocks of one layout that no plan has, the one given back first first.

    Any thread may take and give.

    Parameters
    ----------
    layout : Layout
        Where the arrays are.
    pinned : bool
        Whether a GPU is to copy them.
    size : object, optional
        What they have room for, in terms of whoever laid them out.
    """

    def __init__(self, layout: Layout, pinned: bool, size: Any = None):
        self.layout = layout
        self.size = size
        self._pinned = pinned
        self._idle: deque[Block] = deque()

    def take(self) -> Block:
        """Return a block that nobody uses."""
        block = self._oldest()
        if block is None or block.is_held():
            return Block(self.layout, self, self._pinned)
        return block

    def give(self, block: Block) -> None:
        """Take back the block of a plan that is no more."""
        self._idle.append(block)
        if len(self._idle) > (KEPT if self.layout.size < LARGE else 1):
            self._oldest()

    def _oldest(self) -> Block | None:
        """Take the oldest block out, unless it is still being copied."""
        try:
            block = self._idle.popleft()
        except IndexError:
            return None
        if block.is_sent():
            return block
        self._idle.appendleft(block)
        return None


def pack_host(array: npt.NDArray[Any] | torch.Tensor) -> Any:
    """Return an array as compiled functions take it fastest."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(array)
