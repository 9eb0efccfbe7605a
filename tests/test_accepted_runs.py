"""Runs like one that was checked pass at once; what is wrong is said as if none had been."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.batches import Batch, random_batch
from tests.cases import arguments, kernel
from tests.test_runtime_cuda import SPEC, for_gpu
from tvm_attn.errors import DTypeError, PlanError, ShapeError, SpecError, VariantError
from tvm_attn.runtime import accepted, cuda
from tvm_attn.runtime.accepted import AcceptedRun, guard, is_alike, never, signature
from tvm_attn.runtime.cuda import CudaMachine
from tvm_attn.runtime.executor import Executor
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.runtime.placement import Placement
from tvm_attn.runtime.workspace import PlanLimits

LENS = ([1, 7, 3], [200, 30, 90])
READY = CudaMachine.ready


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels of `for_gpu` run: on the CPU."""
    monkeypatch.setattr(cuda, "has_gpu", lambda: False)
    monkeypatch.setattr(CudaMachine, "ready", lambda machine, plan: None)


@pytest.fixture
def batch() -> Batch:
    return random_batch(SPEC, *LENS)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs that were not like the one before."""
    runs: list[Any] = []
    accept = Executor._accept

    def record(*arguments: Any) -> AcceptedRun:
        runs.append(arguments)
        return accept(*arguments)

    monkeypatch.setattr(Executor, "_accept", record)
    return runs


@pytest.mark.parametrize("make", [kernel, for_gpu])
def test_runs_alike_are_checked_once(
    batch: Batch, checked: list[Any], make: Callable[..., AttentionModule]
) -> None:
    module = make("full", SPEC)
    plan = module.plan(batch.fmt)
    first = module.run(plan, batch.q, batch.kv)
    out, again = torch.empty_like(batch.q), (torch.randn_like(batch.q), batch.kv)
    module.run(plan, *again)
    module.run(plan, *again, out=out)
    module.run(plan, *again, out=out, return_lse=True)
    assert len(checked) == 1
    assert torch.equal(module.run(plan, batch.q, [*batch.kv]), first)
    assert len(checked) == 1
    module.plan(batch.fmt, out=plan)
    assert torch.equal(module.run(plan, batch.q, batch.kv), first)
    assert len(checked) == 2, "another plan, of several families"


@pytest.mark.parametrize("limits", [None, PlanLimits(3, 20, 4000)], ids=["free", "limits"])
def test_a_plan_like_the_one_before_has_its_runs(
    batch: Batch, checked: list[Any], limits: PlanLimits | None
) -> None:
    module = for_gpu("full", SPEC)
    short = random_batch(SPEC, [1, 1, 1], [20, 30, 9])
    plan = module.plan(short.fmt, limits=limits)
    first = module.run(plan, short.q, short.kv)
    for _ in range(5):
        plan = module.plan(short.fmt, out=plan)
        assert torch.equal(module.run(plan, short.q, short.kv), first)
    assert len(checked) == (2 if limits is None else 1), "once for each memory that plans take"
    with pytest.raises(PlanError, match="kv has 1 pages"):
        module.run(plan, short.q, (short.kv[0][:1], short.kv[1][:1]))
    longer = random_batch(SPEC, [2, 1, 1], [20, 30, 9])
    module.plan(longer.fmt, out=plan)
    with pytest.raises(ShapeError, match="q has shape"):
        module.run(plan, short.q, short.kv)
    expected = module.run(module.plan(longer.fmt), longer.q, longer.kv)
    assert torch.equal(module.run(plan, longer.q, longer.kv), expected)


def test_a_plan_of_pages_that_a_cache_has_not_is_checked_again(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    few = random_batch(SPEC, [1, 1], [5, 6])
    limits = PlanLimits(2, 2, 400)
    plan = module.plan(few.fmt, limits=limits)
    module.run(plan, few.q, few.kv)
    pages = few.kv[0].shape[0]
    module.plan([0, 1, 2], [0, 1, 2], [0, pages], [3, 4], out=plan)
    with pytest.raises(PlanError, match=f"the plan refers to page {pages}"):
        module.run(plan, few.q, few.kv)


def test_each_run_has_its_own_scales_and_parameters(batch: Batch, checked: list[Any]) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)

    def fresh(**given: Any) -> torch.Tensor:
        result: Any = module.run(module.plan(batch.fmt), batch.q, batch.kv, **given)
        return result[1] if "lse_base" in given else result

    for given in (
        {},
        {"sm_scale": 0.5},
        {"q_scale": 2.0},
        {"k_scale": 0.25},
        {"v_scale": 3.0},
        {"v_scale": torch.tensor([3.0, 0.5])},
        {"lse_base": "ln", "return_lse": True},
        {},
    ):
        got: Any = module.run(plan, batch.q, batch.kv, **given)
        assert torch.equal(got[1] if "lse_base" in given else got, fresh(**given))


def test_the_content_of_tensors_may_change(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    plan, scale = module.plan(batch.fmt), torch.tensor([3.0, 0.5])
    first = module.run(plan, batch.q, batch.kv, v_scale=scale)
    scale *= 2
    assert torch.equal(module.run(plan, batch.q, batch.kv, v_scale=scale), 2 * first)


def test_parameters_of_a_run_are_looked_at(batch: Batch) -> None:
    module = for_gpu("window", SPEC)
    plan = module.plan(batch.fmt, window_left=50)
    wide = module.run(plan, batch.q, batch.kv)
    narrow = module.run(plan, batch.q, batch.kv, window_left=3)
    assert not torch.equal(wide, narrow)
    assert torch.equal(module.run(plan, batch.q, batch.kv), wide)
    assert torch.equal(module.run(plan, batch.q, batch.kv, window_left=3), narrow)
    with pytest.raises(PlanError, match="window_left=51 is larger"):
        module.run(plan, batch.q, batch.kv, window_left=51)
    with pytest.raises(VariantError, match="'logits' is no parameter"):
        module.run(plan, batch.q, batch.kv, logits=3)


def test_strided_and_fused_tensors_are_alike_as_well(batch: Batch, checked: list[Any]) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    expected = module.run(plan, batch.q, batch.kv)
    wide = torch.cat([batch.q, batch.q], dim=1)
    rows = wide[:, : SPEC.num_qo_heads]
    fused = torch.stack(batch.kv, dim=1)
    for _ in range(2):
        assert torch.equal(module.run(plan, rows, batch.kv), expected)
    assert len(checked) == 2
    for _ in range(2):
        assert torch.equal(module.run(plan, batch.q, fused), expected)
    assert len(checked) == 3


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "rows": (lambda g: {"q": g["q"][1:]}, ShapeError, "q has shape"),
    "dtype": (lambda g: {"q": g["q"].half()}, DTypeError, "q has dtype"),
    "list": (lambda g: {"q": g["q"].tolist()}, DTypeError, "q must be a torch tensor"),
    "device": (lambda g: {"q": g["q"].to("meta")}, ShapeError, "q is on meta"),
    "inner": (lambda g: {"q": g["q"].mT.contiguous().mT}, ShapeError, "innermost stride"),
    "unaligned": (lambda g: {"q": shifted(g["q"])}, ShapeError, "q has rows that do not begin"),
    "k rows": (lambda g: {"kv": (shifted(g["kv"][0]), g["kv"][1])}, ShapeError, "k has rows"),
    "v": (lambda g: {"kv": (g["kv"][0], g["kv"][1].half())}, DTypeError, "v has dtype"),
    "pages": (lambda g: {"kv": tuple(x[:3] for x in g["kv"])}, PlanError, "kv has 3 pages"),
    "pair": (lambda g: {"kv": g["kv"][:1]}, DTypeError, "kv must be a"),
    "fused": (lambda g: {"kv": g["kv"][0]}, ShapeError, "kv has shape"),
    "out": (lambda g: {"out": g["out"][1:]}, ShapeError, "out has shape"),
    "out dtype": (lambda g: {"out": g["out"].half()}, DTypeError, "out has dtype"),
    "out rows": (lambda g: {"out": shifted(g["out"])}, ShapeError, "out has rows"),
    "lse": (lambda g: {"lse": g["lse"].T}, ShapeError, "lse has shape"),
    "base": (lambda g: {"lse_base": "log10"}, SpecError, "lse_base"),
    "number": (lambda g: {"sm_scale": "1"}, DTypeError, "sm_scale"),
}


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose address is a multiple of 4 bytes, and of no more."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_after_runs_that_were_right(batch: Batch, name: str) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    rows = (len(batch.q), SPEC.num_qo_heads)
    good = {
        "q": batch.q,
        "kv": batch.kv,
        "out": torch.empty_like(batch.q),
        "lse": torch.empty(rows),
    }
    expected = module.run(plan, **good)
    change, error, message = WRONG[name]
    for _ in range(2):
        with pytest.raises(error, match=message):
            module.run(plan, **{**good, **change(good)})
    good["out"] = torch.full_like(batch.q, torch.nan)
    assert torch.equal(module.run(plan, **good), expected)


def test_what_a_graph_reads_is_its_own(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that a captured run was given lives as long as the graph, not as the plan."""
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    module.run(plan, batch.q, batch.kv, k_scale=0.5)
    run = plan.placement.accepted
    assert run is not None
    given = (batch.q, *batch.kv, (None, None, 0.5, None), "log2", {})
    assert run.is_like(*given)
    monkeypatch.setattr(accepted, "is_capturing", lambda device: True)
    assert not run.is_like(*given)


