"""Kernels for a GPU where there is none: planned, placed, read and refused as they should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as ta
from tests.batches import Batch, random_batch
from tests.cases import arguments, kernel
from tvm_attn._flashinfer.arguments import schedule_of
from tvm_attn.errors import (
    ArtifactError,
    DTypeError,
    PlanError,
    ProcessError,
    ShapeError,
    WorkspaceError,
)
from tvm_attn.runtime import cuda, library
from tvm_attn.runtime.buffers import ALIGNMENT
from tvm_attn.runtime.cuda import CudaMachine, check_capability
from tvm_attn.runtime.device import ROW_BYTES, check_rows
from tvm_attn.runtime.formats import to_host
from tvm_attn.runtime.inspector import Inspector
from tvm_attn.runtime.library import Library
from tvm_attn.runtime.module import MULTIPROCESSORS, AttentionModule
from tvm_attn.runtime.placement import Placement
from tvm_attn.runtime.plan import Plan
from tvm_attn.runtime.staging import Copies
from tvm_attn.runtime.workspace import PlanLimits
from tvm_attn.spec import AttentionSpec

SPEC = AttentionSpec(8, 2, 64, q_dtype="float32", page_size=4)
RAGGED = replace(SPEC, page_size=None)
LENS = ([1, 7, 0, 40, 3, 1], [200, 30, 5, 90, 0, 3000])
NAMES = ("full", "window", "alibi", "custom_mask")


pytestmark = pytest.mark.usefixtures("no_gpu")


def plans_taken(monkeypatch: pytest.MonkeyPatch, method: str) -> list[Plan]:
    """Return where a method of the inspector notes its plans, but those that it refuses."""
    plans: list[Plan] = []
    take = getattr(Inspector, method)

    def record(inspector: Inspector, plan: Plan, *arguments: Any) -> Any:
        taken = take(inspector, plan, *arguments)
        if taken is not False:
            plans.append(plan)
        return taken

    monkeypatch.setattr(Inspector, method, record)
    return plans


def for_gpu(
    name: str, spec: AttentionSpec, residents: tuple[int, int] = (2, 2), **meta: Any
) -> AttentionModule:
    """Return a CPU's kernel that says it is for a GPU, one with 5 multiprocessors unless told."""
    made = kernel(name, spec)
    families = [
        {**family, "residents": n}
        for family, n in zip(made._artifact.meta["families"], residents, strict=True)
    ]
    says = {
        **made._artifact.meta,
        **{"device": "cuda", "backend": "sm80", "target": "cuda -arch=sm_90a", "cpu_flags": []},
        **{"families": families, "multiprocessors": 5, **meta},
    }
    libraries = {"planner": made._libraries["planner"], "attention": WithArrivals(made)}
    return AttentionModule(replace(made._artifact, meta=says), libraries)


