"""Batches that Hopper's kernels attend to on the host: planned, run by a schedule, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests import cases
from tests.accuracy import State, assert_states_accurate
from tests.batches import Batch, random_batch
from tests.device_planning import plan_batch, plan_short, plan_work
from tests.generating import GeneratedKernel, generate_kernel
from tests.hopper_threads import HopperKernel, Schedule, TensorMap
from tvm_attn.runtime.inspector import Inspector
from tvm_attn.runtime.plan import BATCH, Family, WorkList
from tvm_attn.runtime.short import RowBytes
from tvm_attn.schedules.tiles_sm90 import (
    COLUMN_GROUP,
    WARPGROUP_ROWS,
    HopperTile,
    comes_in_boxes,
)
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target

MASK = "causal"
WORK = ("items", "cta_indptr", "merge_items", "merge_indptr")
STRIDED = ("q", "k", "v", "out", "lse")


@dataclass(frozen=True)
class HopperCase:
    """A kernel of a spec and a tile."""

    spec: AttentionSpec
    tile: HopperTile

    def generate(self) -> GeneratedKernel:
        """Generate its source."""
        variant = cases.variant(MASK, self.spec)
        return generate_kernel(self.spec, variant, self.tile, parse_target("cuda -arch=sm_90"))

    def compile(
        self, folder: Path, edit: Callable[[str], str] = lambda source: source
    ) -> HopperKernel:
        """Compile it for the host, with an edit of its source."""
        made = self.generate()
        return HopperKernel(
            GeneratedKernel(edit(made.source), made.threads, made.shared_bytes), folder
        )

    def work(self, batch: Batch, num_ctas: int, split: int) -> Work:
        """Plan a batch."""
        spec, tile = self.spec, self.tile
        family = Family(tile.family, tile.rows, tile.granule, tile.overhead, schedule="sm90")
        other = Family("decode", 1, tile.granule, tile.overhead)
        inspector = Inspector(
            plan_short(MASK, spec.is_paged),
            *(plan_batch(spec.is_paged), plan_work(MASK), [other, family]),
            *(spec.group_size, spec.num_kv_heads, RowBytes.of(spec)),
        )
        plan = inspector.plan(None, batch.fmt, None, split, [1, num_ctas])
        [listed] = plan.work
        arrays = dict(zip(BATCH, plan.batch, strict=True))
        return Work(self, batch, listed, {n: torch.from_numpy(a.copy()) for n, a in arrays.items()})

    def draw(self, qo_lens: Sequence[int], kv_lens: Sequence[int], seed: int = 0) -> Batch:
        """Draw a batch."""
        return random_batch(self.spec, list(qo_lens), list(kv_lens), seed=seed)


@dataclass(frozen=True)
class Work:
    """A planned batch, and what it should give."""

    case: HopperCase
    batch: Batch
    listed: WorkList
    arrays: dict[str, torch.Tensor]

    @cached_property
    def expected(self) -> tuple[State, State]:
        """Return out and lse in float64, and as torch computes them."""
        args = cases.arguments(MASK, self.batch)
        exact, eager = (
            cases.states(MASK, self.batch, args, compute) for compute in ("float64", "eager")
        )
        return exact, eager

    def check(self, kernel: HopperKernel, schedule: Schedule) -> None:
        """Run the batch, and hold what comes of it against the promise."""
        out, lse = cases.poisoned_results(self.batch)
        kernel.launch(self.listed.num_ctas, schedule, self._arguments(out, lse))
        try:
            assert_states_accurate((out, lse), *self.expected, self.batch.fmt)
        except AssertionError as error:
            raise AssertionError(f"{schedule}: {error}") from error

    def _arguments(self, out: torch.Tensor, lse: torch.Tensor) -> dict[str, Any]:
        """Return arguments by parameter."""
        spec, tile = self.case.spec, self.case.tile
        k, v = (self._as_pages(cache) for cache in self.batch.kv)
        strided = dict(zip(STRIDED, (self.batch.q, k, v, out, lse), strict=True))
        work = {n: torch.from_numpy(getattr(self.listed, n).copy()) for n in WORK}
        slots, ones = self.listed.num_slots, torch.ones(spec.num_kv_heads)
        tensors = {
            **(strided | self.arrays | work),
            "partial_o": torch.full((slots, tile.rows, spec.dim_vo), torch.nan),
            "partial_lse": torch.full((slots, tile.rows), torch.nan),
            "arrivals": torch.zeros(len(work["merge_items"]), dtype=torch.int32),
            **{"k_scale": ones, "v_scale": ones},
        }
        given: dict[str, Any] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            given.update({f"{name}_size{i}": size for i, size in enumerate(tensor.shape)})
            given.update({f"{name}_stride{i}": size for i, size in enumerate(tensor.stride())})
        factors = {"sm_scale": 1 / math.sqrt(spec.head_dim_qk), "q_scale": 1.0, "lse_scale": 1.0}
        return {**given, **factors, **self._maps(strided)}

    def _maps(self, strided: dict[str, torch.Tensor]) -> dict[str, TensorMap]:
        """Return the maps of what is copied in boxes."""
        spec, tile, maps = self.case.spec, self.case.tile, {}
        if comes_in_boxes(spec):
            box = (COLUMN_GROUP, spec.group_size, WARPGROUP_ROWS // spec.group_size)
            maps.update({n: TensorMap.of(strided[n], (2, 1, 0), box) for n in ("q", "out")})
        if not tile.gathers:
            slot, head = (2, 1) if spec.kv_layout == "HND" else (1, 2)
            dims, box = (3, slot, head, 0), (COLUMN_GROUP, tile.box, 1, 1)
            if not spec.is_paged:
                dims, box = (3, 0, head), (COLUMN_GROUP, tile.box, 1)
            maps.update({n: TensorMap.of(strided[n], dims, box) for n in ("k", "v")})
        return {f"{name}_map": map for name, map in maps.items()}

    def _as_pages(self, cache: torch.Tensor) -> torch.Tensor:
        """Return K or V with an axis of pages; ragged ones have pages of one token."""
        if self.case.spec.is_paged:
            return cache
        is_hnd = self.case.spec.kv_layout == "HND"
        return (cache.transpose(0, 1) if is_hnd else cache).unsqueeze(2 if is_hnd else 1)
