"""Filling a paged KV cache: positions of new tokens, and the copy into pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tvm_attn.errors import DTypeError, PlanError, ShapeError, SpecError
from tvm_attn.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens

HEADS, DIM_QK, DIM_VO, PAGE_SIZE, NUM_PAGES = 3, 48, 32, 4, 9
INDPTR = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)
INDICES = torch.tensor([7, 2, 0, 8, 1, 4], dtype=torch.int32)
LAST_PAGE_LEN = torch.tensor([2, 3, 4, 1], dtype=torch.int32)
SEQ_LENS = [10, 0, 8, 1]
NEW = [6, 0, 3, 1]
FP8 = torch.float8_e4m3fn


def new_tokens(nnz: int, dtype: torch.dtype, dim: int, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(nnz, HEADS, dim, generator=rng).to(dtype)


def empty_cache(dtype: torch.dtype, kv_layout: str, dim: int) -> torch.Tensor:
    """A cache whose every slot is a recognisable 5."""
    inner = (PAGE_SIZE, HEADS) if kv_layout == "NHD" else (HEADS, PAGE_SIZE)
    return torch.full((NUM_PAGES, *inner, dim), 5.0).to(dtype)


def by_token(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    return cache.float() if kv_layout == "NHD" else cache.float().transpose(-3, -2)


def expected_cache(new: torch.Tensor, requests: list[int], positions: list[int]) -> torch.Tensor:
    cache = torch.full((NUM_PAGES, PAGE_SIZE, HEADS, new.shape[-1]), 5.0)
    for row, request, position in zip(new.float(), requests, positions, strict=True):
        if request >= 0 and position >= 0:
            page = INDICES[INDPTR[request] + position // PAGE_SIZE]
            cache[page, position % PAGE_SIZE] = row
    return cache


def appended() -> tuple[list[int], list[int]]:
    """Request and position of the tokens in `NEW`, by hand."""
    requests = [b for b, n in enumerate(NEW) for _ in range(n)]
    positions = [SEQ_LENS[b] - n + i for b, n in enumerate(NEW) for i in range(n)]
    return requests, positions


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8])
def test_append(dtype: torch.dtype, kv_layout: str) -> None:
    requests, positions = appended()
    requests, positions = [*requests, -1, 2], [*positions, 0, -3]  # the last two are skipped
    k_new, v_new = (new_tokens(len(requests), dtype, d, d) for d in (DIM_QK, DIM_VO))
    k, v = (empty_cache(dtype, kv_layout, d) for d in (DIM_QK, DIM_VO))
    append_paged_kv_cache(
        k_new, v_new, requests, positions, (k, v), INDICES, INDPTR, LAST_PAGE_LEN, kv_layout
    )
    for cache, new in ((k, k_new), (v, v_new)):
        assert torch.equal(by_token(cache, kv_layout), expected_cache(new, requests, positions))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_append_to_a_fused_cache_with_other_index_types(kv_layout: str) -> None:
    requests, positions = appended()
    k_new, v_new = (new_tokens(len(requests), torch.float16, DIM_VO, seed) for seed in (1, 2))
    half = empty_cache(torch.float16, kv_layout, DIM_VO)
    cache = torch.stack([half, half], dim=1)
    append_paged_kv_cache(
        k_new,
        v_new,
        np.array(requests),
        torch.tensor(positions),
        cache,
        INDICES.numpy(),
        INDPTR.long(),
        LAST_PAGE_LEN.tolist(),
        kv_layout=kv_layout,
    )
    for part, new in ((cache[:, 0], k_new), (cache[:, 1], v_new)):
        assert torch.equal(by_token(part, kv_layout), expected_cache(new, requests, positions))


def test_append_to_pages_of_one_token_without_their_axis() -> None:
    k = v = torch.zeros(6, HEADS, DIM_VO)
    cache = torch.stack([k, v], dim=1)
    new = new_tokens(2, torch.float32, DIM_VO, 0)
    append_paged_kv_cache(new, -new, [0, 0], [1, 0], cache, [4, 2], [0, 2], [1], "HND")
    assert torch.equal(cache[2, 0], new[0])
    assert torch.equal(cache[4, 1], -new[1])
    assert int(cache.any(-1).any(-1).any(-1).sum()) == 2


def test_append_of_views() -> None:
    requests, positions = appended()
    qkv = new_tokens(len(requests), torch.float16, 3 * DIM_VO, 0)
    k_new, v_new = qkv[..., DIM_VO : 2 * DIM_VO], qkv[..., 2 * DIM_VO :]
    pool = torch.full((NUM_PAGES, PAGE_SIZE, HEADS, 2 * DIM_VO), 5.0, dtype=torch.float16)
    k, v = pool[..., :DIM_VO], pool[..., DIM_VO:]
    append_paged_kv_cache(k_new, v_new, requests, positions, (k, v), INDICES, INDPTR, LAST_PAGE_LEN)
    for cache, new in ((k, k_new), (v, v_new)):
        assert torch.equal(cache.float(), expected_cache(new, requests, positions))


def append_one(request: int, position: int, **changes: Any) -> torch.Tensor:
    """Append a token to a new cache, after one that is fine, and return the K cache."""
    k, v = (empty_cache(torch.float32, "NHD", DIM_VO) for _ in range(2))
    arguments = {
        "append_key": new_tokens(2, torch.float32, DIM_VO, 0),
        "append_value": new_tokens(2, torch.float32, DIM_VO, 1),
        "batch_indices": [0, request],
        "positions": [0, position],
        "paged_kv_cache": (k, v),
        "kv_indices": INDICES,
        "kv_indptr": INDPTR,
        "kv_last_page_len": LAST_PAGE_LEN,
        **changes,
    }
    try:
        append_paged_kv_cache(**arguments)
    finally:
        if "paged_kv_cache" not in changes:
            assert bool((k == 5).all()) == bool((v == 5).all())
            append_one.untouched = bool((k == 5).all())  # type: ignore[attr-defined]
    return k


@pytest.mark.parametrize(
    ("request_", "position", "changes", "message"),
    [
        (4, 0, {}, r"batch_indices\[1\] is 4; kv_indptr has 4 requests"),
        (0, 12, {}, r"positions\[1\] is 12, but request 0 has 3 pages of 4"),
        (1, 0, {}, r"positions\[1\] is 0, but request 1 has 0 pages"),
        (2, 0, {"kv_indices": [7, 2, 0, 9, 1, 4]}, r"kv_indices\[3\] is 9; the cache has 9 pages"),
        (2, 0, {"kv_indices": [7, 2, 0, -1, 1, 4]}, r"kv_indices\[3\] is -1"),
        (3, 0, {"kv_indices": [7, 2, 0, 8, 1]}, r"kv_indptr gives request 3 the pages 5\.\.6"),
        (2, 0, {"kv_indptr": [0, 3, -1, 5, 6]}, r"kv_indptr gives request 2 the pages -1\.\.5"),
        (2**31 - 1, 0, {}, r"batch_indices\[1\] is 2147483647; kv_indptr has 4 requests"),
        (3, 2**31 - 1, {}, r"positions\[1\] is 2147483647, but request 3 has 1 pages"),
    ],
)
def test_nothing_is_written_where_an_entry_is_wrong(
    request_: int, position: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        append_one(request_, position, **changes)
    assert append_one.untouched  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_layout": "NDH"}, SpecError, "kv_layout='NDH'"),
        ({"positions": [0]}, ShapeError, "positions has 1 entries, expected 2"),
        ({"kv_last_page_len": [1]}, ShapeError, "kv_last_page_len has 1 entries, expected 4"),
        ({"batch_indices": [0.0, 1.0]}, DTypeError, "batch_indices has dtype"),
        ({"append_key": torch.zeros(2, 3, 16)}, ShapeError, r"append_key has shape \(2, 3, 16\)"),
        (
            {"append_value": torch.zeros(2, HEADS, DIM_VO).half()},
            DTypeError,
            r"append_value has dtype torch\.float16, expected torch\.float32",
        ),
        ({"paged_kv_cache": torch.zeros(9, 3, 4, 3, 32)}, ShapeError, r"\[num_pages, 2, \.\.\.\]"),
        ({"paged_kv_cache": 3}, DTypeError, "a KV cache is a pair"),
        (
            {"paged_kv_cache": torch.zeros(9, 2, 0, HEADS, DIM_VO)},
            ShapeError,
            r"shape \(9, 0, 3, 32\): its pages hold no token",
        ),
        (
            {"paged_kv_cache": (torch.zeros(9, 4, HEADS, 2 * DIM_VO)[..., ::2],) * 2},
            ShapeError,
            r"the cache of K has innermost stride 2",
        ),
        (
            {"kv_indptr": INDPTR.to("meta")},
            ShapeError,
            "kv_indptr is on meta, the kernel runs on the CPU",
        ),
        (
            {"append_value": torch.zeros(2, HEADS, DIM_VO, device="meta")},
            ShapeError,
            "append_value is on meta",
        ),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        append_one(0, 1, **changes)


def test_appending_nothing() -> None:
    k, v = (empty_cache(torch.float32, "NHD", DIM_VO) for _ in range(2))
    none = new_tokens(0, torch.float32, DIM_VO, 0)
    append_paged_kv_cache(none, none, [], [], (k, v), INDICES, INDPTR, LAST_PAGE_LEN)
    assert bool((k == 5).all())
    no_heads = torch.zeros(1, 0, DIM_VO), torch.zeros(NUM_PAGES, 2, PAGE_SIZE, 0, DIM_VO)
    append_paged_kv_cache(
        no_heads[0], no_heads[0], [0], [0], no_heads[1], INDICES, INDPTR, LAST_PAGE_LEN
    )


def test_batch_indices_and_positions() -> None:
    indptr = torch.tensor([0, *np.cumsum(NEW)], dtype=torch.int32)
    requests, positions = appended()
    for lens in (SEQ_LENS, torch.tensor(SEQ_LENS), np.array(SEQ_LENS, np.int32)):
        got = get_batch_indices_positions(indptr, lens, len(requests))
        assert [x.tolist() for x in got] == [requests, positions]
        assert {x.dtype for x in got} == {torch.int32}


def test_entries_past_the_last_token_are_skipped_ones() -> None:
    out = torch.empty(5, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
    got = get_batch_indices_positions([0, 0, 2], [3, 8], 5, *out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    assert [x.tolist() for x in got] == [[1, 1, -1, -1, -1], [6, 7, 0, 0, 0]]
    assert [x.tolist() for x in get_batch_indices_positions([0], [], 2)] == [[-1, -1], [0, 0]]


def test_batch_indices_and_positions_refuse() -> None:
    with pytest.raises(ShapeError, match=r"nnz=1 is too small; append_indptr\[-1\] is 2"):
        get_batch_indices_positions([0, 2], [3], 1)
    with pytest.raises(ShapeError, match="append_indptr has 2 entries, expected 3"):
        get_batch_indices_positions([0, 2], [3, 4], 2)
    with pytest.raises(ShapeError, match=r"positions has shape \(3,\), expected \(2\)"):
        get_batch_indices_positions([0, 2], [3], 2, positions=torch.empty(3, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"seq_lens is on meta"):
        get_batch_indices_positions(INDPTR, torch.tensor(SEQ_LENS, device="meta"), 10)
    with pytest.raises(ShapeError, match=r"positions is on meta"):
        there = torch.empty(2, dtype=torch.int32, device="meta")
        get_batch_indices_positions([0, 2], [3], 2, positions=there)
    with pytest.raises(DTypeError, match=r"batch_indices has dtype torch\.int64"):
        get_batch_indices_positions([0, 2], [3], 2, torch.empty(2, dtype=torch.int64))


def test_seq_lens() -> None:
    assert get_seq_lens(INDPTR, LAST_PAGE_LEN, PAGE_SIZE).tolist() == SEQ_LENS
    assert get_seq_lens(INDPTR.numpy(), LAST_PAGE_LEN.long(), PAGE_SIZE).dtype == torch.int32
    with pytest.raises(ShapeError, match="kv_last_page_len has 1 entries"):
        get_seq_lens(INDPTR, [1], PAGE_SIZE)
    with pytest.raises(ShapeError, match="kv_last_page_len is on meta"):
        get_seq_lens(INDPTR, LAST_PAGE_LEN.to("meta"), PAGE_SIZE)
    assert get_seq_lens([0, 0, 1], [99, 0], PAGE_SIZE).tolist() == [0, 0]  # no pages: no last one
    with pytest.raises(PlanError, match=r"kv_indptr is \[0, 2, 1\]; it never decreases"):
        get_seq_lens([0, 2, 1], [1, 1], PAGE_SIZE)
    for last in (-1, PAGE_SIZE + 1):
        with pytest.raises(PlanError, match=rf"kv_last_page_len\[1\] is {last}"):
            get_seq_lens([0, 1, 2], [1, last], PAGE_SIZE)
