"""Filling a paged KV cache, under FlashInfer's names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tvm_attn import pipeline
from tvm_attn._flashinfer.arguments import (
    IndexArray,
    KVCache,
    check_layout,
    index_array,
    kv_lengths,
    split_cache,
)
from tvm_attn.errors import DTypeError, PlanError, ShapeError
from tvm_attn.runtime.device import CPU, access_unit, check_device, check_writable
from tvm_attn.runtime.executor import check_tensor
from tvm_attn.runtime.library import Library
from tvm_attn.spec import AttentionSpec, is_count

BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
"""What elements of a size are moved as."""


def get_seq_lens(
    kv_indptr: IndexArray, kv_last_page_len: IndexArray, page_size: int
) -> torch.Tensor:
    """Return the KV length of each request of a page table.

    Parameters
    ----------
    kv_indptr : array
        int32 or int64 ``[batch + 1]``.
    kv_last_page_len : array
        int32 or int64 ``[batch]``.
    page_size : int
        Tokens per page.

    Returns
    -------
    torch.Tensor
        int32 ``[batch]``, on the device of the arrays; 0 for a request without pages.

    Raises
    ------
    ShapeError
        If the arrays do not belong to one batch.
    PlanError
        If a length does not fit int32; on a GPU, it is the largest that does. If `kv_indptr`
        decreases, or a last page holds fewer than 0 or more than `page_size` tokens; not looked at
        on a GPU.

    Examples
    --------
    >>> get_seq_lens([0, 1, 1, 4], [5, 9, 2], 16).tolist()
    [5, 0, 34]
    """
    arrays = {"kv_indptr": kv_indptr, "kv_last_page_len": kv_last_page_len}
    device = _device_of(arrays)
    indptr, last_page_len = _on_device(device, arrays).values()
    lengths = kv_lengths(indptr, last_page_len, page_size)
    if device == CPU:
        _check_table(indptr, last_page_len, page_size)
    return lengths


def get_batch_indices_positions(
    append_indptr: IndexArray,
    seq_lens: IndexArray,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which request each appended token belongs to, and its position there.

    Parameters
    ----------
    append_indptr : array
        int32 or int64 ``[batch + 1]``, first appended token of each request, and their number.
    seq_lens : array
        int32 or int64 ``[batch]``, KV length of each request once its tokens are appended.
    nnz : int
        Entries of the results, at least ``append_indptr[-1]``.
    batch_indices, positions : torch.Tensor, optional
        Where to put the results, int32 ``[nnz]``.

    Returns
    -------
    batch_indices, positions : torch.Tensor
        int32 ``[nnz]``, on the device of the arrays. The tokens of a request are its last ones;
        entries past the last token are -1 and 0, which `append_paged_kv_cache` skips.

    Raises
    ------
    ShapeError, DTypeError
        If an array does not have the length, dtype or device it should, or `nnz` is too small. On a
        GPU, where nobody waits for the values, tokens past `nnz` are left out instead.
    PlanError
        If `append_indptr` does not start at 0 or decreases, or a request is shorter than what is
        appended to it; not looked at on a GPU.

    Examples
    --------
    >>> indices, positions = get_batch_indices_positions([0, 1, 3], [5, 9], 4)
    >>> indices.tolist(), positions.tolist()
    ([0, 1, 1, -1], [4, 7, 8, 0])
    """
    arrays = {"append_indptr": append_indptr, "seq_lens": seq_lens}
    device = _device_of(arrays)
    indptr, lens = _on_device(device, arrays).values()
    _check_length("append_indptr", indptr, len(lens) + 1)
    if not is_count(nnz, 0):
        raise DTypeError(f"nnz={nnz!r} must be an integer of at least 0")
    if device == CPU:
        _check_appended(indptr, lens)
        if int(indptr[-1]) > nnz:
            raise ShapeError(f"nnz={nnz} is too small; append_indptr[-1] is {int(indptr[-1])}")
    entry = torch.arange(nnz, dtype=torch.int32, device=device)
    request = torch.searchsorted(indptr, entry, right=True, out_int32=True) - 1
    used = entry < indptr[-1]
    begin = lens - indptr[1:]
    position = entry + begin[request.clamp(max=len(lens) - 1)] if len(lens) else entry
    return (
        _result("batch_indices", batch_indices, torch.where(used, request, -1)),
        _result("positions", positions, torch.where(used, position, 0)),
    )


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: IndexArray,
    positions: IndexArray,
    paged_kv_cache: KVCache,
    kv_indices: IndexArray,
    kv_indptr: IndexArray,
    kv_last_page_len: IndexArray,
    kv_layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens into the pages of their requests.

    On a GPU this is one kernel on the current stream, and the host waits for nothing.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``[nnz, num_kv_heads, head_dim]``, in the dtype of the cache; head dims of `AttentionSpec`.
    batch_indices, positions : array
        int32 or int64 ``[nnz]``, request and position of each token; one with a negative entry is
        skipped. See `get_batch_indices_positions`.
    paged_kv_cache : tuple of torch.Tensor, or torch.Tensor
        ``(k, v)`` of ``[num_pages, page_size, num_kv_heads, head_dim]`` (NHD) or ``[num_pages,
        num_kv_heads, page_size, head_dim]`` (HND), or both in one 5-D tensor with an axis of 2
        after the pages.
    kv_indices, kv_indptr, kv_last_page_len : array
        int32 or int64 page table, with room for the new tokens.
    kv_layout : {"NHD", "HND"}
        Layout of the cache.

    Raises
    ------
    ShapeError, DTypeError
        If a tensor does not fit the others, or is on another device. Index arrays that are lists or
        numpy arrays are copied to it, but not while a CUDA graph is captured.
    PlanError
        If a token has no page in the table or the cache. Nothing is written then. On a GPU, where
        nobody waits for the values, such a token is skipped instead.
    """
    k, v = (
        x if check_layout(kv_layout) == "NHD" else x.transpose(1, 2)
        for x in split_cache(paged_kv_cache, kv_layout)
    )
    table = _on_device(
        k.device,
        {
            "batch_indices": batch_indices,
            "positions": positions,
            "kv_indices": kv_indices,
            "kv_indptr": kv_indptr,
        },
    )
    last_page_len = index_array(kv_last_page_len, "kv_last_page_len")
    _check_length("kv_last_page_len", last_page_len, table["kv_indptr"].shape[0] - 1)
    nnz = table["batch_indices"].shape[0]
    _check_length("positions", table["positions"], nnz)
    check_tensor("the cache of K", k, tuple(k.shape), k.dtype, k.device)
    check_tensor("append_key", append_key, (nnz, *k.shape[2:]), k.dtype, k.device)
    check_tensor("append_value", append_value, (nnz, *v.shape[2:]), v.dtype, k.device)
    check_tensor("the cache of V", v, (*k.shape[:3], None), k.dtype, k.device)
    check_writable("the cache of K", k)
    check_writable("the cache of V", v)
    if k.dtype.itemsize not in BITS:
        raise DTypeError(f"the cache has dtype {k.dtype}, whose elements are not 1, 2 or 4 bytes")
    if k.shape[1] == 0:
        raise ShapeError(f"the cache has shape {tuple(k.shape)}: its pages hold no token")
    if append_key.numel():
        as_bits = BITS[k.dtype.itemsize]
        _append(table, *(x.view(as_bits) for x in (append_key, append_value, k, v)))


def _append(
    table: Mapping[str, torch.Tensor],
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Look for entries that point outside, on a CPU, and append."""
    unit = access_unit(k_new, v_new, k, v)
    library = _library(k.shape[3], v.shape[3], k.dtype, k.device, unit)
    if k.is_cpu:
        num_pages, page_size, *_ = k.shape
        outside = torch.empty(1, dtype=torch.int32, device="cpu")
        library["find_outside"](*table.values(), num_pages, page_size, outside)
        entry = int(outside.item())
        if entry >= 0:
            raise PlanError(_reason(entry, table, num_pages, page_size))
    library.launch("append_paged_kv_cache", k_new, v_new, *table.values(), k, v)


