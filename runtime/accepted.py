"""Runs that were checked, so that others like them need not be.

A run is like another if its tensors have the same shapes, strides and dtypes, all else that it was
given is the same object, and rows begin where kernels can read them. Where torch's compiler has
guards, these see at once that tensors are alike; if they do not, it is looked at one by one. What a
graph reads lives as long as the graph: while one is captured, tensors that were made of scales are
its own. A plan in the memory of one before, of as many queries, has its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tvm_attn.runtime.device import ROW_BYTES, NewTensor, guards
from tvm_attn.runtime.placement import is_capturing

if TYPE_CHECKING:
    from tvm_attn.runtime.plan import Plan

Signature = tuple[torch.Size, tuple[int, ...] | None, torch.dtype, int]
"""Shape, strides (None if contiguous) and dtype of a tensor, and its GPU, -1 on the host."""
Launches = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""Kernels, and their arguments between the inputs and the outputs."""


def signature(tensor: torch.Tensor) -> Signature:
    """Return what the checks of a run look at."""
    strides = None if tensor.is_contiguous() else tensor.stride()
    return tensor.shape, strides, tensor.dtype, tensor.get_device()


def is_alike(tensor: Any, accepted: Signature) -> bool:
    """Whether a tensor is like one that was accepted; its rows begin at multiples of 16 bytes."""
    shape, strides, dtype, device = accepted
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_nested  # which has no shape
        and tensor.shape == shape
        and (tensor.is_contiguous() if strides is None else tensor.stride() == strides)
        and tensor.dtype is dtype
        and tensor.get_device() == device
        and (device >= 0 or tensor.is_cpu)
        and not tensor.data_ptr() % ROW_BYTES
    )


def never(*tensors: Any) -> bool:
    """Say that tensors may not be alike."""
    return False


def guard(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return what is sure at once, of most tensors like these, that they are; not of alignment.

    It is not to be asked about a nested tensor, at which guards end the process.
    """
    make: Any = getattr(guards, "TensorGuards", None)
    if make is None or any(type(tensor) is not torch.Tensor for tensor in tensors):
        return never
    sizes = {
        "dynamic_dims_sizes": [list(tensor.shape) for tensor in tensors],
        "dynamic_dims_strides": [list(tensor.stride()) for tensor in tensors],
    }
    try:
        check: Callable[..., bool] = make(*tensors, **sizes).check
    except (TypeError, RuntimeError, SystemError):  # of another version
        return never
    return check


def is_plain(scales: tuple[Any, ...], params: Mapping[str, Any]) -> bool:
    """Whether scales and parameters are numbers: the content of all else may change."""
    given = (*scales, *params.values())
    return all(value is None or isinstance(value, int | float | np.generic) for value in given)


class AcceptedRun:
    """A run of a plan that was checked, and what is passed to kernels in runs like it.

    Parameters
    ----------
    inputs : tuple of torch.Tensor
        q, k and v, as they were given.
    scales : tuple
        Those of logits, queries, keys and values.
    lse_base : str
        Of the run.
    params : mapping
        The variant's parameters.
    launches : list
        What is launched.
    rows : NewTensor
        What is needed for results.
    most : int
        Pages of the caches, or tokens of ragged K and V.

    Attributes
    ----------
    launches, rows, most
        As given.
    lacks_pages : bool
        Whether K or V are not as kernels take them, but to be made so.
    source : object, optional
        The plan's launches, if plans to come may have them too.
    unread : object, optional
        Room for an LSE that nobody reads.
    lse : NewTensor, optional
        What is needed for an LSE.
    """

    lse: NewTensor | None = None
    source: object = None
    unread: Any = None
    lacks_pages = False
    _out: Signature | None = None

    def __init__(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scales: tuple[Any, Any, Any, Any],
        lse_base: str,
        params: Mapping[str, Any],
        launches: Launches,
        rows: NewTensor,
        most: int,
    ):
        self._q, self._k, self._v = map(signature, inputs)
        self._are_known, self._is_known_out = guard(*inputs), never
        self._device = inputs[0].device
        self._scales = scales
        self._is_filled = scales[2] is not None or scales[3] is not None
        self._lse_base = lse_base
        self._params = dict(params)
        self.launches, self.rows, self.most = launches, rows, most

    def is_like(
        self,
        q: Any,
        k: Any,
        v: Any,
        scales: tuple[Any, Any, Any, Any],
        lse_base: str,
        params: Mapping[str, Any],
    ) -> bool:
        """Whether a run is like this one."""
        mine = self._scales
        return (
            scales[0] is mine[0]
            and scales[1] is mine[1]
            and scales[2] is mine[2]
            and scales[3] is mine[3]
            and lse_base is self._lse_base
            and (self._has(params) if params else not self._params)
            and (
                (
                    type(q) is type(k) is type(v) is torch.Tensor
                    and not (q.is_nested or k.is_nested or v.is_nested)  # guards would abort
                    and self._are_known(q, k, v)
                    and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ROW_BYTES
                )
                or (is_alike(q, self._q) and is_alike(k, self._k) and is_alike(v, self._v))
            )
            and not (self._is_filled and is_capturing(self._device))
        )

    def writes(self, out: Any) -> bool:
        """Whether there is room for results in a tensor, as there was in one that was checked."""
        if self._out is None or type(out) is not torch.Tensor:
            return False
        if out.is_nested or out.requires_grad:
            return False
        if self._is_known_out(out) and not out.data_ptr() % ROW_BYTES:
            return True
        return is_alike(out, self._out)

    def write(self, out: torch.Tensor) -> None:
        """Take note that there is room for results in a tensor."""
        self._out, self._is_known_out = signature(out), guard(out)

    def suits(self, plan: Plan, launches: object) -> bool:
        """Whether it is a run of another plan, with the same launches, as well."""
        return (
            self.source is launches
            and plan.nnz_qo == self.rows.shape[0]
            and plan.max_page < self.most
            and (plan.max_page >= 0 or plan.num_kv_tokens <= self.most)
        )

    def _has(self, params: Mapping[str, Any]) -> bool:
        """Whether parameters are the same objects."""
        return params.keys() == self._params.keys() and all(
            params[name] is value for name, value in self._params.items()
        )
