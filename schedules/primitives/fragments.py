"""Matrix fragments of a warp: ``mma.sync.m16n8k16``, ``ldmatrix`` and where elements are.

A warp multiplies tiles of 16 rows with tiles of 8 columns, 16 deep. Lane ``l`` holds of a 16x8
accumulator the rows ``l // 4`` and ``l // 4 + 8``, columns ``2 (l % 4)`` and the next (PTX ISA,
"Matrix fragments for mma.m16n8k16").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.shapes import WARP

Expr = Any
ACCUMULATORS, LEFT, RIGHT = 4, 4, 2
"""Registers of a lane: float32 accumulators, and pairs of the left and the right operand."""
HALVES = 2
"""Groups of 8 rows: a lane holds one row of each."""
ALL_LANES = 0xFFFFFFFF

LOAD_WORD_IF = r"""
__device__ __forceinline__ void load_word_if(int& word, const void* pointer, int holds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.b32 %0, [%1]; }"
      : "+r"(word) : "l"(pointer), "r"(holds));
}
"""

PTX_NAMES = {"float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Lane:
    """A lane's place in its warp, and what it holds of a fragment.

    Parameters
    ----------
    index : Expr
        0..31.
    """

    index: Expr

    def row(self, half: int) -> Expr:
        """Row of a 16-row tile that the lane holds in a half."""
        return tirx.floordiv(self.index, 4) + 8 * half

    def column(self, element: int) -> Expr:
        """Column of an 8-column tile that the lane's `element` (0 or 1) of a row is in."""
        return tirx.floormod(self.index, 4) * 2 + element

    def left_address(self) -> tuple[Expr, Expr]:
        """Row and column in a 16x16 tile of what the lane shows ``ldmatrix``: left operand."""
        return tirx.floormod(self.index, 16), tirx.floordiv(self.index, 16) * 8

    def right_address(self) -> tuple[Expr, Expr]:
        """As `left_address`, for the right operand stored column by column (keys)."""
        row = tirx.floordiv(self.index, 16) * 8 + tirx.floormod(self.index, 8)
        return row, tirx.floormod(tirx.floordiv(self.index, 8), 2) * 8


def accumulator(row_tile: Any, column_tile: Any, column_tiles: int, half: int, element: int) -> Any:
    """Index of an accumulator among those of a warp's row and column tiles."""
    return (row_tile * column_tiles + column_tile) * ACCUMULATORS + 2 * half + element


def load_matrices(registers: Any, first: Any, pointer: Expr, *, transposed: bool = False) -> Expr:
    """Load four 8x8 matrices of 16-bit elements into ``registers[first:first + 4]``."""
    name = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16"
    return T.ptx[name](*(registers[first + i] for i in range(4)), pointer)


def multiply(dtype: str, out: Any, at: Any, left: Any, a: Any, right: Any, b: Any) -> Expr:
    """Add the product of ``left[a:a + 4]`` and ``right[b:b + 2]`` to ``out[at:at + 4]``."""
    name = PTX_NAMES[dtype]
    accumulators = [out[at + i] for i in range(ACCUMULATORS)]
    return T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"](
        *accumulators,
        *(left[a + i] for i in range(LEFT)),
        *(right[b + i] for i in range(RIGHT)),
        *accumulators,
    )


def pack(dtype: str, register: Any, low: Expr, high: Expr) -> Expr:
    """Round two float32 to a register of two 16-bit elements."""
    return T.ptx[f"cvt.rn.{PTX_NAMES[dtype]}x2.f32"](register, high, low)


def any_lane(condition: Expr) -> Expr:
    """Whether a condition holds in any lane of the warp."""
    if isinstance(condition, tirx.IntImm):
        return condition
    return T.cuda.any_sync(T.uint32(ALL_LANES), T.Cast("int32", condition)) != 0


def of_lane(value: Expr, lane: Expr) -> Expr:
    """Return the value that a lane of the warp has."""
    return T.cuda.__shfl_sync(T.uint32(ALL_LANES), value, lane, WARP)


def over_row(value: Expr, lanes: int) -> Expr:
    """Return the value of the lane that is `lanes` (1 or 2) away among the four of a row."""
    return of_pair(value, lanes)


def of_pair(value: Expr, distance: int) -> Expr:
    """Return the value of the lane whose number differs in one bit: by so much."""
    return T.cuda.__shfl_xor_sync(T.uint32(ALL_LANES), value, distance, WARP)


def store_pair(pointer: Expr, register: Expr) -> Expr:
    """Store a register of two 16-bit elements to global memory."""
    return T.ptx["st.global.b32"](pointer, register)


def load_word(register: Expr, pointer: Expr) -> Expr:
    """Load 4 bytes, aligned, from global memory."""
    return T.ptx["ld.global.b32"](register, pointer)


def load_word_if(register: Expr, pointer: Expr, condition: Expr) -> Expr:
    """Load 4 bytes, aligned, from global memory if a condition holds: without a branch."""
    holds = tirx.Cast("int32", condition)
    return T.cuda.func_call(
        "load_word_if", register, pointer, holds, source_code=LOAD_WORD_IF, return_type="void"
    )


def load_run(registers: Any, first: Any, pointer: Expr) -> Expr:
    """Load 16 bytes, aligned, from global memory into four float32 registers."""
    return T.ptx["ld.global.v4.f32"](*(registers[first + i] for i in range(4)), pointer)


def store_run(pointer: Expr, registers: Any) -> Expr:
    """Store four float32 registers to 16 bytes, aligned, of global memory."""
    return T.ptx["st.global.v4.f32"](pointer, *(registers[i] for i in range(4)))


def store_relaxed(pointer: Expr, value: Expr) -> Expr:
    """Store a float32 to where other CTAs may store the same."""
    return T.ptx["st.relaxed.gpu.global.f32"](pointer, value)


def load_shared(register: Expr, address: Expr) -> Expr:
    """Load 4 bytes from shared memory."""
    return T.ptx["ld.shared.b32"](register, address)


def store_shared_pair(address: Expr, low: Expr, high: Expr) -> Expr:
    """Store 8 bytes to shared memory."""
    return T.ptx["st.shared.v2.b32"](address, low, high)


def half_as_float(pair: Expr, place: Expr) -> Expr:
    """Return one of two float16 in a register as float32."""
    half = tirx.Cast("uint16", tirx.shift_right(pair, tirx.Cast("uint32", place * 16)))
    return tirx.Cast("float32", tirx.reinterpret("float16", half))
