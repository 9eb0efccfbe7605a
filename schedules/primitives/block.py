"""A CTA whose threads do all things together, as `tvm_attn.tir.parallel` has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import ALL_LANES
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.tir.parallel import added, largest, least
from tvm_attn.tir.planner_ints import assign, ceil_div, store, var

Expr = Any
Combine = Callable[[Any, Any], Any]
Total = tuple[Any, Combine]

THREADS = 512
WARPS = THREADS // WARP
LANE_BITS, WARP_BITS = WARP.bit_length() - 1, WARPS.bit_length() - 1
MOST_TOTALS = 5
"""Variables that are agreed on at once."""
RESULTS = MOST_TOTALS * WARPS
COMMON = RESULTS + MOST_TOTALS
"""Words that threads tell one another: a value of each warp, and what all agree on."""

REDUCTIONS: dict[Combine, str] = {largest: "max", least: "min", added: "add"}
"""What a warp does with int32 in one instruction."""

PREFETCH = """
__device__ __forceinline__ void prefetch(int* row) {
  int word;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(row + threadIdx.x % 16));
}
"""
RAISE = """
__device__ __forceinline__ void raise_to(int* word, int value) { atomicMax(word, value); }
"""


def from_below(value: Expr, lanes: int) -> Expr:
    """Return the value of the lane so many below."""
    return T.cuda.__shfl_up_sync(T.uint32(ALL_LANES), value, lanes, WARP)


def from_across(value: Expr, lanes: int) -> Expr:
    """Return the value of the lane whose number differs in a bit."""
    return T.cuda.__shfl_xor_sync(T.uint32(ALL_LANES), value, lanes, WARP)


def agree_in_warp(variable: Any, combine: Combine, bits: int) -> None:
    """Combine a variable of the lanes whose numbers differ in so many bits, to the same in each."""
    if str(variable.ty) == "int32" and bits == LANE_BITS:
        name = REDUCTIONS[combine]
        source = (
            f"__device__ int {name}_of_warp(int x) {{ return __reduce_{name}_sync(~0u, x); }}\n"
        )
        call = T.cuda.func_call(
            f"{name}_of_warp", variable, source_code=source, return_type="int32"
        )
        assign(variable, call)
        return
    for bit in range(bits):
        assign(variable, combine(variable, from_across(variable, 1 << bit)))


@T.inline
def add_up_lanes(variable, lane):
    """Add the values of the lanes below to a lane's own."""
    for bit in T.unroll(LANE_BITS):
        below = var(from_below(variable, T.shift_left(1, bit)))
        if lane >= T.shift_left(1, bit):
            variable = variable + below


@T.inline
def arrive(cta, counter, is_last):
    """Count this CTA in when all it wrote is visible, and find whether all others are by now."""
    cta.meet()
    if cta.thread == 0:
        T.cuda.thread_fence()
        before: T.int32 = T.cuda.atomic_add(counter.ptr_to([0]), T.int32(1))
        cta.common[0] = T.Cast("int64", before == cta.num_ctas - 1)
        if before == cta.num_ctas - 1:
            counter[0] = 0
    cta.meet()
    assign(is_last, T.Cast("int32", cta.common[0]))
    if is_last != 0:
        cta.meet()
        T.cuda.thread_fence()


@T.inline
def publish(cta):
    """Have what was written seen by kernels that begin when this one ends, however early."""
    cta.meet()
    if cta.thread == 0:
        T.cuda.thread_fence()


@T.inline
def add_up_partials(cta):
    """Replace the words of the threads by the sums of those before."""
    own = var(cta.partial[cta.thread])
    total = var(own)
    add_up_lanes(total, cta.lane)
    if cta.lane == WARP - 1:
        cta.common[cta.warp] = total
    cta.meet()
    of_warps = var(cta.common[cta.lane % WARPS])
    add_up_lanes(of_warps, cta.lane)
    before = var(T.cuda.__shfl_sync(T.uint32(ALL_LANES), of_warps, T.max(cta.warp - 1, 0), WARP))
    cta.partial[cta.thread] = total - own + T.Select(cta.warp > 0, before, T.int64(0))


@dataclass(frozen=True)
class Block:
    """A CTA of `THREADS` threads; ``common`` is an int64 array for what they tell one another.

    ``planner`` and ``planners`` are variables: which CTA it is of how many that do the same.
    ``job`` is what they do, the number of jobs if it is something else.
    """

    thread: Expr
    warp: Expr
    lane: Expr
    num_ctas: Expr
    planner: Any
    planners: Any
    job: Any
    partial: Any
    common: Any
    threads: int = THREADS
    add_up_partials: Any = add_up_partials
    arrive: Any = arrive
    publish: Any = publish

    def turns(self, count: Expr) -> Expr:
        """How often each thread has a number below `count`."""
        return ceil_div(count, THREADS)

    def index(self, turn: Expr, count: Expr) -> Expr:
        """Return a thread's number in its turn."""
        return turn * THREADS + self.thread

    def meet(self) -> None:
        """Wait for all threads."""
        T.evaluate(T.cuda.cta_sync())

    def prefetch(self, rows: Any, row: Expr) -> None:
        """Begin to read a row of words, which are needed later."""
        call = T.cuda.func_call(
            "prefetch", rows.ptr_to([row, 0]), source_code=PREFETCH, return_type="void"
        )
        T.evaluate(call)

    def agree(self, totals: Sequence[Total]) -> None:
        """Combine variables of all threads, to the same in each."""
        for place, (variable, combine) in enumerate(totals):
            agree_in_warp(variable, combine, LANE_BITS)
            with T.If(self.lane == 0), T.Then():
                store(self.common, place * WARPS + self.warp, T.cast(variable, "int64"))
        self.meet()
        with T.If(self.warp == 0), T.Then():
            for place, (variable, combine) in enumerate(totals):
                found = self.common[place * WARPS + self.lane % WARPS]
                assign(variable, T.cast(found, str(variable.ty)))
                agree_in_warp(variable, combine, WARP_BITS)
                with T.If(self.lane == 0), T.Then():
                    store(self.common, RESULTS + place, T.cast(variable, "int64"))
        self.meet()
        for place, (variable, _) in enumerate(totals):
            assign(variable, T.cast(self.common[RESULTS + place], str(variable.ty)))

    def is_first(self) -> Expr:
        """Whether this is the one thread that writes what all know."""
        return T.And(self.planner == 0, self.thread == 0)

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
