"""Sampled results against float64, from the tokens alone: the paged cache is not looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from tvm_attn.demo.engine import StepResult
from tvm_attn.demo.model import Model
from tvm_attn.demo.scheduler import Share
from tvm_attn.reference import Accuracy, attention, causal, check_accuracy

REQUESTS_CHECKED = 3
ROWS_CHECKED = 32

State = tuple[torch.Tensor, torch.Tensor]
"""out and lse."""


@dataclass
class Checker:
    """Checks a few requests of a step, in every layer, and keeps count.

    The bound is the library's promise: twice the error of torch eager plus two ulp.

    Parameters
    ----------
    model : Model
        Recomputes the dense K and V of a request.
    seed : int
        Of the choice of requests and rows.

    Attributes
    ----------
    checks : int
        Results compared: one is the out or lse of a request in a layer.
    worst : dict of str to Accuracy
        For out and lse, of all that passed the one closest to its bound.
    failures : list of str
        What did not pass.
    """

    model: Model
    seed: int
    checks: int = 0
    worst: dict[str, Accuracy] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Seed the choice."""
        self._rng = np.random.default_rng(self.seed)

    def check(self, step: int, shares: Sequence[Share], result: StepResult) -> None:
        """Compare some requests of a step: a long prompt chunk, a long context, one at random."""
        chosen = {
            max(range(len(shares)), key=lambda i: shares[i].count),
            max(range(len(shares)), key=lambda i: shares[i].kv_len),
            *self._rng.integers(len(shares), size=REQUESTS_CHECKED - 2).tolist(),
        }
        starts = np.cumsum([0, *(share.count for share in shares)])
        for place in sorted(chosen):
            rows = self._rows(shares[place].count)
            for layer, states in enumerate(result.outputs):
                got = [x[int(starts[place]) + rows] for x in states]
                self._compare(step, shares[place], layer, rows, got)

    def _rows(self, count: int) -> torch.Tensor:
        """Return which of a request's `count` new tokens to check: the ends, and some between."""
        if count <= ROWS_CHECKED:
            return torch.arange(count)
        between = self._rng.choice(count - 2, ROWS_CHECKED - 2, replace=False) + 1
        return torch.from_numpy(np.sort([0, *between, count - 1]))

    def _compare(
        self,
        step: int,
        share: Share,
        layer: int,
        rows: torch.Tensor,
        got: Sequence[torch.Tensor],
    ) -> None:
        position = share.request.done + rows
        tokens = share.request.tokens[: share.kv_len]
        q = self.model.queries(tokens[position], layer)
        k, v = self.model.keys_values(tokens, layer)
        exact, eager = (
            cast(State, attention(q, k, v, mask=causal(), q_pos=position, compute=how))
            for how in ("float64", "eager")
        )
        where = f"of step {step}, request {share.request.index}, layer {layer}"
        for quantity, *states in zip(("out", "lse"), got, exact, eager, strict=True):
            self.checks += 1
            try:
                measured = check_accuracy(*states, name=f"{quantity} {where}")
            except AssertionError as error:
                self.failures.append(str(error))
                continue
            worst = self.worst.get(quantity)
            if worst is None or measured.ratio > worst.ratio:
                self.worst[quantity] = measured
