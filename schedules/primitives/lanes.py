"""What the lanes of a warp do together with integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import ALL_LANES
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.tir.parallel import added, largest, least
from tvm_attn.tir.planner_ints import INT32_MAX, assign, low_word, scalar, var, wide

Expr = Any
Combine = Callable[[Any, Any], Any]

LANE_BITS = WARP.bit_length() - 1
REDUCTIONS: dict[Combine, str] = {largest: "max", least: "min", added: "add"}
"""What a warp does with int32 in one instruction."""
NEUTRAL: dict[Combine, int] = {largest: 0, least: INT32_MAX, added: 0}
"""What changes no total of numbers that are not negative."""
CHUNK_BITS = 21
"""Bits of an int64 that are added up at once."""


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


def only_if(condition: Expr, value: Expr) -> Expr:
    """Return a value, or 0."""
    return T.Select(condition, value, T.cast(0, str(value.ty)))


@T.inline
def add_up_lanes(variable, lane):
    """Add the values of the lanes below to a lane's own."""
    for bit in T.unroll(LANE_BITS):
        below = var(from_below(variable, T.shift_left(1, bit)))
        variable = variable + only_if(lane >= T.shift_left(1, bit), below)
