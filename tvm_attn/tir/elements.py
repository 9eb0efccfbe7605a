"""The elements of one row, wherever it lies: as a buffer of its own, and copied."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr


def row_of(tensor: Any, *place: Expr) -> Any:
    """Return the row of a tensor at a place, for the TVMScript function that is being traced.

    Where a row begins takes 64 bits, and an index in it 32: with more the CUDA code generator does
    not merge neighbouring accesses.
    """
    dtype = str(tensor.dtype)
    first = T.Bind(T.address_of(tensor[(*place, 0)]))
    return T.decl_buffer((tensor.shape[-1],), dtype, data=first, align=itemsize(dtype))


@T.inline
def copy(target, source, dim):
    """Copy the elements of a row to another."""
    for d in T.serial(dim):
        with T.sblock("copy"):
            vd = T.axis.remap("S", [d])
            T.reads()
            T.writes()
            target[vd] = source[vd]
