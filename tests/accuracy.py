"""How every test compares a result with what it should be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from tests.batches import Batch
from tvm_attn.bsr import BSR
from tvm_attn.reference import Accuracy, check_accuracy

State = tuple[torch.Tensor, torch.Tensor | None]
"""out ``[nnz_qo, num_qo_heads, head_dim_vo]`` and base 2 lse ``[nnz_qo, num_qo_heads]``."""


def assert_accurate(got: State | torch.Tensor, batch: Batch, **variant: Any) -> list[Accuracy]:
    """Hold the result of a batch against the promise; `variant` are keywords of the reference.

    A result without an lse is an out alone. Returns the accuracy of what was given.
    """
    return assert_states_accurate(got, batch.exact(**variant), batch.eager(**variant), batch.fmt)


def assert_states_accurate(
    got: State | torch.Tensor, exact: State, eager: State, fmt: BSR | None = None
) -> list[Accuracy]:
    """Hold out and lse against the promise; with `fmt`, a 16-bit out request by request as well.

    A batch mixes magnitudes, and the ulp of a short request's out would hide errors of a long one.
    """
    out, lse = (got, None) if isinstance(got, torch.Tensor) else got
    device = exact[0].device
    measured = [check_accuracy(out.to(device), exact[0], eager[0], name="out")]
    if lse is not None:
        assert exact[1] is not None and eager[1] is not None, "an lse is given but none is defined"
        measured.append(check_accuracy(lse.to(device), exact[1], eager[1], name="lse"))
    if fmt is not None and out.dtype.itemsize == 2:
        for b, (begin, end) in enumerate(pairwise(fmt.qo_indptr.tolist())):
            rows = (x[begin:end] for x in (out.to(device), exact[0], eager[0]))
            check_accuracy(*rows, name=f"out of request {b}")
    return measured
