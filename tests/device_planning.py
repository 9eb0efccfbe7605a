"""Random batches, planned on the host and by a device's planner, be it on the host as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from tvm import tirx

from tests.planning import compile_function
from tests.serial_planner import INTS, LONGS, serial_planner
from tvm_attn.bsr import BSR
from tvm_attn.runtime.device import CPU
from tvm_attn.runtime.device_plan import DevicePlan, DevicePlanner
from tvm_attn.runtime.fixed import FixedMemory, Terms, families_of
from tvm_attn.runtime.inspector import Inspector
from tvm_attn.runtime.plan import Family, Plan
from tvm_attn.runtime.short import RowBytes
from tvm_attn.runtime.workspace import PlanLimits, family_counts
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.planner import batch_planner, work_planner
from tvm_attn.tir.planner_lists import ListMaker
from tvm_attn.tir.planner_short import short_planner

DECODE, SHORT, LONG = (
    Family("decode", 16, 64, 1, 2, cluster=1),
    Family("short", 64, 64, 1, 2),
    Family("long", 128, 64, 1, 2),
)
CLUSTERS = tuple(replace(DECODE, cluster=size) for size in (8, 4, 2))
FAMILIES = (*CLUSTERS, DECODE, SHORT, LONG)
QUEUES = [4, 9, 20, 40, 40, 20]
PAGE = 16
MASKS = ("full", "causal", "window")


@cache
def bounds(mask: str) -> tuple[Any, tuple[Any, ...]]:
    """What queries of a mask see, and the variables that says."""
    left = tirx.Var("window_left", "int32")
    return {
        "full": (None, ()),
        "causal": (lambda request, qo_len, kv_len, q_lo, q_hi: (None, q_hi + 1), ()),
        "window": (lambda request, qo_len, kv_len, q_lo, q_hi: (q_lo - left, q_hi + 1), (left,)),
    }[mask]


@cache
def plan_batch(paged: bool) -> Callable[..., None]:
    return compile_function(batch_planner(paged))


@cache
def plan_short(mask: str, paged: bool) -> Callable[..., None]:
    maker = ListMaker(*bounds(mask))
    return compile_function(short_planner(paged, maker), maker)


@cache
def plan_work(mask: str) -> Callable[..., None]:
    maker = ListMaker(*bounds(mask))
    return compile_function(work_planner(maker), maker)


@cache
def serial(mask: str, paged: bool) -> Callable[..., None]:
    """The planner; its last argument is whether threads take turns backwards."""
    function = compile_function(serial_planner(paged, *bounds(mask)))
    longs, ints = torch.empty(LONGS, dtype=torch.int64), torch.empty(INTS, dtype=torch.int32)
    return lambda *args: function(*args[:-1], longs, ints, int(args[-1]))


@dataclass(frozen=True)
class Setting:
    """A kernel and a machine, and the limits of a plan."""

    limits: PlanLimits
    heads: int = 2
    group: int = 4
    mask: str = "causal"
    window: int = 70
    split: int = 0
    max_qo_len: int = 0
    paged: bool = True
    queues: tuple[int, ...] = tuple(QUEUES)

    @property
    def spec(self) -> AttentionSpec:
        page = PAGE if self.paged else None
        return AttentionSpec(self.group * self.heads, self.heads, 64, page_size=page)

    @property
    def values(self) -> list[int]:
        return [self.window] if self.mask == "window" else []

    @cached_property
    def memory(self) -> FixedMemory:
        terms = Terms(self.limits, self.split, self.max_qo_len)
        chosen = families_of(FAMILIES, terms, self.group, self.heads, self.queues)
        counts = family_counts(self.spec, FAMILIES, self.limits, self.queues, self.split)
        counts = {family: counts[family] for family in chosen}
        return FixedMemory(self.spec, terms, counts, CPU, None)

    def on_host(self, fmt: BSR) -> Plan:
        queues = [
            count if family in self.memory.counts else 0
            for family, count in zip(FAMILIES, self.queues, strict=True)
        ]
        inspector = Inspector(
            plan_short(self.mask, self.paged),
            *(plan_batch(self.paged), plan_work(self.mask)),
            *(FAMILIES, self.group, self.heads, RowBytes(512, 512)),
        )
        memory = self.memory
        memory.device_planner = DevicePlanner(self.spec, memory, lambda *_: None)
        return inspector.plan(None, fmt, lambda _: {"all": self.values}, self.split, queues, memory)

    def on_device(self, fmt: BSR, backward: bool = False) -> DevicePlan:
        function = serial(self.mask, self.paged)

        def launch(*arguments: Any) -> None:
            function(*arguments, backward)

        DevicePlanner(self.spec, self.memory, launch).plan(fmt, self.values)
        plan = DevicePlan(None, fmt, {}, self.memory)
        plan.placement = None  # type: ignore[assignment]
        return plan

    def batches(self, count: int, seed: int) -> Iterator[BSR]:
        """Yield batches within the limits: alike, skewed, with a giant, mostly empty."""
        rng = np.random.default_rng(seed)
        for number in range(count):
            yield self.batch(rng, number)

    def batch(self, rng: np.random.Generator, number: int) -> BSR:
        size = int(rng.integers(0, self.limits.max_batch + 1))
        longest = self.max_qo_len or 1 + self.limits.max_qo_tokens // max(size, 1)
        qo_lens = np.ones(size, int) if number % 3 else rng.integers(0, longest + 1, size)
        if number % 7 == 1 and size:
            qo_lens = qo_lens * (rng.random(size) < 0.8)
        most = max(self.limits.max_kv_tokens // max(size, 1) - PAGE, 1)
        kinds = (
            np.full(size, rng.integers(0, most + 1)),
            np.floor(rng.random(size) ** 8 * most),
            rng.integers(0, 2, size) * rng.integers(0, 40, size),
            np.where(np.arange(size) == size // 2, most * max(size // 2, 1), rng.integers(0, 9)),
            rng.integers(0, most + 1, size),
        )
        while qo_lens.sum() > self.limits.max_qo_tokens:
            qo_lens //= 2
        return self.fmt(qo_lens, kinds[number % len(kinds)].astype(int), rng)

    def fmt(self, qo_lens: Sequence[int], kv_lens: Sequence[int], rng: np.random.Generator) -> BSR:
        qo_indptr = [0, *accumulate(map(int, qo_lens))]
        offsets: dict[str, Any] = {}
        if rng.random() < 0.3:
            offsets["q_pos_offset"] = [int(n) + int(rng.integers(-9, 9)) for n in kv_lens]
            offsets["kv_pos_offset"] = [int(rng.integers(0, 9)) for _ in kv_lens]
        if not self.paged:
            return BSR.from_ragged(qo_indptr, [0, *accumulate(map(int, kv_lens))], **offsets)
        pages = [-(-int(length) // PAGE) for length in kv_lens]
        last = [(int(length) - 1) % PAGE + 1 for length in kv_lens]
        ids = rng.integers(0, 1000, sum(pages))
        return BSR.from_page_table(qo_indptr, [0, *accumulate(pages)], ids, last, PAGE, **offsets)


def assert_same(expected: Plan, made: Plan) -> None:
    """Compare everything that kernels read, and all sums."""
    assert made.to_json() == expected.to_json()
    names = ("nnz_qo", "num_kv_tokens", "max_qo_len", "max_kv_len", "max_page", "batch_size")
    for name in names:
        assert getattr(made, name) == getattr(expected, name), name
    for work, wanted in zip(made.work, expected.work, strict=True):
        assert work.family == wanted.family
        assert [work.num_slots, work.max_load, work.total_load] == [
            wanted.num_slots,
            wanted.max_load,
            wanted.total_load,
        ]
        for array, other in zip(work.arrays, wanted.arrays, strict=True):
            assert np.array_equal(array, other)
