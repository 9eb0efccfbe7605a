"""Batches that kernels with ``mma.sync`` attend to on the host: planned, run, checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import cases
from tests.accuracy import State, assert_states_accurate
from tests.batches import Batch, random_batch
from tests.device_planning import plan_batch, plan_short, plan_work
from tests.generating import GeneratedKernel, generate_kernel
from tests.hopper_runs import WORK
from tests.hopper_threads import Schedule
from tests.mma_threads import MmaKernel
from tvm_attn.runtime.inspector import Inspector
from tvm_attn.runtime.plan import BATCH, Family, WorkList
from tvm_attn.runtime.short import RowBytes
from tvm_attn.schedules.families import tiles_to_try
from tvm_attn.schedules.tiles_cuda import CudaTile, Kind
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget, parse_target


@dataclass(frozen=True)
class MmaCase:
    """A kernel of a spec, a family and a mask: ``"full"``, ``"causal"``, ``"window"`` or custom."""

    spec: AttentionSpec
    family: Kind
    mask: str = "causal"
    arch: str = "sm_80"
    place: int = 0

    @property
    def target(self) -> BuildTarget:
        """The GPU."""
        return parse_target(f"cuda -arch={self.arch}")

    @property
    def tile(self) -> CudaTile:
        """What a CTA is made of: the best tile, or one that is tried after it."""
        return tiles_to_try(self.spec, self.target, self.family, (False, False))[self.place]

    @property
    def planned_mask(self) -> str:
        """The mask as the planner knows it: of bits, nothing."""
        return "full" if self.mask == "custom_mask" else self.mask

    def compile(
        self, folder: Path, edit: Callable[[str], str] = lambda source: source
    ) -> MmaKernel:
        """Compile it for the host, with an edit of its source."""
        made = generate_kernel(
            self.spec, cases.variant(self.mask, self.spec), self.tile, self.target
        )
        return MmaKernel(
            GeneratedKernel(edit(made.source), made.threads, made.shared_bytes), folder
        )

    def draw(self, qo_lens: Sequence[int], kv_lens: Sequence[int], seed: int = 0) -> Batch:
        """Draw a batch."""
        return random_batch(self.spec, list(qo_lens), list(kv_lens), seed=seed)

    def work(self, batch: Batch, num_ctas: int, split: int) -> MmaWork:
        """Plan a batch: all of it for this kernel."""
        spec, tile, mask = self.spec, self.tile, self.planned_mask
        family = Family(tile.family, tile.rows, tile.granule, tile.overhead, schedule="sm80")
        others = Family("decode", 1, 64, 1), Family("long", 128, 64, 1)
        families = [family, others[1]] if tile.family == "decode" else [others[0], family]
        inspector = Inspector(
            plan_short(mask, spec.is_paged),
            *(plan_batch(spec.is_paged), plan_work(mask), families),
            *(spec.group_size, spec.num_kv_heads, RowBytes.of(spec)),
        )
        bind = (lambda _: {"all": [cases.WINDOW]}) if mask == "window" else None
        plan = inspector.plan(None, batch.fmt, bind, split, [num_ctas, num_ctas])
        [listed] = plan.work
        arrays = dict(zip(BATCH, plan.batch, strict=True))
        of_batch = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return MmaWork(self, batch, listed, of_batch)


@dataclass(frozen=True)
class MmaWork:
    """A planned batch, and what it should give."""

    case: MmaCase
    batch: Batch
    listed: WorkList
    arrays: dict[str, torch.Tensor]

    @functools.cached_property
    def expected(self) -> tuple[State, State]:
        """Return out and lse in float64, and as torch computes them."""
        args = cases.arguments(self.case.mask, self.batch)
        exact, eager = (
            cases.states(self.case.mask, self.batch, args, compute)
            for compute in ("float64", "eager")
        )
        return exact, eager

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """Return arguments by parameter, but for results; arrays stay from launch to launch."""
        spec, tile = self.case.spec, self.case.tile
        k, v = (self._as_pages(cache) for cache in self.batch.kv)
        work = {n: torch.from_numpy(getattr(self.listed, n).copy()) for n in WORK}
        slots, ones = max(self.listed.num_slots, 1), torch.ones(spec.num_kv_heads)
        scales = {name: scale for name, scale in self.batch.scales.items()}
        tensors = {
            **(self.arrays | work | {"q": self.batch.q, "k": k, "v": v}),
            "partial_o": torch.full((slots, tile.rows, spec.dim_vo), torch.nan),
            "partial_lse": torch.full((slots, tile.rows), torch.nan),
            "arrivals": torch.zeros(max(len(work["merge_items"]), 1), dtype=torch.int32),
            **({"k_scale": ones, "v_scale": ones} | scales),
        }
        given = described({name: tensor for name, tensor in tensors.items() if tensor.numel()})
        factors = {"sm_scale": 1 / math.sqrt(spec.head_dim_qk), "q_scale": 1.0, "lse_scale": 1.0}
        told = {"size": 1, "follows": 0, "window_left_": cases.WINDOW}
        empty = {f"{n}_ptr": torch.zeros(1, dtype=t.dtype) for n, t in tensors.items()}
        return {**empty, **given, **factors, **told, **self._bits()}

    def check(self, kernel: MmaKernel, schedule: Schedule, launches: int = 1) -> None:
        """Run the batch on the same arrays again and again, and hold it against the promise."""
        for _ in range(launches):
            out, lse = cases.poisoned_results(self.batch)
            results = described({"out": out, "lse": lse})
            kernel.launch(self.listed.num_ctas, schedule, {**self.arguments, **results})
            try:
                assert not self.arguments["arrivals_ptr"].any(), "counters are not 0"
                assert_states_accurate((out, lse), *self.expected, self.batch.fmt)
            except AssertionError as error:
                raise AssertionError(f"{schedule}: {error}") from error

    def _bits(self) -> dict[str, torch.Tensor]:
        """Return the bits of a custom mask."""
        if self.case.mask != "custom_mask":
            return {}
        mask = cases.arguments("custom_mask", self.batch).plan["custom_mask"].numpy()
        fmt = self.batch.fmt
        pairs = (fmt.qo_len.numpy().astype(np.int64) * fmt.kv_len.numpy()).tolist()
        rows = np.split(mask, np.cumsum(pairs)[:-1])
        packed = [np.packbits(row, bitorder="little") for row in rows]
        beyond = np.full(32, 255, np.uint8)
        bits = torch.from_numpy(np.concatenate([*packed, beyond]))
        indptr = torch.from_numpy(np.cumsum([0, *map(len, packed)], dtype=np.int64))
        return {"custom_mask_ptr": bits, "custom_mask__indptr_ptr": indptr}

    def _as_pages(self, cache: torch.Tensor) -> torch.Tensor:
        """Return K or V with an axis of pages; ragged ones have pages of one token."""
        if self.case.spec.is_paged:
            return cache
        is_hnd = self.case.spec.kv_layout == "HND"
        return (cache.transpose(0, 1) if is_hnd else cache).unsqueeze(2 if is_hnd else 1)


def described(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors, their sizes and their strides, by parameter."""
    given: dict[str, Any] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        given.update({f"{name}_size{i}": size for i, size in enumerate(tensor.shape)})
        given.update({f"{name}_stride{i}": size for i, size in enumerate(tensor.stride())})
    return given
