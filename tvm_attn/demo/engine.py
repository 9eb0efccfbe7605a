"""One step of the server: append to the cache, plan once, run every layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

import tvm_attn as ta
from tvm_attn.demo.model import Model
from tvm_attn.demo.options import DemoOptions
from tvm_attn.demo.scheduler import Share


@dataclass
class Seconds:
    """Where the time goes, in seconds."""

    append: float = 0.0
    plan: float = 0.0
    run: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.append + self.plan + self.run


@dataclass(frozen=True)
class StepResult:
    """What a step computed.

    Attributes
    ----------
    plan : Plan
        The plan all layers were run with.
    outputs : list of (torch.Tensor, torch.Tensor)
        For each layer out ``[nnz_qo, num_qo_heads, head_dim]`` and lse ``[nnz_qo, num_qo_heads]``.
    """

    plan: Any
    outputs: list[tuple[torch.Tensor, torch.Tensor]]


class Engine:
    """The paged KV cache of every layer, and the kernel that attends to it.

    Parameters
    ----------
    kernel : AttentionModule
        Causal, built for `DemoOptions.spec`.
    model : Model
        Gives the queries, keys and values.
    options : DemoOptions
        Layers and cache.
    """

    def __init__(self, kernel: Any, model: Model, options: DemoOptions):
        shape = (options.num_pages, options.page_size, options.num_kv_heads, options.head_dim)
        dtype = getattr(torch, options.dtype)
        self._caches = [
            (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
            for _ in range(options.num_layers)
        ]
        self._kernel = kernel
        self._model = model
        self._page_size = options.page_size
        self._plan: Any = None
        self.seconds = Seconds()
        self._build_append()

    def _build_append(self) -> None:
        """Append nothing, so that the first step does not wait for a compiler."""
        nothing = torch.zeros(0, dtype=torch.int32)
        no_kv = self._caches[0][0][0, :0]
        indptr = torch.zeros(1, dtype=torch.int32)
        ta.append_paged_kv_cache(
            no_kv, no_kv, nothing, nothing, self._caches[0], nothing, indptr, nothing
        )

    def step(self, shares: Sequence[Share]) -> StepResult:
        """Put the new tokens of a step into the cache, and attend to it with their queries."""
        start = time.perf_counter()
        qo_indptr, *page_table = self._batch(shares)
        self._plan = self._kernel.plan(qo_indptr, *page_table, out=self._plan)
        self.seconds.plan += time.perf_counter() - start
        where = ta.get_batch_indices_positions(
            qo_indptr,
            torch.tensor([share.kv_len for share in shares], dtype=torch.int32),
            int(qo_indptr[-1]),
        )
        tokens = torch.cat([share.new_tokens for share in shares])
        outputs = [
            self._layer(tokens, layer, where, page_table) for layer in range(len(self._caches))
        ]
        return StepResult(self._plan, outputs)

    def wipe(self, pages: Sequence[int]) -> None:
        """Overwrite freed pages with NaN: whoever still reads them will be found out."""
        index = torch.tensor(pages, dtype=torch.int64)
        for cache in self._caches:
            for kv in cache:
                kv[index] = torch.nan

    def _batch(self, shares: Sequence[Share]) -> list[torch.Tensor]:
        """Return qo_indptr and the page table: indptr, indices, last_page_len."""
        arrays = (
            [0, *accumulate(share.count for share in shares)],
            [0, *accumulate(len(share.request.pages) for share in shares)],
            [page for share in shares for page in share.request.pages],
            [(share.kv_len - 1) % self._page_size + 1 for share in shares],
        )
        return [torch.tensor(array, dtype=torch.int32) for array in arrays]

    def _layer(
        self,
        tokens: torch.Tensor,
        layer: int,
        where: tuple[torch.Tensor, torch.Tensor],
        page_table: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens to a layer's cache, and attend to it."""
        q = self._model.queries(tokens, layer)
        k, v = self._model.keys_values(tokens, layer)
        cache = self._caches[layer]
        kv_indptr, kv_indices, kv_last_page_len = page_table
        start = time.perf_counter()
        ta.append_paged_kv_cache(k, v, *where, cache, kv_indices, kv_indptr, kv_last_page_len)
        appended = time.perf_counter()
        out, lse = self._kernel.run(self._plan, q, cache, return_lse=True)
        self.seconds.append += appended - start
        self.seconds.run += time.perf_counter() - appended
        return out, lse
