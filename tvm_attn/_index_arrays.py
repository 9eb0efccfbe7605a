"""Index arrays of any kind people have, as int32 tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from tvm_attn.errors import DTypeError, PlanError, ShapeError
from tvm_attn.spec import integer

IndexArray = torch.Tensor | npt.NDArray[Any] | Sequence[int]
"""What is accepted for an index array: int32 or int64, on any device."""

INT32 = torch.iinfo(torch.int32)


def as_tensor(value: object, name: str) -> torch.Tensor:
    """Return `value` as a strided tensor that shares its memory where that is possible."""
    if isinstance(value, torch.Tensor):
        check_strided(name, value)
        return value
    if value is None:
        raise DTypeError(f"{name} is missing; give a torch tensor, a numpy array or a list")
    try:
        if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
            return from_dlpack(value)
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"{name} is no array of numbers ({error}); give a torch tensor, a numpy array or a list"
        ) from error


def check_strided(name: str, tensor: torch.Tensor) -> None:
    """Raise `ShapeError` if a tensor is sparse."""
    if tensor.layout is not torch.strided:
        raise ShapeError(f"{name} is {tensor.layout}; give {name}.to_dense()")


def index_array(value: object, name: str) -> torch.Tensor:
    """Return an index array as a contiguous int32 vector.

    Raises
    ------
    DTypeError, ShapeError, PlanError
        If it is no vector of int32 or int64, or a value does not fit int32; `name` names it.
    """
    if is_plain(value):
        return cast(torch.Tensor, value)
    array = as_tensor(value, name)
    if array.shape == (0,):  # of floats by default, in torch and numpy
        array = array.to(torch.int32)
    if array.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"{name} has dtype {array.dtype}; index arrays are int32 or int64")
    if array.ndim != 1:
        raise ShapeError(f"{name} must be 1-D, got shape {tuple(array.shape)}")
    return _to_int32(array, name)


def is_plain(value: Any) -> bool:
    """Whether a value is an index array as it is: a contiguous int32 vector that is not empty."""
    return (
        type(value) is torch.Tensor
        and value.dtype is torch.int32
        and value.dim() == 1
        and value.is_contiguous()
        and value.numel() > 0
    )


def _to_int32(array: torch.Tensor, name: str) -> torch.Tensor:
    """Narrow to int32: on the host with a check, on a device saturating, for the planner to see."""
    if array.dtype == torch.int64:
        narrow = array.clamp(INT32.min, INT32.max)
        if array.is_cpu and not torch.equal(narrow, array):
            wrong = int(array[narrow != array][0])
            raise PlanError(f"{name} holds {wrong}, which does not fit int32")
        array = narrow.to(torch.int32)
    if array.numel() == 0:  # an empty view may have any strides
        return torch.empty(0, dtype=torch.int32, device=array.device)
    return array.contiguous()


def optional_index_array(value: object, name: str) -> torch.Tensor | None:
    """Return `index_array` of a value that may be None."""
    return None if value is None else index_array(value, name)


def param_arrays(params: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """Return a variant's per-batch arrays as tensors."""
    return {name: as_tensor(value, name) for name, value in (params or {}).items()}


def checked_size(value: object, name: str) -> int:
    """Return a size of at least 1, or say which argument is none."""
    size = value if type(value) is int else integer(value)
    if size is None:
        raise DTypeError(f"{name}={value!r} must be an integer of at least 1")
    if size < 1:
        raise PlanError(f"{name}={value} must be at least 1")
    return size
