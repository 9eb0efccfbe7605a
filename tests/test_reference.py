"""The oracle agrees with torch, and the accuracy check fails on what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.accuracy import assert_accurate, assert_states_accurate
from tests.batches import random_batch, random_lens
from tvm_attn import reference as ref
from tvm_attn.bsr import BSR
from tvm_attn.errors import ShapeError, SpecError, VariantError
from tvm_attn.spec import AttentionSpec

SPEC = AttentionSpec(
    num_qo_heads=4, num_kv_heads=2, head_dim_qk=32, q_dtype="bfloat16", page_size=4
)


def qkv(qo_len: int, kv_len: int, *, dim_vo: int = 16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(qo_len, 4, 16), (kv_len, 2, 16), (kv_len, 2, dim_vo)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, enable_gqa=True, **options)[0].transpose(0, 1)


def test_agrees_with_torch() -> None:
    q, k, v = qkv(5, 9, dim_vo=32)
    out, lse = ref.attention(q, k, v, sm_scale=0.3)
    torch.testing.assert_close(out, sdpa(q, k, v, scale=0.3))
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, 1)) * 0.3
    assert lse is not None
    torch.testing.assert_close(lse, scores.exp().sum(-1).log2())


def test_masks_agree_with_torch() -> None:
    q, k, v = qkv(5, 9)
    rows, cols = torch.arange(5)[:, None] + 4, torch.arange(9)
    visible = (cols <= rows) & (cols >= rows - 3)
    out, _ = ref.attention(q, k, v, mask=ref.causal() & ref.sliding_window(3))
    torch.testing.assert_close(out, sdpa(q, k, v, attn_mask=visible))
    off, _ = ref.attention(q, k, v, mask=ref.sliding_window(-1))
    torch.testing.assert_close(off, sdpa(q, k, v))


def test_logits_agree_with_torch() -> None:
    q, k, v = qkv(5, 9)
    slopes = ref.alibi_slopes(4)
    out, _ = ref.attention(q, k, v, logits=ref.alibi(slopes))
    bias = slopes.double()[:, None, None] * (torch.arange(9) - torch.arange(4, 9)[:, None])
    torch.testing.assert_close(out, sdpa(q, k, v, attn_mask=bias))
    out, _ = ref.attention(q, k, v, logits=ref.soft_cap(2.0) & ref.alibi(slopes))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 4
    expected = torch.softmax(2 * torch.tanh(scores / 2) + bias, -1)
    torch.testing.assert_close(
        out, torch.einsum("hqk,khd->qhd", expected, v.repeat_interleave(2, 1))
    )


def test_sigmoid_weighs_without_normalising() -> None:
    q, k, v = qkv(2, 3)
    out, lse = ref.attention(
        q, k, v, logits=ref.sigmoid(-1.0), use_softmax=False, mask=ref.causal()
    )
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    weights = torch.sigmoid(torch.einsum("qhd,khd->hqk", q, k) / 4 - 1)
    weights[:, 0, 2] = 0
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", weights, v))
    assert lse is None


def test_a_sink_is_a_key_with_value_zero() -> None:
    q, k, v = qkv(3, 7)
    sink = torch.tensor([0.0, 1.0, -2.0, 30.0])
    plain, plain_lse = ref.attention(q, k, v)
    out, lse = ref.attention(q, k, v, sink=sink)
    assert lse is not None and plain_lse is not None
    weight, weight_of_sink = plain_lse.exp2(), sink.double().exp()
    torch.testing.assert_close(lse, (weight + weight_of_sink).log2())
    torch.testing.assert_close(out, plain * (weight / (weight + weight_of_sink))[..., None])


def test_slopes_of_the_alibi_paper() -> None:
    assert ref.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(ref.alibi_slopes(12)[8:], 2 ** -torch.tensor([0.5, 1.5, 2.5, 3.5]))


@pytest.mark.parametrize("compute", ["float64", "eager"])
@pytest.mark.parametrize("sink", [None, torch.ones(4)])
def test_rows_without_keys_are_empty_states(compute: str, sink: torch.Tensor | None) -> None:
    q, k, v = qkv(5, 3)
    out, lse = ref.attention(q, k, v, mask=ref.causal(), sink=sink, compute=compute)
    assert lse is not None
    assert (out[:2] == 0).all() and (lse[:2] == -math.inf).all()
    assert out[2:].isfinite().all() and lse[2:].isfinite().all()
    out, lse = ref.attention(q, k[:0], v[:0], sink=sink, compute=compute)
    assert lse is not None
    assert (out == 0).all() and (lse == -math.inf).all()
    hidden = ref.Mask((lambda q_idx, kv_idx, q_pos, kv_pos: kv_pos < 0,))
    out, _ = ref.attention(
        q, k, v, mask=hidden, logits=ref.sigmoid(), use_softmax=False, compute=compute
    )
    assert (out == 0).all()


def test_eager_rounds_where_torch_eager_rounds() -> None:
    q, k, v = (x.bfloat16() for x in qkv(4, 40))
    out, lse = ref.attention(q, k, v, compute="eager")
    assert lse is not None and (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    k, v = (x.repeat_interleave(2, 1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) / 4
    weights = torch.softmax(scores, -1).bfloat16().float()
    assert torch.equal(out, torch.einsum("hqk,khd->qhd", weights, v).bfloat16())
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1).T / math.log(2))
    wide, _ = ref.attention(q, k, v, compute="eager", out_dtype=torch.float32)
    assert wide.dtype == torch.float32


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [None, 1, 4])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_batch_is_its_requests(layout: str, page_size: int | None, kv_dtype: str) -> None:
    spec = AttentionSpec(4, 2, 32, 16, "bfloat16", kv_dtype, None, layout, page_size)
    batch = random_batch(spec, [3, 0, 1, 2], [9, 4, 0, 8])
    assert isinstance(batch.kv, tuple)
    assert all(x.float().isnan().any() for x in batch.kv), "what is not referenced is NaN"
    out, lse = batch.exact(mask=ref.causal())
    assert lse is not None and out.isfinite().all()
    for b, (begin, end) in enumerate([(0, 3), (3, 3), (3, 4), (4, 6)]):
        k, v = (x.double() for x in ref.gather(batch.kv, batch.fmt, b, kv_layout=layout))
        assert k.isfinite().all() and len(k) == batch.fmt.kv_len[b]
        if isinstance(batch.k_scale, torch.Tensor) and isinstance(batch.v_scale, torch.Tensor):
            k, v = k * batch.k_scale[:, None], v * batch.v_scale[:, None]
        expected = ref.attention(batch.q[begin:end], k, v, mask=ref.causal())
        torch.testing.assert_close((out[begin:end], lse[begin:end]), expected)
    assert_accurate(batch.eager(mask=ref.causal()), batch, mask=ref.causal())


def test_a_fused_cache_is_the_same_cache() -> None:
    pair = random_batch(SPEC, [2, 3], [7, 5], seed=3)
    fused = random_batch(SPEC, [2, 3], [7, 5], seed=3, fused=True)
    assert isinstance(fused.kv, torch.Tensor) and fused.kv.shape[1:] == (2, 4, 2, 32)
    assert torch.equal(pair.exact()[0], fused.exact()[0])


def test_batches_are_seeded_and_shuffled() -> None:
    first, again, other = (random_batch(SPEC, [1], [200], seed=seed) for seed in (5, 5, 6))
    assert first.fmt.kv_indices is not None and again.fmt.kv_indices is not None
    assert torch.equal(first.q, again.q) and not torch.equal(first.q, other.q)
    assert torch.equal(first.fmt.kv_indices, again.fmt.kv_indices)
    assert (first.fmt.kv_indices.diff() < 0).any()
    qo_lens, kv_lens = random_lens(200, 20, 300, seed=1)
    assert {0, 20} <= {*qo_lens} <= {*range(21)} and 0 in kv_lens
    assert 0 not in random_lens(200, 20, 300, zeros=False)[1]


def test_position_offsets_place_the_parts_of_a_whole() -> None:
    q, k, v = qkv(4, 10)
    variant = {"mask": ref.causal(), "logits": ref.alibi(ref.alibi_slopes(4))}
    whole, whole_lse = ref.attention(q, k, v, **variant)  # type: ignore[arg-type]
    fmt = BSR.from_ragged([0, 4, 8], [0, 6, 10], q_pos_offset=[6, 6], kv_pos_offset=[0, 6])
    out, lse = ref.batch_attention(torch.cat([q, q]), (k, v), fmt, **variant)  # type: ignore[arg-type]
    assert lse is not None and whole_lse is not None
    weights = torch.softmax(lse.view(2, 4, 4) * math.log(2), dim=0)
    torch.testing.assert_close((weights[..., None] * out.view(2, 4, 4, 16)).sum(0), whole)
    torch.testing.assert_close(torch.logaddexp2(lse[:4], lse[4:]), whole_lse)


def test_a_custom_mask_is_each_requests_own() -> None:
    fmt = BSR.from_ragged([0, 2, 3], [0, 2, 5])
    keeps = torch.tensor([1, 0, 1, 1, 1, 1, 0], dtype=torch.bool)
    q, k, v = qkv(3, 5)
    mask = ref.custom_mask(keeps, fmt) & ref.sliding_window(1)
    out, _ = ref.batch_attention(q, (k, v), fmt, mask=mask)
    v = v.repeat_interleave(2, 1)
    torch.testing.assert_close(out[0], v[0])
    torch.testing.assert_close(out[2], v[3])
    with pytest.raises(VariantError, match=r"take its \.at\(request\)"):
        ref.attention(q, k, v, mask=mask)


def test_an_empty_batch_has_an_empty_result() -> None:
    batch = random_batch(SPEC, [], [])
    out, lse = batch.exact()
    assert lse is not None
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4)
    assert assert_accurate(batch.eager(), batch)[0].ratio == 0


def test_bad_arguments_are_named() -> None:
    q, k, v = qkv(2, 2)
    with pytest.raises(SpecError, match="compute='exact' must be"):
        ref.attention(q, k, v, compute="exact")
    with pytest.raises(ShapeError, match="q has 3 heads, no multiple of the 2 of k"):
        ref.attention(q[:, :3], k, v)


def wrong_by_a_few_ulp(out: torch.Tensor) -> None:
    out.view(torch.int16)[3, 1, 4] += 12


def unscaled_row(out: torch.Tensor) -> None:
    out[7:] *= 1.05


def swapped_heads(out: torch.Tensor) -> None:
    out[:, :2] = out[:, :2].flip(1)


def nan(out: torch.Tensor) -> None:
    out[4, 0, 0] = torch.nan


def infinite(out: torch.Tensor) -> None:
    out[4, 0, 0] = torch.inf


def tiny_but_not_empty(out: torch.Tensor) -> None:
    out[0, 0, 0] = 1e-30


@pytest.mark.parametrize(
    "spoil",
    [wrong_by_a_few_ulp, unscaled_row, swapped_heads, nan, infinite, tiny_but_not_empty],
)
def test_the_check_fails_on_a_wrong_out(spoil: Any) -> None:
    batch = random_batch(SPEC, [6, 2], [4, 300], seed=2)
    out, lse = batch.eager(mask=ref.causal())
    assert_accurate((out, lse), batch, mask=ref.causal())
    spoil(out)
    with pytest.raises(AssertionError, match="out"):
        assert_accurate((out, lse), batch, mask=ref.causal())


@pytest.mark.parametrize(
    ("row", "value"), [(0, -1e30), (0, torch.nan), (5, -torch.inf), (5, torch.nan)]
)
def test_the_check_fails_on_a_wrong_empty_lse(row: int, value: float) -> None:
    batch = random_batch(SPEC, [6], [4], seed=2)
    out, lse = batch.eager(mask=ref.causal())
    assert lse is not None and (lse[0] == -math.inf).all()
    lse[row, 1] = value
    with pytest.raises(AssertionError, match=rf"lse\[{row}, 1\] is"):
        assert_accurate((out, lse), batch, mask=ref.causal())


@pytest.mark.parametrize("error", [1e-5, -1e-5, torch.nan])
def test_the_check_fails_on_a_wrong_lse(error: float) -> None:
    batch = random_batch(SPEC, [5], [200])
    out, lse = batch.eager()
    assert lse is not None
    lse[2, 3] += error
    with pytest.raises(AssertionError, match="lse"):
        assert_accurate((out, lse), batch)


def test_the_check_fails_on_natural_logarithms_and_other_dtypes() -> None:
    batch = random_batch(SPEC, [5], [200])
    out, lse = batch.eager()
    assert lse is not None
    with pytest.raises(AssertionError, match=r"lse: max error .* worst is \[\d, \d\]"):
        assert_accurate((out, lse * math.log(2)), batch)
    with pytest.raises(AssertionError, match=r"out is torch.float32 .*, not torch.bfloat16"):
        assert_accurate(out.float(), batch)
    with pytest.raises(AssertionError, match=r"out is .*\(4, 4, 32\), not"):
        assert_accurate(out[:4], batch)


def test_the_check_fails_when_torch_eager_itself_overflows() -> None:
    exact = torch.ones(2, 2, dtype=torch.float64)
    eager = torch.tensor([[1.0, torch.inf], [1.0, 1.0]])
    with pytest.raises(AssertionError, match="bound inf"):
        assert_states_accurate(exact.float(), (exact, None), (eager, None))


def test_the_check_fails_on_a_bias_that_the_largest_output_hides() -> None:
    exact = torch.full((100, 100), 0.01, dtype=torch.float64)
    exact[3, 4] = 1000
    biased = (exact + 0.1).half()
    with pytest.raises(AssertionError, match=r"rms 1.00e-01"):
        ref.check_accuracy(biased, exact, exact.half())


@pytest.mark.parametrize(
    ("dtype", "ulp"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9), (torch.float32, 2**-22)]
)
def test_the_bound_is_twice_eager_plus_two_ulp_at_the_magnitude(
    dtype: torch.dtype, ulp: float
) -> None:
    exact = torch.full((4, 4), 3.0, dtype=torch.float64)
    eager = exact.to(dtype)
    allowed = ref.error_bound(eager, exact, eager)
    assert allowed.max_bound == allowed.rms_bound == 2 * ulp and allowed.ratio == 0
    eager[1, 2] += 4 * ulp
    measured = ref.error_bound(eager, exact, eager, name="lse")
    assert measured.max_bound == (2 * 4 + 2) * ulp and measured.rms_bound == (2 + 2) * ulp
    assert measured.max_error == 4 * ulp and measured.rms_error == ulp and measured.ratio == 0.4
    assert str(measured).startswith("lse: max error") and "40% of the bound" in str(measured)
