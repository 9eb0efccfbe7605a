"""A CTA whose threads do all things together, as `tvm_attn.tir.parallel` has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.block_sort import sort
from tvm_attn.schedules.primitives.fragments import ALL_LANES
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.tir.parallel import added, largest, least
from tvm_attn.tir.planner_ints import INT32_MAX, assign, ceil_div, low_word, scalar, store, var, wide

Expr = Any
Combine = Callable[[Any, Any], Any]
Total = tuple[Any, Combine]

THREADS = 512
WARPS = THREADS // WARP
LANE_BITS = WARP.bit_length() - 1
MOST_TOTALS = 6
"""Variables that are agreed on at once."""
RESULTS = MOST_TOTALS * WARPS
COMMON = 2 * RESULTS + 1
"""Words that warps tell one another, twice: who is late reads the ones while others write the next.
The last says whether a CTA is the last."""

REDUCTIONS: dict[Combine, str] = {largest: "max", least: "min", added: "add"}
"""What a warp does with int32 in one instruction."""
NEUTRAL: dict[Combine, int] = {largest: 0, least: INT32_MAX, added: 0}
"""What changes no total of numbers that are not negative."""
CHUNK_BITS = 21
"""Bits of an int64 that are added up at once."""

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


def of_warp(value: Expr, combine: Combine) -> Expr:
    """Combine an int32 of all lanes."""
    name = REDUCTIONS[combine]
    source = f"__device__ int {name}_of_warp(int x) {{ return __reduce_{name}_sync(~0u, x); }}\n"
    return T.cuda.func_call(f"{name}_of_warp", value, source_code=source, return_type="int32")


def agree_in_warp(variable: Any, combine: Combine) -> None:
    """Combine a variable of all lanes, to the same in each; int64 ones are not negative."""
    if str(variable.ty) == "int32":
        assign(variable, of_warp(variable, combine))
    elif combine is added:
        chunks = [
            T.shift_right(variable, T.int64(at)) & T.int64((1 << CHUNK_BITS) - 1)
            for at in range(0, 3 * CHUNK_BITS, CHUNK_BITS)
        ]
        low, middle, high = (wide(of_warp(low_word(chunk), added)) for chunk in chunks)
        upper = T.shift_left(high, T.int64(CHUNK_BITS)) + middle
        assign(variable, T.shift_left(upper, T.int64(CHUNK_BITS)) + low)
    else:
        upper, lower = scalar("int32"), scalar("int32")
        assign(upper, of_warp(low_word(T.shift_right(variable, T.int64(31))), combine))
        is_first = T.shift_right(variable, T.int64(31)) == wide(upper)
        assign(lower, low_word(T.bitwise_and(variable, T.int64(INT32_MAX))))
        assign(lower, of_warp(T.Select(is_first, lower, NEUTRAL[combine]), combine))
        assign(variable, T.shift_left(wide(upper), T.int64(31)) + wide(lower))


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
        cta.common[COMMON - 1] = T.Cast("int64", before == cta.num_ctas - 1)
        if before == cta.num_ctas - 1:
            counter[0] = 0
    cta.meet()
    assign(is_last, T.Cast("int32", cta.common[COMMON - 1]))
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
    assign(cta.turn, RESULTS - cta.turn)
    if cta.lane == WARP - 1:
        cta.common[cta.turn + cta.warp] = total
    cta.meet()
    before = var(T.if_then_else(cta.lane < cta.warp, cta.common[cta.turn + cta.lane], T.int64(0)))
    agree_in_warp(before, added)
    cta.partial[cta.thread] = total - own + before


@dataclass(frozen=True)
class Block:
    """A CTA of `THREADS` threads; ``common`` is an int64 array for what they tell one another.

    ``planner`` and ``planners`` are variables: which CTA it is of how many that do the same.
    ``job`` is what they do, the number of jobs if it is something else. ``turn`` is a variable: which
    words of ``common`` were written last. ``bins`` are for sorting.
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
    turn: Any
    bins: Any
    threads: int = THREADS
    add_up_partials: Any = add_up_partials
    arrive: Any = arrive
    publish: Any = publish
    sort: Any = sort

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
        assign(self.turn, RESULTS - self.turn)
        for place, (variable, combine) in enumerate(totals):
            agree_in_warp(variable, combine)
            with T.If(self.lane == 0), T.Then():
                store(self.common, self.turn + place * WARPS + self.warp, wide(variable))
        self.meet()
        for place, (variable, combine) in enumerate(totals):
            found = self.common[self.turn + place * WARPS + self.lane % WARPS]
            if combine is added:
                found = T.if_then_else(self.lane < WARPS, found, T.int64(0))
            assign(variable, T.cast(found, str(variable.ty)))
            agree_in_warp(variable, combine)

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
