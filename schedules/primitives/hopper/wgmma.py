"""Asynchronous multiplications of a warpgroup: ``wgmma``, its operands, and waiting for it.

The left operand is in registers or in shared memory, the right one in shared memory: tiles of 64
columns, 128 bytes a row, swizzled. An accumulator is spread over a warp's lanes as that of
``mma.m16n8k16`` is, 16 rows a warp (PTX ISA, "Register Fragments for wgmma").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import LEFT, PTX_NAMES
from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES, DEPTH
from tvm_attn.schedules.tiles_sm90 import COLUMN_GROUP
from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr

ROW_BYTES = 128
EIGHT_ROWS = 8 * ROW_BYTES // CHUNK_BYTES
"""From 8 rows of a tile to the next 8, in chunks, as descriptors count."""
SWIZZLE = 3

_HOLD = """
__device__ __forceinline__ void hold_{type}({type}& x) {{
  asm volatile("" : "+{kind}"(x) :: "memory");
}}
"""
_CLEAR = """
__device__ __forceinline__ void clear(float& x) {
  asm volatile("mov.f32 %0, 0f00000000;" : "=f"(x) :: "memory");
}
"""
_HELD = {"float32": ("float", "f"), "uint32": ("unsigned", "r"), "int32": ("int", "r")}


def hold(registers: Any, begin: int = 0, end: int | None = None) -> None:
    """Let the compiler neither move nor cache registers over this point: no instruction."""
    name, kind = _HELD[str(registers.dtype)]
    source = _HOLD.format(type=name, kind=kind)
    for i in range(begin, int(registers.shape[0]) if end is None else end):
        T.evaluate(T.cuda.func_call(f"hold_{name}", registers[i], source_code=source))


def clear(registers: Any) -> None:
    """Clear float32 registers here and not earlier: nothing of them has to be kept until then."""
    for i in range(int(registers.shape[0])):
        T.evaluate(T.cuda.func_call("clear", registers[i], source_code=_CLEAR))


@dataclass(frozen=True)
class Operand:
    """A ring of tiles in shared memory as ``wgmma`` reads them.

    Parameters
    ----------
    buffer : Buffer
        The ring, of 16-bit elements.
    rows, columns : int
        Shape of a tile.
    leading : int
        Of descriptors: the leading dimension's stride, in chunks of 16 bytes.
    """

    buffer: Any
    rows: int
    columns: int
    leading: int

    @property
    def half_chunks(self) -> int:
        """From 64 columns to the next 64, in chunks."""
        return self.rows * ROW_BYTES // CHUNK_BYTES

    def at_stage(self, stage: Expr) -> Any:
        """Return a register with the descriptor of a stage's tile."""
        descriptor = T.alloc_local((1,), "uint64")
        origin = self.buffer.ptr_to([stage * (self.rows * self.columns)])
        T.evaluate(
            T.cuda.wgmma.encode_matrix_descriptor(
                T.address_of(descriptor[0]), origin, self.leading, EIGHT_ROWS, SWIZZLE
            )
        )
        return descriptor

    def depth(self, step: int) -> int:
        """Chunks from a tile to 16 of its columns: a step of a product over columns."""
        halves, rest = divmod(step * DEPTH, COLUMN_GROUP)
        return halves * self.half_chunks + rest * itemsize("float16") // CHUNK_BYTES


def keys_operand(buffer: Any, rows: int, columns: int) -> Operand:
    """Return tiles whose rows are multiplied: queries and keys."""
    return Operand(buffer, rows, columns, 1)


def values_operand(buffer: Any, rows: int, columns: int) -> Operand:
    """Return tiles whose columns are multiplied: values."""
    return Operand(buffer, rows, columns, rows * ROW_BYTES // CHUNK_BYTES)


def multiply_keys(dtype: str, out: Any, queries: Any, keys: Any, k: Operand, dim: int) -> None:
    """Begin ``out = queries x keys``: queries in registers, a descriptor's keys."""
    for step in range(dim // DEPTH):
        left = [queries[LEFT * step + i] for i in range(LEFT)]
        right = keys[0] + T.uint64(k.depth(step))
        T.evaluate(
            T.ptx[_name(dtype, out)](*_all(out), *left, right, T.ptx.pred(step > 0), 1, 1, 0)
        )


def multiply_shared(
    dtype: str, out: Any, queries: Any, q: Operand, keys: Any, k: Operand, dim: int
) -> None:
    """Begin ``out = queries x keys``, both by their descriptors."""
    for step in range(dim // DEPTH):
        left = queries[0] + T.uint64(q.depth(step))
        right = keys[0] + T.uint64(k.depth(step))
        T.evaluate(T.ptx[_name(dtype, out)](*_all(out), left, right, T.bool(step > 0), 1, 1, 0, 0))


def multiply_values(
    dtype: str, out: Any, weights: Any, values: Any, block: int, accumulate: Expr
) -> None:
    """Begin ``out += weights x values``, or ``out =`` unless `accumulate`."""
    for step in range(block // DEPTH):
        left = [weights[LEFT * step + i] for i in range(LEFT)]
        right = values[0] + T.uint64(step * 2 * EIGHT_ROWS)
        adds = T.ptx.pred(accumulate if step == 0 else True)
        T.evaluate(T.ptx[_name(dtype, out)](*_all(out), *left, right, adds, 1, 1, 1))


def open_group() -> Expr:
    """Order multiplications to come after accesses to their registers."""
    return T.ptx.wgmma.fence.sync.aligned()


def close_group() -> Expr:
    """Close the group of multiplications begun since the last."""
    return T.ptx.wgmma.commit_group.sync.aligned()


def wait_for_groups(pending: int) -> Expr:
    """Wait until at most `pending` groups are not done."""
    return T.ptx.wgmma.wait_group.sync.aligned(pending)


def _name(dtype: str, out: Any) -> str:
    columns, name = 2 * int(out.shape[0]), PTX_NAMES[dtype]
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name}"


def _all(registers: Any) -> list[Expr]:
    return [registers[i] for i in range(int(registers.shape[0]))]
