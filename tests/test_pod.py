"""A prefill beside a batch of decoding; the plan of decoding that engines make at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tvm_attn as flashinfer
from tests.accuracy import assert_accurate
from tests.batches import Batch, random_batch
from tests.facades import (
    CAUSAL,
    RAGGED,
    SPEC,
    WINDOW,
    decode_batch,
    page_table,
    plan_decode,
    random_mask,
    workspace,
)
from tests.machine import Machine
from tvm_attn import reference
from tvm_attn.errors import DTypeError, PlanError
from tvm_attn.spec import AttentionSpec

SHAPE = (SPEC.num_qo_heads, SPEC.num_kv_heads, SPEC.head_dim_qk, SPEC.page_size)


@pytest.fixture(scope="module")
def decoding(machine: Machine) -> Batch:
    return decode_batch(SPEC).to(machine.device)


@pytest.fixture(scope="module")
def prefilling(machine: Machine) -> Batch:
    return prefill(machine, 19, 40)


def prefill(machine: Machine, qo_len: int, kv_len: int) -> Batch:
    return random_batch(RAGGED, [qo_len], [kv_len], spare=0).to(machine.device)


def plan_pod(batch: Batch, **options: Any) -> flashinfer.PODWithPagedKVCacheWrapper:
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(batch), batch.spec.kv_layout)
    wrapper.plan(*page_table(batch), *SHAPE, **options)
    return wrapper


def test_both_are_attended_to(machine: Machine, prefilling: Batch, decoding: Batch) -> None:
    wrapper = plan_pod(decoding)
    args = (prefilling.q, *prefilling.kv, decoding.q, decoding.kv)
    of_prefill, of_decoding = wrapper.run(
        *args, causal_p=True, return_lse_p=True, return_lse_d=True
    )
    assert_accurate(of_prefill, prefilling, **CAUSAL)
    assert_accurate(of_decoding, decoding)
    assert torch.equal(of_decoding[0], plan_decode(decoding).run(decoding.q, decoding.kv))
    other = prefill(machine, 5, 77)  # the lengths of a prefill are those of the run
    of_prefill, again = wrapper.run(other.q, *other.kv, *args[3:], kv_layout_p="NHD")
    assert_accurate(of_prefill, other)
    assert torch.equal(again, of_decoding[0])


def test_each_has_its_own_options(machine: Machine, prefilling: Batch, decoding: Batch) -> None:
    wrapper = plan_pod(decoding, window_left=WINDOW, sm_scale=0.5)
    mask = random_mask(prefilling).to(machine.device)
    args = (prefilling.q, *prefilling.kv, decoding.q, decoding.kv)
    of_prefill, of_decoding = wrapper.run(
        *args, mask, sm_scale_p=0.7, window_left_d=WINDOW, q_scale=2.0, v_scale=3.0
    )
    twin = reference.custom_mask(mask, prefilling.fmt)
    assert_accurate(of_prefill, prefilling, mask=twin, sm_scale=0.7)
    window = reference.sliding_window(WINDOW)
    assert_accurate(of_decoding, decoding, mask=window, sm_scale=1.0, v_scale=3.0)
    narrow, _ = wrapper.run(*args, causal_p=True, window_left_p=3)
    wide, _ = wrapper.run(*args, causal_p=True, window_left_p=WINDOW)
    for out, left in ((narrow, 3), (wide, WINDOW)):
        twin = reference.causal() & reference.sliding_window(left)
        assert_accurate(out, prefilling, mask=twin)


def test_a_run_may_not_change_what_was_planned(prefilling: Batch, decoding: Batch) -> None:
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(decoding))
    args = (prefilling.q, *prefilling.kv, decoding.q, decoding.kv)
    with pytest.raises(PlanError, match="there is no plan yet"):
        wrapper.run(*args)
    wrapper = plan_pod(decoding)
    changes = (("window_left_d", 3), ("sm_scale_d", 2.0), ("pos_encoding_mode_d", "ALIBI"))
    for name, value in (*changes, ("kv_layout_d", "HND")):
        with pytest.raises(PlanError, match=f"{name}={value!r}, but the batch was planned with"):
            wrapper.run(*args, **{name: value})


def test_pod_in_graph_mode_keeps_plans_in_the_caller_s_buffers(
    prefilling: Batch, decoding: Batch
) -> None:
    indptr, indices, last = page_table(decoding)
    buffers = [torch.zeros_like(x, device=decoding.q.device) for x in (indptr, indices, last)]
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(decoding), "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    wrapper.reset_workspace_buffer(buffers[0], buffers[1])
    wrapper.plan(indptr, indices, last, *SHAPE)
    assert torch.equal(buffers[0].cpu(), indptr)
    _, out = wrapper.run(prefilling.q, *prefilling.kv, decoding.q, decoding.kv)
    assert_accurate(out, decoding)


def test_a_fast_plan_is_the_plan(decoding: Batch) -> None:
    table = page_table(decoding)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(decoding))
    flashinfer.fast_decode_plan(wrapper, *table, *SHAPE, window_left=WINDOW, sm_scale=0.5)
    twin = {"mask": reference.sliding_window(WINDOW), "sm_scale": 0.5}
    assert_accurate(wrapper.run(decoding.q, decoding.kv, return_lse=True), decoding, **twin)
    flashinfer.fast_decode_plan(wrapper, *table, *SHAPE, data_type=torch.float16)
    assert torch.equal(
        wrapper.run(decoding.q, decoding.kv), plan_decode(decoding).run(decoding.q, decoding.kv)
    )


def test_a_fast_plan_of_several_tokens_with_an_indptr_of_the_host_s(machine: Machine) -> None:
    batch = decode_batch(SPEC, q_len=3).to(machine.device)
    indptr, indices, last = page_table(batch)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(batch))
    flashinfer.fast_decode_plan(
        wrapper, None, indices, last, *SHAPE, q_len_per_req=3, global_override_indptr_cpu=indptr
    )
    assert_accurate(wrapper.run(batch.q, batch.kv, return_lse=True), batch, **CAUSAL)
    with pytest.raises(PlanError, match="q_len_per_req=0"):
        flashinfer.fast_decode_plan(wrapper, indptr, indices, last, *SHAPE, q_len_per_req=0)
    assert_accurate(wrapper.run(batch.q, batch.kv), batch, **CAUSAL)


def test_a_fast_plan_in_graph_mode(machine: Machine) -> None:
    spec = AttentionSpec(6, 2, 32, kv_dtype="float8_e4m3fn", page_size=4)
    batch = decode_batch(spec).to(machine.device)
    indptr, indices, last = page_table(batch)
    buffers = [torch.zeros_like(x, device=batch.q.device) for x in (indptr, indices, last)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(batch), *buffers)
    flashinfer.fast_decode_plan(
        wrapper, indptr, indices, last, *SHAPE, kv_data_type=torch.float8_e4m3fn
    )
    assert torch.equal(buffers[1].cpu(), indices)
    got = wrapper.run(batch.q, batch.kv, return_lse=True, **batch.scales)
    assert_accurate(got, batch)


def test_errors_name_the_wrapper_and_its_arguments(machine: Machine) -> None:
    prefilled, decoding = prefill(machine, 3, 4), decode_batch(SPEC).to(machine.device)
    request = (prefilled.q, *prefilled.kv)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(decoding))
    with pytest.raises(PlanError, match=r"^PODWithPagedKVCacheWrapper: there is no plan yet"):
        wrapper.run(*request, decoding.q, decoding.kv)
    with pytest.raises(DTypeError, match="q_d must be a torch tensor, got ndarray"):
        plan_pod(decoding).run(*request, decoding.q.cpu().numpy(), decoding.kv)
