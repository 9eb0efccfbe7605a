"""Kernels in processes that were forked off, on any number of threads, run by several of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tvm_attn as ta
from tvm_attn.runtime import host

MADE = """
import os, signal, torch
import tvm_attn as ta

def threads():
    return len(os.listdir("/proc/self/task"))

SPEC = ta.AttentionSpec(2, 1, 16, q_dtype="float32", page_size=4)
TABLE = [0, 3], [0, 2], [0, 1], [2]
Q, KV = torch.randn(3, 2, 16), tuple(torch.randn(2, 5, 4, 1, 16))
before = threads()
kernel = ta.build(SPEC)
"""
FORKED = """
child = os.fork()
if child == 0:
    signal.alarm(30)
    plan = plan or kernel.plan(*TABLE)
    torch.save(kernel.run(plan, Q, KV), "{path}")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
want = kernel.run(plan or kernel.plan(*TABLE), Q, KV)
print(torch.equal(torch.load("{path}"), want))
"""
UNTIL = {
    "build": "plan = None",
    "load": 'kernel.export("{path}"); kernel, plan = ta.load("{path}"), None',
    "plan": "plan = kernel.plan(*TABLE); str(kernel), kernel.resources",
}


@pytest.mark.parametrize("until", UNTIL)
def test_a_process_forked_before_the_first_run_runs(
    until: str, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    code = (MADE + UNTIL[until] + FORKED).format(path=f"{tmp_path}/file")
    assert run_python(code).split() == ["0", "True"]


def test_plans_are_for_the_threads_of_the_pool_which_a_run_starts(
    run_python: Callable[..., str],
) -> None:
    printed = run_python(
        MADE
        + """
plan = kernel.plan(*TABLE)
print(threads() - before)
kernel.run(plan, Q, KV)
import tvm_ffi
print(tvm_ffi.get_global_func("runtime.NumThreads")() - kernel.resources["threads"])
"""
    )
    assert printed.split() == ["0", "0"]


def test_more_threads_than_cores_are_not_started(run_python: Callable[..., str]) -> None:
    printed = run_python(
        MADE + 'kernel.run(kernel.plan(*TABLE), Q, KV); print(kernel.resources["threads"])',
        env={"TVM_ATTN_NUM_THREADS": "100000000000000000000"},
    )
    assert int(printed) <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("frequencies", "cores"), [({}, 4), (dict.fromkeys(range(4), "9\n"), 4), ({0: "9", 2: "9"}, 2)]
)
def test_cores_of_the_highest_frequency(
    frequencies: dict[int, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, frequency in frequencies.items():
        (tmp_path / f"cpu{index}/cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{index}/cpufreq/cpuinfo_max_freq").write_text(frequency)
    monkeypatch.setattr(host, "CPUS", tmp_path)
    assert host.fastest_cores(4) == cores


def test_threads_share_a_plan_with_partial_states() -> None:
    spec = ta.AttentionSpec(4, 2, 64, q_dtype="float32", page_size=None)
    kernel, length = ta.build(spec, ta.variants.causal()), 6000
    k, v = torch.randn(2, length, 2, 64)
    queries = torch.randn(4, 2, 4, 64)
    plan = kernel.plan([0, 2], [0, length], fixed_split_size=256)
    assert plan.num_slots
    want = [kernel.run(plan, q, (k, v)) for q in queries]

    def is_right(index: int) -> bool:
        return all(
            torch.equal(kernel.run(plan, queries[index], (k, v)), want[index]) for _ in range(100)
        )

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(is_right, range(4))) == [True] * 4


def test_runs_take_turns_where_there_are_partial_states() -> None:
    spec = ta.AttentionSpec(4, 2, 64, q_dtype="float32", page_size=None)
    kernel = ta.build(spec, ta.variants.causal())
    whole, cut = (kernel.plan([0, 2], [0, 600], fixed_split_size=size) for size in (1000, 64))
    assert whole.placement.turn is None

    def fails(*arguments: object) -> None:
        raise ValueError

    q, kv = torch.randn(2, 4, 64), torch.randn(2, 600, 2, 64)
    kernel.run(cut, q, tuple(kv))
    accepted: Any = cut.placement.accepted
    accepted.launches = [(fails, ())]
    with pytest.raises(ValueError):
        kernel.run(cut, q, tuple(kv))
    with ThreadPoolExecutor(1) as thread:
        free = thread.submit(cut.placement.turn.acquire, blocking=False)
        assert free.result(), "errors end a turn"
