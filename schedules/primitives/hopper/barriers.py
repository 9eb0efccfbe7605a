"""Barriers in shared memory (mbarriers), and rings of stages that one side fills, another empties.

A barrier completes phase after phase; who waits names the parity of the phase. It completes one
when all its arrivals have come, and all bytes that copies were announced to bring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.variant import Expr


@dataclass(frozen=True)
class Barriers:
    """Consecutive barriers in shared memory.

    Parameters
    ----------
    words : Buffer
        uint64, where barriers are.
    first, count : int
        Which of them.
    arrivals : int
        How often threads arrive at each before it completes a phase.
    """

    words: Any
    first: int
    count: int
    arrivals: int

    def pointer(self, i: Expr = 0) -> Expr:
        """Return the address of barrier `i`."""
        return self.words.ptr_to([self.first + i])

    def initialise(self) -> None:
        """Initialise them: one thread does."""
        for i in range(self.count):
            initialise = T.ptx.mbarrier.init.shared.b64
            T.evaluate(initialise(self.pointer(i), T.uint32(self.arrivals)))

    def wait(self, parity: Expr, i: Expr = 0) -> Expr:
        """Wait until barrier `i` has completed the phase of this parity."""
        return T.cuda.mbarrier_wait(self.pointer(i), parity)

    def arrive(self, i: Expr = 0) -> Expr:
        """Arrive at barrier `i`."""
        return T.ptx.mbarrier.arrive.shared.b64(self.pointer(i), T.uint32(1))

    def expect(self, num_bytes: Expr, i: Expr = 0) -> Expr:
        """Arrive at barrier `i`, and announce bytes that copies will bring."""
        count = T.uint32(num_bytes) if isinstance(num_bytes, int) else num_bytes
        return T.ptx.mbarrier.arrive.expect_tx.shared.b64(self.pointer(i), count)

    def arrive_with_copies(self, i: Expr = 0) -> Expr:
        """Arrive at barrier `i` once all that this thread began to copy is there."""
        return T.ptx.cp.async_.mbarrier.arrive.noinc.shared__cta.b64(self.pointer(i))


@dataclass(frozen=True)
class Pipe:
    """A ring of stages: a stage is `full` when it was filled, and `empty` when it may be again."""

    full: Barriers
    empty: Barriers

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.full.count


@dataclass(frozen=True)
class Cursor:
    """Where one side of a pipe is: int32 registers of the stage and of the parity it waits for."""

    stages: int
    at: Any

    @staticmethod
    def begin(pipe: Pipe, *, fills: bool) -> Cursor:
        """Begin at stage 0; to the side that fills, all stages are empty."""
        at = T.alloc_local((2,), "int32")
        T.buffer_store(at, T.int32(0), [0])
        T.buffer_store(at, T.int32(1 if fills else 0), [1])
        return Cursor(pipe.stages, at)

    @property
    def stage(self) -> Expr:
        """The stage."""
        return self.at[0]

    @property
    def parity(self) -> Expr:
        """Parity of the phase to wait for."""
        return self.at[1]


@T.inline
def advance(cursor):
    """Go on to the next stage."""
    cursor.at[0] = cursor.at[0] + 1
    if cursor.at[0] == cursor.stages:
        cursor.at[0] = 0
        cursor.at[1] = T.bitwise_xor(cursor.at[1], 1)


def begin_barriers() -> Expr:
    """Let the other threads, and copies, see barriers that this thread initialised."""
    return T.ptx.fence.mbarrier_init.release.cluster()


def publish_to_copies() -> Expr:
    """Let what reads and writes shared memory asynchronously see what this thread wrote there."""
    return T.ptx.fence.proxy.async_.shared__cta()
