"""The batch that a plan is made for: from what callers have, to one `BSR` on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import PlanError, ShapeError, SpecError
from tvm_attn.spec import AttentionSpec

PageTable = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
TABLE = ("kv_indptr", "kv_indices", "kv_last_page_len")


def batch_format(spec: AttentionSpec, given: Mapping[str, Any]) -> BSR:
    """Return the format of a batch.

    Parameters
    ----------
    spec : AttentionSpec
        The kernel's.
    given : mapping of str to array
        The index arrays, by the names of their arguments of plan(); ``qo_indptr`` may be a format.

    Raises
    ------
    PlanError, SpecError, ShapeError, DTypeError
        If they are no batch of the kernel's.
    """
    qo_indptr, kv_indptr = given["qo_indptr"], given["kv_indptr"]
    offsets = {"q_pos_offset": given["q_pos_offset"], "kv_pos_offset": given["kv_pos_offset"]}
    if isinstance(qo_indptr, BSR):
        _expect_none(given, TABLE, "the format has it already")
        bsr = qo_indptr.with_positions(**offsets)
    elif spec.page_size is None:
        _expect_none(given, TABLE[1:], "the kernel was built for ragged K/V (page_size=None)")
        bsr = BSR.from_ragged(qo_indptr, kv_indptr, **offsets)
    else:
        pages = (given["kv_indices"], given["kv_last_page_len"], spec.page_size)
        bsr = BSR.from_page_table(qo_indptr, kv_indptr, *pages, **offsets)
    if bsr.page_size != spec.page_size:
        raise SpecError(
            f"the format has page_size={bsr.page_size}, the kernel's spec {spec.page_size}; build "
            "with the format's"
        )
    return bsr


def plain_arrays(spec: AttentionSpec, given: Mapping[str, Any]) -> PageTable | None:
    """Return the arrays of a page table of int32 tensors on the host, None if it is any other.

    Whether all are there, vectors, contiguous and of one length, is left to whoever reads them.
    """
    qo_indptr, kv_indptr, kv_indices, last, q_pos_offset, kv_pos_offset = given.values()
    if (
        type(qo_indptr) is type(kv_indptr) is type(kv_indices) is type(last) is torch.Tensor
        and qo_indptr.dtype is kv_indptr.dtype is kv_indices.dtype is last.dtype is torch.int32
        and qo_indptr.is_cpu
        and q_pos_offset is kv_pos_offset is None is not spec.page_size
    ):
        return qo_indptr, kv_indptr, kv_indices, last
    return None


def check_on_host(bsr: BSR) -> None:
    """Raise `ShapeError` unless a batch is on the host."""
    if not bsr.qo_indptr.is_cpu:
        raise ShapeError(
            f"qo_indptr is on {bsr.qo_indptr.device}; plan on the host: pass qo_indptr.cpu()"
        )


def one_gpu(given: Mapping[str, Any]) -> torch.device | None:
    """Return the GPU that all arrays of a batch are on, None if some are elsewhere."""
    found = set()
    for value in given.values():
        value = value.qo_indptr if isinstance(value, BSR) else value
        if value is not None:
            found.add(value.device if isinstance(value, torch.Tensor) else None)
    device = found.pop() if len(found) == 1 else None
    return device if device is not None and device.type == "cuda" else None


def to_host(given: Mapping[str, Any]) -> tuple[dict[str, Any], torch.device | None]:
    """Copy what is on a GPU to the host, which waits for the GPU, and say which one that was.

    Raises
    ------
    ShapeError
        If it was more than one.
    """
    found: dict[torch.device, str] = {}
    moved = {name: _moved(name, value, found) for name, value in given.items()}
    if len(found) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise ShapeError(f"a batch is planned for one device, but there is {where}; move them")
    return moved, next(iter(found), None)


def _moved(name: str, value: Any, found: dict[torch.device, str]) -> Any:
    """Return a value on the host, and add the GPU it was on to those found."""
    if isinstance(value, BSR):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        tensors = {n: v for n, v in parts.items() if isinstance(v, torch.Tensor)}
        params = {n: _moved(n, v, found) for n, v in value.index_params.items()}
        arrays = {n: _moved(n, v, found) for n, v in tensors.items()}
        return replace(value, **arrays, index_params=params)
    if isinstance(value, torch.Tensor) and value.is_cuda:
        found.setdefault(value.device, name)
        return value.cpu()
    return value


def _expect_none(given: Mapping[str, Any], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if given[name] is not None:
            raise PlanError(f"{name} was given, but {why}; leave it out")
