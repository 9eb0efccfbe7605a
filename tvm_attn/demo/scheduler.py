"""Continuous batching: which tokens of which requests make up the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tvm_attn.demo.options import DemoOptions
from tvm_attn.demo.pages import PageError, PagePool


@dataclass
class Request:
    """A request on its way through the server.

    Attributes
    ----------
    index : int
        Its place in the trace.
    time : float
        Its arrival, in seconds.
    tokens : torch.Tensor
        ``[prompt + answer]``, all tokens that will ever be in the cache.
    prompt : int
        How many of them are known from the start.
    done : int
        How many are in the cache.
    pages : list of int
        Its pages, in KV order.
    """

    index: int
    time: float
    tokens: torch.Tensor
    prompt: int
    done: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        """Whether its whole prompt is in the cache."""
        return self.done >= self.prompt

    @property
    def is_finished(self) -> bool:
        """Whether all its tokens are in the cache."""
        return self.done == len(self.tokens)


@dataclass(frozen=True)
class Share:
    """What a step computes of one request: its `count` next tokens."""

    request: Request
    count: int

    @property
    def new_tokens(self) -> torch.Tensor:
        """The tokens ``[count]`` that the step adds."""
        done = self.request.done
        return self.request.tokens[done : done + self.count]

    @property
    def kv_len(self) -> int:
        """Tokens of the request that are in the cache when attention runs."""
        return self.request.done + self.count


class Scheduler:
    """Admits requests in order of arrival, and mixes their tokens into steps.

    A request is admitted when the pages for all of its tokens can be promised to it, so that it
    never has to be stopped. Decodes come first; what is left of the step's tokens goes to prompts,
    oldest first, in chunks.

    Parameters
    ----------
    requests : sequence of Request
        In order of arrival.
    pool : PagePool
        Where pages are taken from and given back to.
    options : DemoOptions
        Page size, requests and tokens of a step.

    Raises
    ------
    PageError
        If a request is longer than the whole cache.
    """

    def __init__(self, requests: Sequence[Request], pool: PagePool, options: DemoOptions):
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self._pool = pool
        self._options = options
        self._promised = 0
        for request in requests:
            if self._pages_of(len(request.tokens)) > pool.num_pages:
                raise PageError(
                    f"request {request.index} has {len(request.tokens)} tokens, the cache "
                    f"{pool.num_pages} pages of {options.page_size}; enlarge it"
                )

    @property
    def is_done(self) -> bool:
        """Whether every request has been served."""
        return not self.waiting and not self.running

    def admit(self, now: float) -> None:
        """Let arrived requests in, while there is room for them."""
        while self.waiting and self.waiting[0].time <= now:
            pages = self._pages_of(len(self.waiting[0].tokens))
            full = len(self.running) == self._options.max_batch
            if full or self._promised + pages > self._pool.num_pages:
                return
            self._promised += pages
            self.running.append(self.waiting.popleft())

    def next_step(self) -> list[Share]:
        """Return the shares of the next step, with the pages for their tokens taken."""
        budget = self._options.max_tokens
        shares = []
        for request in sorted(self.running, key=lambda r: (not r.is_decoding, r.index)):
            wanted = 1 if request.is_decoding else request.prompt - request.done
            count = min(wanted, budget)
            if count:
                budget -= count
                shares.append(Share(request, count))
        for share in shares:
            held = share.request.pages
            held += self._pool.take(self._pages_of(share.kv_len) - len(held), share.request.index)
        return shares

    def complete(self, shares: Sequence[Share]) -> list[int]:
        """Count a step's tokens as done; return the pages that finished requests gave back."""
        freed: list[int] = []
        for share in shares:
            share.request.done += share.count
            if share.request.is_finished:
                freed += self._retire(share.request)
        return freed

    def _retire(self, request: Request) -> list[int]:
        self.running.remove(request)
        self._promised -= self._pages_of(len(request.tokens))
        pages, request.pages = request.pages, []
        self._pool.give_back(pages, request.index)
        return pages

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self._options.page_size)
