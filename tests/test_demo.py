"""The demo's server: its parts, a whole run, and that its checks can fail."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as ta
from tvm_attn.demo import DemoOptions, Summary, serve
from tvm_attn.demo.checker import Checker
from tvm_attn.demo.console import run_demo
from tvm_attn.demo.engine import Engine
from tvm_attn.demo.model import Model
from tvm_attn.demo.pages import PageError, PagePool
from tvm_attn.demo.scheduler import Request, Scheduler, Share
from tvm_attn.demo.trace import TRACE_REQUESTS, load_trace
from tvm_attn.errors import SpecError

FEW = DemoOptions(requests=4, check_every=5)


@pytest.fixture(scope="session")
def kernel() -> ta.AttentionModule:
    return ta.build(FEW.spec, ta.variants.causal())


@pytest.fixture(scope="session")
def twenty(kernel: ta.AttentionModule) -> Summary:
    return serve(DemoOptions(requests=20), kernel)


class Spoiled:
    """A kernel whose plans get other arguments, or whose results are not what they should be."""

    def __init__(
        self,
        kernel: ta.AttentionModule,
        arguments: Callable[..., tuple[Any, ...]] = lambda *arguments: arguments,
        result: Callable[..., tuple[Any, ...]] = lambda *result: result,
    ):
        self._kernel, self._arguments, self._result = kernel, arguments, result
        self.target = kernel.target

    def plan(self, *arguments: Any, out: Any = None) -> Any:
        return self._kernel.plan(*self._arguments(*arguments), out=out)

    def run(self, *arguments: Any, **options: Any) -> Any:
        return self._result(*self._kernel.run(*arguments, **options))


def test_the_trace_is_complete_and_attributed(root: Any) -> None:
    arrivals = load_trace(TRACE_REQUESTS)
    assert len(arrivals) == 2000
    first, second = arrivals[:2]
    assert (first.time, first.prompt, first.answer) == (0.0, 374, 44)
    assert (round(second.time, 6), second.prompt, second.answer) == (4.314579, 396, 109)
    assert all(a.time <= b.time for a, b in itertools.pairwise(arrivals))
    assert min(min(a.prompt, a.answer) for a in arrivals) >= 1
    words = (root / "tvm_attn/data/ATTRIBUTION.md").read_text()
    assert "Azure" in words and "CC-BY 4.0" in words and "Splitwise" in words


def test_pages_have_one_holder() -> None:
    pool = PagePool(4)
    mine, yours = pool.take(3, holder=0), pool.take(1, holder=1)
    assert sorted([*mine, *yours]) == [0, 1, 2, 3]
    with pytest.raises(PageError, match="0 of 4 are free"):
        pool.take(1, holder=2)
    with pytest.raises(PageError, match="which 1 holds"):
        pool.give_back(yours, holder=0)
    pool.give_back(mine, holder=0)
    with pytest.raises(PageError, match="which nobody holds"):
        pool.give_back(mine[:1], holder=0)
    assert (pool.num_held, pool.high_water) == (1, 4)


def test_a_leak_is_a_page_without_a_living_holder() -> None:
    pool = PagePool(4)
    (page,) = pool.take(1, holder=7)
    assert pool.leaked(alive=[7]) == []
    assert pool.leaked(alive=[]) == [page]
    pool.give_back([page], holder=7)
    assert pool.leaked(alive=[]) == []
    pool._free.remove(2)
    assert pool.leaked(alive=[]) == [2], "a page that is neither free nor held"


def requests_of(*lengths: tuple[int, int]) -> list[Request]:
    return [Request(i, 0.0, torch.arange(p + a), p) for i, (p, a) in enumerate(lengths)]


def shares_until_done(scheduler: Scheduler) -> list[list[tuple[int, int]]]:
    steps = []
    while not scheduler.is_done:
        scheduler.admit(0.0)
        shares = scheduler.next_step()
        steps.append([(share.request.index, share.count) for share in shares])
        scheduler.complete(shares)
    return steps


def test_decodes_come_first_and_prompts_fill_up_in_chunks() -> None:
    options = DemoOptions(max_batch=4, max_tokens=10)
    scheduler = Scheduler(requests_of((4, 2), (15, 1)), PagePool(8), options)
    assert shares_until_done(scheduler) == [
        [(0, 4), (1, 6)],
        [(0, 1), (1, 9)],
        [(0, 1), (1, 1)],
    ]


def test_requests_wait_for_pages_and_places_in_order() -> None:
    options = DemoOptions(max_batch=2, max_tokens=64)
    lengths = (31, 1), (16, 1), (1, 1), (1, 1)  # 2, 2, 1 and 1 pages of 16
    pool = PagePool(3)
    scheduler = Scheduler(requests_of(*lengths), pool, options)
    running = []
    while not scheduler.is_done:
        scheduler.admit(0.0)
        running.append([request.index for request in scheduler.running])
        scheduler.complete(scheduler.next_step())
    assert running == [[0], [0], [1, 2], [1, 2], [3], [3]]
    assert pool.leaked(alive=()) == [] and pool.high_water == 3


def test_requests_are_not_admitted_before_they_arrive() -> None:
    (request,) = requests_of((4, 1))
    request.time = 2.5
    scheduler = Scheduler([request], PagePool(8), DemoOptions())
    scheduler.admit(2.4)
    assert not scheduler.running
    scheduler.admit(2.5)
    assert scheduler.running == [request]


def test_a_request_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(PageError, match=r"request 0 has 33 tokens, the cache 2 pages of 16"):
        Scheduler(requests_of((32, 1)), PagePool(2), DemoOptions())


def test_the_model_depends_on_seed_request_position_and_layer_alone() -> None:
    model, again, other = Model(FEW), Model(FEW), Model(DemoOptions(seed=1))
    tokens = model.tokens(3, 100)
    assert torch.equal(tokens, again.tokens(3, 100))
    assert not torch.equal(tokens, model.tokens(4, 100))
    assert not torch.equal(tokens, other.tokens(3, 100))
    assert torch.equal(model.queries(tokens, 1), again.queries(tokens, 1))
    for layer in range(2):
        for mine, same in zip(
            model.keys_values(tokens, layer), again.keys_values(tokens, layer), strict=True
        ):
            assert mine.dtype == torch.bfloat16 and torch.equal(mine, same)
    (k, v), (other_k, _) = (model.keys_values(tokens, layer) for layer in range(2))
    assert not torch.equal(k, other_k) and not torch.equal(k, v)
    assert (model.queries(tokens, 0).shape, k.shape) == ((100, 8, 64), (100, 2, 64))


def test_a_run_computes_every_token_within_bounds_and_leaks_nothing(twenty: Summary) -> None:
    arrivals = load_trace(20)
    assert twenty.ok, str(twenty)
    assert twenty.prefill_tokens == sum(a.prompt for a in arrivals)
    assert twenty.decode_tokens == sum(a.answer for a in arrivals)
    assert twenty.leaked == [] and 0 < twenty.high_water < FEW.num_pages
    assert twenty.checks > 100 and set(twenty.worst) == {"out", "lse"}
    assert all(0 < worst.ratio <= 1 for worst in twenty.worst.values())
    assert min(vars(twenty.seconds).values()) > 0


def test_the_report_has_what_was_asked_for(twenty: Summary) -> None:
    text = str(twenty)
    for word in ("steps", "tokens", "plan time", "run time", "tokens/s", "leaked", "cta 0 |"):
        assert word in text
    assert text.endswith("OK: every bound kept, every page given back")
    assert "short tiles" in twenty.picture and "long tiles" in twenty.picture, "a mixed step"
    fields = json.loads(twenty.to_json())
    assert fields["ok"] and fields["steps"] == twenty.steps
    assert fields["worst"]["out"]["ratio"] == twenty.worst["out"].ratio


def test_torch_gets_its_threads_back(kernel: ta.AttentionModule) -> None:
    threads = torch.get_num_threads()
    serve(DemoOptions(requests=1), kernel)
    assert torch.get_num_threads() == threads


def test_batches_do_not_depend_on_the_machine(kernel: ta.AttentionModule) -> None:
    runs = [serve(FEW, kernel) for _ in range(2)]
    for name in ("steps", "clock", "checks", "worst", "high_water", "largest_batch"):
        assert getattr(runs[0], name) == getattr(runs[1], name)


def test_another_dtype() -> None:
    options = DemoOptions(requests=2, dtype="float32", check_every=5)
    assert serve(options, ta.build(options.spec, ta.variants.causal())).ok


FAULTS = {
    "out is off by a percent": {"result": lambda out, lse: (out * 1.02, lse)},
    "lse is natural": {"result": lambda out, lse: (out, lse * np.log(2))},
    "heads are swapped": {"result": lambda out, lse: (out.flip(1), lse.flip(1))},
    "one value is NaN": {
        "result": lambda out, lse: (out.index_fill(0, torch.tensor(0), torch.nan), lse)
    },
    "last token is not seen": {
        "arguments": lambda qo, kv, pages, last: (qo, kv, pages, last.clamp(max=15))
    },
    "pages are in another order": {
        "arguments": lambda qo, kv, pages, last: (qo, kv, pages.flip(0), last)
    },
    "pages are a neighbour's": {
        "arguments": lambda qo, kv, pages, last: (qo, kv, pages.roll(1), last)
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(kernel: ta.AttentionModule, fault: str) -> None:
    summary = serve(FEW, Spoiled(kernel, **FAULTS[fault]))
    assert summary.failures and not summary.ok
    assert "FAILED\nbound passed: " in str(summary)


def test_reading_freed_pages_is_found(
    kernel: ta.AttentionModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose first page is taken away early keeps reading it."""
    step = Engine.step

    def steal(self: Engine, shares: list[Share]) -> Any:
        self.wipe(shares[0].request.pages[:1] if shares[0].request.is_decoding else [])
        return step(self, shares)

    monkeypatch.setattr(Engine, "step", steal)
    assert any("not finite" in failure for failure in serve(FEW, kernel).failures)


