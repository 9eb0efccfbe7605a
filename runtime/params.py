"""A variant's run-time parameters: from what the caller gave to what the kernel takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tvm_attn.bsr import as_tensor, check_strided
from tvm_attn.errors import DTypeError, PlanError, ShapeError, VariantError
from tvm_attn.runtime.device import CPU, check_device
from tvm_attn.spec import Param
from tvm_attn.worklist import READ_BEYOND

Lengths = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
NO_LENGTHS = (np.empty(0, np.int32), np.empty(0, np.int32))

LARGEST = float(np.finfo(np.float32).max)

UNBOUNDED = 2**30
"""More tokens than any request has: what a negative value of a narrowing scalar means, such as a
window of -1, and any larger count."""


def param_from_json(fields: dict[str, Any]) -> Param:
    """Return a parameter from its JSON form."""
    return Param(**{**fields, "shape": tuple(fields["shape"])})


def check_names(params: Sequence[Param], given: Mapping[str, Any], at: str) -> None:
    """Raise `VariantError` for a keyword that is no parameter of this kernel at this stage."""
    known = [p.name for p in params if p.at == at or (at == "run" and p.narrows)]
    for name in given:
        if name not in known:
            allowed = ", ".join(known) or "none"
            other = {"run": "plan", "plan": "run"}[at]
            hint = f"; give it to {other}()" if any(p.name == name for p in params) else ""
            raise VariantError(f"{name!r} is no parameter of {at}(); it takes: {allowed}{hint}")


def plan_values(
    params: Sequence[Param],
    given: Mapping[str, Any],
    lengths: Lengths,
    sizes: Mapping[str, int],
) -> dict[str, list[Any]]:
    """Return the kernel arguments of every plan-time parameter, by parameter name.

    They are on the host, and the plan's own: arrays are copied. `lengths` are the batch's ``qo_len,
    kv_len``.
    """
    check_names(params, given, "plan")
    return {
        p.name: [_owned(value) for value in _values(p, given, lengths, sizes, CPU)]
        for p in params
        if p.at == "plan"
    }


def run_values(
    params: Sequence[Param],
    given: Mapping[str, Any],
    planned: Mapping[str, list[Any]],
    sizes: Mapping[str, int],
    device: torch.device,
) -> list[Any]:
    """Return the kernel arguments of all parameters, on the device, in declaration order."""
    if given:
        check_names(params, given, "run")
    values: list[Any] = []
    for p in params:
        if p.at == "run":
            values += _values(p, given, NO_LENGTHS, sizes, device)
        elif given.get(p.name) is not None:
            values.append(_narrower(p, given[p.name], planned[p.name][0]))
        else:
            values += planned[p.name]
    return values


def _owned(value: Any) -> Any:
    """Copy an array, with room after it; see `READ_BEYOND`."""
    if not isinstance(value, torch.Tensor):
        return value
    beyond = READ_BEYOND // value.element_size()
    room = torch.empty(value.numel() + beyond, dtype=value.dtype, device="cpu")
    return room[: value.numel()].view(value.shape).copy_(value)


def _values(
    param: Param,
    given: Mapping[str, Any],
    lengths: Lengths,
    sizes: Mapping[str, int],
    device: torch.device,
) -> list[Any]:
    value = given.get(param.name)
    if value is None:
        value = param.default
    if value is None:
        raise VariantError(f"{param.name!r} is a required argument of {param.at}()")
    if param.kind == "scalar":
        return [_scalar(param, value)]
    if param.kind == "tensor":
        return [_tensor(param, value, sizes, device)]
    return list(_bitmap(param, value, lengths))


def _scalar(param: Param, value: Any) -> int | float:
    if isinstance(value, torch.Tensor) and value.is_cpu and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise DTypeError(f"{param.name}={value!r} must be a number")
    if not param.dtype.startswith("int"):
        number = float32(param.name, value)
        return number if param.largest is None else min(number, param.largest)
    if value != value or value in (np.inf, -np.inf) or int(value) != value:
        raise DTypeError(f"{param.name}={value!r} must be an integer")
    if param.narrows:
        return UNBOUNDED if value < 0 else min(int(value), UNBOUNDED)
    info = np.iinfo(param.dtype)
    if not info.min <= value <= info.max:
        raise VariantError(f"{param.name}={value!r} does not fit {param.dtype}")
    return int(value)


def float32(name: str, value: Any) -> float:
    """Return a number as a float, or raise `VariantError` if it is NaN or does not fit float32."""
    try:
        number = float(value)
    except OverflowError as error:
        raise VariantError(f"{name} does not fit float32") from error
    if math.isnan(number):
        raise VariantError(f"{name} is NaN; it must be a number")
    if LARGEST < abs(number) < np.inf:
        raise VariantError(f"{name}={number} does not fit float32")
    return number


def _narrower(param: Param, value: Any, planned: int) -> int | float:
    narrow = _scalar(param, value)
    if narrow > planned:
        raise PlanError(
            f"{param.name}={value} is larger than the {planned} that the plan was cut for; "
            f"plan with {param.name}={value}"
        )
    return narrow


def _tensor(
    param: Param, value: Any, sizes: Mapping[str, int], device: torch.device
) -> torch.Tensor:
    if param.at == "plan":
        value = _array_of(param, value)
    if not isinstance(value, torch.Tensor):
        raise DTypeError(f"{param.name} must be a torch tensor, got {type(value).__name__}")
    check_strided(param.name, value)
    check_device(param.name, value, device)
    if str(value.dtype) != f"torch.{param.dtype}":
        raise DTypeError(f"{param.name} has dtype {value.dtype}, expected {param.dtype}")
    shape = tuple(value.shape)
    free: dict[Any, int] = {**dict(zip(param.shape, shape, strict=False)), **sizes}
    expected = tuple(sizes.get(s, s) if isinstance(s, str) else s for s in param.shape)
    if shape != tuple(free.get(s) if isinstance(s, str) else s for s in param.shape):
        wanted = ", ".join(str(s) for s in expected)
        raise ShapeError(f"{param.name} has shape {shape}, expected ({wanted})")
    return value.contiguous()


def _array_of(param: Param, value: Any) -> torch.Tensor:
    """Return an array as a tensor; numbers in a list become what the parameter is declared as."""
    if not isinstance(value, list | tuple):
        return as_tensor(value, param.name)
    given = as_tensor(value, param.name)
    declared = given.to(getattr(torch, param.dtype))
    return declared if torch.equal(declared.to(given.dtype), given) else given


def _bitmap(param: Param, value: Any, lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of each request's [qo_len, kv_len] mask, little-endian, and each request's byte."""
    mask = as_tensor(value, param.name)
    check_device(param.name, mask, CPU)
    qo_len, kv_len = lengths
    pairs = qo_len.astype(np.int64) * kv_len
    indptr = np.concatenate([[0], np.cumsum((pairs + 7) // 8)])
    if mask.dtype == torch.uint8:
        _check_length(param, mask, int(indptr[-1]), "bytes of little-endian bits")
        return mask.reshape(-1).contiguous(), torch.from_numpy(indptr)
    if mask.dtype != torch.bool:
        raise DTypeError(f"{param.name} has dtype {mask.dtype}, expected bool, or uint8 of bits")
    _check_length(param, mask, int(pairs.sum()), "values, the sum of qo_len * kv_len")
    rows = np.split(mask.reshape(-1).numpy(), np.cumsum(pairs)[:-1])
    packed = [np.packbits(row, bitorder="little") for row in rows]
    bits = np.concatenate([*packed, np.empty(0, np.uint8)])
    return torch.from_numpy(bits), torch.from_numpy(indptr)


def _check_length(param: Param, mask: torch.Tensor, expected: int, unit: str) -> None:
    if mask.numel() != expected:
        raise PlanError(f"{param.name} has {mask.numel()} entries, expected {expected} {unit}")
