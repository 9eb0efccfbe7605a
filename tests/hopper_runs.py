"""Batches that Hopper's kernels attend to on the host: planned, run by a schedule, checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch

from tests import cases
from tests.accuracy import State, assert_states_accurate
from tests.batches import Batch, random_batch
from tests.generating import GeneratedKernel, generate_kernel
from tests.hopper_threads import HopperKernel, Schedule, TensorMap
from tvm_attn.runtime.plan import BATCH
from tvm_attn.schedules.tiles_sm90 import (
    COLUMN_GROUP,
    WARPGROUP_ROWS,
    HopperTile,
    comes_in_boxes,
)
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target
from tvm_attn.worklist import NO_SLOT

MASK = "causal"
WORK = ("items", "cta_indptr", "merge_items", "merge_indptr")
STRIDED = ("q", "k", "v", "out", "lse")


@dataclass(frozen=True)
class HopperCase:
    """A kernel of a spec and a tile."""

    spec: AttentionSpec
    tile: HopperTile

    @functools.cache  # noqa: B019
    def generate(self) -> GeneratedKernel:
        """Generate its source."""
        variant = cases.variant(MASK, self.spec)
        return generate_kernel(self.spec, variant, self.tile, parse_target("cuda -arch=sm_90"))

    def compile(
        self,
        folder: Path,
        edit: Callable[[str], str] = lambda source: source,
        kind: type[HopperKernel] = HopperKernel,
    ) -> HopperKernel:
        """Compile it for the host, with an edit of its source."""
        made = self.generate()
        edited = GeneratedKernel(edit(made.source), made.threads, made.shared_bytes)
        return kind(edited, folder)

    def work(self, batch: Batch, num_ctas: int, split: int) -> Work:
        """Deal a batch to CTAs: units in pieces of so many keys, one after the other."""
        items, merges, slots = [], [], [0]
        for unit, keys in self._units(batch):
            pieces = max(-(-keys // split), 1)
            slot = slots[-1] if pieces > 1 else NO_SLOT
            for i in range(pieces):
                own = slot + i if pieces > 1 else NO_SLOT
                items.append((*unit, i * split, min(i * split + split, keys), own, 0))
            if pieces > 1:
                merges.append(unit)
                slots.append(slot + pieces)
        queues = [items[c::num_ctas] for c in range(num_ctas)]
        dealt, ends = [item for queue in queues for item in queue], accumulate(map(len, queues))
        arrays = (dealt, [0, *ends], merges, slots)
        ints = [torch.tensor(array, dtype=torch.int32) for array in arrays]
        return Work(self, batch, dict(zip(WORK, ints, strict=True)))

    def _units(self, batch: Batch) -> Iterator[tuple[tuple[int, int, int, int], int]]:
        """Yield request, head and rows of each unit, and how many keys its rows see."""
        group, rows = self.spec.group_size, self.tile.rows
        lens = zip(batch.fmt.qo_len.tolist(), batch.fmt.kv_len.tolist(), strict=True)
        for request, (qo_len, kv_len) in enumerate(lens):
            for head, begin in product(
                range(self.spec.num_kv_heads), range(0, qo_len * group, rows)
            ):
                end = min(begin + rows, qo_len * group)
                seen = kv_len - qo_len + (end - 1) // group + 1
                yield (request, head, begin, end), max(seen, 0)

    def draw(self, qo_lens: Sequence[int], kv_lens: Sequence[int], seed: int = 0) -> Batch:
        """Draw a batch."""
        return random_batch(self.spec, list(qo_lens), list(kv_lens), seed=seed)


@dataclass(frozen=True)
class Work:
    """A batch, and its work list."""

    case: HopperCase
    batch: Batch
    lists: dict[str, torch.Tensor]

    @property
    def num_ctas(self) -> int:
        """CTAs that have work."""
        return len(self.lists["cta_indptr"]) - 1

    def run(self, kernel: HopperKernel, schedule: Schedule) -> State:
        """Return out and lse."""
        out, lse = cases.poisoned_results(self.batch)
        assert lse is not None
        kernel.launch(self.num_ctas, schedule, self._arguments(out, lse))
        return out, lse

    def check(self, kernel: HopperKernel, schedules: Iterable[Schedule]) -> None:
        """Hold what comes of one schedule against the promise, and of others against that."""
        args = cases.arguments(MASK, self.batch)
        exact, eager = (
            cases.states(MASK, self.batch, args, compute) for compute in ("float64", "eager")
        )
        first: State | None = None
        for schedule in schedules:
            got = self.run(kernel, schedule)
            if first is None:
                assert_states_accurate(got, exact, eager, self.batch.fmt)
                first = got
            for name, a, b in zip(("out", "lse"), first, got, strict=True):
                assert a is not None and b is not None
                assert torch.equal(a, b), f"{name} is another one by {schedule}"

    def _arguments(self, out: torch.Tensor, lse: torch.Tensor) -> dict[str, Any]:
        """Return arguments by parameter."""
        spec, tile = self.case.spec, self.case.tile
        k, v = as_pages(self.batch)
        strided = dict(zip(STRIDED, (self.batch.q, k, v, out, lse), strict=True))
        slots, ones = int(self.lists["merge_indptr"][-1]), torch.ones(spec.num_kv_heads)
        tensors = {
            **(strided | batch_arrays(self.batch) | self.lists),
            "partial_o": torch.full((slots, tile.rows, spec.dim_vo), torch.nan),
            "partial_lse": torch.full((slots, tile.rows), torch.nan),
            "arrivals": torch.zeros(len(self.lists["merge_items"]), dtype=torch.int32),
            **{"k_scale": ones, "v_scale": ones},
        }
        factors = {"sm_scale": 1 / math.sqrt(spec.head_dim_qk), "q_scale": 1.0, "lse_scale": 1.0}
        return {**described(tensors), **factors, **self._maps(strided)}

    def _maps(self, strided: dict[str, torch.Tensor]) -> dict[str, TensorMap]:
        """Return the maps of what is copied in boxes."""
        spec, tile, maps = self.case.spec, self.case.tile, {}
        if comes_in_boxes(spec):
            rows = (COLUMN_GROUP, spec.group_size, WARPGROUP_ROWS // spec.group_size)
            maps.update({n: TensorMap.of(strided[n], (2, 1, 0), rows) for n in ("q", "out")})
        if not tile.gathers:
            slot, head = (2, 1) if spec.kv_layout == "HND" else (1, 2)
            dims = (3, slot, head, 0) if spec.is_paged else (3, 0, head)
            block = (COLUMN_GROUP, tile.box, 1, 1)[: len(dims)]
            maps.update({n: TensorMap.of(strided[n], dims, block) for n in ("k", "v")})
        return {f"{name}_map": map for name, map in maps.items()}


def batch_arrays(batch: Batch) -> dict[str, torch.Tensor]:
    """Return what says where a batch's tokens are, by parameter."""
    fmt = batch.fmt
    indices = torch.zeros(1) if fmt.kv_indices is None else fmt.kv_indices
    offsets = (fmt.kv_len - fmt.qo_len, torch.zeros_like(fmt.kv_len))
    arrays = (fmt.qo_indptr, fmt.kv_indptr, indices, fmt.kv_len, *offsets)
    return {name: a.int().contiguous() for name, a in zip(BATCH, arrays, strict=True)}


def as_pages(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return K and V with an axis of pages; ragged ones have pages of one token."""
    if batch.spec.is_paged:
        return tuple(batch.kv)
    is_hnd = batch.spec.kv_layout == "HND"
    return tuple(
        (x.transpose(0, 1) if is_hnd else x).unsqueeze(2 if is_hnd else 1) for x in batch.kv
    )


def described(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors, their sizes and their strides, by parameter."""
    given: dict[str, Any] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        given.update({f"{name}_size{i}": size for i, size in enumerate(tensor.shape)})
        given.update({f"{name}_stride{i}": size for i, size in enumerate(tensor.stride())})
    return given
