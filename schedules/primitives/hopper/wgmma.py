"""Asynchronous multiplications of a warpgroup: ``wgmma``, its operands, and waiting for it.

The left operand is in registers or in shared memory, the right one in shared memory: tiles of 64
columns, 128 bytes a row, swizzled. An accumulator is spread over a warp's lanes as that of
``mma.m16n8k16`` is, 16 rows a warp (PTX ISA, "Register Fragments for wgmma").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import LEFT
from tvm_attn.schedules.primitives.hopper.tensor_maps import ROW_ELEMENTS
from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES, DEPTH
from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr

ROW_BYTES = 128
EIGHT_ROWS = 8 * ROW_BYTES // CHUNK_BYTES
"""From 8 rows of a tile to the next 8, in chunks, as descriptors count."""
SWIZZLE = 3
_PTX_NAMES = {"float16": "f16", "bfloat16": "bf16"}

_HOLD_FLOAT = """
__device__ __forceinline__ void hold_float(float& x) { asm volatile("" : "+f"(x) :: "memory"); }
"""
_HOLD_WORD = """
__device__ __forceinline__ void hold_word(unsigned& x) { asm volatile("" : "+r"(x) :: "memory"); }
"""


def hold(registers: Any, begin: int = 0, end: int | None = None) -> None:
    """Let the compiler neither move nor cache registers over this point: no instruction."""
    is_float = str(registers.dtype) == "float32"
    name, source = ("hold_float", _HOLD_FLOAT) if is_float else ("hold_word", _HOLD_WORD)
    for i in range(begin, int(registers.shape[0]) if end is None else end):
        T.evaluate(T.cuda.func_call(name, registers[i], source_code=source))


@dataclass(frozen=True)
class Operand:
    """A ring of tiles in shared memory as ``wgmma`` reads them.

    Parameters
    ----------
    descriptor : Buffer
        A uint64 register: the first tile's descriptor.
    stage_chunks, half_chunks : int
        From one stage to the next, and from 64 columns to the next 64, in chunks of 16 bytes.
    """

    descriptor: Any
    stage_chunks: int
    half_chunks: int

    @staticmethod
    def of(buffer: Any, rows: int, columns: int, leading: int) -> Operand:
        """Describe tiles of `rows` times `columns`, `leading` chunks from group to group."""
        descriptor = T.alloc_local((1,), "uint64")
        T.evaluate(
            T.cuda.wgmma.encode_matrix_descriptor(
                T.address_of(descriptor[0]), buffer.ptr_to([0]), leading, EIGHT_ROWS, SWIZZLE
            )
        )
        half = rows * ROW_BYTES // CHUNK_BYTES
        return Operand(descriptor, half * (columns // ROW_ELEMENTS), half)

    def at_stage(self, stage: Expr) -> Any:
        """Return a register with the descriptor of a stage."""
        here = T.alloc_local((1,), "uint64")
        chunks = tirx.Cast("uint64", stage * self.stage_chunks)
        T.buffer_store(here, self.descriptor[0] + chunks, [0])
        return here

    def depth(self, step: int) -> int:
        """Chunks from a tile to 16 of its columns: a step of a product over columns."""
        halves, rest = divmod(step * DEPTH, ROW_ELEMENTS)
        return halves * self.half_chunks + rest * itemsize("float16") // CHUNK_BYTES


def keys_operand(buffer: Any, rows: int, columns: int) -> Operand:
    """Return tiles whose rows are multiplied: queries and keys."""
    return Operand.of(buffer, rows, columns, 1)


def values_operand(buffer: Any, rows: int, columns: int) -> Operand:
    """Return tiles whose columns are multiplied: values."""
    return Operand.of(buffer, rows, columns, rows * ROW_BYTES // CHUNK_BYTES)


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
    columns, name = 2 * int(out.shape[0]), _PTX_NAMES[dtype]
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name}"


def _all(registers: Any) -> list[Expr]:
    return [registers[i] for i in range(int(registers.shape[0]))]
