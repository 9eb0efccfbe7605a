"""Arguments as flashinfer-python 0.7.4 takes them: what is refused, checked and made uniform.

An argument that is there for the sake of FlashInfer's code alone is accepted at its default and
otherwise refused by name; ``docs/flashinfer.md`` lists these, and where results differ.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from tvm_attn._index_arrays import IndexArray, checked_size, is_plain
from tvm_attn._index_arrays import index_array as index_array
from tvm_attn.errors import DTypeError, PlanError, ShapeError, SpecError
from tvm_attn.runtime.buffers import Ints
from tvm_attn.spec import LAYOUTS

__all__ = [
    "IndexArray",
    "KVCache",
    "Result",
    "Scale",
    "check_backend",
    "check_buffer",
    "check_layout",
    "check_lengths",
    "check_stride_variant",
    "data_types",
    "host_indices",
    "implemented_except",
    "index_array",
    "kv_lengths",
    "last_page_len",
    "on_host",
    "paged_cache",
    "schedule_of",
    "split_cache",
]

P = ParamSpec("P")
R = TypeVar("R")
Array = TypeVar("Array", torch.Tensor, Ints)
KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A pair (k, v) of 4-D caches, or both in one 5-D tensor with an axis of 2 after the pages."""
Scale = float | torch.Tensor | None
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""out, or (out, lse) with ``return_lse=True``."""

BACKENDS = ("auto", "fa2", "fa3", "cudnn", "cutlass", "trtllm-gen", "cute-dsl", "cute-dsl-prims")
"""FlashInfer's backends. Those that are not in `SCHEDULES` change nothing here."""

SCHEDULES = {"fa2": "sm80"}
"""The schedules of backends, on a GPU."""


