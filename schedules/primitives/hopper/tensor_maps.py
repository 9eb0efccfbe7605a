"""Tensor maps: how the copy engine (TMA) addresses boxes of a tensor in global memory.

A box goes to shared memory row by row, 128 bytes a row, 16-byte chunk ``c`` of row ``r`` to place
``c ^ (r % 8)`` (PTX ISA, "Swizzling modes", 128B). What lies outside of the tensor becomes zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr

_ELECTED = """
__device__ __forceinline__ int is_elected() {
  int is;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.s32 %0, 1, 0, p; }" : "=r"(is));
  return is;
}
"""
SWIZZLE_128B, PROMOTE_128B = 3, 2
"""Of `cuTensorMapEncodeTiled`: the swizzle, and how much of a line the L2 cache fetches."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor map, encoded on the host with every launch.

    Parameters
    ----------
    handle : Var
        The map.
    rank : int
        Dimensions of the tensor, innermost first in coordinates.
    """

    handle: Any
    rank: int

    def load(self, destination: Expr, coordinates: Sequence[Expr], barrier: Expr) -> Expr:
        """Begin to copy a box to shared memory; its bytes arrive at a barrier."""
        name = (
            f"cp.async.bulk.tensor.{self.rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        )
        return T.ptx[name](destination, T.address_of(self.handle), *coordinates, barrier)

    def store(self, coordinates: Sequence[Expr], source: Expr) -> Expr:
        """Begin to copy a box from shared memory, in a group of this thread's."""
        name = f"cp.async.bulk.tensor.{self.rank}d.global.shared::cta.bulk_group"
        return T.ptx[name](T.address_of(self.handle), *coordinates, source)


def is_elected() -> Expr:
    """Whether this is the one lane of its warp that begins copies.

    It is always the same one, and the compiler knows that it is one. Copies by several lanes are in
    a loop each over those lanes, of 7 instructions.
    """
    name = "is_elected"
    return T.cuda.func_call(name, source_code=_ELECTED, return_type="int32") != 0


def close_stores() -> Expr:
    """Close the group of stores begun since the last."""
    return T.ptx["cp.async.bulk.commit_group"]()


def wait_for_stores() -> Expr:
    """Wait until what this thread stores was read from shared memory."""
    return T.ptx["cp.async.bulk.wait_group.read"](0)


def encode(handle: Any, tensor: Any, dims: Sequence[int], box: Sequence[Expr]) -> TensorMap:
    """Encode a map of a strided tensor: `dims` of it, innermost first.

    Parameters
    ----------
    handle : Var
        Room for the map.
    tensor : Buffer
        The tensor, which is not empty; the stride of its innermost dimension is 1.
    dims : sequence of int
        Axes of `tensor` by dimension of the map.
    box : sequence of Expr
        Elements of a box, by dimension.
    """
    size = itemsize(str(tensor.dtype))
    sizes = [tensor.shape[axis] for axis in dims]
    strides = [
        tirx.Select(
            extent > 1, tensor.strides[axis] * size, tirx.IntImm("int64", int(sizes[0]) * size)
        )
        for axis, extent in zip(dims[1:], sizes[1:], strict=True)
    ]
    T.evaluate(
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            *(handle, str(tensor.dtype), len(dims), tensor.data),
            *sizes,
            *strides,
            *box,
            *[1] * len(dims),
            *(0, SWIZZLE_128B, PROMOTE_128B, 0),
        )
    )
    return TensorMap(handle, len(dims))
