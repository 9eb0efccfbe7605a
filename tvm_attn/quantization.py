"""Bits packed into bytes, under FlashInfer's names. For masks give ``bitorder="little"``.

Results are on the device of the bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tvm_attn.errors import DTypeError, ShapeError, SpecError
from tvm_attn.runtime.device import check_device

Array = torch.Tensor | npt.NDArray[np.generic]


def packbits(x: Array, bitorder: str = "big") -> torch.Tensor:
    """Pack a binary array into bytes, as `numpy.packbits` does.

    Parameters
    ----------
    x : torch.Tensor
        ``[n]``, of which 0 and False are clear bits and anything else is a set one.
    bitorder : {"big", "little"}
        Whether the first of eight elements is the highest or the lowest bit of a byte. The bits of
        attention masks are little-endian.

    Returns
    -------
    torch.Tensor
        uint8 ``[ceil(n / 8)]``; missing elements of the last byte are clear.

    Raises
    ------
    ShapeError
        If `x` is not 1-D.
    SpecError
        If `bitorder` is neither.

    Examples
    --------
    >>> packbits(torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1])).tolist()
    [179, 128]
    """
    bits = _vector(x, "x").to(torch.bool)
    return _pack(torch.nn.functional.pad(bits, (0, -len(bits) % 8)), bitorder)


def segment_packbits(
    x: Array, indptr: Array, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack each segment of a binary array into bytes of its own.

    Parameters
    ----------
    x : torch.Tensor
        ``[indptr[-1]]``, as for `packbits`.
    indptr : torch.Tensor
        int32 or int64 ``[batch + 1]``; segment ``b`` is ``x[indptr[b]:indptr[b + 1]]``. The host
        has to know the size of the result: it waits for an `indptr` on a GPU, and not for one that
        is on the host, where it may be for an `x` on a GPU too.
    bitorder : {"big", "little"}
        As for `packbits`.

    Returns
    -------
    packed : torch.Tensor
        uint8 ``[new_indptr[-1]]``, the bytes of all segments.
    new_indptr : torch.Tensor
        int32 ``[batch + 1]``, where the bytes of each segment begin.

    Raises
    ------
    ShapeError
        If an array is not 1-D, or `indptr` decreases, leaves `x` or is on another GPU.
    DTypeError
        If `indptr` is neither int32 nor int64.
    SpecError
        If `bitorder` is neither.

    Examples
    --------
    >>> packed, new_indptr = segment_packbits(torch.ones(11), torch.tensor([0, 4, 7, 11]))
    >>> packed.tolist(), new_indptr.tolist()
    ([240, 224, 240], [0, 1, 2, 3])
    """
    bits = _vector(x, "x").to(torch.bool)
    begins = _indptr(indptr, bits)
    lengths = begins.diff()
    new_indptr = torch.nn.functional.pad(torch.cumsum((lengths + 7) // 8, 0), (1, 0))
    facts = torch.stack([(lengths < 0).any(), begins[0], begins[-1], new_indptr[-1]])
    decreases, first, last, num_bytes = facts.tolist()  # the one point where the host may wait
    if decreases or first < 0 or last > len(bits):
        raise ShapeError(
            f"indptr must not decrease and stay in 0..{len(bits)} (len(x)), got {indptr}"
        )
    begins, lengths, new_indptr = (
        array.to(bits.device, non_blocking=True) for array in (begins, lengths, new_indptr)
    )
    shift = torch.repeat_interleave(
        8 * new_indptr[:-1] - begins[:-1], lengths, output_size=last - first
    )
    segments = torch.arange(first, last, device=bits.device)
    aligned = bits.new_zeros(8 * num_bytes)
    aligned[segments + shift] = bits[first:last]
    return _pack(aligned, bitorder), new_indptr.to(torch.int32)


def _pack(bits: torch.Tensor, bitorder: str) -> torch.Tensor:
    """Pack bools, their number a multiple of 8."""
    if bitorder not in ("big", "little"):
        raise SpecError(f'bitorder={bitorder!r} must be "big" or "little"')
    weights = 1 << torch.arange(8, device=bits.device)
    if bitorder == "big":
        weights = weights.flip(0)
    bytes_ = bits.view(-1, 8).to(torch.uint8) * weights.to(torch.uint8)
    return bytes_.sum(dim=1, dtype=torch.uint8)


def _vector(x: Array, name: str) -> torch.Tensor:
    tensor = x
    if isinstance(x, np.ndarray):
        tensor = torch.from_numpy(np.require(x, requirements=["C", "W"]))
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"{name} is a {type(x).__name__}; give a torch tensor or a numpy array")
    if tensor.ndim != 1:
        raise ShapeError(f"{name} must be 1-D, got shape {tuple(tensor.shape)}; flatten it")
    return tensor


def _indptr(indptr: Array, bits: torch.Tensor) -> torch.Tensor:
    """Return `indptr` as int64, on the host or where the bits are."""
    begins = _vector(indptr, "indptr")
    if begins.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"indptr has dtype {begins.dtype}; index arrays are int32 or int64")
    if len(begins) == 0:
        raise ShapeError("indptr is empty; without segments it is [0]")
    if not begins.is_cpu:
        check_device("indptr", begins, bits.device)
    return begins.to(torch.int64)