def test_a_subclass_of_tensors_is_always_checked(batch: Batch) -> None:
    q = batch.q
    assert is_alike(q, signature(q))
    assert not is_alike(torch.nn.Parameter(q), signature(q))
    assert not is_alike(None, signature(q))


def test_guards_are_sure_of_tensors_that_are_alike_and_of_no_others(batch: Batch) -> None:
    q = batch.q
    are_alike = guard(q)
    if are_alike is never:
        pytest.skip("this PyTorch has no such guards")
    assert are_alike(torch.empty_like(q))
    wide = torch.cat([q, q], dim=1)
    others = (q[1:], q.half(), wide[:, : q.shape[1]], q.to("meta"), torch.nn.Parameter(q), None)
    assert not any(are_alike(other) for other in others)
    assert guard(torch.nn.Parameter(q)) is never, "subclasses are always checked"


class OtherGuards:
    """Guards that are made in another way."""

    def __init__(self, *tensors: torch.Tensor):
        raise AssertionError


@pytest.mark.parametrize("guards", [None, OtherGuards], ids=["none", "other"])
def test_without_guards_tensors_are_looked_at(
    batch: Batch, checked: list[Any], monkeypatch: pytest.MonkeyPatch, guards: Any
) -> None:
    monkeypatch.setattr(accepted, "guards", SimpleNamespace(TensorGuards=guards))
    module = for_gpu("full", SPEC)
    plan, out = module.plan(batch.fmt), torch.empty_like(batch.q)
    first = module.run(plan, batch.q, batch.kv)
    for _ in range(2):
        assert torch.equal(module.run(plan, batch.q, batch.kv, out=out), first)
    assert len(checked) == 1
    with pytest.raises(ShapeError, match="q has rows that do not begin"):
        module.run(plan, shifted(batch.q), batch.kv)


