"""The facades compute what FlashInfer's names say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as flashinfer
from tests.accuracy import assert_accurate
from tests.batches import Batch, random_batch
from tests.facades import (
    ALL_OPTIONS,
    CAP,
    CAUSAL,
    HND,
    KV_LENS,
    QO_LENS,
    RAGGED,
    RAGGED_HND,
    SPEC,
    WINDOW,
    decode_batch,
    page_table,
    plan_decode,
    plan_mixed,
    plan_paged,
    plan_ragged,
    prefill_batch,
    random_mask,
    workspace,
)
from tests.machine import Machine
from tvm_attn import reference
from tvm_attn._flashinfer.options import alibi_slopes, split_tokens
from tvm_attn.bsr import BSR
from tvm_attn.errors import DTypeError, PlanError, ShapeError, SpecError
from tvm_attn.spec import AttentionSpec


@pytest.fixture(scope="module")
def decoding(machine: Machine) -> Batch:
    return decode_batch(SPEC).to(machine.device)


@pytest.fixture(scope="module")
def prefilling(machine: Machine) -> Batch:
    return prefill_batch(SPEC).to(machine.device)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode(machine: Machine, kv_layout: str, page_size: int, fused: bool) -> None:
    spec = AttentionSpec(6, 2, 32, kv_layout=kv_layout, page_size=page_size)
    batch = decode_batch(spec, fused=fused).to(machine.device)
    wrapper = plan_decode(batch)
    assert_accurate(wrapper.run(batch.q, batch.kv, return_lse=True), batch)
    if page_size == 1:
        axis = -3 if kv_layout == "NHD" else -2
        kv = batch.kv.squeeze(axis) if fused else tuple(x.squeeze(axis) for x in batch.kv)
        assert torch.equal(wrapper.run(batch.q, kv), wrapper.run(batch.q, batch.kv))


def test_results_go_where_they_are_wanted(decoding: Batch) -> None:
    wrapper = plan_decode(decoding)
    out, lse = wrapper.run_return_lse(decoding.q, decoding.kv)
    into = torch.empty_like(out), torch.empty_like(lse)
    got = wrapper.run(decoding.q, decoding.kv, out=into[0], lse=into[1], return_lse=True)
    assert got[0] is into[0]
    assert got[1] is into[1]
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)
    assert torch.equal(wrapper.run(decoding.q, decoding.kv), out)


def test_decode_with_everything_a_plan_takes(decoding: Batch) -> None:
    options = {"sm_scale": 0.7, "logits_soft_cap": CAP, "window_left": WINDOW}
    wrapper = plan_decode(decoding, **options, pos_encoding_mode="ALIBI")
    twins = {**ALL_OPTIONS, "sm_scale": 0.7}
    assert_accurate(wrapper.run(decoding.q, decoding.kv, return_lse=True), decoding, **twins)
    twins["mask"] = reference.sliding_window(3)
    narrow = wrapper.run(decoding.q, decoding.kv, return_lse=True, window_left=3)
    assert_accurate(narrow, decoding, **twins)
    with pytest.raises(PlanError, match="window_left"):
        wrapper.run(decoding.q, decoding.kv, window_left=WINDOW + 1)


def test_rows_without_keys_are_empty_states(machine: Machine) -> None:
    """Causal, with requests of more queries than keys."""
    batch = prefill_batch(SPEC).to(machine.device)
    out, lse = plan_paged(batch, causal=True).run(batch.q, batch.kv, return_lse=True)
    lens = zip(QO_LENS, KV_LENS, strict=True)
    empty = torch.cat([torch.arange(qo) < qo - kv for qo, kv in lens])
    assert empty.any()
    assert (out[empty] == 0).all()
    assert (lse[empty] == -torch.inf).all()
    assert lse[~empty].isfinite().all()


def test_a_flat_indptr_has_no_keys(decoding: Batch) -> None:
    indptr, indices, last = page_table(decoding)
    assert indptr[2] == indptr[3]
    for tokens in (0, 1, 4, 99):
        last = last.clone()
        last[2] = tokens
        assert flashinfer.get_seq_lens(indptr, last, 4)[2] == 0
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(decoding))
        wrapper.plan(indptr, indices, last, 6, 2, 32, 4)
        out, lse = wrapper.run(decoding.q, decoding.kv, return_lse=True)
        assert (out[2] == 0).all()
        assert (lse[2] == -torch.inf).all()


@pytest.mark.parametrize("num_heads", [1, 6, 8, 12, 32])
def test_alibi_slopes(num_heads: int) -> None:
    torch.testing.assert_close(alibi_slopes(num_heads), reference.alibi_slopes(num_heads))


def test_scales_of_an_fp8_cache(machine: Machine) -> None:
    spec = AttentionSpec(6, 2, 32, kv_dtype="float8_e4m3fn", page_size=4)
    batch = decode_batch(spec).to(machine.device)
    wrapper = plan_decode(batch)
    assert_accurate(wrapper.run(batch.q, batch.kv, return_lse=True, **batch.scales), batch)
    got = wrapper.run(batch.q, batch.kv, return_lse=True, q_scale=2.0, k_scale=0.5, v_scale=3.0)
    one = {"sm_scale": 2.0 / 32**0.5, "k_scale": 0.5, "v_scale": 3.0}
    assert_accurate(got, batch, **one)


def test_scales_are_applied_to_16_bit_caches_too(machine: Machine, decoding: Batch) -> None:
    scales = {"k_scale": 0.5, "v_scale": machine.put(3.0)}
    got = plan_decode(decoding).run(decoding.q, decoding.kv, **scales)
    assert_accurate(got, decoding, k_scale=0.5, v_scale=3.0)


def test_several_query_tokens_a_request(machine: Machine) -> None:
    batch = decode_batch(SPEC, q_len=3).to(machine.device)
    wrapper = plan_decode(batch, q_len_per_req=3)
    assert_accurate(
        wrapper.run(batch.q, batch.kv, return_lse=True, q_len_per_req=3), batch, **CAUSAL
    )
    wrapper = plan_decode(batch, q_len_per_req=3, is_causal=False)
    assert_accurate(wrapper.run(batch.q, batch.kv), batch)
    with pytest.raises(PlanError, match="q_len_per_req=1, but the batch was planned with 3"):
        wrapper.run(batch.q, batch.kv, q_len_per_req=1)
    with pytest.raises(PlanError, match="q_len_per_req=0"):
        plan_decode(batch, q_len_per_req=0)


def alone(batch: Batch, b: int) -> Batch:
    """One request of a batch, as a batch of its own."""
    fmt = batch.fmt
    rows, keys = (slice(*map(int, x[b : b + 2])) for x in (fmt.qo_indptr, fmt.kv_indptr))
    qo_indptr, kv_indptr = [0, rows.stop - rows.start], [0, keys.stop - keys.start]
    if fmt.kv_indices is None:
        single, kv = BSR.from_ragged(qo_indptr, kv_indptr), tuple(x[keys] for x in batch.kv)
    else:
        last = fmt.kv_last_page_len[b : b + 1]
        single, kv = (
            BSR.from_page_table(qo_indptr, kv_indptr, fmt.kv_indices[keys], last, fmt.page_size),
            batch.kv,
        )
    return replace(batch, fmt=single, q=batch.q[rows], kv=kv)


SPLITS = {"fixed_split_size": 16}, {"disable_split_kv": True}


@pytest.mark.parametrize("options", SPLITS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
def test_fixed_splits_make_the_bits_of_a_request_its_own(
    machine: Machine, kind: str, options: dict[str, Any]
) -> None:
    plan = {"decode": plan_decode, "paged": plan_paged, "ragged": plan_ragged}[kind]
    lens = [1, 1, 1] if kind == "decode" else [2, 9, 3]
    spec = RAGGED if kind == "ragged" else SPEC
    batch = random_batch(spec, lens, [90, 7, 300]).to(machine.device)

    def run(part: Batch) -> torch.Tensor:
        caches = part.kv if kind == "ragged" else (part.kv,)
        return plan(part, **options).run(part.q, *caches)

    together = run(batch)
    assert_accurate(together, batch)
    assert torch.equal(torch.cat([run(alone(batch, b)) for b in range(3)]), together)


def test_fixed_splits_are_in_pages_or_ragged_tokens(machine: Machine) -> None:
    """-1 is off, as in serving engines, and disabling wins."""
    assert split_tokens(3, False, 16) == 48
    assert split_tokens(3, False, 1) == 3
    assert split_tokens(None, False, 16) is None
    assert split_tokens(-1, False, 16) is None
    assert split_tokens(3, True, 16) == 1 << 30
    batch = random_batch(SPEC, [1], [90]).to(machine.device)
    counts = [
        plan_decode(batch, **options)._planned.num_slots
        for options in ({"fixed_split_size": 16}, {"fixed_split_size": 8}, *SPLITS[1:])
    ]
    assert counts == [2 * 2, 2 * 3, 0]  # pieces of 64 and 32 tokens, for each KV head


def test_prefill_with_pages(prefilling: Batch) -> None:
    got = plan_paged(prefilling, causal=True).run(prefilling.q, prefilling.kv, return_lse=True)
    assert_accurate(got, prefilling, **CAUSAL)


def test_prefill_hnd_with_other_head_dims_and_dtype(machine: Machine) -> None:
    batch = prefill_batch(HND).to(machine.device)
    got = plan_paged(batch, causal=True).run_return_lse(batch.q, batch.kv)
    assert_accurate(got, batch, **CAUSAL)


@pytest.mark.parametrize("spec", [RAGGED, RAGGED_HND], ids=str)
def test_prefill_with_ragged_keys(machine: Machine, spec: AttentionSpec) -> None:
    batch = prefill_batch(spec).to(machine.device)
    got = plan_ragged(batch, causal=True).run(batch.q, *batch.kv, return_lse=True)
    assert_accurate(got, batch, **CAUSAL)


def test_layouts_and_bases_of_the_lse(prefilling: Batch) -> None:
    wrapper = plan_paged(prefilling, causal=True)
    args = (prefilling.q, prefilling.kv)
    lse = wrapper.run(*args, return_lse=True)[1]
    by_head = wrapper.run(*args, return_lse=True, lse_layout="HN")[1]
    assert by_head.is_contiguous()
    assert torch.equal(by_head, lse.T)
    into = torch.empty_like(by_head)
    assert wrapper.run(*args, lse=into, return_lse=True, lse_layout="HN")[1] is into
    assert torch.equal(into, by_head)
    natural = wrapper.run(*args, return_lse=True, lse_base="ln")[1]
    torch.testing.assert_close(natural, lse * np.log(2), rtol=1e-6, atol=1e-6)
    with pytest.raises(SpecError, match="lse_layout='TH'"):
        wrapper.run(*args, lse_layout="TH")
    with pytest.raises(SpecError, match="lse_base='log10'"):
        wrapper.run(*args, return_lse=True, lse_base="log10")
    with pytest.raises(ShapeError, match=r"lse has shape"):
        wrapper.run(*args, lse=lse, return_lse=True, lse_layout="HN")


@pytest.mark.parametrize("packed", [False, True])
def test_a_custom_mask_replaces_causal_and_meets_the_window(
    machine: Machine, prefilling: Batch, packed: bool
) -> None:
    mask = random_mask(prefilling)
    given = {"custom_mask": mask}
    if packed:
        pairs = (prefilling.fmt.qo_len * prefilling.fmt.kv_len).cumsum(0)
        indptr = torch.nn.functional.pad(pairs, (1, 0))
        bits, _ = flashinfer.segment_packbits(mask, indptr, bitorder="little")
        given = {"packed_custom_mask": bits, "custom_mask": ~mask}  # bits win
    wrapper = plan_paged(prefilling, **given, causal=True, window_left=WINDOW)
    twin = reference.custom_mask(mask.to(machine.device), prefilling.fmt)
    twin &= reference.sliding_window(WINDOW)
    assert_accurate(
        wrapper.run(prefilling.q, prefilling.kv, return_lse=True), prefilling, mask=twin
    )


def test_custom_masks_are_checked(machine: Machine, prefilling: Batch) -> None:
    mask = random_mask(prefilling)
    with pytest.raises(PlanError, match="custom_mask has"):
        plan_paged(prefilling, custom_mask=mask[:-1], window_left=WINDOW)
    with pytest.raises(DTypeError, match=r"packed_custom_mask has dtype torch\.bool"):
        plan_paged(prefilling, packed_custom_mask=mask)
    zeros_and_ones = plan_paged(prefilling, custom_mask=mask.to(torch.uint8), window_left=WINDOW)
    twin = reference.custom_mask(mask.to(machine.device), prefilling.fmt)
    twin &= reference.sliding_window(WINDOW)
    assert_accurate(zeros_and_ones.run(prefilling.q, prefilling.kv), prefilling, mask=twin)


def test_forward_replaces_the_options_of_the_plan(machine: Machine, prefilling: Batch) -> None:
    wrapper = plan_paged(prefilling, causal=True)
    args = (prefilling.q, prefilling.kv)
    assert_accurate(wrapper.forward(*args), prefilling)
    assert_accurate(wrapper.forward_return_lse(*args, causal=True), prefilling, **CAUSAL)
    got = wrapper.forward(*args, causal=True, sm_scale=0.5)
    assert_accurate(got, prefilling, sm_scale=0.5, **CAUSAL)
    assert torch.equal(wrapper.run(*args), got)
    ragged = prefill_batch(RAGGED).to(machine.device)
    wrapper = plan_ragged(ragged)
    assert_accurate(wrapper.forward(ragged.q, *ragged.kv, causal=True), ragged, **CAUSAL)
    assert_accurate(wrapper.forward_return_lse(ragged.q, *ragged.kv), ragged)
    decoding = decode_batch(SPEC).to(machine.device)
    wrapper = plan_decode(decoding)
    args = (decoding.q, decoding.kv)
    options = {"window_left": WINDOW, "logits_soft_cap": CAP, "pos_encoding_mode": "ALIBI"}
    assert_accurate(wrapper.forward(*args, **options), decoding, **ALL_OPTIONS)
    assert_accurate(wrapper.forward_return_lse(*args), decoding)


def test_batch_attention_defaults_to_bfloat16_and_returns_the_lse(machine: Machine) -> None:
    batch = prefill_batch(HND).to(machine.device)
    attention = plan_mixed(batch, causal=True, logits_soft_cap=CAP)
    cap = {"logits": reference.soft_cap(CAP), **CAUSAL}
    assert_accurate(attention.run(batch.q, batch.kv), batch, **cap)
    out = torch.empty_like(batch.q[..., :1].expand(-1, -1, HND.dim_vo)).contiguous()
    lse = torch.empty(batch.q.shape[:2], device=machine.device)
    got = attention.run(batch.q, batch.kv, out, lse, logits_soft_cap=5.0)
    assert got[0] is out
    assert got[1] is lse
    assert_accurate(got, batch, logits=reference.soft_cap(5.0), **CAUSAL)


def test_batch_attention_is_on_a_gpu_unless_told_otherwise() -> None:
    assert flashinfer.BatchAttention().device.type == "cuda"
    assert flashinfer.BatchAttention(device="cpu").device.type == "cpu"


def test_batch_attention_needs_its_soft_cap_at_plan(machine: Machine) -> None:
    batch = prefill_batch(HND).to(machine.device)
    attention = plan_mixed(batch, causal=True)
    with pytest.raises(PlanError, match=r"logits_soft_cap=5\.0"):
        attention.run(batch.q, batch.kv, logits_soft_cap=5.0)


def test_batch_attention_reads_the_pages_that_its_lengths_take(machine: Machine) -> None:
    batch = prefill_batch(HND).to(machine.device)
    args = (HND.num_qo_heads, HND.num_kv_heads, HND.head_dim_qk, HND.dim_vo, HND.page_size, True)
    indptr, indices, _ = page_table(batch)
    spare = indptr + 2 * torch.arange(len(indptr), dtype=torch.int32)
    padded = torch.full((int(spare[-1]),), 999, dtype=torch.int32)
    for b in range(len(indptr) - 1):
        pages = indices[indptr[b] : indptr[b + 1]]
        padded[spare[b] : spare[b] + len(pages)] = pages
    attention = flashinfer.BatchAttention("HND", machine.device)
    attention.plan(batch.fmt.qo_indptr, spare, padded, batch.fmt.kv_len, *args)
    assert_accurate(attention.run(batch.q, batch.kv), batch, **CAUSAL)
    with pytest.raises(PlanError, match=r"kv_len_arr\[1\] is 9; .* 2 pages of 4"):
        attention.plan(batch.fmt.qo_indptr, indptr, indices, [17, 9, 0, 40, 2], *args)
    with pytest.raises(PlanError, match=r"kv_len_arr\[2\] is -1"):
        attention.plan(batch.fmt.qo_indptr, indptr, indices, [17, 6, -1, 40, 2], *args)
    with pytest.raises(ShapeError, match="kv_len_arr has 1 entries"):
        attention.plan(batch.fmt.qo_indptr, indptr, indices, [17], *args)
    with pytest.raises(PlanError, match=r"kv_indices has 3 entries"):
        attention.plan(batch.fmt.qo_indptr, spare, padded[:3], batch.fmt.kv_len, *args)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_decode(machine: Machine, kv_layout: str) -> None:
    spec = AttentionSpec(6, 2, 32, kv_layout=kv_layout, page_size=None)
    batch = random_batch(spec, [1], [77], spare=0).to(machine.device)
    out, lse = flashinfer.single_decode_with_kv_cache(
        batch.q[0], *batch.kv, kv_layout, return_lse=True
    )
    assert lse.shape == (6,)
    assert_accurate((out[None], lse[None]), batch)
    got = flashinfer.single_decode_with_kv_cache(
        batch.q[0], *batch.kv, kv_layout, q_scale=2.0, k_scale=0.5, v_scale=3.0
    )
    assert_accurate(got[None], batch, sm_scale=2.0 / 32**0.5, k_scale=0.5, v_scale=3.0)


def test_single_prefill(machine: Machine) -> None:
    batch = random_batch(RAGGED, [9], [30], spare=0).to(machine.device)
    args = (batch.q, *batch.kv)
    got = flashinfer.single_prefill_with_kv_cache(*args, causal=True, return_lse=True)
    assert_accurate(got, batch, **CAUSAL)
    mask = random_mask(batch).to(machine.device)
    bits = flashinfer.packbits(mask, bitorder="little")
    twin = {"mask": reference.custom_mask(mask, batch.fmt)}
    for given in ({"custom_mask": mask.view(9, 30)}, {"packed_custom_mask": bits}):
        out = flashinfer.single_prefill_with_kv_cache(*args, **given, causal=True, backend="fa2")
        assert_accurate(out, batch, **twin)
    got = flashinfer.prefill.single_prefill_with_kv_cache_return_lse(
        *args, k_scale=0.5, v_scale=2.0
    )
    assert_accurate(got, batch, k_scale=0.5, v_scale=2.0)
    batch = random_batch(RAGGED_HND, [9], [30], spare=0).to(machine.device)
    wide = flashinfer.single_prefill_with_kv_cache(
        batch.q, *batch.kv, causal=True, kv_layout="HND", o_dtype=torch.float32
    )
    assert wide.dtype == torch.float32
    assert_accurate(wide, batch, **CAUSAL)
