"""A plan as kernels read it: which arrays each launch takes, and where they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from tvm_attn.runtime.device import current_index, on_device, raw_stream

if TYPE_CHECKING:
    from tvm_attn.runtime.accepted import AcceptedRun
    from tvm_attn.runtime.device_memory import DeviceMemory
    from tvm_attn.runtime.fixed import FixedMemory


@dataclass(eq=False)
class Launch:
    """What the launch of one family's kernel takes of a plan.

    ``indices`` are the work list and the batch, ``partials`` the room for partial states (and, on
    a GPU, the counters of the parts that have arrived, and how many CTAs share an item, where there
    is a choice), each in the kernel's order.
    """

    family: str
    indices: tuple[Any, ...]
    partials: tuple[Any, ...]

    @cached_property
    def packed(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Both, with what is on a GPU as tensors that are passed fastest."""
        return tuple(map(pack, self.indices)), tuple(map(pack, self.partials))


def pack(value: Any) -> Any:
    """Return a tensor on a GPU as one that is passed fastest, and anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    import tvm_ffi

    return tvm_ffi.from_dlpack(value)


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
        Of a GPU: the memory that the plan owns besides `there`.
    there : DeviceMemory, optional
        Of a GPU: where the arrays are.
    accepted : AcceptedRun, optional
        The last run that was checked.
    moved : bool
        Whether it is used on another stream than it was made for.
    used : tuple of int
        The GPU and the address of the stream of the last run; negative before the first.
    turn : RLock, optional
        Of the CPU: what the kernels of a run hold if they write partial states, of all threads.
    """

    device: torch.device
    launches: list[Launch]
    params: dict[str, list[Any]]
    ones: torch.Tensor
    stream: torch.cuda.Stream | None = None
    memory: tuple[torch.Tensor, ...] = ()
    there: DeviceMemory | None = None
    accepted: AcceptedRun | None = None
    moved: bool = False
    used: tuple[int, int] = (-1, -1)
    turn: Any = None
    _unread: torch.Tensor | None = None

    @cached_property
    def packed_ones(self) -> Any:
        """`ones` as they are passed fastest."""
        return pack(self.ones)

    @property
    def fixed(self) -> FixedMemory | None:
        """Where the arrays of a plan with limits stay."""
        return None if self.there is None else self.there.fixed

    def unread_lse(self, rows: int, heads: int) -> Any:
        """Return room for an LSE of so many rows at least that nobody reads."""
        if self.there is not None:
            return self.there.unread_lse(rows)
        if self._unread is None:
            self._unread = torch.empty((rows, heads), dtype=torch.float32, device="cpu")
        return self._unread

    def stays(self) -> bool:
        """Whether a plan that is made now may have it again.

        That is, if no graph is captured, and the stream it was made for is the current one still.
        """
        stream = self.stream
        if stream is None:
            return True
        index = self.device.index
        return (
            not self.moved
            and current_index() == index
            and raw_stream(index) == stream.cuda_stream
            and not is_capturing_here()
        )

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Let work on `stream` use the arrays, after what is queued on the stream before it.

        Not while a graph is captured: a graph cannot wait for work outside of it, and whoever
        captures one has waited for that work before.
        """
        if self.stream is None or stream == self.stream or is_capturing(self.device):
            return
        stream.wait_stream(self.stream)
        for memory in (*self.memory, *(() if self.there is None else self.there.memory)):
            memory.record_stream(stream)
        self.stream, self.moved = stream, True


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the device's current stream."""
    if device.type != "cuda":
        return False
    if current_index() == device.index:
        return bool(is_capturing_here())
    with on_device(device):
        return bool(is_capturing_here())


is_capturing_here: Any = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether a CUDA graph is captured on the current stream, without a call around it."""
