"""The device's planner as CUDA, its threads on the host in any order: the plans of the host."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda_threads import HostKernel, Order, is_possible
from tests.device_planning import Setting, assert_same, bounds
from tests.test_device_planner import OF_THE_HOST, SETTINGS, SMALL, assert_empty_states, bad
from tvm_attn.bsr import BSR
from tvm_attn.codegen import cuda
from tvm_attn.errors import PlanError
from tvm_attn.runtime import device_plan
from tvm_attn.runtime.device_plan import DevicePlan, DevicePlanner
from tvm_attn.runtime.workspace import PlanLimits
from tvm_attn.schedules.device_planner import device_planner
from tvm_attn.schedules.primitives.block import THREADS
from tvm_attn.target import parse_target

pytestmark = pytest.mark.skipif(not is_possible(), reason="there is no g++ on x86-64")

NAME = "plan_on_device"
ARRAYS = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "q_pos_offset", "kv_pos_offset")
TABLES = ("place", "jobs")
NUMBERS = (
    *("page_size", "group_size", "num_kv_heads", "split"),
    *("max_batch", "max_qo_tokens", "max_pages", "max_qo_len", "num_pages"),
    *("cluster_size", "clusters", "cluster_rows", "planners", "copiers"),
)


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    function = device_planner(True, 2048, *bounds("causal"))
    made = cuda.generate({NAME: function}, parse_target("sm_90"), "tirx")
    folder = tmp_path_factory.mktemp("planner")
    return HostKernel(made.device.source, f"{NAME}_kernel", THREADS, folder)


@pytest.fixture(autouse=True)
def few_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_plan, "PLANNERS", 2)
    monkeypatch.setattr(device_plan, "COPIED_PAGES", 100)
    monkeypatch.setattr(device_plan, "MOST_COPIERS", 2)


def planned(kernel: HostKernel, setting: Setting, fmt: BSR, order: Order, seed: int) -> DevicePlan:
    def launch(*given: Any) -> None:
        arrays = {**dict(zip((*ARRAYS, *TABLES), given, strict=False)), "block": given[-1]}
        numbers = dict(zip(NUMBERS, given[len(arrays) - 1 :], strict=False))
        planning = len(arrays["jobs"]) * numbers["planners"]
        blocks = planning + numbers["copiers"]
        sizes = {f"{name}_size0": len(array) for name, array in arrays.items()}
        arguments: dict[str, torch.Tensor | int] = {**numbers, **sizes}
        arguments.update({f"{name}_ptr": array for name, array in arrays.items()})
        # TVM computes these before the launch: CTAs that plan (numbered first), and all
        first, *_ = (name for name in kernel.parameters if re.match("cse", name))
        arguments.update({n: blocks for n in kernel.parameters if re.match("cse", n)})
        arguments[first] = planning
        kernel.launch(blocks, order, seed, arguments)

    DevicePlanner(setting.spec, setting.memory, launch).plan(fmt, setting.values)
    plan = DevicePlan(None, fmt, {}, setting.memory)
    plan.placement = None  # type: ignore[assignment]
    return plan


LARGE = Setting(PlanLimits(1400, 1400, 400000), heads=8, max_qo_len=1)
CHOSEN = {
    **{n: SETTINGS[n] for n in ("decoding", "clusters", "all", "fixed split")},
    "large": LARGE,
}


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("name", CHOSEN)
def test_plans_are_those_of_the_host(kernel: HostKernel, name: str, order: Order) -> None:
    setting = replace(CHOSEN[name], mask="causal")
    for seed, fmt in enumerate(setting.batches(10, seed=int(order))):
        expected = setting.on_host(fmt)
        assert_same(expected, planned(kernel, setting, fmt, order, seed).to_host())


@pytest.mark.parametrize("order", list(Order))
def test_lengths_may_have_three_digits(kernel: HostKernel, order: Order) -> None:
    """Costs are sorted digit by digit, those that are alike in their order."""
    setting = Setting(PlanLimits(600, 600, 2**24), max_qo_len=1)
    rng = np.random.default_rng(int(order))
    for size in (40, 600):
        kv_lens = 64 * rng.choice([0, 1, 255, 256, 300, 2**16 // size, 2**17 // size], size)
        kv_lens[size // 2] = 64 * 2**16 + 64 * 300
        fmt = setting.fmt([1] * size, kv_lens, rng)
        expected = setting.on_host(fmt)
        assert_same(expected, planned(kernel, setting, fmt, order, size).to_host())


@pytest.mark.parametrize("far", [1, 2, 32, 33])
def test_few_lengths_may_be_far_from_the_others(kernel: HostKernel, far: int) -> None:
    """Costs that differ by more than a digit are sorted by one if few are so large."""
    setting = Setting(PlanLimits(600, 600, 2**22), max_qo_len=1)
    rng = np.random.default_rng(far)
    for size, order in zip((40, 100, 600), Order, strict=True):
        kv_lens = 64 * rng.integers(0, 60, size)
        kv_lens[rng.permutation(size)[:far]] = 64 * rng.integers(316, 420, far)
        fmt = setting.fmt([1] * size, kv_lens, rng)
        expected = setting.on_host(fmt)
        assert_same(expected, planned(kernel, setting, fmt, order, size).to_host())


@pytest.mark.parametrize("changes", OF_THE_HOST, ids=str)
def test_what_is_wrong_gives_empty_states(kernel: HostKernel, changes: dict[str, Any]) -> None:
    for order in Order:
        with pytest.raises(PlanError):
            planned(kernel, SMALL, bad(**changes), order, 1).check()
        assert_empty_states(SMALL)
    planned(kernel, SMALL, bad(), Order.FORWARD, 1).check()
