"""Scales of a run: numbers, and one for each KV head, as kernels take them."""

from __future__ import annotations

from typing import Any

import torch

from tvm_attn.bsr import check_strided
from tvm_attn.errors import DTypeError, ShapeError, VariantError
from tvm_attn.runtime.device import check_device
from tvm_attn.runtime.params import float32
from tvm_attn.runtime.placement import Placement, is_capturing

KEPT = 256
"""Tensors that are kept of scales given as numbers: two for each layer of a large model."""


class HeadScales:
    """Scales of K and V as kernels take them: float32 ``[num_kv_heads]``, on the plan's device.

    Parameters
    ----------
    num_heads : int
        KV heads.
    """

    def __init__(self, num_heads: int):
        self._num_heads = num_heads
        self._filled: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, name: str, scale: Any, placement: Placement) -> torch.Tensor:
        """Return a scale that is a number, or a tensor of one number or of all heads.

        Nothing is read back from a device.

        Raises
        ------
        DTypeError, ShapeError
            If it is none of these; `name` is in the message.
        """
        if not isinstance(scale, torch.Tensor):
            return self._fill(number(name, scale), placement)
        if scale.dtype != torch.float32:
            raise DTypeError(f"{name} has dtype {scale.dtype}; it must be float32")
        check_strided(name, scale)
        if scale.numel() == 1 and scale.is_cpu:
            return self._fill(scale.item(), placement)
        check_device(name, scale, placement.device)
        if scale.numel() == 1:
            return scale.reshape(1).expand(self._num_heads).contiguous()
        if scale.shape != (self._num_heads,):
            raise ShapeError(f"{name} has shape {tuple(scale.shape)}, expected ({self._num_heads})")
        return scale.contiguous()

    def _fill(self, value: float, placement: Placement) -> torch.Tensor:
        """Return a tensor of a value, kept for other runs on the same stream.

        What a graph reads lives as long as the graph: while one is captured, a tensor is its own.
        """
        capturing = is_capturing(placement.device)
        key = (value, placement.device, placement.stream)
        filled = None if capturing else self._filled.get(key)
        if filled is None:
            shape = (self._num_heads,)
            filled = torch.full(shape, value, dtype=torch.float32, device=placement.device)
            if not capturing:
                if len(self._filled) >= KEPT:
                    self._filled.clear()
                self._filled[key] = filled
        return filled


def number(name: str, value: Any) -> float:
    """Return a scale given as a number, or as a tensor or array of one on the host.

    Raises
    ------
    DTypeError, VariantError
        If it is no number, or one that does not fit float32.
    """
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        raise DTypeError(
            f"{name} is a tensor on {value.device}; it must be a number, which can be had without "
            "waiting for the device"
        )
    try:
        if isinstance(value, str | bool):
            raise TypeError
        return float32(name, value)
    except VariantError:
        raise
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{name}={value!r} must be a number") from error