class WithArrivals(Library):
    """A CPU's kernels with the parameters of a GPU's: counters after the partial states."""

    def __init__(self, made: AttentionModule):
        self._functions = {
            f"attention_{family.name}": self._without(
                made._libraries["attention"][f"attention_{family.name}"]
            )
            for family in made.families
        }

    @staticmethod
    def _without(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            *before, arrivals, out, lse = args
            assert arrivals.dtype == torch.int32
            assert not arrivals.any()
            function(*before, out, lse)

        return call


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels of `for_gpu` run: on the CPU."""
    monkeypatch.setattr(CudaMachine, "ready", lambda machine, plan: None)


@pytest.fixture
def batch() -> Batch:
    return random_batch(SPEC, *LENS)


def planned(module: AttentionModule, name: str, batch: Batch, **options: Any) -> ta.Plan:
    return module.plan(batch.fmt, **arguments(name, batch).plan, **options)


# Plans


@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("name", NAMES)
def test_plans_are_those_of_as_many_threads(batch: Batch, name: str, split: int | None) -> None:
    plan = planned(for_gpu(name, SPEC), name, batch, fixed_split_size=split)
    twin = planned(kernel(name, SPEC).with_ctas(10), name, batch, fixed_split_size=split)
    assert plan.to_json() == twin.to_json()
    assert str(plan) == str(twin)
    assert plan._repr_svg_() == twin._repr_svg_()
    assert plan.num_slots > 0 or (name, split) == ("window", None)


def test_ctas_are_multiprocessors_times_residents(batch: Batch) -> None:
    module = for_gpu("full", SPEC, residents=(3, 1))
    assert [work.num_ctas for work in module.plan(batch.fmt).work] == [15, 5]
    assert [work.num_ctas for work in module.with_ctas(7).plan(batch.fmt).work] == [7, 7]
    limits = PlanLimits(10, 100, 1000)
    assert module.workspace_size(limits) != module.with_ctas(7).workspace_size(limits)
    assert "7 CTAs" in str(module.with_ctas(7))


def test_a_usual_number_of_multiprocessors(batch: Batch) -> None:
    module = for_gpu("full", SPEC, residents=(1, 1))
    del module._artifact.meta["multiprocessors"]
    plan = AttentionModule(module._artifact, module._libraries).plan(batch.fmt)
    assert {work.num_ctas for work in plan.work} == {MULTIPROCESSORS}


@pytest.mark.parametrize("name", NAMES)
def test_what_kernels_read_is_the_plan(batch: Batch, name: str) -> None:
    plan = planned(for_gpu(name, SPEC), name, batch)
    placement = plan.placement
    assert plan.device == torch.device("cpu")
    assert [launch.family for launch in placement.launches] == [w.family.name for w in plan.work]
    for launch, work in zip(placement.launches, plan.work, strict=True):
        for placed, array in zip(launch.indices, (*work.arrays, *plan.batch), strict=True):
            assert placed.dtype == torch.int32
            assert placed.is_contiguous()
            assert placed.data_ptr() % ALIGNMENT == 0
            assert np.array_equal(placed.numpy()[: len(array)], array)
        _, cta_indptr, merge_items, merge_indptr = launch.indices[:4]
        merges = len(work.merge_items)
        assert len(cta_indptr) == work.num_ctas + 1, "a CTA for each queue"
        assert not merge_items[merges:].any(), "no units behind the last cut one"
        assert (merge_indptr[merges:] == work.num_slots).all()
        o, lse, arrivals = launch.partials
        assert o.shape[:2] == lse.shape
        assert len(lse) >= work.num_slots
        assert lse.shape[1] == work.family.rows
        assert len(arrivals) >= merges
        assert not arrivals.any()
    assert torch.equal(placement.ones, torch.ones(SPEC.num_kv_heads))
    assert list(placement.params) == list(plan.params)
    for param, values in plan.params.items():
        for placed, value in zip(placement.params[param], values, strict=True):
            assert torch.equal(torch.as_tensor(placed), torch.as_tensor(value))
            assert placed is not value or not isinstance(value, torch.Tensor)


def test_a_batch_without_queries_launches_nothing() -> None:
    fmt = random_batch(SPEC, [0, 0], [3, 9]).fmt
    assert not for_gpu("full", SPEC).plan(fmt).placement.launches


def test_replanning_replaces_everything(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    before = plan.placement
    with pytest.raises(PlanError):
        module.plan([0, 3], [0, 5], [0, 1], [4], out=plan)
    assert plan.placement is before
    other = random_batch(SPEC, [2], [9])
    assert module.plan(other.fmt, out=plan) is plan
    assert plan.placement is not before
    assert plan.to_json() == module.plan(other.fmt).to_json()


def test_partial_states_are_in_the_callers_workspace(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    size, _ = module.workspace_size(PlanLimits(10, 100, 4000), fixed_split_size=4)
    workspace = torch.empty(size, dtype=torch.uint8)
    begin, end = workspace.data_ptr(), workspace.data_ptr() + size
    plan = module.plan(batch.fmt, workspace=workspace, fixed_split_size=4)
    parts = sorted((x.data_ptr(), x.nbytes) for states in plan.partials for x in states[:2])
    assert len(parts) == 4, "two launches, which may run at the same time"
    ends = [address + size for address, size in parts]
    assert begin == parts[0][0] and ends[-1] <= end
    assert all(a <= b for a, (b, _) in zip(ends, parts[1:], strict=False))
    with pytest.raises(WorkspaceError, match="64 bytes"):
        module.plan(batch.fmt, workspace=workspace[:64])
    with pytest.raises(ShapeError, match="workspace is on meta, the kernel runs on the CPU"):
        module.plan(batch.fmt, workspace=workspace.to("meta"))


# Runs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("runs")
def test_kernels_get_what_they_take(batch: Batch, name: str) -> None:
    module, twin, args = (
        for_gpu(name, SPEC),
        kernel(name, SPEC).with_ctas(10),
        arguments(name, batch),
    )
    tensors = (batch.q, batch.kv)
    given = {"return_lse": True, "k_scale": 0.5, "v_scale": torch.tensor([3.0, 0.25]), **args.run}
    got = module.run(planned(module, name, batch), *tensors, **given)
    expected = twin.run(planned(twin, name, batch), *tensors, **given)
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("runs")
def test_ragged_keys_and_values() -> None:
    batch = random_batch(RAGGED, *LENS)
    module, twin = for_gpu("full", RAGGED), kernel("full", RAGGED).with_ctas(10)
    got = module.run(module.plan(batch.fmt), batch.q, batch.kv)
    assert torch.equal(got, twin.run(twin.plan(batch.fmt), batch.q, batch.kv))


@pytest.mark.usefixtures("runs")
def test_numbers_become_tensors_once(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    filled: list[float] = []
    full = torch.full
    monkeypatch.setattr(
        torch, "full", lambda s, value, **k: filled.append(value) or full(s, value, **k)
    )
    for scale in (0.5, torch.tensor(0.5), np.float32(0.5), 0.25, 0.5):
        module.run(plan, batch.q, batch.kv, k_scale=scale, v_scale=scale)
    assert filled == [0.5, 0.25]


@pytest.mark.usefixtures("runs")
def test_what_a_run_refuses(batch: Batch) -> None:
    module = for_gpu("alibi", SPEC)
    plan, args = module.plan(batch.fmt), arguments("alibi", batch)
    k, v = batch.kv
    good: dict[str, Any] = {"q": batch.q, "kv": (k, v), **args.run}
    one = torch.ones(1, device="meta")
    for given in (
        {"q": batch.q.to("meta")},
        {"kv": (k, v.to("meta"))},
        {"alibi_slopes": torch.ones(8, device="meta")},
        {"k_scale": one},
    ):
        name = next(iter(given)).replace("kv", "v")
        with pytest.raises(ShapeError, match=f"{name} is on meta, the kernel runs on the CPU"):
            module.run(plan, **{**good, **given})
    for name in ("sm_scale", "q_scale"):
        with pytest.raises(DTypeError, match=f"{name} is a tensor on meta; it must be a number"):
            module.run(plan, **good, **{name: one})


def wider(x: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(*x.shape[:-1], x.shape[-1] + 1)
    room[..., :-1] = x
    return room[..., :-1]


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.usefixtures("runs")
def test_rows_begin_at_multiples_of_16_bytes(batch: Batch, name: str) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    tensors = {"q": batch.q, "k": batch.kv[0], "v": batch.kv[1], "out": torch.empty_like(batch.q)}

    def run(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return module.run(plan, tensors["q"], (tensors["k"], tensors["v"]), out=tensors["out"])

    expected = run(tensors).clone()
    x = tensors[name]
    shifted = torch.zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for misplaced in (wider(x), shifted):
        with pytest.raises(ShapeError, match=rf"^{name} has rows .* pass {name}\.contiguous\(\)"):
            run({**tensors, name: misplaced})
    spaced = torch.zeros(*x.shape[:-1], x.shape[-1] + ROW_BYTES // 4)[..., : x.shape[-1]].copy_(x)
    assert torch.equal(run({**tensors, name: spaced}), expected)


def test_strides_of_axes_of_one_do_not_matter() -> None:
    check_rows(q=torch.zeros(100).as_strided((1, 3, 8), (5, 8, 1)))


def test_a_run_needs_a_driver(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)

    def load(*_: object) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(library.ctypes, "CDLL", load)
    library.load_cuda_runtime.cache_clear()
    for run in (module.run, lambda *args: module.launcher(*args, *args[1:2], *args[1:2])):
        with pytest.raises(ProcessError, match=r"need an NVIDIA driver.*libcuda\.so\.1"):
            run(plan, batch.q, batch.kv)


def test_a_run_needs_a_plan_for_a_gpu(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    module = for_gpu("full", SPEC)
    monkeypatch.setattr(cuda, "load_cuda_runtime", lambda: None)
    with pytest.raises(ProcessError, match="planned where there was no GPU, and cuda -arch=sm_90a"):
        module.run(module.plan(batch.fmt), batch.q, batch.kv)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_120a", (10, 0), False),
    ],
)
def test_code_runs_on_its_architecture(
    arch: str, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    device = torch.device("cuda", 1)
    if runs:
        check_capability(f"cuda -arch={arch}", device)
        return
    wanted = "sm_{}{}".format(*capability)
    with pytest.raises(
        ArtifactError, match=rf"-arch={arch}, and cuda:1 is an {wanted} \(some card"
    ):
        check_capability(f"cuda -arch={arch}", device)


# Exported, read and printed


def test_a_kernel_for_a_gpu_is_loaded_and_read_anywhere(batch: Batch, tmp_path: Path) -> None:
    module = for_gpu("window", SPEC)
    assert (module.device, module.backend) == ("cuda", "sm80")
    assert "target  cuda -arch=sm_90a, schedule sm80\n" in str(module)
    module.export(tmp_path / "kernel.tar")
    loaded = ta.load(tmp_path / "kernel.tar")
    assert str(loaded) == str(module)
    assert loaded.families == module.families
    assert loaded.plan(batch.fmt).to_json() == module.plan(batch.fmt).to_json()


def test_device_code_is_loaded_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    content = kernel("full", SPEC)._artifact.libraries["attention"]
    made = Library(content, [b"no module"])
    assert made["attention_short"]

    def load() -> None:
        raise ProcessError("no driver")

    monkeypatch.setattr(library, "load_cuda_runtime", load)
    for use in (made.load_device_code, lambda: made.launch("attention_short")):
        with pytest.raises(ProcessError, match="no driver"):
            use()


# Memory and streams


def test_arrays_of_all_dtypes_travel_together() -> None:
    arrays = [
        np.arange(5, dtype=np.int32),
        np.arange(24, dtype=np.int32).reshape(3, 8),
        np.empty((0, 4), np.int32),
        torch.arange(3, dtype=torch.int64),
        torch.randn(2, 3, 5).to(torch.bfloat16),
        torch.arange(7, dtype=torch.uint8),
        torch.empty(0, dtype=torch.float32),
    ]
    copies = Copies(torch.device("cpu"), arrays)
    for array in arrays:
        original, copy = torch.as_tensor(array), copies.of(array)
        assert torch.equal(copy, original)
        assert copy.dtype == original.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % ALIGNMENT == 0 or not copy.numel()
        assert copy.untyped_storage().data_ptr() == copies.block.untyped_storage().data_ptr()
    arrays[0][:] = 77
    assert torch.equal(copies.of(arrays[0]), torch.arange(5))


class Stream:
    """What a plan does with a stream."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Memory:
    """What a plan does with its memory."""

    def __init__(self) -> None:
        self.recorded: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream)


