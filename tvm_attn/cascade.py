"""Merging attention states, under FlashInfer's names.

Attention over two parts of the keys is the merge of the attention over each: a state is the pair of
an output row and its log-sum-exp, base 2, and ``(0, -inf)`` is the identity, for two empty states
too. Sums are in float32.

All tensors are on one device. On a GPU a merge is one kernel on the current stream, and the host
waits for nothing; the first one of a dtype and head dim builds it, or loads it from the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from tvm_attn import pipeline
from tvm_attn.errors import DTypeError, ShapeError
from tvm_attn.runtime.device import access_unit, check_writable
from tvm_attn.runtime.executor import check_tensor
from tvm_attn.runtime.library import Library
from tvm_attn.spec import Q_DTYPES

DTYPES = tuple(getattr(torch, name) for name in Q_DTYPES)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states of each row.

    Parameters
    ----------
    v_a, v_b : torch.Tensor
        ``[seq_len, num_heads, head_dim]``: float32, float16 or bfloat16.
    s_a, s_b : torch.Tensor
        ``[seq_len, num_heads]`` float32, base 2.

    Returns
    -------
    v, s : torch.Tensor
        The merged states, shaped like `v_a` and `s_a`.

    Raises
    ------
    ShapeError, DTypeError
        If the tensors do not belong together, or are not on one device.

    Examples
    --------
    >>> v, s = torch.randn(2, 4, 64), torch.zeros(2, 4)
    >>> merged, lse = merge_state(v, s, torch.zeros_like(v), torch.full((2, 4), -torch.inf))
    >>> torch.equal(merged, v), torch.equal(lse, s)
    (True, True)
    """
    _check_state("v_a", v_a, "s_a", s_a, 3)
    _check_other(v_a, "v_b", v_b, "s_b", s_b)
    v = torch.empty(v_a.shape, dtype=v_a.dtype, device=v_a.device)
    s = torch.empty(s_a.shape, dtype=torch.float32, device=v_a.device)
    if v.numel():
        _library(v_a, v_b, v).launch(
            "merge_state", v_a, s_a.reshape(-1), v_b, s_b.reshape(-1), v, s.view(-1)
        )
    return v, s


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge other states into those of each row.

    Parameters
    ----------
    v, s : torch.Tensor
        States to change, as for `merge_state`; `s` is contiguous.
    v_other, s_other : torch.Tensor
        States to merge in.
    mask : torch.Tensor, optional
        bool ``[seq_len]``: the rows to change, all by default.

    Raises
    ------
    ShapeError, DTypeError
        If the tensors do not belong together, or are not on one device. Nothing has changed then.
    """
    _check_state("v", v, "s", s, 3)
    _check_other(v, "v_other", v_other, "s_other", s_other)
    check_tensor("s", s, tuple(s.shape), torch.float32, v.device, contiguous=True)
    check_writable("v", v)
    check_writable("s", s)
    if mask is None:
        mask = torch.empty(0, dtype=torch.bool, device=v.device)
    else:
        check_tensor("mask", mask, (len(v),), torch.bool, v.device)
    if v.numel():
        _library(v, v_other).launch(
            "merge_state_in_place",
            v,
            s.view(-1),
            v_other,
            s_other.reshape(-1),
            mask.contiguous(),
        )


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge any number of states of each row, in their order.

    Parameters
    ----------
    v : torch.Tensor
        ``[seq_len, num_states, num_heads, head_dim]``: float32, float16 or bfloat16.
    s : torch.Tensor
        ``[seq_len, num_states, num_heads]`` float32, base 2.

    Returns
    -------
    v, s : torch.Tensor
        ``[seq_len, num_heads, head_dim]`` and ``[seq_len, num_heads]``; of no states, 0 and -inf.

    Raises
    ------
    ShapeError, DTypeError
        If the tensors do not belong together, or are not on one device.
    """
    _check_state("v", v, "s", s, 4)
    n, _, num_heads, head_dim = v.shape
    merged = torch.empty(n, num_heads, head_dim, dtype=v.dtype, device=v.device)
    lse = torch.empty(n, num_heads, dtype=torch.float32, device=v.device)
    if not v.numel():
        return merged.zero_(), lse.fill_(-torch.inf)
    _library(v, merged).launch("merge_states", v, s.contiguous(), merged, lse.view(-1))
    return merged, lse


def _library(*values: torch.Tensor) -> Library:
    """Return the kernels for values of this dtype, size, device and alignment."""
    like = values[0]
    return _build(like.dtype, like.shape[-1], like.device, access_unit(*values))


@functools.cache
def _build(dtype: torch.dtype, dim: int, device: torch.device, unit: int) -> Library:
    name = str(dtype).removeprefix("torch.")

    def define(rows: int) -> Mapping[str, Any]:
        from tvm_attn.tir import states_merge

        functions = ("merge_state", "merge_state_in_place", "merge_states")
        return {f: getattr(states_merge, f)(name, dim, rows) for f in functions}

    return pipeline.build_functions("merge_states", {"dtype": name}, define, device, dim, unit)


def _check_state(v_name: str, v: torch.Tensor, s_name: str, s: torch.Tensor, rank: int) -> None:
    if not isinstance(v, torch.Tensor) or v.dtype not in DTYPES:
        given = v.dtype if isinstance(v, torch.Tensor) else type(v).__name__
        raise DTypeError(f"{v_name} has dtype {given}, expected one of {DTYPES}")
    if v.ndim != rank:
        axes = "seq_len, " + "num_states, " * (rank == 4) + "num_heads, head_dim"
        raise ShapeError(f"{v_name} has shape {tuple(v.shape)}, expected [{axes}]")
    if not v.shape[-1]:
        raise ShapeError(f"{v_name} has shape {tuple(v.shape)}; head_dim must be at least 1")
    check_tensor(v_name, v, tuple(v.shape), v.dtype, v.device)
    check_tensor(s_name, s, tuple(v.shape[:-1]), torch.float32, v.device)


def _check_other(
    like: torch.Tensor, v_name: str, v: torch.Tensor, s_name: str, s: torch.Tensor
) -> None:
    check_tensor(v_name, v, tuple(like.shape), like.dtype, like.device)
    check_tensor(s_name, s, tuple(like.shape[:-1]), torch.float32, like.device)
