"""Bits packed into bytes, under FlashInfer's names. For masks give ``bitorder="little"``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tvm_attn.errors import DTypeError, ShapeError, SpecError

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
        int32 or int64 ``[batch + 1]``; segment ``b`` is ``x[indptr[b]:indptr[b + 1]]``.
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
        If an array is not 1-D, or `indptr` decreases or does not stay inside `x`.
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
    begins = _checked_indptr(indptr, len(bits)).to(bits.device)
    lengths = begins.diff()
    new_indptr = torch.nn.functional.pad(torch.cumsum((lengths + 7) // 8, 0), (1, 0))
    shift = torch.repeat_interleave(8 * new_indptr[:-1] - begins[:-1], lengths)
    segments = torch.arange(int(begins[0]), int(begins[-1]), device=bits.device)
    aligned = bits.new_zeros(8 * int(new_indptr[-1]))
    aligned[segments + shift] = bits[segments]
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


def _checked_indptr(indptr: Array, size: int) -> torch.Tensor:
    begins = _vector(indptr, "indptr")
    if begins.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"indptr has dtype {begins.dtype}; index arrays are int32 or int64")
    begins = begins.to(torch.int64)
    if len(begins) == 0:
        raise ShapeError("indptr is empty; without segments it is [0]")
    if (begins.diff() < 0).any() or begins[0] < 0 or begins[-1] > size:
        raise ShapeError(f"indptr must not decrease and stay in 0..{size} (len(x)), got {indptr}")
    return begins