@functools.cache
def _library(
    dim_qk: int, dim_vo: int, storage: torch.dtype, device: torch.device, unit: int
) -> Library:
    name = str(storage).removeprefix("torch.")
    spec = AttentionSpec(1, 1, dim_qk, dim_vo)

    def define(_: int) -> Mapping[str, Any]:
        from tvm_attn.tir.append import append, find_outside

        functions = {"append_paged_kv_cache": append(spec, name)}
        return {**functions, "find_outside": find_outside(spec)} if device == CPU else functions

    key = {"dim_qk": dim_qk, "dim_vo": dim_vo, "storage": name}
    dim = max(dim_qk, dim_vo)
    return pipeline.build_functions("append_paged_kv_cache", key, define, device, dim, unit)


def _reason(entry: int, table: Mapping[str, torch.Tensor], num_pages: int, page_size: int) -> str:
    """Say what is wrong with an entry that the kernel refused."""
    indptr, indices = table["kv_indptr"].tolist(), table["kv_indices"].tolist()
    request, position = (int(table[name][entry]) for name in ("batch_indices", "positions"))
    if request >= len(indptr) - 1:
        return f"batch_indices[{entry}] is {request}; kv_indptr has {len(indptr) - 1} requests"
    begin, end = indptr[request : request + 2]
    if not 0 <= begin <= end <= len(indices):
        return (
            f"kv_indptr gives request {request} the pages {begin}..{end} of kv_indices, "
            f"which has {len(indices)}"
        )
    if position >= (end - begin) * page_size:
        return (
            f"positions[{entry}] is {position}, but request {request} has {end - begin} pages of "
            f"{page_size}; give the page table with room for the new tokens"
        )
    at = begin + position // page_size
    return f"kv_indices[{at}] is {indices[at]}; the cache has {num_pages} pages"


