"""Plans made on the GPU: those of the host, in graphs, without waiting; and what is wrong there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from tests.accuracy import assert_accurate
from tests.cases import variant
from tests.gpu.device import ANY_GPU
from tests.gpu.test_graphs import PAGES, batch_of, cache_of, in_graph, lengths
from tests.machine import Machine
from tests.test_semantics import assert_same_bits
from tvm_attn import reference
from tvm_attn.bsr import BSR
from tvm_attn.errors import LimitError, PlanError
from tvm_attn.runtime.device_plan import DevicePlan
from tvm_attn.runtime.workspace import PlanLimits

SPEC = ANY_GPU.spec(head_dim_qk=128, page_size=16)
KERNELS = [(SPEC, variant(name, SPEC)) for name in ("causal", "window")]
BATCHES = 500
TOKENS = 16 * PAGES


def on_gpu(fmt: BSR) -> BSR:
    parts = {f.name: getattr(fmt, f.name) for f in fields(fmt)}
    return replace(fmt, **{n: v.cuda() for n, v in parts.items() if isinstance(v, torch.Tensor)})


@contextmanager
def without_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_format(rng: np.random.Generator, number: int, max_batch: int, longest: int) -> BSR:
    size = int(rng.integers(1, max_batch + 1))
    kv_lens = np.array(lengths(size, number))
    if number % 4 == 3:
        kv_lens = np.where(np.arange(size) == size // 2, TOKENS // 2, rng.integers(0, 9))
    qo_lens = rng.integers(0, longest + 1, size) if longest > 1 else np.ones(size, int)
    pages = -(-kv_lens // 16)
    indptrs = ([0, *accumulate(map(int, lens))] for lens in (qo_lens, pages))
    ids = rng.integers(0, PAGES, int(pages.sum()))
    return BSR.from_page_table(*indptrs, ids, (kv_lens - 1) % 16 + 1, 16)


@pytest.mark.parametrize(
    ("name", "max_batch", "longest", "window"),
    [
        ("causal", 3, 1, None),
        ("causal", 200, 1, None),
        ("window", 64, 1, 2000),
        ("causal", 40, 12, None),
    ],
)
def test_plans_are_those_of_the_host(
    machine: Machine, name: str, max_batch: int, longest: int, window: int | None
) -> None:
    module, rng = machine.kernel(name, SPEC), np.random.default_rng(longest)
    limits = PlanLimits(max_batch, max_batch * longest, TOKENS + 16 * max_batch)
    kinds = set()
    terms: dict[str, Any] = {"window_left": window, "limits": limits, "max_qo_len": longest}
    first = on_gpu(random_format(rng, 0, max_batch, longest))
    plans = [module.plan(first, **terms) for _ in range(2)]
    for number in range(BATCHES // 4):
        fmt = random_format(rng, number, max_batch, longest)
        plans = [
            module.plan(each, out=out, window_left=window)
            for each, out in zip((fmt, on_gpu(fmt)), plans, strict=True)
        ]
        expected, made = plans
        assert isinstance(made, DevicePlan)
        assert made.to_json() == expected.to_json()
        kinds |= {(work.family, work.num_slots > 0) for work in expected.work}
    assert len(kinds) > 1


@pytest.mark.parametrize("batch_size", [3, 40])
def test_a_graph_plans_and_runs(machine: Machine, batch_size: int) -> None:
    """Lengths grow and shrink between replays, in the arrays that the graph reads."""
    module, kv = machine.kernel("causal", SPEC), cache_of(machine)
    q = torch.randn(batch_size, SPEC.num_qo_heads, 128, device=machine.device).half()
    batches = [
        batch_of(q, kv, [1] * batch_size, lengths(batch_size, seed), seed) for seed in range(60)
    ]
    limits = PlanLimits(batch_size, batch_size, TOKENS)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    sizes = (batch_size + 1, batch_size + 1, PAGES, batch_size)
    buffers = [torch.zeros(n, dtype=torch.int32, device=machine.device) for n in sizes]

    def fill(fmt: BSR) -> None:
        for name, buffer in zip(names, buffers, strict=True):
            given = getattr(fmt, name)
            buffer[: len(given)].copy_(given)

    fill(batches[0].fmt)
    plan, host = (module.plan(*buffers, limits=limits, max_qo_len=1) for _ in range(2))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=machine.device)

    def step() -> None:
        module.plan(*buffers, out=plan)
        module.run(plan, q, kv, out=out, lse=lse)
        module.run(plan, q, kv, out=out, lse=lse)

    graph = in_graph(step)
    for number, batch in enumerate(batches):
        fill(batch.fmt)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        plan.check()
        module.plan(batch.fmt, out=host)
        assert_same_bits((out, lse), module.run(host, q, kv, return_lse=True))
        if number % 10 == 0:
            assert_accurate((out, lse), batch, mask=reference.causal())


def test_nothing_waits(machine: Machine) -> None:
    module, kv = machine.kernel("causal", SPEC), cache_of(machine)
    q = torch.randn(8, SPEC.num_qo_heads, 128, device=machine.device).half()
    formats = [on_gpu(batch_of(q, kv, [1] * 8, lengths(8, s), s).fmt) for s in range(4)]
    limits = PlanLimits(8, 8, TOKENS)
    plan = module.plan(formats[0], limits=limits, max_qo_len=1)
    module.run(plan, q, kv)
    with without_waiting():
        for fmt in formats:
            module.plan(fmt, out=plan)
            module.run(plan, q, kv)
        module.plan(formats[0], limits=limits, max_qo_len=1)
    plan.check()


def bad(**changes: tuple[int, int]) -> BSR:
    """Three requests of 40, 20 and 33 tokens; changes are (place, value) of an array."""
    arrays = {
        "qo_indptr": [0, 1, 2, 3],
        "kv_indptr": [0, 3, 5, 8],
        "kv_indices": list(range(8)),
        "kv_last_page_len": [8, 4, 1],
    }
    for name, (place, value) in changes.items():
        arrays[name][place] = value
    device = {n: torch.tensor(a, dtype=torch.int32, device="cuda") for n, a in arrays.items()}
    return BSR.from_page_table(*device.values(), 16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qo_indptr": (1, 3)}, PlanError, r"qo_indptr\[2\] is 2; it must start at 0"),
        ({"qo_indptr": (3, 7)}, LimitError, "max_qo_tokens=7, its plan was limited to 4"),
        ({"kv_indptr": (0, 2)}, PlanError, r"kv_indptr\[0\] is 2"),
        ({"kv_indptr": (3, 9)}, PlanError, "kv_indices has 8 entries, .* asks for 9"),
        ({"kv_indptr": (3, 30)}, PlanError, "kv_indices has 8 entries, .* asks for 30"),
        ({"kv_indices": (6, -2)}, PlanError, r"kv_indices\[6\] is -2; page ids are at least 0"),
        ({"kv_indices": (7, 4096)}, PlanError, r"kv_indices\[7\] is 4096; .* num_pages=4096"),
        ({"kv_last_page_len": (1, 17)}, PlanError, r"kv_last_page_len\[1\] is 17"),
        ({"qo_indptr": (3, 4)}, PlanError, "max_qo_len=1, but a request has 2 queries"),
    ],
)
def test_what_is_wrong_is_said_later_and_gives_empty_states(
    machine: Machine, changes: dict[str, tuple[int, int]], error: type[Exception], message: str
) -> None:
    module, kv = machine.kernel("causal", SPEC), cache_of(machine)
    q = torch.randn(4, SPEC.num_qo_heads, 128, device=machine.device).half()
    limits = PlanLimits(4, 4, 16 * 20, num_pages=PAGES)
    plan = module.plan(bad(), limits=limits, max_qo_len=1)
    plan.check()
    out, lse = (torch.full_like(t, torch.nan) for t in (q, q[..., 0].float()))
    wrong = bad(**changes)
    with without_waiting():
        module.plan(wrong, out=plan)
        module.run(plan, q, kv, out=out, lse=lse)
    assert not out.any()
    assert (lse == -torch.inf).all()
    with pytest.raises(error, match=message):
        plan.check()
    module.plan(bad(), out=plan)
    plan.check()
    host = module.plan(bad(), limits=limits, max_qo_len=1)
    module.plan(BSR(**{**vars(bad()), **_on_host(bad())}), out=host)
    made, expected = (module.run(p, q[:n], kv) for p, n in ((plan, 4), (host, 3)))
    assert torch.equal(made[:3], expected)


def _on_host(fmt: BSR) -> dict[str, torch.Tensor]:
    return {n: v.cpu() for n, v in vars(fmt).items() if isinstance(v, torch.Tensor)}


def test_what_only_the_host_plans_is_refused(machine: Machine) -> None:
    module = machine.kernel("causal", SPEC)
    too_many = bad()
    with pytest.raises(LimitError, match="max_batch=3, its plan was limited to 2"):
        module.plan(too_many, limits=PlanLimits(2, 4, 320), max_qo_len=1)
    with pytest.raises(PlanError, match=r"long.* dealt on the host; give a max_qo_len"):
        module.plan(bad(), limits=PlanLimits(4, 400, 320))
