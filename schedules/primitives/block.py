"""A CTA whose threads do all things together, as `tvm_attn.tir.parallel` has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.block_sort import sort
from tvm_attn.schedules.primitives.lanes import Combine, Expr, add_up_lanes, agree_in_warp
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.tir.parallel import added
from tvm_attn.tir.planner_ints import assign, ceil_div, store, var, wide

Total = tuple[Any, Combine]

THREADS = 512
WARPS = THREADS // WARP
MOST_TOTALS = 6
"""Variables that are agreed on at once."""
RESULTS = MOST_TOTALS * WARPS
COMMON = 2 * RESULTS + 1
"""Words that warps tell one another, twice: who is late reads the ones while others write the next.
The last says whether a CTA is the last."""

WAIT = """
__device__ __forceinline__ void wait_until(int* word, int goal) {
  while (*(volatile int*)word - goal < 0) __nanosleep(100);
}
"""
COUNT = """
__device__ __forceinline__ void count_out(int* word) {
#ifdef __CUDA_ARCH__
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(word) : "memory");
#else
  atomicAdd(word, 1);
#endif
}
"""
RAISE = """
__device__ __forceinline__ void raise_to(int* word, int value) { atomicMax(word, value); }
"""


def wait_until(words: Expr, goal: Expr) -> None:
    """Wait until a word of memory, which only grows, is as large as a number, or has passed it."""
    call = T.cuda.func_call(
        "wait_until", words.ptr_to([0]), goal, source_code=WAIT, return_type="void"
    )
    T.evaluate(call)


@T.inline
def arrive(cta, counter, is_last):
    """Count this CTA in when all it wrote is visible, and find whether all others are by now."""
    cta.meet()
    if cta.thread == 0:
        T.cuda.thread_fence()
        before: T.int32 = T.cuda.atomic_add(counter.ptr_to([0]), T.int32(1))
        cta.common[COMMON - 1] = T.Cast("int64", before == cta.planners - 1)
        if before == cta.planners - 1:
            counter[0] = 0
    cta.meet()
    assign(is_last, T.Cast("int32", cta.common[COMMON - 1]))
    if is_last != 0:
        cta.meet()
        T.cuda.thread_fence()


def count_out(words: Expr) -> None:
    """Add 1 to a word of memory; who sees that sees all that was written before by threads met."""
    call = T.cuda.func_call("count_out", words.ptr_to([0]), source_code=COUNT, return_type="void")
    T.evaluate(call)


@T.inline
def publish(cta):
    """Have what was written seen by kernels that begin when this one ends, however early."""
    cta.meet()
    if cta.thread == 0:
        T.cuda.thread_fence()


@T.inline
def leave(cta, counter):
    """Count this CTA out when all it wrote is visible."""
    cta.meet()
    if cta.thread == 0:
        count_out(counter)


@T.inline
def wait_for_others(cta, counter, goal):
    """Wait until so many others have left, since the memory is used."""
    if cta.thread == 0:
        wait_until(counter, goal)
        T.cuda.thread_fence()
    cta.meet()


@T.inline
def scan(cta, own, before, totals):
    """Find the sum of the values of the threads before, and agree on totals; all threads meet."""
    assign(before, own)
    add_up_lanes(before, cta.lane)
    cta.turn_over()
    if cta.lane == WARP - 1:
        cta.common[cta.turn + cta.warp] = before
    cta.offer(totals, 1)
    cta.meet()
    ahead = var(T.if_then_else(cta.lane < cta.warp, cta.common[cta.turn + cta.lane], T.int64(0)))
    agree_in_warp(ahead, added)
    assign(before, before - own + ahead)
    cta.take(totals, 1)


@T.inline
def add_up(cta, value_of, sums, count, totals):
    """Write the sums of the values before each; the sum of all comes behind them.

    If a thread has more than one value, they follow one another, an odd number of them: in shared
    memory, they are then in different banks.
    """
    run = var(T.bitwise_or(ceil_div(count, THREADS), 1))
    at = var(cta.thread * run)
    end = var(T.min(at + run, count))
    own = var(T.int64(0))
    before = var(T.int64(0))
    if run == 1:
        if at < end:
            own = value_of(at)
    else:
        while at < end:
            value = var(value_of(at))
            sums[at] = value
            own = own + value
            at = at + 1
    scan(cta, own, before, totals)
    if cta.thread == THREADS - 1:
        sums[count] = before + own
    at = cta.thread * run
    while at < end:
        held = var(T.if_then_else(run > 1, sums[at], T.int64(0)))
        sums[at] = before
        before = before + held
        at = at + 1
    cta.meet()


@dataclass(frozen=True)
class Block:
    """A CTA of `THREADS` threads; ``common`` is an int64 array for what they tell one another.

    ``planner`` and ``planners`` are variables: which CTA it is of how many that do the same; all
    that plan are ``num_planning``.
    ``job`` is what they do, the number of jobs if it is something else. ``turn`` is a variable:
    which words of ``common`` were written last. ``bins`` are for sorting (`block_sort`).
    """

    thread: Expr
    warp: Expr
    lane: Expr
    num_planning: Expr
    planner: Any
    planners: Any
    job: Any
    common: Any
    turn: Any
    bins: Any
    threads: int = THREADS
    add_up: Any = add_up
    arrive: Any = arrive
    publish: Any = publish
    leave: Any = leave
    wait_for_others: Any = wait_for_others
    sort: Any = sort

    def own(self, count: Expr) -> tuple[Expr, Expr]:
        """Return the first number that a thread visits, and the step to the next."""
        return self.thread, THREADS

    def behind(self, busy: Expr, count: Expr) -> tuple[Expr, Expr]:
        """Return the same if the warps of so many threads come last."""
        first = T.bitwise_and(busy + WARP - 1, -WARP)
        return T.bitwise_and(self.thread - first, THREADS - 1), THREADS

    def last(self, count: Expr) -> tuple[Expr, Expr]:
        """Return the same if the last thread comes first."""
        return THREADS - 1 - self.thread, THREADS

    def shared(self, count: Expr) -> tuple[Expr, Expr]:
        """Return the same of what CTAs share: a warp of each in turn, so that all have a few."""
        warp = self.warp * self.planners + self.planner
        return warp * WARP + self.lane, self.planners * THREADS

    def is_inside(self, i: Expr, count: Expr) -> Expr:
        """Whether a thread goes on with a number."""
        return i < count

    def meet(self) -> None:
        """Wait for all threads."""
        T.evaluate(T.cuda.cta_sync())

    @property
    def pairs_of_bins(self) -> Expr:
        """The bins, two in each int32."""
        bins = self.bins
        shape = (bins.shape[0] // 2,)
        return T.decl_buffer(shape, "int32", data=bins.data, elem_offset=bins.elem_offset // 2)

    def turn_over(self) -> None:
        """Tell one another something else now."""
        assign(self.turn, RESULTS - self.turn)

    def offer(self, totals: Sequence[Total], first: int) -> None:
        """Tell others the totals of a warp."""
        for place, (variable, combine) in enumerate(totals, first):
            agree_in_warp(variable, combine)
            with T.If(self.lane == 0), T.Then():
                store(self.common, self.turn + place * WARPS + self.warp, wide(variable))

    def take(self, totals: Sequence[Total], first: int) -> None:
        """Combine the totals of all warps."""
        for place, (variable, combine) in enumerate(totals, first):
            found = self.common[self.turn + place * WARPS + self.lane % WARPS]
            if combine is added:
                found = T.if_then_else(self.lane < WARPS, found, T.int64(0))
            assign(variable, T.cast(found, str(variable.ty)))
            agree_in_warp(variable, combine)

    def agree(self, totals: Sequence[Total]) -> None:
        """Combine variables of all threads, to the same in each."""
        self.turn_over()
        self.offer(totals, 0)
        self.meet()
        self.take(totals, 0)

    def is_first(self) -> Expr:
        """Whether this is the one thread that writes what all know: one with little else to do."""
        return T.And(self.planner == self.planners - 1, self.thread == THREADS - 1)

    def raise_to(self, words: Any, value: Expr) -> None:
        """Make a word of memory at least as large as a value."""
        call = T.cuda.func_call(
            "raise_to", words.ptr_to([0]), value, source_code=RAISE, return_type="void"
        )
        T.evaluate(call)

    def plan_alone(self) -> None:
        """Do by itself from now on what several CTAs did."""
        assign(self.planner, 0)
        assign(self.planners, 1)