def _device_of(arrays: Mapping[str, IndexArray]) -> torch.device:
    """Return the device of the first tensor; what is no tensor may be copied to any."""
    return next((x.device for x in arrays.values() if isinstance(x, torch.Tensor)), CPU)


def _on_device(device: torch.device, arrays: Mapping[str, IndexArray]) -> dict[str, torch.Tensor]:
    """Return index arrays on a device: lists and numpy arrays are copied, others must be there."""
    found = {}
    for name, array in arrays.items():
        index = index_array(array, name)
        if isinstance(array, list | tuple | np.ndarray) and device != CPU:
            index = index.to(device, non_blocking=True)
        check_device(name, index, device)
        found[name] = index
    return found


def _check_table(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> None:
    """Raise `PlanError` unless every request has pages, and a last one that is possible."""
    if bool((indptr[1:] < indptr[:-1]).any()):
        raise PlanError(f"kv_indptr is {indptr.tolist()}; it never decreases")
    outside = (last_page_len < 0) | (last_page_len > page_size)
    wrong = (outside & (indptr[1:] > indptr[:-1])).nonzero()
    if len(wrong):
        b = int(wrong[0])
        raise PlanError(
            f"kv_last_page_len[{b}] is {int(last_page_len[b])}; a page holds {page_size} tokens"
        )


def _check_appended(indptr: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Raise `PlanError` unless every request has the tokens that are appended to it."""
    appended = indptr.to(torch.int64).diff()
    if int(indptr[0]) or bool((appended < 0).any()):
        raise PlanError(f"append_indptr is {indptr.tolist()}; it starts at 0 and never decreases")
    short = (appended > seq_lens).nonzero()
    if len(short):
        b = int(short[0])
        raise PlanError(
            f"seq_lens[{b}] is {int(seq_lens[b])}, but {int(appended[b])} tokens are appended to "
            "this request; give its length once they are"
        )


def _check_length(name: str, array: torch.Tensor, length: int) -> None:
    if array.shape[0] != length:
        raise ShapeError(f"{name} has {len(array)} entries, expected {length}")


def _result(name: str, out: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    if out is None:
        return values
    check_tensor(name, out, tuple(values.shape), torch.int32, values.device)
    return out.copy_(values)
