"""Runs that were checked, so that others like them need not be.

A run is like another if its tensors have the same shapes, strides and dtypes, all else that it was
given is the same object, and rows begin where kernels can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import torch

from tvm_attn.runtime.device import ROW_BYTES

Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, dtype and device of a tensor."""
Launches = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""Kernels, and their arguments between the inputs and the outputs."""


def signature(tensor: torch.Tensor) -> Signature:
    """Return what the checks of a run look at."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def is_alike(tensor: Any, accepted: Signature) -> bool:
    """Whether a tensor is like one that was accepted; its rows begin at multiples of 16 bytes."""
    return (
        type(tensor) is torch.Tensor
        and tensor.shape == accepted[0]
        and tensor.stride() == accepted[1]
        and tensor.dtype is accepted[2]
        and tensor.device == accepted[3]
        and tensor.data_ptr() % ROW_BYTES == 0
    )


def is_plain(options: tuple[Any, ...], params: Mapping[str, Any]) -> bool:
    """Whether there is no tensor among options and parameters: its content may change."""
    return not any(isinstance(given, torch.Tensor) for given in (*options, *params.values()))


class AcceptedRun:
    """A run of a plan that was checked, and what is passed to kernels in runs like it.

    Parameters
    ----------
    inputs : tuple of torch.Tensor
        q, k and v, as they were given.
    options : tuple
        Scales, and the base of the LSE.
    params : mapping
        The variant's parameters.
    launches : list
        What is launched.

    Attributes
    ----------
    launches : list
        As given.
    out : Signature, optional
        Of results that the caller had room for.
    """

    out: Signature | None = None

    def __init__(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: tuple[Any, ...],
        params: Mapping[str, Any],
        launches: Launches,
    ):
        self._q, self._k, self._v = map(signature, inputs)
        self._options = options
        self._params = dict(params)
        self.launches = launches

    def is_like(
        self, q: Any, k: Any, v: Any, options: tuple[Any, ...], params: Mapping[str, Any]
    ) -> bool:
        """Whether a run is like this one."""
        return (
            all(map(is_, options, self._options))
            and params.keys() == self._params.keys()
            and all(params[name] is value for name, value in self._params.items())
            and is_alike(q, self._q)
            and is_alike(k, self._k)
            and is_alike(v, self._v)
        )