def implemented_except(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse arguments by `NotImplementedError` unless they have their default.

    The names stay readable as the function's attribute ``not_implemented``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        defaults = {name: parameters[name].default for name in names}
        order = list(parameters)
        first = min(i for i, name in enumerate(order) if name in defaults)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > first:
                for name, value in zip(order[first:], args[first:], strict=False):
                    if name in defaults:
                        _require_default(function, name, value, defaults[name])
            if not defaults.keys().isdisjoint(kwargs):
                for name in defaults.keys() & kwargs.keys():
                    _require_default(function, name, kwargs[name], defaults[name])
            return function(*args, **kwargs)

        vars(checked)["not_implemented"] = names
        return checked

    return decorate


def _require_default(function: Callable[..., Any], name: str, value: Any, default: Any) -> None:
    if value is default or (type(value) is type(default) and value == default):
        return
    allowed = "" if default is inspect.Parameter.empty else f"; leave it at {default!r}"
    caller = function.__qualname__.replace("._plan", ".plan")
    raise NotImplementedError(f"{caller}: {name} is not implemented{allowed}")


def check_layout(kv_layout: str) -> str:
    """Return `kv_layout`, or raise `SpecError` if it is none."""
    if kv_layout not in LAYOUTS:
        raise SpecError(f"kv_layout={kv_layout!r} is not a layout; use one of {LAYOUTS}")
    return kv_layout


def check_backend(backend: str) -> str:
    """Return `backend`, or raise `SpecError` if FlashInfer has none of that name."""
    if backend not in BACKENDS:
        raise SpecError(f"backend={backend!r} is not a backend; use one of {BACKENDS}")
    return backend


def schedule_of(backend: str, device: torch.device) -> str | None:
    """Return the schedule that a backend asks for on a device, None where it asks for none."""
    return SCHEDULES.get(backend) if device.type == "cuda" else None


def check_stride_variant(variant: str) -> None:
    """Raise `SpecError` unless `variant` is the one that FlashInfer has."""
    if variant != "independent":
        raise SpecError(f'variant={variant!r} must be "independent"')


def check_buffer(buffer: Any, name: str) -> torch.Tensor:
    """Return a caller's buffer, or raise `DTypeError` if it is no tensor."""
    if not isinstance(buffer, torch.Tensor):
        raise DTypeError(f"{name} must be a torch tensor, got {type(buffer).__name__}")
    return buffer


def on_host(*arrays: Any) -> tuple[Any, ...]:
    """Return arrays on the host: what is on a GPU is copied, which waits for the GPU."""
    return tuple(map(_on_host, arrays))


def _on_host(array: Any) -> Any:
    return array.cpu() if isinstance(array, torch.Tensor) and array.is_cuda else array


def host_indices(**arrays: IndexArray) -> tuple[torch.Tensor, ...]:
    """Return index arrays as int32 vectors `on_host`; those called ``indptr`` are not empty."""
    given: tuple[Any, ...] = tuple(arrays.values())
    if all(is_plain(array) and array.is_cpu for array in given):
        return given
    found = [index_array(_on_host(array), name) for name, array in arrays.items()]
    for name, array in zip(arrays, found, strict=True):
        if not array.shape[0] and name.endswith("indptr"):
            raise ShapeError(f"{name} is empty; of a batch of n requests it has n + 1 entries")
    return tuple(found)


def check_lengths(name: str, given: IndexArray, lengths: torch.Tensor) -> None:
    """Raise `PlanError` unless lengths are those that the index arrays give."""
    [array] = on_host(given)
    array = index_array(array, name)
    if not torch.equal(array, lengths.to(torch.int32)):
        raise PlanError(
            f"{name} is {array.tolist()}, but the index arrays give {lengths.tolist()}; "
            "leave it out, or make them agree"
        )


def data_types(
    q_data_type: str | torch.dtype | None,
    kv_data_type: str | torch.dtype | None,
    o_data_type: str | torch.dtype | None,
    data_type: str | torch.dtype | None,
) -> tuple[Any, Any, Any]:
    """Return the dtypes of q, K and V, and out; `data_type` stands in for those that are None."""
    return q_data_type or data_type or "float16", kv_data_type or data_type, o_data_type


def kv_lengths(kv_indptr: IndexArray, kv_last_page_len: IndexArray, page_size: int) -> torch.Tensor:
    """Return the KV lengths of a page table, int32 ``[batch]``; 0 for a request without pages.

    Raises
    ------
    ShapeError, DTypeError, PlanError
        If the arrays are of different batches, or the page size is none; on the host, if a length
        does not fit int32.
    """
    checked_size(page_size, "page_size")
    pages = index_array(kv_indptr, "kv_indptr").to(torch.int64).diff()
    last = index_array(kv_last_page_len, "kv_last_page_len")
    if len(pages) != len(last):
        raise ShapeError(
            f"kv_last_page_len has {len(last)} entries, kv_indptr is for {len(pages)} requests"
        )
    return index_array(torch.where(pages > 0, (pages - 1) * page_size + last, 0), "kv_len")


def last_page_len(kv_len: Array, page_size: int) -> Array:
    """Return the tokens in the last page of requests of these lengths (a full page for none)."""
    return (kv_len - 1) % page_size + 1


def paged_cache(cache: KVCache, kv_layout: str) -> KVCache:
    """Return a paged cache with its axis of tokens, which may be left out for pages of one."""
    if type(cache) is tuple and len(cache) == 2:
        k, v = cache
        if type(k) is type(v) is torch.Tensor and k.ndim == v.ndim == 4:
            return cache
    axis = -3 if kv_layout == "NHD" else -2
    if isinstance(cache, torch.Tensor):
        return cache.unsqueeze(axis) if cache.ndim == 4 else cache
    if not isinstance(cache, tuple | list) or len(cache) != 2:
        raise DTypeError(f"a KV cache is a pair (k, v) or one tensor, got {type(cache).__name__}")
    named = (check_buffer(x, name) for name, x in zip("kv", cache, strict=True))
    k, v = (x.unsqueeze(axis) if x.ndim == 3 else x for x in named)
    return k, v


def split_cache(cache: KVCache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a paged cache, each 4-D."""
    cache = paged_cache(cache, kv_layout)
    if not isinstance(cache, torch.Tensor):
        return cache
    if cache.ndim != 5 or cache.shape[1] != 2:
        raise ShapeError(
            f"the KV cache has shape {tuple(cache.shape)}; one tensor of both is "
            "[num_pages, 2, ...] with 5 axes"
        )
    k, v = cache.unbind(1)
    return k, v
