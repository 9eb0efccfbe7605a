"""What a warp keeps in registers: fragments of scores and outputs, and the state of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import ACCUMULATORS, HALVES, LEFT, RIGHT
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.schedules.tiles_cuda import CudaTile
from tvm_attn.spec import AttentionSpec

KEEP = r"""
__device__ __forceinline__ unsigned keep(unsigned value) {
  unsigned kept;
  asm volatile("mov.b32 %0, %1;" : "=r"(kept) : "r"(value));
  return kept;
}
"""
"""What the compiler sees through it computes again where it is used, even in a loop."""


def held(value: Any) -> Any:
    """Return a value of 32 bits, unsigned, in a register: computed here, not where it is used."""
    register = T.alloc_local((1,), "uint32")
    call = T.cuda.func_call("keep", value, source_code=KEEP, return_type="uint32")
    T.buffer_store(register, call, [0])
    return register[0]


@dataclass(frozen=True)
class Registers:
    """Registers of a lane; its row ``i`` is half ``i % 2`` of the warp's row tile ``i // 2``.

    ``score, out`` are float32 accumulators; ``left, right, weight`` operands: queries and keys or
    values of one step and the next, or all queries, and the weights of one step;
    ``reference, total, best, scale`` are float32, one for each of the lane's rows.
    """

    score: Any
    out: Any
    left: Any
    right: Any
    weight: Any
    reference: Any
    total: Any
    best: Any
    scale: Any

    @staticmethod
    def allocate(tile: CudaTile, spec: AttentionSpec) -> Registers:
        """Allocate the registers of a lane."""
        rows = HALVES * tile.row_tiles
        scores, outs = (
            tile.row_tiles * columns // COLUMNS * ACCUMULATORS
            for columns in (tile.block, spec.dim_vo)
        )
        state = ("reference", "total", "best", "scale")
        return Registers(
            score=T.alloc_local((scores,), "float32"),
            out=T.alloc_local((outs,), "float32"),
            left=T.alloc_local((tile.query_steps(spec) * tile.row_tiles * LEFT,), "uint32"),
            right=T.alloc_local((2 * HALVES * RIGHT,), "uint32"),
            weight=T.alloc_local((tile.row_tiles * LEFT,), "uint32"),
            **{name: T.alloc_local((rows,), "float32") for name in state},
        )