class Stream:
    """A stream of a GPU, by its address."""

    def __init__(self, cuda_stream: int):
        self.cuda_stream = cuda_stream


def test_a_run_where_the_one_before_was_is_ready_at_once(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    placement, streams = plan.placement, {0: Stream(0), 7: Stream(7)}
    placement.device, placement.stream = torch.device("cuda", 0), streams[0]  # type: ignore
    now, followed = {"stream": 0, "gpu": 0}, []

    def follow(placement: Placement, stream: Any) -> None:
        followed.append(stream.cuda_stream)
        placement.stream = stream

    monkeypatch.setattr(Placement, "follow", follow)
    monkeypatch.setattr(CudaMachine, "_prepare", lambda machine, device: followed.append("load"))
    for name in ("raw_stream", "stream_handle"):
        monkeypatch.setattr(cuda, name, lambda of: now["stream"])
    monkeypatch.setattr(cuda, "current_stream", lambda of: streams[now["stream"]])
    monkeypatch.setattr(cuda, "current_index", lambda: now["gpu"])
    monkeypatch.setattr(cuda, "on_device", lambda device: "guard")
    monkeypatch.setattr(CudaMachine, "ready", READY)
    machine: Any = module._machine
    assert machine.ready(plan) is None and followed == ["load"]
    machine._ready.add(placement.device)
    assert machine.ready(plan) is None and followed == ["load"]
    now["gpu"] = 1
    assert machine.ready(plan) == "guard" and followed == ["load"]
    now.update(gpu=0, stream=7)
    for _ in range(2):
        assert machine.ready(plan) is None and followed == ["load", 7]
    now["stream"] = 0
    assert machine.ready(plan) is None and followed == ["load", 7, 0]


def test_an_array_of_a_scale_may_change(batch: Batch) -> None:
    module = kernel("full", SPEC)
    plan, scale = module.plan(batch.fmt), np.array(0.5)
    first = module.run(plan, batch.q, batch.kv, v_scale=scale)
    scale *= 2
    assert torch.equal(module.run(plan, batch.q, batch.kv, v_scale=scale), 2 * first)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_are_refused(batch: Batch) -> None:
    """Whether a run like it was accepted before or not."""
    module = kernel("full", SPEC)
    plan, out = module.plan(batch.fmt), torch.empty_like(batch.q)
    nested = torch.nested.nested_tensor([batch.q[:1], batch.q[1:]])
    for _ in range(2):
        with pytest.raises(ShapeError, match="q is a nested tensor"):
            module.run(plan, nested, batch.kv)
        with pytest.raises(ShapeError, match="out is a nested tensor"):
            module.run(plan, batch.q, batch.kv, out=nested)
        module.run(plan, batch.q, batch.kv, out=out)


def test_results_are_not_written_where_gradients_are_kept(batch: Batch) -> None:
    module = kernel("full", SPEC)
    plan, out = module.plan(batch.fmt), torch.empty_like(batch.q)
    module.run(plan, batch.q, batch.kv, out=out)
    with pytest.raises(DTypeError, match="out requires gradients"):
        module.run(plan, batch.q, batch.kv, out=out.requires_grad_())


def test_the_default_device_is_not_asked(batch: Batch) -> None:
    module = kernel("custom_mask", SPEC)
    masks = arguments("custom_mask", batch).plan
    expected = module.run(module.plan(batch.fmt, **masks), batch.q, batch.kv)
    with torch.device("meta"):
        got = module.run(module.plan(batch.fmt, **masks), batch.q, batch.kv)
    assert torch.equal(got, expected)