def exit_code(options: DemoOptions, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    from tvm_attn.cli import main

    monkeypatch.setattr(ta, "build", lambda *_, **__: kernel, raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--requests", str(options.requests)])
    return int(stopped.value.code or 0)


def test_a_good_run_exits_with_0(
    kernel: ta.AttentionModule, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(FEW, kernel, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "100%" in printed and "bfloat16" in printed and "OK: " in printed


def test_a_passed_bound_exits_with_1(
    kernel: ta.AttentionModule, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = Spoiled(kernel, result=lambda out, lse: (out, lse + 1e-4))
    assert exit_code(FEW, spoiled, monkeypatch) == 1
    assert "bound passed: lse of step 1," in capsys.readouterr().out


def test_a_leaked_page_exits_with_1(
    kernel: ta.AttentionModule, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_back = PagePool.give_back
    monkeypatch.setattr(
        PagePool, "give_back", lambda self, pages, holder: give_back(self, pages[1:], holder)
    )
    assert exit_code(FEW, kernel, monkeypatch) == 1
    assert "pages leaked: " in capsys.readouterr().out


def test_a_run_without_checks_does_not_pass(
    kernel: ta.AttentionModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checker, "check", lambda *_: None)
    summary = serve(FEW, kernel)
    assert not summary.ok and "nothing was checked" in str(summary)


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(DemoOptions(requests=1), as_json=True)
    assert json.loads(capsys.readouterr().out)["options"]["requests"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0},
        {"requests": 2001},
        {"seed": -1},
        {"dtype": "int8"},
        {"num_pages": 0},
        {"max_tokens": 63},
    ],
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        DemoOptions(**wrong)