def test_a_plan_follows_the_stream_it_is_used_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, memory = Stream(), Stream(), Memory()
    placed: Any = (torch.device("cuda", 0), [], {}, torch.ones(1), first, (memory,))
    placement = Placement(*placed)
    capturing = False
    monkeypatch.setattr("tvm_attn.runtime.placement.is_capturing", lambda device: capturing)
    for stream in (first, second, second, first):
        placement.follow(stream)  # type: ignore[arg-type]
    assert second.waited == [first]
    assert first.waited == [second]
    assert memory.recorded == [second, first]
    capturing = True
    placement.follow(second)  # type: ignore[arg-type]
    assert placement.stream is first
    assert second.waited == [first]


def test_what_is_on_the_host_stays_there(batch: Batch) -> None:
    given = {"qo_indptr": batch.fmt, "custom_mask": torch.ones(3), "window_left": 3, "q": [1, 2]}
    moved, device = to_host(given)
    assert device is None
    assert moved["custom_mask"] is given["custom_mask"]
    assert moved["qo_indptr"].kv_indices is batch.fmt.kv_indices
    assert moved["q"] == [1, 2]


# Facades


def test_a_backend_chooses_a_schedule_on_a_gpu() -> None:
    gpu = torch.device("cuda", 0)
    assert schedule_of("fa2", gpu) == "sm80"
    assert schedule_of("auto", gpu) is None
    assert schedule_of("fa2", torch.device("cpu")) is None
