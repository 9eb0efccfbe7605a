"""The facades check what they are given: arguments, graph buffers, and runs against plans."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tvm_attn as flashinfer
from tests.accuracy import assert_accurate
from tests.batches import Batch, random_batch
from tests.facades import (
    ALL_OPTIONS,
    CAP,
    CAUSAL,
    KV_LENS,
    QO_LENS,
    RAGGED,
    SPEC,
    WINDOW,
    WORKSPACE,
    decode_batch,
    page_table,
    plan_decode,
    plan_paged,
    plan_ragged,
    prefill_batch,
    random_mask,
)
from tvm_attn import reference
from tvm_attn._flashinfer.options import kernel_for
from tvm_attn.errors import (
    DTypeError,
    LimitError,
    PlanError,
    ShapeError,
    SpecError,
    VariantError,
)


@pytest.fixture(scope="module")
def decoding() -> Batch:
    return decode_batch(SPEC)


@pytest.fixture(scope="module")
def prefilling() -> Batch:
    return prefill_batch(SPEC)


def test_index_arrays_may_be_numpy_int64_or_lists(decoding: Batch) -> None:
    expected = plan_decode(decoding).run(decoding.q, decoding.kv)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    for convert in (lambda x: x.numpy(), lambda x: x.long(), lambda x: x.tolist()):
        wrapper.begin_forward(*map(convert, page_table(decoding)), 6, 2, 32, 4)
        assert torch.equal(wrapper.run(decoding.q, decoding.kv), expected)


def test_arguments_after_page_size_by_position_are_deprecated(decoding: Batch) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.warns(DeprecationWarning, match="by name"):
        wrapper.plan(*page_table(decoding), 6, 2, 32, 4, "ALIBI", WINDOW, CAP)
    assert_accurate(wrapper.run(decoding.q, decoding.kv), decoding, **ALL_OPTIONS)
    with pytest.raises(TypeError, match="multiple values for argument 'window_left'"):
        wrapper.plan(*page_table(decoding), 6, 2, 32, 4, "NONE", WINDOW, window_left=1)
    with pytest.raises(TypeError, match="at most 16 arguments"):
        wrapper.plan(*page_table(decoding), 6, 2, 32, 4, *["NONE"] * 17)
    with pytest.raises(NotImplementedError, match=r"Wrapper\.plan: window_right is"):
        wrapper.plan(*page_table(decoding), 6, 2, 32, 4, window_right=3)
    with pytest.raises(TypeError, match="'causal'"):
        wrapper.plan(*page_table(decoding), 6, 2, 32, 4, causal=True)


def test_data_type_stands_in_for_dtypes_that_are_none(decoding: Batch) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    shape = (*page_table(decoding), 6, 2, 32, 4)
    wrapper.plan(*shape, q_data_type=None, data_type=torch.float16)
    assert wrapper.run(decoding.q, decoding.kv).dtype == torch.float16
    with pytest.raises(SpecError, match=r"kv_dtype='float32' must equal q_dtype='float16'"):
        wrapper.plan(*shape, data_type="float32")


def test_lengths_that_are_given_twice_must_agree(prefilling: Batch) -> None:
    fmt = prefilling.fmt
    plan_paged(prefilling, causal=True, seq_lens=fmt.kv_len, seq_lens_q=fmt.qo_len.numpy())
    with pytest.raises(PlanError, match=r"seq_lens is \[18, 7, 1, 41, 3\]"):
        plan_paged(prefilling, causal=True, seq_lens=fmt.kv_len + 1)
    with pytest.raises(PlanError, match="seq_lens_q is"):
        plan_paged(prefilling, causal=True, seq_lens_q=QO_LENS[:-1])
    with pytest.raises(PlanError, match="seq_lens is"):
        plan_decode(decode_batch(SPEC), seq_lens=[1, 2, 3, 4, 5])
    ragged = prefill_batch(RAGGED)
    plan_ragged(ragged, causal=True, seq_lens=KV_LENS, seq_lens_q=QO_LENS)
    with pytest.raises(PlanError, match="seq_lens is"):
        plan_ragged(ragged, causal=True, seq_lens=QO_LENS)


def test_single_functions_check_their_tensors() -> None:
    q, k, v = torch.zeros(6, 32).half(), torch.zeros(5, 2, 32).half(), torch.zeros(5, 2, 32).half()
    with pytest.raises(ShapeError, match=r"q has shape \(1, 6, 32\), expected \[num_qo_heads"):
        flashinfer.single_decode_with_kv_cache(q[None], k, v)
    with pytest.raises(ShapeError, match=r"q has shape \(6, 32\), expected \[qo_len"):
        flashinfer.single_prefill_with_kv_cache(q, k, v)
    with pytest.raises(ShapeError, match=r"k has shape \(1, 5, 2, 32\), expected 3 axes"):
        flashinfer.single_decode_with_kv_cache(q, k[None], v)
    with pytest.raises(DTypeError, match="v must be a torch tensor, got list"):
        flashinfer.single_decode_with_kv_cache(q, k, v.tolist())
    with pytest.raises(SpecError, match="kv_dtype='float32' must equal q_dtype='float16'"):
        flashinfer.single_decode_with_kv_cache(q, k.float(), v.float())
    with pytest.raises(DTypeError, match="v has dtype"):
        flashinfer.single_decode_with_kv_cache(q, k, v.float())
    with pytest.raises(SpecError, match="backend='fa9'"):
        flashinfer.single_prefill_with_kv_cache(q[None], k, v, backend="fa9")
    with pytest.raises(SpecError, match="kv_layout='DHN'"):
        flashinfer.single_decode_with_kv_cache(q, k, v, "DHN")


def graph_decode(max_batch: int, max_pages: int) -> tuple[Any, list[torch.Tensor]]:
    buffers = [
        torch.full((n,), -7, dtype=torch.int32) for n in (max_batch + 1, max_pages, max_batch)
    ]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    return wrapper, buffers


def test_graph_mode_copies_plans_into_the_callers_buffers(decoding: Batch) -> None:
    wrapper, (indptr, indices, last) = graph_decode(8, 40)
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(*page_table(decoding), 6, 2, 32, 4)
    assert_accurate(wrapper.run(decoding.q, decoding.kv, return_lse=True), decoding)
    table = page_table(decoding)
    assert torch.equal(indptr[:6], table[0])
    assert torch.equal(indices[: len(table[1])], table[1])
    assert torch.equal(last[:2], table[2][:2])
    assert (indptr[6:] == -7).all()
    assert not plan_decode(decoding).is_cuda_graph_enabled


def test_graph_mode_refuses_what_does_not_fit(decoding: Batch) -> None:
    shape = (6, 2, 32, 4)
    table = page_table(decoding)
    for limits, name in (((4, 40), "max_batch"), ((5, 3), "max_kv_tokens")):
        wrapper, buffers = graph_decode(*limits)
        with pytest.raises(LimitError, match=f"{name}=.*the sizes of the constructor's buffers"):
            wrapper.plan(*table, *shape)
        assert all((buffer == -7).all() for buffer in buffers)
    wrapper, buffers = graph_decode(5, 40)
    wrapper.plan(*table, *shape)
    before = wrapper.run(decoding.q, decoding.kv)
    with pytest.raises(LimitError, match="max_qo_tokens"):
        wrapper.plan(*table, *shape, q_len_per_req=2)
    assert torch.equal(wrapper.run(decoding.q, decoding.kv), before)


def test_graph_mode_of_the_prefill_wrappers(prefilling: Batch) -> None:
    def buffer(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def paged(mask_bytes: int | None, **options: Any) -> Any:
        masks = (None, None) if mask_bytes is None else (buffer(mask_bytes, torch.uint8), buffer(6))
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            WORKSPACE, "NHD", True, buffer(6), buffer(6), buffer(64), buffer(5), *masks, **options
        )
        return wrapper, masks

    def plan(wrapper: Any, **options: Any) -> None:
        table = page_table(prefilling)
        wrapper.plan(prefilling.fmt.qo_indptr, *table, 6, 2, 32, 4, window_left=WINDOW, **options)

    mask = random_mask(prefilling)
    wrapper, (bits, indptr) = paged(200)
    plan(wrapper, custom_mask=mask)
    twin = reference.custom_mask(mask, prefilling.fmt) & reference.sliding_window(WINDOW)
    assert_accurate(wrapper.run(prefilling.q, prefilling.kv), prefilling, mask=twin)
    packed = flashinfer.packbits(mask[: 3 * 17], "little")
    assert torch.equal(bits[: len(packed)], packed)
    assert indptr.tolist() == [0, 7, 7, 7, 102, 104]
    with pytest.raises(LimitError, match="custom_mask_buf has 20 entries, this batch needs 104"):
        plan(paged(20)[0], custom_mask=mask)
    with pytest.raises(LimitError, match="custom_mask_buf; give it to the constructor"):
        plan(paged(None)[0], custom_mask=mask)
    with pytest.raises(LimitError, match="max_qo_tokens"):
        plan(paged(200, max_total_num_rows=20)[0], custom_mask=mask)
    ragged = prefill_batch(RAGGED)
    graph = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        WORKSPACE, "NHD", True, buffer(6), buffer(6)
    )
    graph.plan(ragged.fmt.qo_indptr, ragged.fmt.kv_indptr, 6, 2, 32, causal=True)
    assert_accurate(graph.run(ragged.q, *ragged.kv), ragged, **CAUSAL)


def test_graph_mode_needs_its_buffers() -> None:
    table = [torch.zeros(n, dtype=torch.int32) for n in (6, 64, 4)]
    with pytest.raises(DTypeError, match="paged_kv_indices_buffer must be a torch tensor"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            WORKSPACE, use_cuda_graph=True, paged_kv_indptr_buffer=table[0]
        )
    with pytest.raises(ShapeError, match="paged_kv_last_page_len_buffer has 4 entries"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, False, *table)
    with pytest.raises(SpecError, match="max_total_num_rows"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, max_total_num_rows=4)


def test_workspace_is_accepted_and_its_exact_size_told(decoding: Batch, prefilling: Batch) -> None:
    wrapper = plan_decode(decoding)
    wrapper.reset_workspace_buffer(WORKSPACE, WORKSPACE)
    sizes = wrapper.workspace_size(*page_table(decoding), 6, 2, 32, 4)
    assert len(sizes) == 2
    assert all(isinstance(size, int) and size > 0 for size in sizes)
    fmt = prefilling.fmt
    sizes = plan_paged(prefilling, causal=True).workspace_size(
        fmt.qo_indptr, *page_table(prefilling), 6, 2, 32, 4, causal=True
    )
    assert all(size > 0 for size in sizes)
    with pytest.raises(DTypeError, match="float_workspace_buffer must be a torch tensor, got int"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(128)
    with pytest.raises(DTypeError, match="int_workspace_buffer must be a torch tensor"):
        wrapper.reset_workspace_buffer(WORKSPACE, None)


def test_hints_change_nothing(decoding: Batch) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE, use_tensor_cores=True, backend="trtllm-gen"
    )
    assert wrapper.use_tensor_cores
    assert wrapper.resolved_backend == "trtllm-gen"
    wrapper.plan(*page_table(decoding), 6, 2, 32, 4, non_blocking=False)
    got = wrapper.run(decoding.q, decoding.kv, enable_pdl=True)
    plain = plan_decode(decoding)
    assert torch.equal(got, plain.run(decoding.q, decoding.kv))
    assert plain.resolved_backend == "tvm"
    with pytest.raises(SpecError, match="backend='fa9' is not a backend"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa9")


def test_strides_need_no_prewarming(decoding: Batch) -> None:
    plan_decode(decoding).prewarm_paged_kv_stride_variant()
    with pytest.raises(SpecError, match="variant='shared'"):
        plan_decode(decoding).prewarm_paged_kv_stride_variant("shared")
    with pytest.raises(PlanError, match=r"there is no plan yet; call plan\(\) first"):
        flashinfer.BatchAttention(device="cpu").prewarm_paged_kv_stride_variant()


def test_runs_are_checked_against_the_plan(decoding: Batch) -> None:
    fresh = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(PlanError, match=r"there is no plan yet; call plan\(\) first"):
        fresh.run(decoding.q, decoding.kv)
    wrapper = plan_decode(decoding)
    k, v = decoding.kv
    with pytest.raises(ShapeError, match=r"q has shape \(4, 6, 32\), expected \(5, 6, 32\)"):
        wrapper.run(decoding.q[1:], (k, v))
    with pytest.raises(DTypeError, match=r"q has dtype torch\.float32"):
        wrapper.run(decoding.q.float(), (k, v))
    with pytest.raises(DTypeError, match=r"v has dtype torch\.float32"):
        wrapper.run(decoding.q, (k, v.float()))
    with pytest.raises(PlanError, match="refers to page"):
        wrapper.run(decoding.q, (k[:2], v[:2]))
    with pytest.raises(DTypeError, match="a KV cache is a pair"):
        wrapper.run(decoding.q, 7)
    with pytest.raises(PlanError, match="window_left=3, but the batch was planned without"):
        wrapper.run(decoding.q, (k, v), window_left=3)


def test_a_bad_plan_leaves_the_earlier_one(decoding: Batch) -> None:
    wrapper = plan_decode(decoding)
    before = wrapper.run(decoding.q, decoding.kv)
    indptr, indices, last = page_table(decoding)
    for table, options, error in (
        ((indptr, indices[:2], last), {}, PlanError),
        ((indptr, indices, last + 4), {}, PlanError),
        ((indptr, indices, last.float()), {}, DTypeError),
        ((indptr, indices, last), {"pos_encoding_mode": "ROTARY"}, SpecError),
        ((indptr, indices, last), {"sm_scale": "0.1"}, DTypeError),
        ((indptr, indices, last), {"sm_scale": math.nan}, VariantError),
        ((indptr, indices, last), {"logits_soft_cap": math.nan}, VariantError),
        ((indptr, indices, last), {"pos_encoding_mode": "ROPE_LLAMA"}, NotImplementedError),
    ):
        with pytest.raises(error):
            wrapper.plan(*table, 6, 2, 32, 4, **options)
    with pytest.raises(SpecError, match="num_qo_heads=5"):
        wrapper.plan(indptr, indices, last, 5, 2, 32, 4)
    assert torch.equal(wrapper.run(decoding.q, decoding.kv), before)


def test_kernels_are_built_once(decoding: Batch) -> None:
    plan_decode(decoding)
    built = kernel_for.cache_info().misses
    wrapper = plan_decode(decoding)
    assert wrapper._kernel is plan_decode(decoding)._kernel
    wrapper.plan(*page_table(decoding), 6, 2, 32, 4, sm_scale=0.3)
    assert kernel_for.cache_info().misses == built


def test_an_lse_by_head_is_written_though_it_is_not_returned() -> None:
    batch = random_batch(RAGGED, [6], [9], spare=0)  # as many tokens as heads: NH would fit
    wrapper = plan_ragged(batch)
    out, want = wrapper.run(batch.q, *batch.kv, return_lse=True, lse_layout="HN")
    lse = torch.zeros(6, 6)
    got = wrapper.run(batch.q, *batch.kv, lse=lse, lse_layout="HN")
    assert torch.equal(got, out)
    assert torch.equal(lse, want)
    with pytest.raises(DTypeError, match="lse requires gradients"):
        wrapper.run(
            *(batch.q, *batch.kv), lse=lse.requires_grad_(), lse_layout="HN", return_lse=True
        )
    with pytest.raises(ShapeError, match="lse of shape"):
        wrapper.run(batch.q, *batch.kv, lse=torch.zeros(1, 6).expand(6, 6), lse_layout="HN")
