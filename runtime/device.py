"""Devices of tensors: whether they are where a kernel runs, and as it reads them."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from tvm_attn.errors import DTypeError, ShapeError

CPU = torch.device("cpu")
ROW_BYTES = 16
"""What CUDA kernels read and write rows in."""


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise `ShapeError` if a tensor is not where the kernel runs."""
    if tensor.device != device:
        raise elsewhere(name, tensor, device)


def elsewhere(name: str, tensor: torch.Tensor, device: torch.device) -> ShapeError:
    """Return the error of a tensor that is not where the kernel runs."""
    where = "the CPU" if device == CPU else str(device)
    return ShapeError(f"{name} is on {tensor.device}, the kernel runs on {where}; move it there")


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raise a typed error if a tensor cannot be written to: gradients, or elements that are one.

    Elements may be apart in ways that are not seen: axes whose steps interlace.
    """
    if tensor.requires_grad:
        raise DTypeError(
            f"{name} requires gradients, which results do not have; pass {name}.detach()"
        )
    if not tensor.is_contiguous() and not _nests(tensor):
        raise ShapeError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: different "
            f"results would be written to one place; pass {name}.clone() or memory of its own"
        )


def _nests(tensor: torch.Tensor) -> bool:
    """Whether each axis steps over all that faster ones reach: then no two elements are one."""
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return False
            reach += stride * (length - 1)
    return True


def check_rows(**tensors: torch.Tensor) -> None:
    """Raise `ShapeError` if a row of a tensor, its innermost axis, begins between 16 bytes."""
    for name, tensor in tensors.items():
        if not has_aligned_rows(tensor):
            raise ShapeError(
                f"{name} has rows that do not begin at multiples of {ROW_BYTES} bytes (address "
                f"{tensor.data_ptr():#x}, strides {tensor.stride()}); pass {name}.contiguous(), or "
                f"{name}.clone() if it is contiguous"
            )


def has_contiguous_rows(*tensors: torch.Tensor) -> bool:
    """Whether tensors are contiguous and aligned, as rows of head dims then are: a quick look."""
    for tensor in tensors:
        if tensor.data_ptr() % ROW_BYTES or not tensor.is_contiguous():
            return False
    return True


def has_aligned_rows(tensor: torch.Tensor) -> bool:
    """Whether every row of a tensor, its innermost axis, begins at a multiple of 16 bytes."""
    if tensor.data_ptr() % ROW_BYTES:
        return False
    size = tensor.element_size()
    if tensor.is_contiguous() and tensor.shape[-1] * size % ROW_BYTES == 0:
        return True
    steps = zip(tensor.shape[:-1], tensor.stride(), strict=False)
    return all(length < 2 or stride * size % ROW_BYTES == 0 for length, stride in steps)


current_index: Any = getattr(torch._C, "_cuda_getDevice", None)
"""Returns the index of the current GPU, for half of what torch's own function takes."""


def stream_handle(device: torch.device) -> int:
    """Return the address of a GPU's current stream, for a tenth of what the stream itself costs."""
    handle: int = raw_stream(device.index)
    return handle


raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Returns that of a GPU by its index: what most runs ask for, without a call around it."""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a GPU's current stream: looked up once, since that takes a while."""
    key = (device, stream_handle(device))
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def access_unit(*tensors: torch.Tensor) -> int:
    """Return how many elements of a row a kernel may access at once in these tensors of one dtype.

    On a GPU 16 bytes of them if all rows are whole and aligned units of that size, else one. On a
    CPU, which needs no alignment, one.
    """
    if tensors[0].is_cpu:
        return 1
    unit = ROW_BYTES // tensors[0].element_size()
    is_whole = all(x.shape[-1] % unit == 0 and has_aligned_rows(x) for x in tensors)
    return unit if is_whole else 1


guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
"""What torch's compiler looks at tensors with, and makes them, where there is that."""
_empty_strided_cuda: Any = getattr(guards, "_empty_strided_cuda", None)
"""The latter, without torch's dispatcher."""


class NewTensor(NamedTuple):
    """A compact tensor to be made: of its shape, strides and dtype, or else like another one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    like: torch.Tensor | None


def new_rows(
    count: int, row: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> NewTensor:
    """Return what is needed for so many rows of a shape."""
    shape = (count, *row)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    like = None
    if _empty_strided_cuda is None or device.type != "cuda":
        like = torch.empty((1,) * len(shape), dtype=dtype, device=device).expand(shape)
    return NewTensor(shape, strides, dtype, like)


def new_tensor(wanted: NewTensor) -> torch.Tensor:
    """Make a tensor; on a GPU, which is the current one, in two thirds of `torch.empty`'s time."""
    shape, strides, dtype, like = wanted
    if like is not None:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    made: torch.Tensor = _empty_strided_cuda(shape, strides, dtype)
    return made


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current device for the time of a ``with`` block, unless it is."""
    if device.type != "cuda" or device.index == current_index():
        return nullcontext()
    return torch.cuda.device(device)


def located(device: torch.device) -> torch.device:
    """Return a device with its index: of ``cuda`` alone, the current GPU, if there is one."""
    if str(device) != "cuda" or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())
