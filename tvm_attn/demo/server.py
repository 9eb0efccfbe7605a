"""The server's loop: admit, step, check, free; on a clock that does not depend on the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tvm_attn.demo.checker import Checker
from tvm_attn.demo.engine import Engine, StepResult
from tvm_attn.demo.model import Model
from tvm_attn.demo.options import DemoOptions
from tvm_attn.demo.pages import PagePool
from tvm_attn.demo.report import Summary
from tvm_attn.demo.scheduler import Request, Scheduler, Share
from tvm_attn.demo.trace import load_trace

STEP_SECONDS, TOKEN_SECONDS = 25e-3, 50e-6
"""What a step, and each token in it, takes on the server's clock. Requests arrive by this clock, so
that they meet in the same batches on every machine."""


@dataclass(frozen=True)
class Progress:
    """Where the server is after a step.

    Attributes
    ----------
    step : int
        Steps so far.
    now : float
        The server's clock, in seconds.
    tokens, all_tokens : int
        Tokens computed so far, and in the end.
    running, waiting : int
        Requests admitted and not finished; requests not admitted yet.
    pages : int
        Pages held.
    """

    step: int
    now: float
    tokens: int
    all_tokens: int
    running: int
    waiting: int
    pages: int


def serve(
    options: DemoOptions, kernel: Any, observe: Callable[[Progress], None] | None = None
) -> Summary:
    """Serve the first requests of the trace and return what happened.

    Parameters
    ----------
    options : DemoOptions
        Traffic, model and server.
    kernel : AttentionModule
        Causal, built for `DemoOptions.spec`.
    observe : callable, optional
        Called after every step.
    """
    model = Model(options)
    requests = [
        Request(
            index,
            arrival.time,
            model.tokens(index, arrival.prompt + arrival.answer),
            arrival.prompt,
        )
        for index, arrival in enumerate(load_trace(options.requests))
    ]
    server = _Server(
        options, requests, Engine(kernel, model, options), Checker(model, options.seed)
    )
    with _one_torch_thread():
        while not server.scheduler.is_done:
            server.step()
            if observe:
                observe(server.progress())
    return server.summary()


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Keep torch to one thread: its others would spin on the cores that the kernels run on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Server:
    """The parts of the server, and what is counted on the way."""

    def __init__(
        self,
        options: DemoOptions,
        requests: Sequence[Request],
        engine: Engine,
        checker: Checker,
    ):
        self.pool = PagePool(options.num_pages)
        self.scheduler = Scheduler(requests, self.pool, options)
        self.engine = engine
        self.checker = checker
        self.options = options
        self.all_tokens = sum(len(request.tokens) for request in requests)
        self.steps = self.prefill = self.decode = self.largest_batch = 0
        self.now = 0.0
        self.picture = ""
        self._drawn = 0

    def step(self) -> None:
        """Admit what has arrived, compute a step, check a sample, free what has finished."""
        if not self.scheduler.running:
            self.now = max(self.now, self.scheduler.waiting[0].time)
        self.scheduler.admit(self.now)
        shares = self.scheduler.next_step()
        result = self.engine.step(shares)
        self._count(shares)
        if self.steps % self.options.check_every == 1 % self.options.check_every:
            self.checker.check(self.steps, shares, result)
            self._draw(shares, result)
        self.engine.wipe(self.scheduler.complete(shares))

    def progress(self) -> Progress:
        """Return where the server is."""
        return Progress(
            self.steps,
            self.now,
            self.prefill + self.decode,
            self.all_tokens,
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            self.pool.num_held,
        )

    def summary(self) -> Summary:
        """Return what happened, once all is done."""
        return Summary(
            options=self.options,
            steps=self.steps,
            prefill_tokens=self.prefill,
            decode_tokens=self.decode,
            largest_batch=self.largest_batch,
            clock=self.now,
            seconds=self.engine.seconds,
            checks=self.checker.checks,
            worst=self.checker.worst,
            failures=self.checker.failures,
            high_water=self.pool.high_water,
            leaked=self.pool.leaked(alive=()),
            picture=self.picture,
        )

    def _count(self, shares: Sequence[Share]) -> None:
        decodes = sum(share.request.is_decoding for share in shares)
        tokens = sum(share.count for share in shares)
        self.steps += 1
        self.decode += decodes
        self.prefill += tokens - decodes
        self.largest_batch = max(self.largest_batch, len(shares))
        self.now += STEP_SECONDS + TOKEN_SECONDS * tokens

    def _draw(self, shares: Sequence[Share], result: StepResult) -> None:
        """Keep the picture of the checked step that mixes prefill and decodes of most requests."""
        mixed = len({share.request.is_decoding for share in shares}) > 1
        if not self.picture or (mixed and len(shares) > self._drawn):
            self.picture = f"step {self.steps}: {result.plan}"
            self._drawn = len(shares) if mixed else 0
