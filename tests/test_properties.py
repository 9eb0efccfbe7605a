"""Properties of attention states on batches that hypothesis invents: the algebra of merging."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.accuracy import State, assert_accurate, assert_states_accurate
from tests.batches import Batch
from tests.machine import Machine
from tvm_attn import reference
from tvm_attn.bsr import BSR
from tvm_attn.cascade import merge_state, merge_states

FEW = settings(max_examples=15)

lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), min_size=1, max_size=4).map(
    lambda lens: tuple(map(list, zip(*lens, strict=True)))
)
seeds = st.integers(0, 2**16)


# Merging states

log_sums = st.one_of(
    st.just(-math.inf), st.floats(-30, 30, width=32), st.sampled_from([-(2.0**20), 2.0**20, 0.0])
)


@st.composite
def states(draw: Callable[..., float], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``v [3, count, 2, 16]`` and ``s [3, count, 2]``; empty states are (0, -inf)."""
    s = torch.tensor([draw(log_sums) for _ in range(6 * count)]).view(3, count, 2)
    v = torch.randn(3, count, 2, 16, generator=torch.Generator().manual_seed(draw(seeds)))
    return v.masked_fill((s == -math.inf)[..., None], 0.0), s


def on(machine: Machine, vs: State) -> State:
    """Return states on the machine's device."""
    return vs[0].to(machine.device), vs[1].to(machine.device)


def merged(v: torch.Tensor, s: torch.Tensor, dtype: torch.dtype) -> State:
    """Merge states along axis 1 in torch."""
    s = s.to(dtype) * math.log(2)
    shares = torch.softmax(s, dim=1).nan_to_num(0.0)
    return torch.einsum("nph,nphd->nhd", shares, v.to(dtype)), s.logsumexp(1) / math.log(2)


def assert_merged(got: State, v: torch.Tensor, s: torch.Tensor) -> None:
    assert_states_accurate(got, merged(v, s, torch.float64), merged(v, s, torch.float32))


def assert_same_bits(a: State, b: State) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@FEW
@given(states(2))
def test_merging_two_states_in_any_order(machine: Machine, vs: State) -> None:
    vs = on(machine, vs)
    (v_a, s_a), (v_b, s_b) = ((vs[0][:, i], vs[1][:, i]) for i in range(2))
    assert_merged(merge_state(v_a, s_a, v_b, s_b), *vs)
    assert_merged(merge_state(v_b, s_b, v_a, s_a), *vs)


@FEW
@given(states(3))
def test_merging_three_states_in_any_grouping(machine: Machine, vs: State) -> None:
    vs = on(machine, vs)
    parts = [(vs[0][:, i], vs[1][:, i]) for i in range(3)]
    assert_merged(merge_state(*merge_state(*parts[0], *parts[1]), *parts[2]), *vs)
    assert_merged(merge_state(*parts[0], *merge_state(*parts[1], *parts[2])), *vs)
    assert_merged(merge_states(*vs), *vs)


@FEW
@given(states(1))
def test_the_empty_state_is_the_identity(machine: Machine, vs: State) -> None:
    v, s = (x[:, 0] for x in on(machine, vs))
    empty = torch.zeros_like(v), torch.full_like(s, -math.inf)
    assert_same_bits(merge_state(v, s, *empty), (v, s))
    assert_same_bits(merge_state(*empty, v, s), (v, s))
    assert_same_bits(merge_state(*empty, *empty), empty)


# Attention over parts of the keys


def attend(machine: Machine, name: str, batch: Batch, **plan: object) -> State:
    module = machine.kernel(name, batch.spec)
    return module.run(module.plan(batch.fmt, **plan), batch.q, batch.kv, return_lse=True)


def part(batch: Batch, kept: torch.Tensor) -> Batch:
    """Return the batch with those of its tokens that are kept, for attention without positions."""
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
    fmt = BSR.from_page_table(
        batch.fmt.qo_indptr,
        indptr[batch.fmt.kv_indptr.long()],
        batch.fmt.kv_indices[kept],
        torch.ones(batch.fmt.batch_size, dtype=torch.int32),
        page_size=1,
    )
    return replace(batch, fmt=fmt)


@FEW
@given(lengths, seeds, st.floats(0, 1))
@example(([3, 2], [0, 40]), 0, 1.0)
def test_attention_over_a_union_is_the_merge(
    machine: Machine, lens: tuple[list[int], list[int]], seed: int, share: float
) -> None:
    batch = machine.batch(machine.tokens, *lens, seed=seed)
    in_a = torch.rand(sum(lens[1]), generator=torch.Generator().manual_seed(seed)) < share
    a, b = (attend(machine, "full", part(batch, kept)) for kept in (in_a, ~in_a))
    assert_accurate(merge_state(*a, *b), batch)


@FEW
@given(lengths, seeds, st.floats(0, 1))
@example(([3], [0]), 0, 1.0)
def test_a_mask_and_its_complement_merge_to_the_whole(
    machine: Machine, lens: tuple[list[int], list[int]], seed: int, share: float
) -> None:
    batch = machine.batch(machine.tokens, *lens, seed=seed)
    pairs = int((batch.fmt.qo_len * batch.fmt.kv_len).sum())
    mask = torch.rand(pairs, generator=torch.Generator().manual_seed(seed)) < share
    a, b = (attend(machine, "custom_mask", batch, custom_mask=bits) for bits in (mask, ~mask))
    assert_accurate(merge_state(*a, *b), batch)


@FEW
@given(lengths, seeds)
def test_the_order_of_keys_without_positions_does_not_matter(
    machine: Machine, lens: tuple[list[int], list[int]], seed: int
) -> None:
    batch = machine.batch(machine.tokens, *lens, seed=seed)
    shuffled = [
        ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
        for ids in batch.fmt.kv_indices.split(lens[1])
    ]
    reordered = replace(batch.fmt, kv_indices=torch.cat(shuffled))
    assert_accurate(attend(machine, "full", replace(batch, fmt=reordered)), batch)


@FEW
@given(lengths, seeds, st.one_of(st.none(), st.integers(1, 200)), st.integers(1, 12))
def test_split_is_unsplit(
    machine: Machine, lens: tuple[list[int], list[int]], seed: int, split: int | None, num_ctas: int
) -> None:
    batch = machine.batch(machine.tokens, *lens, seed=seed)
    module = machine.kernel("window", machine.tokens).with_ctas(num_ctas)
    plan = module.plan(batch.fmt, fixed_split_size=split)
    got = module.run(plan, batch.q, batch.kv, return_lse=True)
    assert_accurate(got, batch, mask=reference.causal())
