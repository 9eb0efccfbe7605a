"""Hopper's own kernels beside those of ``mma.sync``, on random batches: right, and alike."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as ta
from tests.batches import random_batch
from tests.cases import check, name_of, spec_of, variant
from tests.gpu.device import gpu
from tests.machine import Machine
from tvm_attn._pairwise import Row
from tvm_attn.runtime.module import AttentionModule

_ROWS = (
    ("causal", ("bfloat16", "bfloat16"), "NHD", None, 4, (128, 128)),
    ("full", ("float16", "float16"), "HND", None, 1, (128, 128)),
    ("causal", ("bfloat16", "bfloat16"), "NHD", 16, 8, (128, 128)),
    ("window_sink", ("float16", "float16"), "HND", 8, 3, (64, 64)),
    ("window_soft_cap", ("bfloat16", "bfloat16"), "NHD", 64, 2, (128, 128)),
    ("alibi", ("bfloat16", "bfloat16"), "HND", 24, 5, (96, 96)),
    ("custom_mask_window", ("float16", "float16"), "NHD", None, 4, (64, 128)),
    ("custom_mask", ("bfloat16", "bfloat16"), "NHD", 32, 16, (128, 64)),
    ("causal", ("float16", "float16", "float32"), "NHD", 256, 1, (112, 80)),
    ("sink", ("float16", "float16", "bfloat16"), "HND", 48, 64, (16, 32)),
    ("causal", ("bfloat16", "bfloat16"), "NHD", 1, 4, (128, 128)),
    ("full", ("float16", "float16"), "HND", 12, 1, (128, 128)),
    ("window_sink", ("float16", "float16"), "HND", 5, 3, (64, 64)),
    ("alibi", ("bfloat16", "bfloat16"), "NHD", 12, 5, (96, 96)),
    ("window_soft_cap", ("bfloat16", "bfloat16", "float32"), "NHD", 1, 8, (256, 256)),
    ("custom_mask_window", ("bfloat16", "bfloat16"), "HND", 1, 2, (80, 112)),
    ("sink", ("float16", "float16"), "HND", 5, 16, (16, 32)),
    ("causal", ("bfloat16", "bfloat16"), "NHD", None, 8, (256, 256)),
    ("sink", ("float16", "float16"), "HND", 16, 4, (192, 128)),
    ("alibi", ("bfloat16", "bfloat16"), "NHD", 48, 5, (256, 256)),
    ("full", ("bfloat16", "bfloat16"), "NHD", 1, 4, (256, 256)),
    ("custom_mask", ("float16", "float16"), "NHD", None, 2, (192, 192)),
    ("causal", ("bfloat16", "bfloat16"), "HND", 64, 4, (160, 144)),
    ("causal", ("bfloat16", "bfloat16"), "NHD", 16, 8, (64, 64)),
    ("custom_mask", ("bfloat16", "bfloat16"), "NHD", None, 4, (64, 48)),
    ("causal", ("bfloat16", "bfloat16"), "NHD", 16, 4, (96, 96)),
    ("full", ("float16", "float16"), "HND", None, 8, (80, 80)),
    ("causal", ("bfloat16", "bfloat16"), "NHD", 1, 4, (64, 64)),
    ("window", ("bfloat16", "bfloat16", "float32"), "NHD", 64, 1, (64, 96)),
)
ROWS: list[Row] = [
    dict(zip(("variant", "dtypes", "layout", "page_size", "group", "dims"), row, strict=True))
    for row in _ROWS
]
SCHEDULES = ("sm80", "sm90")
BATCHES = 30
"""Random batches of each kernel."""


def build(row: Row, schedule: str, target: str) -> AttentionModule:
    """Build one of the two kernels of a row."""
    spec = spec_of(row)
    return ta.build(spec, variant(row["variant"], spec), target, schedule=schedule)


BUILDS = [partial(build, row, schedule) for row in ROWS for schedule in SCHEDULES]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    """Skip where there is no such card."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is no Hopper")


def lengths(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Draw a batch of requests of a few to many tiles, some of them without queries or keys."""
    size = int(rng.integers(1, 7))
    longest = int(rng.choice([3, 70, 300, 900]))
    qo = rng.integers(0, longest, size) * (rng.random(size) > 0.1)
    kv = np.where(rng.random(size) > 0.3, qo + rng.integers(0, 700, size), qo // 2)
    return qo.tolist(), (kv * (rng.random(size) > 0.1)).tolist()


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_random_batches(machine: Machine, row: Row) -> None:
    spec, target = spec_of(row), str(gpu().target)
    modules = {schedule: build(row, schedule, target) for schedule in SCHEDULES}
    rng = np.random.default_rng(0)
    for seed in range(BATCHES):
        qo_lens, kv_lens = lengths(rng)
        plan: dict[str, Any] = {}
        if rng.random() < 0.3:
            plan["fixed_split_size"] = int(rng.choice([64, 100, 256]))
        batch = random_batch(spec, qo_lens, kv_lens, seed=seed).to(machine.device)
        for module in modules.values():
            first = check(row["variant"], batch, module=module, plan=plan)
            again = check(row["variant"], batch, module=module, plan=plan)
            assert all(
                torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None
            )


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_queues_of_pieces_of_one_block(machine: Machine, row: Row) -> None:
    """Items that are read ahead of time spare those whose rows are still being stored."""
    spec = spec_of(row)
    module = build(row, "sm90", str(gpu().target))
    batch = random_batch(spec, [200, 3, 70, 0, 20], [400, 900, 500, 30, 640], seed=0)
    for num_ctas in (1, 2, 5):
        made = module.with_ctas(num_ctas)
        for plan in ({"fixed_split_size": 64}, {}):
            check(row["variant"], batch.to(machine.device), module=made, plan=plan)


@pytest.mark.parametrize("scale", [1.0, 20.0, 200.0])
def test_scores_that_outgrow_their_reference(machine: Machine, scale: float) -> None:
    row = ROWS[0]
    module = build(row, "sm90", str(gpu().target))
    batch = random_batch(spec_of(row), [300, 40], [1000, 700], seed=1).to(machine.device)
    check(row["variant"], replace(batch, q=batch.q * scale), module=module)


def test_what_was_accumulated_is_kept_when_references_move_far(machine: Machine) -> None:
    """A key weighs 4 % of one that comes later and moves the reference by more than 2**126."""
    row = ROWS[0]
    module = build(row, "sm90", str(gpu().target))
    batch = random_batch(spec_of(row), [128], [512], seed=1).to(machine.device)
    q, (k, v) = torch.zeros_like(batch.q), (x.clone() for x in batch.kv)
    q[..., 0] = 8
    k.zero_()
    k[300, :, 0], k[100, :, 0] = 121.5, 126
    v[300] = 50
    check(row["variant"], replace(batch, q=q, kv=(k, v)), module=module)
