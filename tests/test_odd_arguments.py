"""What careless callers give: numbers of numpy, nothing, lists, views, hooks of two minds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as ta
from tvm_attn.bsr import BSR
from tvm_attn.errors import (
    CompileError,
    DTypeError,
    PlanError,
    ShapeError,
    SpecError,
    TargetError,
    VariantError,
)
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.tir.fingerprint import fingerprint
from tvm_attn.tir.hooks import Hooks
from tvm_attn.variant import AttentionVariant

SPEC = AttentionSpec(2, 1, 16, q_dtype="float32", page_size=4)
TABLE: tuple[Any, ...] = ([0, 3], [0, 2], [0, 1], [2])


def run(variant: AttentionVariant | None, planned: Any = None, **given: Any) -> Any:
    """Run the one request of `TABLE`, 3 queries of 6 keys, with these arguments."""
    rng = torch.Generator().manual_seed(0)
    q, kv = torch.randn(3, 2, 16, generator=rng), torch.randn(2, 2, 4, 1, 16, generator=rng)
    kernel = ta.build(SPEC, variant)
    return kernel.run(kernel.plan(*TABLE, **planned or {}), q, (kv[0], kv[1]), **given)


# Numbers


def test_counts_of_numpy_are_counts() -> None:
    kernel = ta.build(SPEC).with_ctas(np.int64(8))
    plan = kernel.plan(*TABLE, fixed_split_size=np.int64(2), max_qo_len=np.int32(3))
    assert plan.num_slots > 0
    for given in ({"fixed_split_size": 2.0}, {"max_qo_len": True}):
        with pytest.raises(PlanError, match="integer"):
            kernel.plan(*TABLE, **given)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_integers_of_numpy_are_integers(kind: Callable[[int], Any]) -> None:
    spec = AttentionSpec(kind(2), kind(1), kind(16), q_dtype="float32", page_size=kind(4))
    assert spec == SPEC
    assert type(spec.num_qo_heads) is type(spec.page_size) is int
    limits = ta.PlanLimits(kind(1), kind(2), kind(3))
    assert limits == ta.PlanLimits(1, 2, 3)
    assert type(limits.max_batch) is int
    assert ta.variants.sliding_window(kind(5)).params[0].default == 5
    shape = Param("x", kind="tensor", shape=(kind(3), "n")).shape
    assert shape == (3, "n")
    assert type(shape[0]) is int


def test_dtypes_of_numpy_and_torch_are_dtypes() -> None:
    for dtype in (np.float16, np.dtype("float16"), torch.float16, "float16", "half"):
        assert AttentionSpec(1, 1, 16, q_dtype=dtype).q_dtype == "float16"
    for dtype in (float, int, None, "float8_e5m2"):
        with pytest.raises(SpecError, match="q_dtype") as raised:
            AttentionSpec(1, 1, 16, q_dtype=dtype)  # type: ignore[arg-type]
        assert "('float32', 'float16', 'bfloat16')" in str(raised.value)


@pytest.mark.parametrize(
    "given",
    [
        {"name": 3},
        {"kind": "tensor", "shape": (-3,)},
        {"kind": "tensor", "shape": (2.5,)},
        {"kind": "tensor", "shape": (True,)},
        {"kind": "tensor", "shape": ("not one",)},
        {"kind": "tensor", "shape": 3},
        {"default": "abc"},
        {"default": True},
        {"default": 1j},
        {"dtype": "int32", "default": 2.5},
    ],
)
def test_parameters_that_no_kernel_can_have(given: dict[str, Any]) -> None:
    with pytest.raises(VariantError, match=str(given.get("name", "x"))):
        Param(**{"name": "x", **given})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"params": ("x",)}, "params"),
        ({"params": Param("x")}, "params"),
        ({"params": None}, "params"),
        ({"use_softmax": "no"}, "use_softmax"),
        ({"name": 3}, "name"),
    ],
)
def test_variants_of_other_types(given: dict[str, Any], word: str) -> None:
    with pytest.raises(VariantError, match=word):
        AttentionVariant(**given)


# Hooks

NUMPY = {
    "logits_transform": lambda ctx, s: np.float32(1),
    "query_transform": lambda ctx, x, d: np.float32(1),
    "output_transform": lambda ctx, o, lse: np.int64(1),
    "initial_state": lambda ctx: (np.float32(1), np.float64(1)),
    "mask": lambda ctx: np.bool_(True),
    "kv_range": lambda ctx, lo, hi: (np.int64(0), np.int32(5)),
}
TYPES = {
    "logits_transform": lambda ctx, s: ctx.kv_pos,
    "query_transform": lambda ctx, x, d: d,
    "output_transform": lambda ctx, o, lse: 1,
    "initial_state": lambda ctx: (0, 1),
    "mask": lambda ctx: True,
    "kv_range": lambda ctx, lo, hi: (lo.astype("int64") - 2**40, 2**31),
}
NEXT = {
    "logits_transform": lambda ctx, s: s / 2,
    "query_transform": lambda ctx, x, d: x(d) / 2,
    "output_transform": lambda ctx, o, lse: o.astype("float32") / 2,
    "initial_state": lambda ctx: (1, 2),
    "mask": lambda ctx: ctx.kv_pos < 100,
    "kv_range": lambda ctx, lo, hi: (None, hi + 100),
}
"""Hooks that take what came before them for an expression of its documented type."""


def test_results_of_any_width_build_and_compose() -> None:
    for hooks in (NUMPY, TYPES):
        assert run(AttentionVariant(**hooks) & AttentionVariant(**NEXT)).isfinite().all()


def test_a_composed_state_is_the_sum() -> None:
    one, two = (AttentionVariant(initial_state=lambda ctx, d=d: (0, d)) for d in (1, 2))
    both = AttentionVariant(initial_state=lambda ctx: (0.0, 3.0))
    torch.testing.assert_close(run(one & two), run(both))


@pytest.mark.parametrize("far", [2**30, 2**31, 2**70])
def test_far_bounds_are_none(far: int) -> None:
    hooks = Hooks(AttentionVariant(kv_range=lambda ctx, lo, hi: (-far, far)))
    unbounded = Hooks(AttentionVariant()).kv_range(hooks.range_context(), None, None)
    assert [int(end) for end in hooks.kv_range(hooks.range_context(), None, None)] == [
        int(end) for end in unbounded
    ]


@pytest.mark.parametrize(
    "variant",
    [
        AttentionVariant(logits_transform=lambda ctx, s: 10**50),
        AttentionVariant(logits_transform=lambda ctx, s: 1e300),
        AttentionVariant(logits_transform=lambda ctx, s: torch.ones(())),
        AttentionVariant(mask=lambda ctx: True) & AttentionVariant(mask=lambda ctx: ctx.kv_pos),
        AttentionVariant(mask=lambda ctx: 1) & AttentionVariant(mask=lambda ctx: True),
        AttentionVariant(kv_range=lambda ctx, lo, hi: (0, 1))
        & AttentionVariant(kv_range=lambda ctx, lo, hi: None),
        AttentionVariant(initial_state=lambda ctx: 1)
        & AttentionVariant(initial_state=lambda ctx: (0, 1)),
    ],
)
def test_results_that_are_none_of_these_are_errors(variant: AttentionVariant) -> None:
    with pytest.raises(CompileError, match="cannot be traced"):
        fingerprint(Hooks(variant), SPEC)


def test_sizes_of_one_name_agree() -> None:
    square = Param("t", kind="tensor", shape=("n", "n"))
    biased = AttentionVariant(
        logits_transform=lambda ctx, s: s + ctx.t[ctx.kv_idx, ctx.kv_idx], params=(square,)
    )
    torch.testing.assert_close(run(biased, t=torch.zeros(6, 6)), run(None))
    for shape in ((6, 7), (6,), (6, 6, 6), ()):
        with pytest.raises(ShapeError, match=r"expected \(n, n\)"):
            run(biased, t=torch.zeros(shape))


def test_arrays_of_a_plan_may_be_of_numpy_or_lists() -> None:
    of_batch = Param("t", kind="tensor", dtype="int64", shape=("batch",), at="plan")
    limited = AttentionVariant(
        mask=lambda ctx: ctx.kv_idx < ctx.t[ctx.batch].astype("int32"), params=(of_batch,)
    )
    want = run(limited, {"t": torch.tensor([2])})
    for given in ([2], np.array([2]), np.array([0, 2])[1:]):
        assert torch.equal(run(limited, {"t": given}), want)
    for given in ("x", [[1], [1, 2]], object(), {2}):
        with pytest.raises(DTypeError, match="t is no array"):
            run(limited, {"t": given})


def test_masks_may_be_views_and_are_arrays() -> None:
    keep = np.arange(18) % 3 > 0
    want = run(ta.variants.custom_mask(), {"custom_mask": keep})
    for given in (keep[::-1][::-1], keep.tolist(), torch.from_numpy(keep)):
        assert torch.equal(run(ta.variants.custom_mask(), {"custom_mask": given}), want)
    for given in ("x", object(), [[True], [True, False]]):
        with pytest.raises(DTypeError, match="custom_mask is no array"):
            run(ta.variants.custom_mask(), {"custom_mask": given})


def test_scalars_of_torch_and_numpy() -> None:
    want = run(ta.variants.soft_cap(), logits_soft_cap=3.0)
    for cap in (torch.tensor(3.0), np.float64(3), np.int8(3), torch.tensor(3)):
        assert torch.equal(run(ta.variants.soft_cap(), logits_soft_cap=cap), want)
    for cap in (torch.ones(1), torch.tensor(True), torch.ones((), device="meta"), np.complex64(1)):
        with pytest.raises(DTypeError, match="logits_soft_cap"):
            run(ta.variants.soft_cap(), logits_soft_cap=cap)


@pytest.mark.parametrize("cap", [1e300, 10**400, -(10**400)])
def test_numbers_that_no_float_holds(cap: float) -> None:
    with pytest.raises(VariantError, match=r"logits_soft_cap.* does not fit float32"):
        run(ta.variants.soft_cap(), logits_soft_cap=cap)
    for name in ("sm_scale", "q_scale", "k_scale", "v_scale"):
        with pytest.raises(VariantError, match=rf"{name}.* does not fit float32"):
            run(None, **{name: cap})


def test_large_scales_that_fit() -> None:
    assert torch.equal(run(None, sm_scale=1e38, q_scale=0), run(None, sm_scale=0))
    with pytest.raises(VariantError, match=r"q_scale=1e\+39 does not fit"):
        run(None, q_scale=torch.tensor(1e39, dtype=torch.float64))


@pytest.mark.parametrize("cap", [math.inf, np.float32(math.inf), 2.0**64, 3e38])
def test_a_soft_cap_that_no_logit_feels_is_off(cap: float) -> None:
    assert torch.equal(
        run(ta.variants.soft_cap(), logits_soft_cap=cap),
        run(ta.variants.soft_cap(), logits_soft_cap=0.0),
    )
    torch.testing.assert_close(run(ta.variants.soft_cap(), logits_soft_cap=cap), run(None))


def test_only_a_float_has_a_largest_value() -> None:
    for given in ({"dtype": "int32"}, {"kind": "tensor", "shape": (2,)}):
        with pytest.raises(VariantError, match="only a float32 scalar has a largest"):
            Param("x", largest=1.0, **given)


def test_an_infinite_soft_cap_is_off() -> None:
    torch.testing.assert_close(run(ta.variants.soft_cap(math.inf)), run(None))
    q, k = torch.ones(1, 16), torch.ones(3, 1, 16)
    capped = ta.single_decode_with_kv_cache(q, k, k, logits_soft_cap=math.inf)
    assert torch.equal(capped, ta.single_decode_with_kv_cache(q, k, k))


# Index arrays


def test_what_is_missing_is_called_missing() -> None:
    for i in range(4):
        given = [None if i == j else array for j, array in enumerate(TABLE)]
        with pytest.raises(DTypeError, match="is missing"):
            ta.build(SPEC).plan(*given)


@pytest.mark.parametrize("empty", [np.array([]), torch.tensor([]), [], ()])
def test_an_empty_array_has_no_wrong_dtype(empty: Any) -> None:
    assert ta.build(SPEC).plan([0], [0], empty, empty).batch_size == 0
    assert ta.get_seq_lens([0], empty, 4).tolist() == []


def test_a_sparse_array_is_none() -> None:
    with pytest.raises(ShapeError, match="qo_indptr"):
        BSR.from_ragged(torch.tensor([0, 5]).to_sparse(), [0, 5])


def test_a_length_in_blocks_is_an_integer() -> None:
    with pytest.raises(DTypeError, match=r"qo_len=1\.5"):
        BSR.from_block_mask([[True]], 2, 2, qo_len=1.5)  # type: ignore[arg-type]


# Facades


@pytest.mark.parametrize("nnz", [-1, 3.0, "3", None])
def test_numbers_of_appended_tokens(nnz: Any) -> None:
    with pytest.raises(DTypeError, match="nnz"):
        ta.get_batch_indices_positions([0, 1, 3], [5, 9], nnz)


@pytest.mark.parametrize(
    ("indptr", "lens", "words"),
    [
        ([1, 3], [9], "append_indptr"),
        ([0, 3, 1], [5, 9], "append_indptr"),
        ([0, 1, 30], [5, 9], r"seq_lens\[1\] is 9, but 29"),
    ],
)
def test_tokens_that_would_be_lost(indptr: list[int], lens: list[int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        ta.get_batch_indices_positions(indptr, lens, 30)


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match="int32"):
        ta.get_seq_lens([0, 2**30], [5], 16)
    wrapper = ta.BatchAttention(device="cpu")
    with pytest.raises(PlanError, match=r"kv_len_arr\[0\] is 2147483647"):
        wrapper.plan([0, 1], [0, 1], [0], [2**31 - 1], 1, 1, 16, 16, 16)


def test_halves_of_a_cache() -> None:
    k = torch.zeros(2, 4, 1, 16)
    wrapper = ta.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.plan([0, 1], [0], [1], 1, 1, 16, 4, q_data_type="float32")
    for cache in ((k, None), (None, k), (k, k.numpy())):
        with pytest.raises(DTypeError, match="must be a torch tensor"):
            wrapper.run(torch.zeros(1, 1, 16), cache)
        with pytest.raises(DTypeError, match="must be a torch tensor"):
            ta.append_paged_kv_cache(k[0, :1], k[0, :1], [0], [0], cache, [0], [0, 1], [1])


def test_devices_that_there_are_not() -> None:
    for device in ("gpu", None, 1.5):
        with pytest.raises(SpecError, match="device="):
            ta.BatchAttention(device=device)  # type: ignore[arg-type]


def test_states_without_elements() -> None:
    v, s = torch.empty(3, 2, 0), torch.zeros(3, 2)
    with pytest.raises(ShapeError, match="head_dim"):
        ta.merge_state(v, s, v, s)
    with pytest.raises(ShapeError, match="head_dim"):
        ta.merge_states(v.unsqueeze(1), s.unsqueeze(1))


def test_nothing_is_written_where_results_would_meet() -> None:
    v, s, row = torch.ones(3, 2, 16), torch.zeros(3, 2), torch.zeros(1, 2, 16)
    with pytest.raises(ShapeError, match="v of shape"):
        ta.merge_state_in_place(row.expand(3, 2, 16), s, v, s)
    page, cache = torch.zeros(1, 4, 2, 16), torch.zeros(2, 4, 2, 16)
    for pages in ((page.expand(2, 4, 2, 16), cache), (cache, page.expand(2, 4, 2, 16))):
        with pytest.raises(ShapeError, match="cache of"):
            ta.append_paged_kv_cache(v[:1], v[:1], [0], [0], pages, [0], [0, 1], [1])
    assert not row.any()
    assert not page.any()
    ta.append_paged_kv_cache(v[:1], v[:1], [0], [0], (page[:1], page[:1]), [0], [0, 1], [1])


def test_results_are_not_written_over_one_another() -> None:
    row, one = torch.full((1, 2, 16), 7.0), torch.full((1, 2), 7.0)
    with pytest.raises(ShapeError, match="out of shape"):
        run(None, out=row.expand(3, 2, 16))
    with pytest.raises(ShapeError, match="lse of shape"):
        run(None, lse=one.expand(3, 2))
    assert (row == 7.0).all()
    assert (one == 7.0).all()


OVERLAPPING = [
    (16, 16, 1),
    (17, 16, 1),
    (31, 16, 1),
    (16, 8, 1),
    (0, 16, 1),
    (1, 48, 1),
    (15, 45, 1),
]


@pytest.mark.parametrize("strides", OVERLAPPING)
def test_rows_that_share_elements_are_not_written_to(strides: tuple[int, ...]) -> None:
    memory, new, s = torch.full((1000,), 7.0), torch.ones(3, 2, 16), torch.zeros(3, 2)
    apart = memory.as_strided((3, 2, 16), strides)
    with pytest.raises(ShapeError, match=r"out of shape .* to one place"):
        run(None, out=apart)
    with pytest.raises(ShapeError, match=r"v of shape .* to one place"):
        ta.merge_state_in_place(apart, s, new, s)
    cache = torch.zeros(3, 1, 2, 16)
    page = memory.as_strided(cache.shape, (strides[0], 16, *strides[1:]))
    for pages in ((page, cache), (cache, page)):
        with pytest.raises(ShapeError, match=r"cache of .* to one place"):
            ta.append_paged_kv_cache(new[:1], new[:1], [0], [0], pages, [0], [0, 1], [1])
    with pytest.raises(ShapeError, match=r"lse of shape .* to one place"):
        run(None, lse=memory.as_strided((3, 2), (1, 1)))
    assert (memory == 7.0).all()


@pytest.mark.parametrize("strides", [(32, 16, 1), (16, 48, 1), (100, 40, 1), (20, 60, 1)])
def test_rows_in_any_order_and_with_gaps_are_written_to(strides: tuple[int, ...]) -> None:
    out, lse = torch.zeros(1000).as_strided((3, 2, 16), strides), torch.zeros(5, 9)[:3, 2:4]
    want, want_lse = run(None, return_lse=True)
    run(None, out=out, lse=lse)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_a_sparse_tensor_is_told_from_a_strided_one() -> None:
    kernel = ta.build(SPEC)
    k = torch.zeros(2, 4, 1, 16)
    with pytest.raises(ShapeError, match=r"q is torch.sparse_coo; pass q.to_dense\(\)"):
        kernel.run(kernel.plan(*TABLE), torch.ones(3, 2, 16).to_sparse(), (k, k))
    with pytest.raises(ShapeError, match=r"alibi_slopes is torch.sparse_coo"):
        run(ta.variants.alibi(), alibi_slopes=torch.ones(2).to_sparse())
    mask = torch.ones(3, 6, dtype=torch.bool).to_sparse()
    with pytest.raises(ShapeError, match=r"custom_mask is torch.sparse_coo"):
        run(ta.variants.custom_mask(), {"custom_mask": mask})
    q, k = torch.ones(3, 2, 16), torch.ones(6, 1, 16)
    with pytest.raises(ShapeError, match=r"custom_mask is torch.sparse_coo"):
        ta.single_prefill_with_kv_cache(q, k, k, custom_mask=mask)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ShapeError, match=rf"{name} is torch.sparse_coo"):
            run(None, **{name: torch.ones(1).to_sparse()})


@pytest.mark.parametrize(
    "target",
    [
        'cuda -arch="sm_90',
        {"kind": "cuda", "arch": ["sm_90"]},
        {"kind": "cuda", "arch": 90},
        {"kind": "llvm", "mattr": 5},
        {"kind": "llvm", "mattr": [1]},
        {"kind": "llvm", "mcpu": 5},
        {"kind": "llvm", "mtriple": 3},
    ],
)
def test_targets_of_other_types(target: Any) -> None:
    with pytest.raises(TargetError):
        ta.parse_target(target)
