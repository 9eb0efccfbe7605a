"""A plan as kernels read it: which arrays each launch takes, and where they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tvm_attn.runtime.device import on_device

if TYPE_CHECKING:
    from tvm_attn.runtime.fixed import FixedMemory


class Launch(NamedTuple):
    """What the launch of one family's kernel takes of a plan.

    ``indices`` are the work list and the batch, ``partials`` the room for partial states (and, on
    a GPU, the counters of the parts that have arrived, and how many CTAs share an item, where there
    is a choice), each in the kernel's order.
    """

    family: str
    indices: tuple[Any, ...]
    partials: tuple[Any, ...]


@dataclass
class Placement:
    """The arrays of a plan, on its device.

    Attributes
    ----------
    device : torch.device
        Where they are: on the host numpy arrays, on a GPU tensors in one block.
    launches : list of Launch
        One for each family that has work, on a GPU in the order of `in_order`.
    params : dict of str to list
        Kernel arguments of the plan-time parameters, by parameter.
    ones : torch.Tensor
        float32 ``[num_kv_heads]``, the scales of K and V that have none.
    stream : torch.cuda.Stream, optional
        Of a GPU: the stream that work on these arrays was last queued on.
    memory : tuple of torch.Tensor
        Of a GPU: the memory that the plan owns.
    fixed : FixedMemory, optional
        Of a GPU: where the arrays of a plan with limits stay.
    """

    device: torch.device
    launches: list[Launch]
    params: dict[str, list[Any]]
    ones: torch.Tensor
    stream: torch.cuda.Stream | None = None
    memory: tuple[torch.Tensor, ...] = ()
    fixed: FixedMemory | None = None
    _unread: torch.Tensor | None = None

    @cached_property
    def packed(self) -> tuple[Any, list[Launch]]:
        """`ones` and `launches` with what is on a GPU as tensors that are passed fastest."""
        if self.device.type != "cuda":
            return self.ones, self.launches
        import tvm_ffi

        def pack(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                tvm_ffi.from_dlpack(value) if isinstance(value, torch.Tensor) else value
                for value in values
            )

        [ones] = pack((self.ones,))
        return ones, [Launch(each[0], *map(pack, each[1:])) for each in self.launches]

    def unread_lse(self, shape: tuple[int, int]) -> torch.Tensor:
        """Return room for an LSE that nobody reads, kept for other runs on the same stream.

        What a graph writes lives as long as the graph: while one is captured, it is its own.
        """
        if self._unread is not None and self._unread.shape == shape and not self._is_captured():
            return self._unread
        unread = torch.empty(shape, dtype=torch.float32, device=self.device)
        if not self._is_captured():
            self._unread = unread
        return unread

    def _is_captured(self) -> bool:
        """Whether a graph is captured on the current stream, of the plan's device."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Let work on `stream` use the arrays, after what is queued on the stream before it.

        Not while a graph is captured: a graph cannot wait for work outside of it, and whoever
        captures one has waited for that work before.
        """
        if self.stream is None or stream == self.stream or is_capturing(self.device):
            return
        stream.wait_stream(self.stream)
        for memory in self.memory:
            memory.record_stream(stream)
        self._unread = None
        self.stream = stream


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the device's current stream."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()
