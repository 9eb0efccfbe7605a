"""The numerics grid on a GPU: as on a CPU, with more lengths and everything unwritten poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.batches import random_batch
from tests.cases import name_of, spec_of, variant
from tests.machine import Machine
from tvm_attn._pairwise import Row, pairwise_rows, uncovered_pairs

FACTORS: dict[str, Sequence[Any]] = {
    "variant": (
        *("full", "causal", "window_soft_cap", "alibi", "custom_mask", "custom_mask_window"),
        *("window_sink", "sigmoid", "rotary"),
    ),
    "dtypes": (
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e5m2"),
        ("float16", "float8_e4m3fn"),
    ),
    "layout": ("NHD", "HND"),
    "page_size": (None, 1, 5, 16, 64),
    "group": (1, 2, 4, 5, 8),
    "dims": ((64, 64), (128, 128), (96, 96), (256, 256), (192, 128)),
}
_OTHERS = (
    ("causal", ("bfloat16", "bfloat16"), "NHD", 16, 16, (16, 16)),
    ("window", ("float16", "float16", "bfloat16"), "HND", 3, 3, (80, 112)),
    ("soft_cap", ("bfloat16", "float8_e5m2"), "NHD", None, 7, (112, 112)),
    ("sink", ("float16", "float8_e4m3fn"), "HND", 8, 6, (32, 32)),
    ("causal", ("bfloat16", "bfloat16"), "HND", None, 16, (192, 192)),
    ("alibi", ("float16", "float16"), "NHD", 16, 12, (160, 160)),
    ("rotary", ("bfloat16", "float8_e4m3fn"), "NHD", 2, 1, (224, 224)),
    ("full", ("bfloat16", "bfloat16"), "NHD", 16, 32, (240, 48)),
)
OTHERS = [
    dict(zip(("variant", "dtypes", "layout", "page_size", "group", "dims"), row, strict=True))
    for row in _OTHERS
]
"""Head dims that are not tuned, and other values that are not worth meeting everything else."""

GRID = pairwise_rows(FACTORS, given=OTHERS)
KERNELS = [(spec, variant(row["variant"], spec)) for row in GRID for spec in [spec_of(row)]]

TILES = (63, 64, 65, 127, 128, 129)
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1] * 9, [1, 17, 63, 64, 65, 300, 0, 1024, 1025]),
    "draft": ([2, 5, 1, 4, 3], [70, 5, 1, 3, 140]),
    "prefill": ([33, 90, *TILES], [33, 200, *TILES]),
    "tiles": ([*TILES, 1, 16], [*reversed(TILES), 128, 128]),
    "mixed": ([1, 50, 0, 1, 3, 40], [129, 50, 9, 0, 2, 160]),
    "long": ([1, 700, 3], [5000, 3001, 2049]),
}
"""Query and KV lengths; some requests have no key, no query, or more queries than keys."""


def test_the_grid_covers_all_pairs() -> None:
    assert not uncovered_pairs(FACTORS, GRID)
    assert len(GRID) <= 60, "each row of the grid is a kernel to compile"


@pytest.mark.parametrize("row", GRID, ids=name_of)
def test_numerics(machine: Machine, row: Row) -> None:
    spec = spec_of(row)
    for seed, (kind, (qo_lens, kv_lens)) in enumerate(LENGTHS.items()):
        fused = kind == "draft" and spec.is_paged and spec.head_dim_qk == spec.dim_vo
        batch = random_batch(spec, qo_lens, kv_lens, seed=seed, fused=fused)
        for split in (None, 128) if kind in ("decode", "mixed") else (None,):
            plan = {"fixed_split_size": split}
            machine.check(row["variant"], batch.to(machine.device), plan=plan)
