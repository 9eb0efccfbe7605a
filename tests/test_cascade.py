"""Merging attention states: the algebra, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from tests.accuracy import assert_states_accurate
from tvm_attn.cascade import merge_state, merge_state_in_place, merge_states
from tvm_attn.errors import DTypeError, ShapeError
from tvm_attn.reference import attention

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
State = tuple[torch.Tensor, torch.Tensor]


def states(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, empty: float = 0.2
) -> State:
    """States ``[*shape, 48]``, some of them empty, with lse of very different sizes."""
    rng = torch.Generator().manual_seed(seed)
    v = torch.randn(*shape, 48, generator=rng).to(dtype)
    s = 20 * torch.randn(*shape, generator=rng)
    hidden = torch.rand(*shape, generator=rng) < empty
    return v.masked_fill(hidden[..., None], 0), s.masked_fill(hidden, -math.inf)


def merged(v: torch.Tensor, s: torch.Tensor, dtype: torch.dtype) -> State:
    """What merging over axis 1 should give, computed in `dtype`."""
    ln = s.to(dtype) * math.log(2)
    weights = torch.softmax(ln, dim=1).nan_to_num(0)
    return (
        torch.einsum("nkh,nkhd->nhd", weights, v.to(dtype)),
        torch.logsumexp(ln, dim=1) / math.log(2),
    )


def check_merge(got: State, v: torch.Tensor, s: torch.Tensor) -> None:
    eager_v, eager_s = merged(v, s, torch.float32)
    assert_states_accurate(got, merged(v, s, torch.float64), (eager_v.to(v.dtype), eager_s))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states(dtype: torch.dtype) -> None:
    v, s = states(40, 5, 3, dtype=dtype)
    s[0], v[0] = -math.inf, 0  # a row of nothing but empty states
    check_merge(merge_states(v, s), v, s)
    check_merge(merge_states(v[:, :1], s[:, :1]), v[:, :1], s[:, :1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_state(dtype: torch.dtype) -> None:
    v, s = states(40, 2, 3, dtype=dtype)
    check_merge(merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), v, s)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_empty_state_is_the_identity(dtype: torch.dtype) -> None:
    v, s = states(40, 3, dtype=dtype)
    nothing = torch.zeros_like(v), torch.full_like(s, -math.inf)
    for merge in (merge_state(v, s, *nothing), merge_state(*nothing, v, s)):
        assert torch.equal(merge[0], v)
        assert torch.equal(merge[1], s)
    out, lse = merge_state(*nothing, *nothing)
    assert not out.any()
    assert (lse == -math.inf).all()
    out, lse = merge_states(v[:, None][:, :0], s[:, None][:, :0])
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dead", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_empty_states_are_not_looked_at(dtype: torch.dtype, dead: float) -> None:
    v, s = states(40, 3, dtype=dtype, empty=0)
    nothing = torch.full_like(v, dead), torch.full_like(s, -math.inf)
    for got in (merge_state(v, s, *nothing), merge_state(*nothing, v, s)):
        assert all(map(torch.equal, got, (v, s)))
    into = tuple(part.clone() for part in nothing)
    merge_state_in_place(*into, v, s)
    assert all(map(torch.equal, into, (v, s)))
    between = (torch.stack(parts, dim=1) for parts in zip(nothing, (v, s), nothing, strict=True))
    assert all(map(torch.equal, merge_states(*between), (v, s)))
    for out, lse in (
        merge_state(*nothing, *nothing),
        merge_states(*(part[:, None] for part in nothing)),
    ):
        assert not out.any()
        assert (lse == -math.inf).all()


def test_merging_is_commutative_and_associative() -> None:
    a, b, c = (states(40, 3, seed=seed) for seed in range(3))
    ab, ba = merge_state(*a, *b), merge_state(*b, *a)
    left, right = merge_state(*ab, *c), merge_state(*a, *merge_state(*b, *c))
    at_once = merge_states(*(torch.stack(parts, dim=1) for parts in zip(a, b, c, strict=True)))
    for one, other in ((ab, ba), (left, right), (left, at_once)):
        torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-5)


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 3, 48, generator=rng) for n in (7, 30, 30))
    parts = [attention(q, k[keys], v[keys]) for keys in (slice(0, 4), slice(4, 29), slice(29, 30))]
    out, lse = (torch.stack([part[i] for part in parts], dim=1).float() for i in range(2))
    eager = attention(q, k, v, compute="eager")
    assert_states_accurate(merge_states(out, lse), attention(q, k, v), eager)


def test_merge_in_place() -> None:
    v, s = states(40, 3)
    other = states(40, 3, seed=1)
    expected = merge_state(v, s, *other)
    mask = torch.arange(40) % 3 > 0
    partly = v.clone(), s.clone()
    merge_state_in_place(*partly, *other, mask=mask)
    for got, new, old in zip(partly, expected, (v, s), strict=True):
        assert torch.equal(got[mask], new[mask])
        assert torch.equal(got[~mask], old[~mask])
    assert merge_state_in_place(v, s, *other) is None
    assert torch.equal(v, expected[0])
    assert torch.equal(s, expected[1])


def test_any_strides_whose_innermost_is_1() -> None:
    v, s = states(2, 40, 3)
    expected = merge_state(v[0], s[0], v[1], s[1])
    wide = torch.empty(2, 40, 6, 96)[:, :, ::2, :48].copy_(v)
    transposed = s.permute(0, 2, 1).contiguous().permute(0, 2, 1)
    got = merge_state(wide[0], s[0], wide[1], s[1])
    assert torch.equal(got[0], expected[0])
    with pytest.raises(ShapeError, match=r"s_a.*\.contiguous\(\)"):
        merge_state(v[0], transposed[0], v[1], s[1])
    merge_state_in_place(wide[0], s[0], wide[1], s[1])
    assert torch.equal(wide[0], expected[0])
    one_row = wide[:, :1, :, :], torch.empty(2, 40, 3)[:, :1].copy_(s[:, :1])
    got = merge_state(one_row[0][1], one_row[1][1], one_row[0][1], one_row[1][1])
    assert got[0].shape == (1, 3, 48)


def test_no_rows() -> None:
    v, s = states(0, 3)
    assert merge_state(v, s, v, s)[0].shape == (0, 3, 48)
    assert merge_states(v[:, None], s[:, None])[1].shape == (0, 3)
    merge_state_in_place(v, s, v, s)


def test_merging_in_place_with_itself() -> None:
    v, s = states(40, 3)
    expected = merge_state(v, s, v, s)
    merge_state_in_place(v, s, v, s)
    assert torch.equal(v, expected[0])
    assert torch.equal(s, expected[1])


def test_tensors_of_several_devices_are_named() -> None:
    v, s = states(4, 3)
    there, mask = s.to("meta"), torch.ones(4, dtype=torch.bool, device="meta")
    with pytest.raises(ShapeError, match=r"s_a is on meta, the kernel runs on the CPU"):
        merge_state(v, there, v, s)
    with pytest.raises(ShapeError, match=r"v_b is on cpu, the kernel runs on meta"):
        merge_state(v.to("meta"), there, v, s)
    with pytest.raises(ShapeError, match=r"s_other is on meta"):
        merge_state_in_place(v, s, v, there)
    with pytest.raises(ShapeError, match=r"mask is on meta"):
        merge_state_in_place(v, s, v, s, mask)
    with pytest.raises(ShapeError, match=r"s is on meta"):
        merge_states(v[:, None], there[:, None])


def test_bad_arguments_change_nothing() -> None:
    v, s = states(4, 3)
    before = v.clone(), s.clone()
    with pytest.raises(DTypeError, match=r"s_b has dtype torch\.float16"):
        merge_state(v, s, v, s.half())
    with pytest.raises(DTypeError, match=r"v_b has dtype torch\.float16"):
        merge_state(v, s, v.half(), s)
    with pytest.raises(DTypeError, match=r"v_a has dtype torch\.float64"):
        merge_state(v.double(), s, v.double(), s)
    with pytest.raises(DTypeError, match="v has dtype list"):
        merge_states([1.0], s)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"v has shape \(4, 3, 48\), expected .*num_states"):
        merge_states(v, s)
    with pytest.raises(ShapeError, match=r"s_other has shape \(4, 2\)"):
        merge_state_in_place(v, s, v, s[:, :2])
    with pytest.raises(ShapeError, match=r"mask has shape \(3,\)"):
        merge_state_in_place(v, s, v, s, mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(DTypeError, match=r"mask has dtype torch\.uint8"):
        merge_state_in_place(v, s, v, s, mask=torch.ones(4, dtype=torch.uint8))
    with pytest.raises(ShapeError, match=r"s must be contiguous"):
        merge_state_in_place(v, torch.empty(4, 6)[:, :3].copy_(s), v, s)
    with pytest.raises(DTypeError, match="s requires gradients"):
        merge_state_in_place(v, s.clone().requires_grad_(), v, s)
    assert torch.equal(v, before[0])
    assert torch.equal(s, before[1])
