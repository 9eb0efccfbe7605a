"""Arguments of a wrong type raise this library's errors in every facade, which name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tvm_attn as flashinfer
from tests.facades import WORKSPACE
from tvm_attn.errors import DTypeError, PlanError, ShapeError, TvmAttnError

SHAPE = (6, 2, 32)
DECODE = ([0, 1], [0], [4], *SHAPE, 4)
PAGED = ([0, 3], *DECODE)
RAGGED = ([0, 3], [0, 4], *SHAPE)
BATCH = ([0, 3], [0, 1], [0], [4], *SHAPE, 32, 4)


def single(**options: Any) -> None:
    q, kv = torch.zeros(6, 32).half(), torch.zeros(5, 2, 32).half()
    flashinfer.single_decode_with_kv_cache(q, kv, kv, **options)


def decode(*given: Any, **options: Any) -> None:
    flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE).plan(*(given or DECODE), **options)


def fast(*given: Any, **options: Any) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    flashinfer.fast_decode_plan(wrapper, *(given or DECODE), **options)


def size(*given: Any, **options: Any) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.workspace_size(*(given or DECODE), **options)


def paged(*given: Any, **options: Any) -> None:
    flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE).plan(*(given or PAGED), **options)


def ragged(*given: Any, **options: Any) -> None:
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE).plan(*(given or RAGGED), **options)


def batch(*given: Any) -> None:
    flashinfer.BatchAttention(device="cpu").plan(*given)


@pytest.mark.parametrize("call", [single, decode, fast, size, paged, ragged])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("window_left", value) for value in ("1", None, 1.5, True)),
        *(("logits_soft_cap", value) for value in ("1", [1])),
    ],
)
def test_options(call: Callable[..., None], name: str, value: Any) -> None:
    with pytest.raises(DTypeError, match=f"{name}={value!r}".replace("[", r"\[")):
        call(**{name: value})


@pytest.mark.parametrize("value", ["2", 1.5, [2]])
@pytest.mark.parametrize("name", ["q_len_per_req", "fixed_split_size"])
@pytest.mark.parametrize("call", [decode, fast])
def test_sizes(call: Callable[..., None], name: str, value: Any) -> None:
    with pytest.raises(DTypeError, match=f"{name}=.* must be an integer of at least 1"):
        call(**{name: value})
    with pytest.raises(PlanError, match=f"{name}=0 must be at least 1"):
        call(**{name: 0})


@pytest.mark.parametrize("value", [None, "x", 1.5, [None], [1.5], []], ids=str)
@pytest.mark.parametrize(
    ("call", "good"),
    [
        *((decode, DECODE), (fast, DECODE), (size, DECODE)),
        *((paged, PAGED), (ragged, RAGGED), (batch, BATCH)),
    ],
)
def test_arguments_by_position(
    call: Callable[..., None], good: tuple[Any, ...], value: Any
) -> None:
    indptrs = [
        place for place, given in enumerate(good) if isinstance(given, list) and len(given) > 1
    ]
    for place in range(len(good)):
        given = [*good[:place], value, *good[place + 1 :]]
        if value == [] and place not in indptrs:
            continue
        if call is size and place == 1:
            continue  # page ids take no room
        if call is batch and place == 7 and value is None:
            continue  # values as wide as keys
        with pytest.raises(TvmAttnError):
            call(*given)


@pytest.mark.parametrize("page_size", [None, "4", [4]])
def test_page_size_of_lengths(page_size: Any) -> None:
    with pytest.raises(DTypeError, match=r"page_size=.* must be an integer"):
        flashinfer.get_seq_lens([0, 1], [4], page_size)


def test_an_indptr_has_an_entry() -> None:
    with pytest.raises(ShapeError, match="qo_indptr is empty"):
        ragged([], *RAGGED[1:])


@pytest.mark.parametrize("kv_len", [4, 8])
@pytest.mark.parametrize("indptr", [[-1, 1], [1, 3]])
def test_a_page_table_begins_at_0_also_with_pages_to_spare(indptr: list[int], kv_len: int) -> None:
    with pytest.raises(PlanError, match=r"kv_indptr\[0\] is .*; it must start at 0"):
        batch([0, 1], indptr, [2, 3, 1], [kv_len], *SHAPE, 32, 4)


@pytest.mark.parametrize("page_size", [None, "4", [4]])
@pytest.mark.parametrize(("call", "good"), [(decode, DECODE), (paged, PAGED)])
def test_page_size_beside_lengths(
    call: Callable[..., None], good: tuple[Any, ...], page_size: Any
) -> None:
    with pytest.raises(DTypeError, match=r"page_size=.* must be an integer"):
        call(*good[:-1], page_size, seq_lens=[4])
