"""What a GPU kernel refuses, with an error that says what to do; nothing is launched then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases import variant
from tests.gpu.device import ANY_GPU
from tests.machine import Machine
from tests.test_semantics import assert_same_bits
from tvm_attn.errors import TvmAttnError

SPEC = ANY_GPU.paged
KERNELS = [(SPEC, variant(name, SPEC)) for name in ("window", "sink", "custom_mask")]
LENS = ([1, 7, 40], [200, 30, 90])

Tensors = dict[str, Any]


def given(machine: Machine) -> Tensors:
    """The tensors of a run, all of them given."""
    batch = machine.batch(SPEC, *LENS)
    out = torch.empty_like(batch.q)
    lse = torch.empty(out.shape[:2], device=machine.device)
    return {"q": batch.q, "k": batch.kv[0], "v": batch.kv[1], "out": out, "lse": lse}


def run(machine: Machine, tensors: Tensors, name: str = "window", **keywords: Any) -> Any:
    batch = machine.batch(SPEC, *LENS)
    module = machine.kernel(name, SPEC)
    q, k, v, out, lse = (tensors[n] for n in ("q", "k", "v", "out", "lse"))
    return module.run(module.plan(batch.fmt), q, (k, v), out=out, lse=lse, **keywords)


def wider(x: torch.Tensor) -> torch.Tensor:
    """The same values in rows that begin at odd multiples of two bytes."""
    room = x.new_zeros(*x.shape[:-1], x.shape[-1] + 1)
    room[..., :-1] = x
    return room[..., :-1]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, all of them two bytes after a multiple of 16."""
    room = x.new_zeros(x.numel() + 1)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


@pytest.mark.parametrize("misplace", [wider, shifted])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_rows_that_are_not_aligned(
    machine: Machine, name: str, misplace: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensors = given(machine)
    with pytest.raises(TvmAttnError, match=rf"\b{name}\b.*\.contiguous\(\)"):
        run(machine, {**tensors, name: misplace(tensors[name])})


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_tensors_on_the_host(machine: Machine, name: str) -> None:
    tensors = given(machine)
    with pytest.raises(TvmAttnError, match=rf"\b{name} is on cpu"):
        run(machine, {**tensors, name: tensors[name].cpu()})


def test_everything_on_the_host(machine: Machine) -> None:
    with pytest.raises(TvmAttnError, match="is on cpu"):
        run(machine, {name: tensor.cpu() for name, tensor in given(machine).items()})


def test_parameters_and_scales_on_the_host(machine: Machine) -> None:
    with pytest.raises(TvmAttnError, match="sink is on cpu"):
        run(machine, given(machine), "sink", sink=torch.zeros(8))
    with pytest.raises(TvmAttnError, match="k_scale is on cpu"):
        run(machine, given(machine), k_scale=torch.ones(2))


def test_a_workspace_on_the_host_or_too_small(machine: Machine) -> None:
    batch = machine.batch(SPEC, [1], [9000])
    module = machine.kernel("window", SPEC)
    with pytest.raises(TvmAttnError, match="workspace is on cpu"):
        module.plan(batch.fmt, workspace=torch.empty(2**24, dtype=torch.uint8))
    with pytest.raises(TvmAttnError, match="bytes"):
        small = torch.empty(64, dtype=torch.uint8, device=machine.device)
        module.plan(batch.fmt, workspace=small)


def test_kernels_of_a_cpu_refuse_gpu_tensors(machine: Machine) -> None:
    cpu = Machine("cpu", None, machine.dtype)
    tensors = given(machine)
    with pytest.raises(TvmAttnError, match="is on cuda"):
        run(cpu, tensors)


def test_earlier_plans_stay_valid(machine: Machine) -> None:
    batch = machine.batch(SPEC, *LENS)
    module = machine.kernel("window", SPEC)
    plan = module.plan(batch.fmt)
    expected = module.run(plan, batch.q, batch.kv, return_lse=True)
    with pytest.raises(TvmAttnError):
        module.run(plan, wider(batch.q), batch.kv)
    with pytest.raises(TvmAttnError):
        module.plan([0, 3], [0, 5], [0, 1], [4], out=plan)
    with pytest.raises(TvmAttnError):
        module.plan(batch.fmt, out=plan, workspace=torch.empty(2**24, dtype=torch.uint8))
    assert_same_bits(module.run(plan, batch.q, batch.kv, return_lse=True), expected)
