"""What attention means at its edges: empty states, positions, strides, scales, equal bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.accuracy import State, assert_accurate, assert_states_accurate
from tests.batches import Batch
from tests.cases import arguments, random_mask
from tests.machine import Machine
from tvm_attn import reference
from tvm_attn.bsr import BSR
from tvm_attn.quantization import packbits
from tvm_attn.reference import Scale
from tvm_attn.runtime.workspace import PlanLimits

RAGGED_HND = {"page_size": None, "kv_layout": "HND"}
MIXED = ([1, 7, 0, 40, 3], [200, 30, 5, 90, 0])
EMPTY_ROWS = ([3, 4, 2, 1], [0, 2, 2, 0])
"""Without any key, or with more causal queries than keys."""


def assert_same_bits(a: State, b: State) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def merge(a: State, b: State) -> State:
    """Merge two states in float64."""
    top = torch.maximum(a[1], b[1]).double().nan_to_num(neginf=0.0)
    weights = [torch.exp2(lse.double() - top) for _, lse in (a, b)]
    total = sum(weights)
    shares = [(w / total).nan_to_num(0.0)[..., None] for w in weights]
    out = sum(share * out.double() for share, (out, _) in zip(shares, (a, b), strict=True))
    return out.to(a[0].dtype), (top + total.log2()).float()


# Empty states


@pytest.mark.parametrize("name", ["window", "alibi", "sink", "custom_mask"])
def test_rows_without_a_visible_key_are_exactly_empty(machine: Machine, name: str) -> None:
    batch = machine.batch(machine.paged, *EMPTY_ROWS)
    out, lse = machine.run(name, batch)
    hidden = (
        torch.tensor([0, 1, 2, 3, 4, 9]) if name != "custom_mask" else torch.tensor([0, 1, 2, 9])
    )
    assert not out[hidden].any()
    assert (lse[hidden] == -math.inf).all()
    machine.check(name, batch)


@pytest.mark.parametrize("last_page_len", [1, 0, 4, 99, -3])
def test_a_request_without_pages_has_no_keys_whatever_its_last_page_holds(
    machine: Machine, last_page_len: int
) -> None:
    batch = machine.batch(machine.paged, [2, 1, 3], [9, 0, 6])
    lens = batch.fmt.kv_last_page_len.clone()
    lens[1] = last_page_len
    strange = replace(batch, fmt=replace(batch.fmt, kv_last_page_len=lens))
    assert_same_bits(machine.run("window", strange), machine.run("window", batch))


@pytest.mark.parametrize("name", ["window", "custom_mask"])
@pytest.mark.parametrize("lens", [([], []), ([0, 0], [5, 0])], ids=["no-request", "no-query"])
def test_batches_without_queries(
    machine: Machine, name: str, lens: tuple[list[int], list[int]]
) -> None:
    batch = machine.batch(machine.paged, *lens)
    out, lse = machine.run(name, batch)
    assert out.shape == (0, 8, 64)
    assert lse.shape == (0, 8)


def test_a_sink_does_not_fill_an_empty_row(machine: Machine) -> None:
    batch = machine.batch(machine.paged, *EMPTY_ROWS)
    out, lse = machine.run("sink", batch, sink=machine.put([4.0] * 8))
    empty = batch.exact(mask=reference.causal())[1] == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert torch.equal((out == 0).all(-1), empty)


# What must not be read


@pytest.mark.parametrize("name", ["window", "custom_mask"])
def test_what_unused_slots_and_pages_hold_changes_no_bit(machine: Machine, name: str) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    results = []
    for filler in (math.nan, math.inf, -math.inf, 0.0):
        kv = tuple(torch.where(cache.isnan(), filler, cache) for cache in batch.kv)
        results.append(machine.run(name, replace(batch, kv=kv)))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_page_ids_after_those_in_use_are_ignored(machine: Machine) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    longer = torch.cat([batch.fmt.kv_indices, torch.tensor([-1, 2**31 - 1], dtype=torch.int32)])
    padded = replace(batch, fmt=replace(batch.fmt, kv_indices=longer))
    assert_same_bits(machine.run("window", padded), machine.run("window", batch))


def test_offsets_pass_two_to_the_31_elements(machine: Machine) -> None:
    batch = machine.batch(machine.paged, [1, 6], [7, 9], spare=0)
    apart = 2**31 // (batch.fmt.num_blocks - 2) // 8 * 8 + 8  # rows stay aligned
    memory = batch.q.new_empty(apart * (batch.fmt.num_blocks - 1) + 2**12)
    assert memory.numel() > 2**31

    def spread(cache: torch.Tensor, begin: int) -> torch.Tensor:
        view = memory.as_strided(cache.shape, (apart, *cache.stride()[1:]), begin)
        return view.copy_(cache)

    spread_kv = (spread(batch.kv[0], 0), spread(batch.kv[1], 2**11))
    assert_same_bits(
        machine.run("window", replace(batch, kv=spread_kv)), machine.run("window", batch)
    )


# Positions


@pytest.mark.parametrize(
    ("name", "window"), [("alibi", None), ("window", None), ("window", 11), ("window", -1)]
)
def test_parts_with_position_offsets_merge_to_the_whole(
    machine: Machine, name: str, window: int | None
) -> None:
    batch = machine.batch(machine.tokens, [1, 20, 4, 6], [100, 60, 4, 3])
    plan = {} if window is None else {"window_left": window}
    kv_len = batch.fmt.kv_len
    cut = torch.tensor([37, 50, 4, 0])
    q_pos = (kv_len - batch.fmt.qo_len).int()
    begin, middle = batch.fmt.kv_indptr[:-1].long(), batch.fmt.kv_indptr[:-1] + cut
    prefix = _slice_of_tokens(batch, begin, middle, q_pos, torch.zeros_like(cut))
    suffix = _slice_of_tokens(batch, middle, begin + kv_len, q_pos, cut)
    merged = merge(machine.run(name, prefix, plan), machine.run(name, suffix, plan))
    variant = arguments(name, batch).reference
    if window is not None:
        variant = {"mask": reference.causal() & reference.sliding_window(window)}
    assert_accurate(merged, batch, **variant)


def _slice_of_tokens(
    batch: Batch,
    begin: torch.Tensor,
    end: torch.Tensor,
    q_pos: torch.Tensor,
    kv_pos: torch.Tensor,
) -> Batch:
    indices = [batch.fmt.kv_indices[b:e] for b, e in zip(begin, end, strict=True)]
    indptr = torch.tensor([0, *(len(i) for i in indices)]).cumsum(0)
    fmt = BSR.from_page_table(
        batch.fmt.qo_indptr,
        indptr,
        torch.cat(indices),
        torch.ones_like(begin),
        page_size=1,
        q_pos_offset=q_pos,
        kv_pos_offset=kv_pos.int(),
    )
    return replace(batch, fmt=fmt)


def test_position_offsets_as_arguments_of_plan_are_those_of_the_format(machine: Machine) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    fmt = batch.fmt
    offsets = {"q_pos_offset": [250, 90, 3, 60, 5], "kv_pos_offset": [50, 70, 0, 10, 1]}
    module = machine.kernel("window", machine.paged)
    table = (fmt.qo_indptr, fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len)
    with_format = module.plan(BSR.from_page_table(*table, machine.paged.page_size, **offsets))
    for plan in (module.plan(*table, **offsets), module.plan(fmt, **offsets)):
        assert plan.to_json() == with_format.to_json()


@pytest.mark.parametrize("window", [0, 1, 30, 10_000])
def test_a_smaller_window_at_run_clips_what_was_planned(machine: Machine, window: int) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    clipped = machine.run("window", batch, {"window_left": -1}, window_left=window)
    mask = reference.causal() & reference.sliding_window(window)
    assert_accurate(clipped, batch, mask=mask)
    assert_accurate(machine.run("window", batch, {"window_left": window}), batch, mask=mask)


@pytest.mark.parametrize("window", [-1, 2**30, 2**31 - 1, 2**40])
def test_a_window_that_is_off_or_larger_than_everything_hides_nothing(
    machine: Machine, window: int
) -> None:
    batch = machine.batch(machine.paged, [1, 7, 9, 40, 3], [200, 30, 5, 90, 0])
    assert_accurate(
        machine.run("window", batch, {"window_left": window}), batch, mask=reference.causal()
    )


# Custom masks


def test_custom_masks_with_empty_requests_in_the_middle(machine: Machine) -> None:
    batch = machine.batch(machine.paged, [3, 0, 5, 2, 1], [7, 6, 9, 0, 13])
    bits = random_mask(batch, torch.Generator().manual_seed(3))
    mask = reference.custom_mask(bits.to(machine.device), batch.fmt)
    as_bools = machine.run("custom_mask", batch, {"custom_mask": bits})
    assert_accurate(as_bools, batch, mask=mask)
    requests = bits.split((batch.fmt.qo_len * batch.fmt.kv_len).tolist())
    packed = torch.cat([packbits(request, bitorder="little") for request in requests])
    assert_same_bits(machine.run("custom_mask", batch, {"custom_mask": packed}), as_bools)


@pytest.mark.parametrize("visible", [slice(0, 3), slice(70, 80), slice(150, 151), slice(199, 200)])
def test_rows_that_are_hidden_in_some_pieces_only(machine: Machine, visible: slice) -> None:
    batch = machine.batch(machine.paged, [1, 20], [200, 200])
    bits = torch.zeros(21, 200, dtype=torch.bool)
    bits[::2, visible] = True
    mask = reference.custom_mask(bits.flatten().to(machine.device), batch.fmt)
    for split in (None, 16, 64):
        plan = {"custom_mask": bits.flatten(), "fixed_split_size": split}
        assert_accurate(machine.run("custom_mask", batch, plan), batch, mask=mask)


# Results and inputs of any form


@pytest.mark.parametrize("split", [None, 32])
@pytest.mark.parametrize("lens", [EMPTY_ROWS, MIXED], ids=["empty-rows", "mixed"])
def test_lse_in_base_e(
    machine: Machine, lens: tuple[list[int], list[int]], split: int | None
) -> None:
    batch = machine.batch(machine.paged, *lens)
    plan = {"fixed_split_size": split}
    (out, log2), (same, ln) = (
        machine.run("window", batch, plan, lse_base=b) for b in ("log2", "ln")
    )
    assert torch.equal(out, same)
    torch.testing.assert_close(ln, log2 * math.log(2), rtol=1e-6, atol=1e-6)


def test_results_go_where_they_are_wanted(machine: Machine) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    expected = machine.run("window", batch)
    nnz = batch.q.shape[0]
    spacious = batch.q.new_full((nnz, 10, 80), 7.0)
    by_head = batch.q.new_empty(8, nnz, 64).transpose(0, 1)
    for out in (batch.q.new_empty(nnz, 8, 64), spacious[:, 1:9, 8:72], by_head):
        lse = torch.empty_like(expected[1])
        got = machine.run("window", batch, out=out, lse=lse)
        assert got[0] is out
        assert got[1] is lse
        assert_same_bits(got, expected)
    spacious[:, 1:9, 8:72] = 7.0
    assert (spacious == 7.0).all(), "only the results are written"


def test_an_lse_between_other_numbers(machine: Machine) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    spacious = machine.put([[7.0] * 12] * batch.q.shape[0])
    got = machine.run("window", batch, lse=spacious[:, 2:10])
    assert_same_bits(got, machine.run("window", batch))
    assert (spacious[:, :2] == 7.0).all()
    assert (spacious[:, 10:] == 7.0).all()


def test_without_return_lse_there_is_out_alone(machine: Machine) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    module = machine.kernel("window", machine.paged)
    out = module.run(module.plan(batch.fmt), batch.q, batch.kv)
    assert torch.equal(out, machine.run("window", batch, {"window_left": -1})[0])


def _views(x: torch.Tensor) -> list[torch.Tensor]:
    """The same values with other strides: between others, reordered in memory, in wider rows."""
    between = x.new_full((x.shape[0], 3, *x.shape[1:]), math.nan)
    between[:, 1] = x
    reordered = x.transpose(0, 1).contiguous().transpose(0, 1)
    wider = x.new_full((*x.shape[:-1], x.shape[-1] + 8), math.nan)
    wider[..., :-8] = x
    return [between[:, 1], reordered, wider[..., :-8]]


@pytest.mark.parametrize("fields", [{}, RAGGED_HND], ids=["paged", "ragged-HND"])
def test_strides_change_no_bit(machine: Machine, fields: dict[str, Any]) -> None:
    spec = machine.spec(**fields)
    name = "window" if spec.is_paged else "full"
    batch = machine.batch(spec, *MIXED)
    expected = machine.run(name, batch)
    k, v = batch.kv
    for q in _views(batch.q):
        assert_same_bits(machine.run(name, replace(batch, q=q)), expected)
    for view in zip(_views(k), reversed(_views(v)), strict=True):
        assert_same_bits(machine.run(name, replace(batch, kv=view)), expected)


def test_a_fused_cache_is_a_pair_of_caches(machine: Machine) -> None:
    batch = machine.batch(machine.paged, *MIXED, fused=True)
    assert batch.kv.ndim == 5
    expected = machine.run(
        "window", replace(batch, kv=tuple(x.contiguous() for x in batch.kv.unbind(1)))
    )
    assert_same_bits(machine.run("window", batch), expected)


@pytest.mark.parametrize(
    "convert",
    [torch.Tensor.long, torch.Tensor.numpy, lambda x: x.long().numpy(), torch.Tensor.tolist],
    ids=["int64", "numpy", "numpy-int64", "list"],
)
def test_index_arrays_of_any_form_give_the_same_plan(
    machine: Machine, convert: Callable[[torch.Tensor], Any]
) -> None:
    fmt = machine.batch(machine.paged, *MIXED).fmt
    arrays = (fmt.qo_indptr, fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len)
    module = machine.kernel("window", machine.paged)
    assert module.plan(*map(convert, arrays)).to_json() == module.plan(*arrays).to_json()


def test_a_plan_owns_its_arrays(machine: Machine) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    bits = random_mask(batch, torch.Generator().manual_seed(3))
    pieces = bits.split((batch.fmt.qo_len * batch.fmt.kv_len).tolist())
    packed = torch.cat([packbits(piece, bitorder="little") for piece in pieces])
    fmt = batch.fmt
    arrays = (fmt.qo_indptr, fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len, packed)
    arrays = tuple(array.clone() for array in arrays)
    module = machine.kernel("custom_mask", machine.paged)
    plan = module.plan(*arrays[:4], custom_mask=arrays[4])
    before = module.run(plan, batch.q, batch.kv, return_lse=True)
    for array in arrays:
        array.zero_()
    assert_same_bits(module.run(plan, batch.q, batch.kv, return_lse=True), before)


def test_one_plan_serves_all_layers(machine: Machine) -> None:
    layers = [machine.batch(machine.paged, *MIXED, seed=seed) for seed in range(3)]
    module = machine.kernel("window", machine.paged)
    fmt = layers[0].fmt
    plan = module.plan(fmt)
    for layer in layers:
        layer = replace(layer, kv=machine.batch(machine.paged, *MIXED).kv, fmt=fmt)
        got = module.run(plan, layer.q, layer.kv, return_lse=True)
        assert_accurate(got, layer, mask=reference.causal())


# Scales and magnitudes


@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [
        (0.5, 3.0),
        (torch.tensor(0.5), torch.tensor([3.0])),
        (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])),
    ],
    ids=["numbers", "one", "per-head"],
)
@pytest.mark.parametrize("name", ["window", "sink"])
def test_scales_of_keys_and_values(
    machine: Machine, name: str, k_scale: Scale, v_scale: Scale
) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    scaled = replace(batch, k_scale=k_scale, v_scale=v_scale).to(machine.device)
    machine.check(name, scaled)


def test_scales_of_logits_and_queries(machine: Machine) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    got = machine.run("window", batch, {"window_left": -1}, sm_scale=0.3, q_scale=1.5)
    assert_accurate(got, batch, mask=reference.causal(), sm_scale=0.45)


@pytest.mark.parametrize("name", ["window", "alibi", "soft_cap", "custom_mask", "sink"])
def test_very_large_logits(machine: Machine, name: str) -> None:
    batch = machine.batch(machine.paged, *MIXED, seed=1)
    machine.check(name, replace(batch, q=batch.q * 40))


# The same bits


@pytest.mark.parametrize("name", ["window", "sink"])
def test_rerun_and_replan_give_the_same_bits(machine: Machine, name: str) -> None:
    batch = machine.batch(machine.paged, *MIXED)
    module = machine.kernel(name, machine.paged)
    args = arguments(name, batch)
    plan = module.plan(batch.fmt, **args.plan)
    results = [module.run(plan, batch.q, batch.kv, return_lse=True, **args.run) for _ in range(3)]
    results.append(machine.run(name, batch))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("split", [7, 64, 1000])
@pytest.mark.parametrize("name", ["window", "alibi"])
def test_with_a_fixed_split_neighbours_change_no_bit(
    machine: Machine, name: str, split: int
) -> None:
    neighbours = [([], []), ([5, 0, 60], [300, 9, 80]), ([1] * 9, [17] * 9)]
    for mine in ((1, 150), (9, 150), (40, 90), (3, 0), (4, 2)):
        alone = machine.batch(machine.paged, [mine[0]], [mine[1]], seed=5)
        args = arguments(name, alone)
        expected = None
        for before in neighbours:
            for num_ctas in (2, 7):
                module = machine.kernel(name, machine.paged).with_ctas(num_ctas)
                batch, rows = _among(machine, alone, before, neighbours[-2])
                plan = module.plan(batch.fmt, fixed_split_size=split)
                got = module.run(plan, batch.q, batch.kv, return_lse=True, **args.run)
                got = tuple(x[rows] for x in got)
                expected = expected or got
                assert_same_bits(got, expected)
        variant = {**args.reference, "mask": reference.causal()}
        assert_accurate(expected, alone, **variant)


def _among(
    machine: Machine,
    alone: Batch,
    before: tuple[list[int], list[int]],
    after: tuple[list[int], list[int]],
) -> tuple[Batch, slice]:
    """Return a batch with one request's tensors among others, and that request's rows."""
    qo_len, kv_len = int(alone.fmt.qo_len[0]), int(alone.fmt.kv_len[0])
    lens = [[*b, mine, *a] for b, mine, a in zip(before, (qo_len, kv_len), after, strict=True)]
    batch = machine.batch(alone.spec, *lens, seed=9)
    first = sum(before[0])
    rows = slice(first, first + qo_len)
    batch.q[rows] = alone.q
    begin, end = batch.fmt.kv_indptr[len(before[0]) : len(before[0]) + 2].tolist()
    for cache, mine in zip(batch.kv, alone.kv, strict=True):
        cache[batch.fmt.kv_indices[begin:end].long()] = mine[alone.fmt.kv_indices.long()]
    return batch, rows


# Plans


@pytest.mark.parametrize(
    "lens",
    [MIXED, ([1], [3000]), ([1] * 100, list(range(100))), ([100], [130])],
    ids=["mixed", "one-long", "many-short", "prefill"],
)
@pytest.mark.parametrize("name", ["window", "sink", "custom_mask"])
def test_any_number_of_ctas(machine: Machine, name: str, lens: tuple[list[int], list[int]]) -> None:
    batch = machine.batch(machine.paged, *lens)
    args = arguments(name, batch)
    expected = batch.exact(**args.reference), batch.eager(**args.reference)
    for num_ctas in (1, 2, 7, 132):
        module = machine.kernel(name, machine.paged).with_ctas(num_ctas)
        plan = module.plan(batch.fmt, **args.plan)
        got = module.run(plan, batch.q, batch.kv, return_lse=True, **args.run)
        assert_states_accurate(got, *expected)


def test_replanning_in_place(machine: Machine) -> None:
    module = machine.kernel("window", machine.paged)
    first, second = (
        machine.batch(machine.paged, *MIXED),
        machine.batch(machine.paged, [2, 2], [50, 3], seed=1),
    )
    plan = module.plan(first.fmt)
    assert module.plan(second.fmt, out=plan) is plan
    got = module.run(plan, second.q, second.kv, return_lse=True)
    assert_accurate(got, second, mask=reference.causal())


def test_a_workspace_within_its_declared_limits_is_enough(machine: Machine) -> None:
    module = machine.kernel("window", machine.paged).with_ctas(7)
    limits = PlanLimits(max_batch=5, max_qo_tokens=64, max_kv_tokens=600)
    for split in (None, 8, 64):
        size, _ = module.workspace_size(limits, fixed_split_size=split)
        workspace = machine.put([255]).to(torch.uint8).expand(size).contiguous()
        for lens in (MIXED, ([1], [590]), ([60, 4], [590, 3]), ([1] * 5, [110] * 5)):
            batch = machine.batch(machine.paged, *lens)
            plan = module.plan(
                batch.fmt, limits=limits, workspace=workspace, fixed_split_size=split
            )
            got = module.run(plan, batch.q, batch.kv, return_lse=True)
            assert_accurate(got, batch, mask=reference.causal())


def test_the_workspace_does_not_grow_with_the_batch(machine: Machine) -> None:
    module = machine.kernel("window", machine.paged)
    small, large = (PlanLimits(n, n, 1000 * n) for n in (10, 10_000))
    assert module.workspace_size(small)[0] == module.workspace_size(large)[0]
    assert module.workspace_size(small)[1] < module.workspace_size(large)[1]


def test_the_longest_query_may_be_declared(machine: Machine) -> None:
    module = machine.kernel("window", machine.paged)
    batch = machine.batch(machine.paged, *MIXED)
    plan = module.plan(batch.fmt, max_qo_len=40)
    assert plan.to_json() == module.plan(batch.fmt).to_json()
