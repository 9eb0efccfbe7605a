"""Rows of global memory by their addresses: noted ahead, and copied from in few instructions.

What a copy takes of a thread is taken from the multiplications of its warp. An address that is
known lacks only the thread's chunk, and those of further chunks follow from it at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES
from tvm_attn.schedules.primitives.staging import Copy
from tvm_attn.variant import Expr

NO_ROW = 1
"""Address of a row that there is not: those of rows are multiples of a chunk."""
ADDRESS_OF = r"""
__device__ __forceinline__ unsigned long long address_of(void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer);
}
"""
CHUNK_OF_ROW = r"""
__device__ __forceinline__ void* chunk_of_row(unsigned long long row, unsigned lane, int bytes) {
  char* chunk;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(chunk) : "r"(lane), "l"(row));
  return chunk + bytes;
}
"""
"""The constant is added by the instruction that copies, as long as it is added last."""

NOTE_ROW = r"""
__device__ __forceinline__ void note_row(
    unsigned place, unsigned long long row, int is_row, int is_noted) {
  asm volatile(
      "{ .reg .pred p, q; .reg .b64 a; setp.ne.b32 p, %2, 0; setp.ne.b32 q, %3, 0;"
      " selp.b64 a, %1, %4, p; @q st.shared.b64 [%0], a; }"
      :: "r"(place), "l"(row), "r"(is_row), "r"(is_noted), "n"(NO_ROW) : "memory");
}
""".replace("NO_ROW", str(NO_ROW))
"""In one piece, of which the compiler makes no branches."""


def note_row(places: Any, place: Expr, row: Expr, is_row: Expr, is_noted: Expr) -> Expr:
    """Note the address of a row, or that there is none, if that is to be noted."""
    pointer = T.cuda.cvta_generic_to_shared(places.ptr_to([place]))
    flags = (tirx.Cast("int32", flag) for flag in (is_row, is_noted))
    return T.cuda.func_call(
        "note_row", pointer, row, *flags, source_code=NOTE_ROW, return_type="void"
    )


def no_row() -> Expr:
    """Return the address of a row that there is not."""
    return T.uint64(NO_ROW)


def address_of(pointer: Expr) -> Expr:
    """Return the address that a pointer is, uint64."""
    given = {"source_code": ADDRESS_OF, "return_type": "uint64"}
    return T.cuda.func_call("address_of", pointer, **given)


@dataclass(frozen=True)
class AddressedCopy(Copy):
    """A copy of rows that places are the addresses of, uint64: `no_row` becomes 0."""

    @property
    def place_dtype(self) -> str:
        """Of a place."""
        return "uint64"

    def is_there(self, place: Expr) -> Expr:
        """Whether a place is that of a row."""
        return tirx.Cast("uint32", place) != T.uint32(NO_ROW)

    def chunk_at(self, place: Expr, turn: Expr, part: Expr) -> Expr:
        """Address of a chunk that this thread copies in a turn from the row at a place."""
        lane = tirx.floormod(turn * self.threads + self.thread, self.lanes)
        beyond = part * self.lanes * CHUNK_BYTES
        given = {"source_code": CHUNK_OF_ROW, "return_type": "handle"}
        return T.cuda.func_call("chunk_of_row", place, tirx.Cast("uint32", lane), beyond, **given)
