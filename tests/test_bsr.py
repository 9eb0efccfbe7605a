"""The BSR formats: what they hold, what they refuse, how they print."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tvm_attn.bsr
from tests.batches import random_batch
from tvm_attn.bsr import BSR
from tvm_attn.errors import DTypeError, PlanError, ShapeError
from tvm_attn.reference import attention, batch_attention, custom_mask, gather
from tvm_attn.spec import AttentionSpec

PAGE_TABLE = ([0, 1, 6, 6], [0, 1, 4, 4], [2, 7, 3, 9], [16, 12, 5], 16)


def as_is(values: list[int]) -> list[int]:
    return values


@pytest.mark.parametrize("convert", [as_is, tuple, np.array, torch.tensor, np.int32, np.int64])
def test_every_kind_of_array_gives_the_same_int32_tensors(convert: Callable[..., Any]) -> None:
    qo_indptr, kv_indptr, kv_indices, last_page_len = map(convert, PAGE_TABLE[:4])
    fmt = BSR.from_page_table(qo_indptr, kv_indptr, kv_indices, last_page_len, 16)
    for name, values in zip(
        ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"), PAGE_TABLE, strict=False
    ):
        assert getattr(fmt, name).dtype == torch.int32
        assert getattr(fmt, name).tolist() == values


def test_lengths() -> None:
    fmt = BSR.from_page_table(*PAGE_TABLE)
    assert (fmt.batch_size, fmt.nnz_qo, fmt.num_blocks) == (3, 6, 4)
    assert fmt.qo_len.tolist() == [1, 5, 0]
    assert fmt.kv_len.tolist() == [16, 44, 0], "a flat indptr is 0 whatever last_page_len says"
    ragged = BSR.from_ragged([0, 2, 2], [0, 5, 12])
    assert ragged.kv_len.tolist() == [5, 7]
    assert BSR.from_ragged([0], [0]).batch_size == 0


def test_int32_arrays_are_borrowed() -> None:
    indices = torch.tensor([4, 5], dtype=torch.int32)
    array = np.array([0, 2], dtype=np.int32)
    fmt = BSR.from_page_table([0, 1], array, indices, [3], 8)
    indices[0], array[1] = 9, 1
    assert fmt.kv_indices is not None
    assert fmt.kv_indices.tolist() == [9, 5] and fmt.num_blocks == 1


def test_read_only_and_strided_arrays_are_accepted() -> None:
    frozen = np.array([0, 3], dtype=np.int32)
    frozen.setflags(write=False)
    strided = torch.arange(8, dtype=torch.int32)[::5]
    fmt = BSR.from_ragged(frozen, strided)
    assert fmt.kv_indptr.tolist() == [0, 5] and fmt.kv_indptr.is_contiguous()


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (0, np.array([0, 1, 6, 6], np.float32), DTypeError, "qo_indptr has dtype torch.float32"),
        (1, torch.tensor([0, 1, 4, 4], dtype=torch.int16), DTypeError, "kv_indptr has dtype"),
        (2, [True, False], DTypeError, "kv_indices has dtype torch.bool"),
        (2, ["a"], DTypeError, "kv_indices is no array of numbers"),
        (2, [[1], [2, 3]], DTypeError, "kv_indices is no array of numbers"),
        (2, [[1, 2]], ShapeError, r"kv_indices must be 1-D, got shape \(1, 2\)"),
        (0, [], ShapeError, "qo_indptr is empty"),
        (1, [0, 1], ShapeError, "kv_indptr has 2 entries; a batch of 3 requests"),
        (3, [16], ShapeError, "kv_last_page_len has 1 entries"),
        (3, None, DTypeError, "kv_last_page_len is missing"),
        (2, [2**31, 0, 0, 0], PlanError, "kv_indices holds 2147483648, which does not fit"),
        (4, 0, PlanError, "page_size=0 must be at least 1"),
        (4, 16.0, DTypeError, "page_size=16.0 must be an integer"),
        (4, True, DTypeError, "page_size=True must be an integer"),
    ],
)
def test_bad_arguments_are_named(
    position: int, value: object, error: type[Exception], message: str
) -> None:
    arguments: list[Any] = [*PAGE_TABLE]
    arguments[position] = value
    with pytest.raises(error, match=message):
        BSR.from_page_table(*arguments)


def test_position_offsets_are_checked() -> None:
    fmt = BSR.from_ragged([0, 2], [0, 4], q_pos_offset=[7], kv_pos_offset=np.array([3]))
    assert fmt.q_pos_offset is not None and fmt.q_pos_offset.tolist() == [7]
    with pytest.raises(ShapeError, match="kv_pos_offset has 2 entries"):
        BSR.from_ragged([0, 2], [0, 4], kv_pos_offset=[1, 2])


def test_the_class_itself_takes_int32_tensors_and_whole_page_tables_only() -> None:
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(DTypeError, match="kv_indptr is no int32 tensor"):
        BSR(indptr, indptr.long())
    with pytest.raises(ShapeError, match="missing: kv_last_page_len, page_size"):
        BSR(indptr, indptr, kv_indices=indptr)


def test_devices_may_not_be_mixed() -> None:
    with pytest.raises(ShapeError, match="kv_indptr is on meta, qo_indptr on cpu"):
        BSR.from_ragged([0, 1], torch.zeros(2, dtype=torch.int32, device="meta"))
    with pytest.raises(ShapeError, match="custom_mask is on meta"):
        BSR.from_ragged([0, 1], [0, 1], index_params={"custom_mask": torch.zeros(1, device="meta")})


@given(
    mask=st.integers(1, 5).flatmap(
        lambda cols: st.lists(
            st.lists(st.booleans(), min_size=cols, max_size=cols), min_size=1, max_size=5
        )
    ),
    row_block=st.integers(1, 4),
    col_block=st.integers(1, 4),
    cut=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_block_mask_names_the_tokens_it_keeps(
    mask: list[list[bool]], row_block: int, col_block: int, cut: tuple[int, int]
) -> None:
    qo_len = len(mask) * row_block - min(cut[0], row_block - 1)
    kv_len = len(mask[0]) * col_block - min(cut[1], col_block - 1)
    fmt = BSR.from_block_mask(mask, row_block, col_block, qo_len=qo_len, kv_len=kv_len)
    assert fmt.nnz_qo == qo_len and fmt.kv_indices is not None
    for row, keeps in enumerate(mask):
        pages = fmt.kv_indices[fmt.kv_indptr[row] : fmt.kv_indptr[row + 1]].tolist()
        slots = [page * col_block + i for page in pages for i in range(col_block)]
        tokens = [t for t in range(kv_len) if keeps[t // col_block]]
        assert slots[: int(fmt.kv_len[row])] == tokens


def test_a_block_mask_is_a_mask_of_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 5, generator=generator) < 0.5
    q, k, v = (torch.randn(n, 2, 16, generator=generator) for n in (14, 20, 20))
    fmt = BSR.from_block_mask(mask.numpy(), 4, 4, qo_len=14, kv_len=18)
    out, lse = batch_attention(q, (k.view(5, 4, 2, 16), v.view(5, 4, 2, 16)), fmt)

    def keeps(q_idx: torch.Tensor, kv_idx: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return mask[q_idx // 4, kv_idx // 4]

    expected, expected_lse = attention(q, k[:18], v[:18], mask=keeps)
    assert lse is not None and expected_lse is not None
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize(
    ("mask", "options", "error", "message"),
    [
        ([[1, 0]], {}, DTypeError, "mask has dtype torch.int64; convert it to bool"),
        ([True], {}, ShapeError, "mask must be .row blocks, column blocks., got 1-D"),
        ([[True, True]], {"kv_len": 4}, PlanError, r"kv_len=4 .* must be in 5..8"),
        ([[True, True]], {"kv_len": 9}, PlanError, r"kv_len=9 .* must be in 5..8"),
        ([[True, True]], {"qo_len": 0}, PlanError, r"qo_len=0 .* must be in 1..2"),
        ([[True, True]], {"row_block": 0}, PlanError, "row_block=0 must be at least 1"),
        ([[True, True]], {"col_block": 1.5}, DTypeError, "col_block=1.5 must be an integer"),
    ],
)
def test_bad_block_masks_are_refused(
    mask: object, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"row_block": 2, "col_block": 4, **options}
    with pytest.raises(error, match=message):
        BSR.from_block_mask(mask, **arguments)  # type: ignore[arg-type]


def test_a_token_tree_sees_prefix_ancestors_and_itself() -> None:
    fmt = BSR.from_token_tree([[-1, 0, 0, 2], np.array([-1, -1]), []], [0, 6, 8, 9])
    assert fmt.qo_indptr.tolist() == [0, 4, 6, 6]
    mask = fmt.index_params["custom_mask"]
    assert mask.dtype == torch.bool
    assert mask[:24].view(4, 6).int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]
    assert mask[24:].view(2, 2).int().tolist() == [[1, 0], [0, 1]]


def test_a_node_attends_as_its_branch_would_alone() -> None:
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=16, page_size=4)
    batch = random_batch(spec, [4, 3], [13, 3], seed=1)
    table = batch.fmt
    assert table.kv_indices is not None and table.kv_last_page_len is not None
    fmt = BSR.from_token_tree(
        [[-1, 0, 0, 2], [-1, 0, 1]],
        table.kv_indptr,
        table.kv_indices,
        table.kv_last_page_len,
        spec.page_size,
    )
    variant = custom_mask(fmt.index_params["custom_mask"], fmt)
    out, _ = batch_attention(batch.q, batch.kv, fmt, mask=variant)
    k, v = gather(batch.kv, fmt, 0)
    branch = [*range(9), 9, 11, 12]  # the prefix, then nodes 0, 2, 3
    alone, _ = attention(batch.q[3:4], k[branch], v[branch])
    torch.testing.assert_close(out[3:4], alone)


@pytest.mark.parametrize(
    ("parents", "error", "message"),
    [
        ([[0]], PlanError, r"parents\[0\]\[0\] is 0; a parent comes before its child"),
        ([[-1, -2]], PlanError, r"parents\[0\]\[1\] is -2"),
        ([[-1] * 6], PlanError, r"parents\[0\] has 6 nodes, but its request only 5 KV tokens"),
        ([[-1], [-1]], ShapeError, "2 trees in parents, 1 rows in kv_indptr"),
        ([[0.5]], DTypeError, r"parents\[0\] has dtype torch.float64"),
    ],
)
def test_bad_trees_are_refused(parents: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BSR.from_token_tree(parents, [0, 5])


def test_the_docstring_shows_what_is_printed() -> None:
    assert doctest.testmod(tvm_attn.bsr).failed == 0


def test_pictures_of_odd_batches() -> None:
    assert str(BSR.from_ragged([0], [0])) == "BSR: batch 0, 0 query tokens, 0 KV tokens, ragged"
    assert str(BSR.from_token_tree([[-1], []], [0, 3, 3])).splitlines() == [
        "BSR: batch 2, 1 query tokens, 3 KV tokens, ragged, custom_mask",
        "  req 0  q 1  kv 3 | tokens 0:3",
        "  req 1  q 0  kv 0 | -",
    ]


def test_a_block_mask_prints_as_a_grid_with_its_sparsity() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool).tril()
    assert str(BSR.from_block_mask(mask, 8, 8, kv_len=30)).splitlines() == [
        "BSR: batch 3, 24 query tokens, 48 KV tokens, 6 pages of 8, sparsity 50.00%",
        "  ██······",
        "  ████····",
        "  ██████··",
    ]


def test_large_formats_print_clipped() -> None:
    page_table = BSR.from_page_table(
        range(100), range(0, 3000, 30), list(range(2970)), [3] * 99, page_size=16
    )
    lines = str(page_table).splitlines()
    assert len(lines) == 18 and "83 more" in lines[-2]
    assert lines[-1] == (
        "  req 98  q 1  kv 467 | p2940 p2941 p2942 p2943 p2944 p2945 p2946 ... 22 more ... "
        "p2969:3/16"
    )
    mask = torch.ones(500, 300, dtype=torch.bool).tril()
    mask[0, 299] = True
    grid = str(BSR.from_block_mask(mask, 1, 1)).splitlines()[1:]
    assert len(grid) == 32 and all(len(line) == 2 + 64 for line in grid)
    assert grid[0].endswith("░░") and "··" in grid[0] and grid[-1] == "  " + "█" * 64
