"""Batches that kernels with ``mma.sync`` attend to on the host: dealt, run, checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import cases
from tests.accuracy import State, assert_states_accurate
from tests.batches import Batch, random_batch
from tests.generating import GeneratedKernel, generate_kernel
from tests.hopper_runs import WORK, as_pages, batch_arrays, described
from tests.hopper_threads import Schedule
from tests.watched_threads import WatchedKernel
from tvm_attn.schedules.families import tiles_to_try
from tvm_attn.schedules.tiles_cuda import CudaTile, Kind
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget, parse_target
from tvm_attn.worklist import NO_SLOT, READ_BEYOND


@dataclass(frozen=True)
class MmaCase:
    """A kernel of a spec, a family of tiles, a variant and a GPU; CTAs that share each item."""

    spec: AttentionSpec
    family: Kind
    variant: str = "causal"
    arch: str = "sm_80"
    cluster: int = 1

    @property
    def target(self) -> BuildTarget:
        """The GPU."""
        return parse_target(f"cuda -arch={self.arch}")

    @property
    def tile(self) -> CudaTile:
        """What a CTA is made of."""
        return tiles_to_try(self.spec, self.target, self.family, (False, False))[0]

    @functools.cache  # noqa: B019
    def generate(self) -> GeneratedKernel:
        """Generate its source."""
        variant = cases.variant(self.variant, self.spec)
        return generate_kernel(self.spec, variant, self.tile, self.target)

    def compile(
        self, folder: Path, edit: Callable[[str], str] = lambda source: source
    ) -> WatchedKernel:
        """Compile it for the host, with an edit of its source."""
        made = self.generate()
        edited = GeneratedKernel(edit(made.source), made.threads, made.shared_bytes)
        return WatchedKernel(edited, folder, cluster=self.cluster)

    def draw(self, qo_lens: Sequence[int], kv_lens: Sequence[int], seed: int = 0) -> Batch:
        """Draw a batch."""
        return random_batch(self.spec, list(qo_lens), list(kv_lens), seed=seed)

    def work(self, batch: Batch, num_ctas: int, split: int) -> MmaWork:
        """Deal a batch to CTAs: units in pieces of so many keys, seen or not, 0 for whole ones."""
        group, heads, rows = self.spec.group_size, self.spec.num_kv_heads, self.tile.rows
        items: list[tuple[int, ...]] = []
        merges, slots = [], [0]
        lens = zip(batch.fmt.qo_len.tolist(), batch.fmt.kv_len.tolist(), strict=True)
        for request, (qo_len, kv_len) in enumerate(lens):
            for head, begin in product(range(heads), range(0, qo_len * group, rows)):
                unit = (request, head, begin, min(begin + rows, qo_len * group))
                size = split or max(kv_len, 1)
                pieces = range(0, max(kv_len, 1), size)
                for i, first in enumerate(pieces):
                    slot = slots[-1] + i if len(pieces) > 1 else NO_SLOT
                    items.append((*unit, first, min(first + size, kv_len), slot, 0))
                if len(pieces) > 1:
                    merges.append(unit)
                    slots.append(slots[-1] + len(pieces))
        queues = [items[c::num_ctas] for c in range(num_ctas)]
        ends = [0, *accumulate(map(len, queues))]
        arrays = ([item for queue in queues for item in queue], ends, merges, slots)
        ints = [torch.tensor(array, dtype=torch.int32) for array in arrays]
        return MmaWork(self, batch, dict(zip(WORK, ints, strict=True)))


@dataclass(frozen=True)
class MmaWork:
    """A batch, its work list, and what it should give."""

    case: MmaCase
    batch: Batch
    lists: dict[str, torch.Tensor]

    @property
    def num_ctas(self) -> int:
        """CTAs."""
        return len(self.lists["cta_indptr"]) - 1

    @functools.cached_property
    def expected(self) -> tuple[State, State]:
        """Return out and lse in float64, and as torch computes them."""
        args = cases.arguments(self.case.variant, self.batch)
        exact, eager = (
            cases.states(self.case.variant, self.batch, args, compute)
            for compute in ("float64", "eager")
        )
        return exact, eager

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """Return arguments by parameter, but for results; arrays stay from launch to launch."""
        spec, tile = self.case.spec, self.case.tile
        k, v = as_pages(self.batch)
        slots = max(int(self.lists["merge_indptr"][-1]), 1)
        tensors = {
            **(self.lists | batch_arrays(self.batch) | {"q": self.batch.q, "k": k, "v": v}),
            "partial_o": torch.full((slots, tile.rows, spec.dim_vo), torch.nan),
            "partial_lse": torch.full((slots, tile.rows), torch.nan),
            "arrivals": torch.zeros(slots * self.case.cluster, dtype=torch.int32),
            **{name: self._scale(name) for name in ("k_scale", "v_scale")},
        }
        factors = {"sm_scale": 1 / math.sqrt(spec.head_dim_qk), "q_scale": 1.0, "lse_scale": 1.0}
        told = {
            "size": self.case.cluster,
            "follows": 0,
            "window_left_": cases.WINDOW,
            "logits_soft_cap_": cases.CAP,
        }
        return {**described(tensors), **factors, **told, **self._bits()}

    def check(self, kernel: WatchedKernel, schedules: Iterable[Schedule]) -> None:
        """Run it on the same arrays by schedules; what is the first's result is the others'."""
        first: State | None = None
        for schedule in schedules:
            got = cases.poisoned_results(self.batch)
            out, lse = got
            assert lse is not None
            results = described({"out": out, "lse": lse})
            kernel.launch(self.num_ctas, schedule, {**self.arguments, **results})
            assert not self.arguments["arrivals_ptr"].any(), f"counters are not 0 by {schedule}"
            if first is None:
                assert_states_accurate(got, *self.expected, self.batch.fmt)
                first = got
            for name, a, b in zip(("out", "lse"), first, got, strict=True):
                assert a is not None and b is not None
                assert torch.equal(a, b), f"{name} is another one by {schedule}"

    def _scale(self, name: str) -> torch.Tensor:
        """Return the scales of heads."""
        scale = self.batch.scales.get(name)
        return torch.ones(self.case.spec.num_kv_heads) if scale is None else torch.as_tensor(scale)

    def _bits(self) -> dict[str, torch.Tensor]:
        """Return the bits of a custom mask, if there is one."""
        mask = cases.arguments(self.case.variant, self.batch).plan.get("custom_mask")
        if mask is None:
            return {}
        pairs = [
            int(q * k) for q, k in zip(self.batch.fmt.qo_len, self.batch.fmt.kv_len, strict=True)
        ]
        packed = [np.packbits(row.numpy(), bitorder="little") for row in mask.split(pairs)]
        bits = torch.from_numpy(np.concatenate([*packed, np.full(READ_BEYOND, 255, np.uint8)]))
        indptr = torch.tensor([0, *accumulate(map(len, packed))])
        return {"custom_mask_ptr": bits, "custom_mask__indptr_ptr": indptr}
