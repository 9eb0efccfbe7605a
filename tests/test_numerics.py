"""The numerics grid: every pair of variant, dtypes, layout, paging, group and head dims.

The grid is a pairwise covering, and each of its kernels runs batches of all kinds of lengths.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import pytest

import tvm_attn as ta
from tests.batches import random_batch
from tests.cases import check, kernel, name_of, spec_of, variant
from tvm_attn._pairwise import Row, pairwise_rows, uncovered_pairs
from tvm_attn.target import parse_target

FACTORS: dict[str, Sequence[Any]] = {
    "variant": (
        *("full", "causal", "window", "soft_cap", "alibi"),
        *("custom_mask", "sink", "sigmoid", "rotary"),
    ),
    "dtypes": (
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e5m2"),
    ),
    "layout": ("NHD", "HND"),
    "page_size": (None, 1, 5, 16, 64),
    "group": (1, 4, 5, 7, 8),
    "dims": ((64, 64), (128, 128), (96, 96), (256, 256), (192, 128)),
}
EXTREMES: tuple[Row, ...] = (
    {
        "variant": "causal",
        "dtypes": ("bfloat16", "bfloat16", "float32"),
        "layout": "NHD",
        "page_size": 16,
        "group": 16,
        "dims": (16, 16),
    },
    {
        "variant": "window",
        "dtypes": ("float16", "float16", "bfloat16"),
        "layout": "HND",
        "page_size": 3,
        "group": 3,
        "dims": (80, 112),
    },
)
"""Sizes, and dtypes of the output, that are not worth meeting everything else."""

GRID = pairwise_rows(FACTORS, given=EXTREMES)

LENGTHS = {
    "decode": ([1, 1, 1, 1, 1], [1, 17, 64, 300, 0]),
    "draft": ([2, 5, 1, 4, 3], [70, 5, 1, 3, 140]),
    "prefill": ([33, 90], [33, 200]),
    "mixed": ([1, 50, 0, 1, 3, 40], [129, 50, 9, 0, 2, 160]),
}
"""Query and KV lengths; some requests have no key, no query, or more queries than keys."""


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of the rows that run here in parallel, unless test workers do."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        tests = [item for item in request.session.items if item.path == request.path]
        rows = [item.callspec.params["row"] for item in tests if hasattr(item, "callspec")]
        ta.build_many(
            [(spec, variant(row["variant"], spec)) for row in rows for spec in [spec_of(row)]]
        )


def test_the_grid_covers_all_pairs() -> None:
    assert not uncovered_pairs(FACTORS, GRID)
    assert len(GRID) <= 50, "each row of the grid is a kernel to compile"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("row", GRID, ids=name_of)
def test_numerics(row: Row) -> None:
    spec = spec_of(row)
    module = kernel(row["variant"], spec)
    for seed, (kind, (qo_lens, kv_lens)) in enumerate(LENGTHS.items()):
        fused = kind == "draft" and spec.is_paged and spec.head_dim_qk == spec.dim_vo
        batch = random_batch(spec, qo_lens, kv_lens, seed=seed, fused=fused)
        machine = module.with_ctas(7) if kind in ("decode", "mixed") else module
        check(row["variant"], batch, module=machine)


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="x86 only")
@pytest.mark.parametrize(
    ("level", "newest", "row"),
    [("x86-64-v2", "sse4.2", EXTREMES[1]), ("x86-64-v3", "avx2", EXTREMES[0])],
)
def test_numerics_on_older_cpus(level: str, newest: str, row: Row) -> None:
    if newest not in parse_target(None).features:
        pytest.skip(f"this CPU has no {newest}, which {level} needs")
    target = f"llvm -mcpu={level}"
    spec = spec_of(row)
    module = ta.build(spec, variant(row["variant"], spec), target)
    for qo_lens, kv_lens in LENGTHS.values():
        check(row["variant"], random_batch(spec, qo_lens, kv_lens), module=module)
