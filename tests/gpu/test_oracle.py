"""The reference, computed on the GPU for speed, is the one computed on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.batches import Batch, random_batch
from tests.cases import PARTS, arguments, states
from tests.machine import Machine
from tvm_attn.reference import check_accuracy


@pytest.mark.parametrize("name", PARTS)
def test_the_reference_is_the_same_on_both_devices(machine: Machine, name: str) -> None:
    here = random_batch(machine.spec(kv_layout="HND"), [1, 7, 0, 40, 3], [200, 30, 5, 90, 0])
    there = here.to(machine.device)

    def on_cpu(batch: Batch, compute: str) -> list[torch.Tensor]:
        given = states(name, batch, arguments(name, batch), compute)
        return [x.cpu() for x in given if x is not None]

    exact, eager = on_cpu(here, "float64"), on_cpu(here, "eager")
    for got, expected in zip(on_cpu(there, "float64"), exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for got, *expected in zip(on_cpu(there, "eager"), exact, eager, strict=True):
        check_accuracy(got, *expected)
