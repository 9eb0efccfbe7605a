"""Work side by side on a GPU: on a second stream, between two points of the current one.

Both begin after what is queued before, and what is queued later waits for both. A CUDA graph that
captures this has two branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


def side_by_side(
    device: torch.device, first: Callable[[], A], second: Callable[[], B]
) -> tuple[A, B]:
    """Call two functions, and have what they launch run side by side on a GPU.

    What the second one launches is on a stream of its own: it is to allocate nothing that outlives
    it. Where there is no GPU, they are called one after the other.
    """
    if device.type != "cuda":
        return first(), second()
    stream = torch.cuda.current_stream(device)
    side = _beside(stream)
    side.wait_stream(stream)
    try:
        result = first()
        with torch.cuda.stream(side):
            return result, second()
    finally:
        stream.wait_stream(side)


@functools.cache
def _beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return the stream that goes with one: two that shared it could not be captured alone."""
    cuda: Any = torch.cuda
    made: torch.cuda.Stream = cuda.Stream(stream.device)
    return made
