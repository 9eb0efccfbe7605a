"""Kernel signatures: parameters with free sizes and strides, and those a variant adds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.layout import S, TileLayout


def dense(
    handle: Any, name: str, shape: Sequence[int | None], dtype: str, *, index: str = "int64"
) -> Any:
    """Bind a parameter to a compact tensor; None is a free size of type `index`."""
    return _match(handle, name, _sizes(name, shape, index), dtype, align=itemsize(dtype))


def strided(handle: Any, name: str, shape: Sequence[int | None], dtype: str) -> Any:
    """Bind a parameter to a tensor whose innermost stride is 1 and whose others are free."""
    sizes, strides = _free(name, shape)
    return _match(handle, name, sizes, dtype, strides=strides, align=itemsize(dtype))


def strided_rows(handle: Any, name: str, shape: Sequence[int | None], dtype: str) -> Any:
    """Bind as `strided`, in a kernel of explicit threads, to rows that are aligned to 16 bytes.

    There the strides of a buffer are ignored unless its layout has them too.
    """
    sizes, strides = _free(name, shape)
    layout = TileLayout(S[tuple(sizes) : tuple(strides)])
    return _match(handle, name, sizes, dtype, strides=strides, layout=layout, align=16)


def ints(handle: Any, name: str, *row: int) -> Any:
    """Bind a parameter to int32 data of free length, each entry a row of the given size."""
    return dense(handle, name, (None, *row), "int32", index="int32")


def _match(handle: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Match a buffer and name it, as an assignment in a kernel would."""
    buffer = T.match_buffer(handle, *args, **kwargs)
    IRBuilder.name(name, buffer)
    return buffer


def _free(name: str, shape: Sequence[int | None]) -> tuple[list[Any], list[Any]]:
    """Sizes, and strides of which all but the innermost are free."""
    strides = [tirx.Var(f"{name}_stride{i}", "int64") for i in range(len(shape) - 1)]
    strides.append(1 if shape[-1] else tirx.IntImm("int64", 1))  # of the type of the size
    return _sizes(name, shape, "int64"), strides


def _sizes(name: str, shape: Sequence[int | None], index: str) -> list[Any]:
    return [tirx.Var(f"{name}_size{i}", index) if s is None else s for i, s in enumerate(shape)]


def array(name: str, shape: Sequence[Any], dtype: str) -> Any:
    """Declare a compact tensor that `close_over` will make a parameter."""
    return tirx.decl_buffer(shape, dtype, name=name, data_alignment=itemsize(dtype))


def itemsize(dtype: str) -> int:
    """Bytes of an element: all the alignment that a view of a tensor has."""
    bits = re.search(r"[0-9]+", dtype)
    return int(bits[0]) // 8 if bits else 1


GIVEN = "tvm_attn.given"
"""Attribute of a function: names of the arguments that may be a caller's. The library makes all
others, and nothing checks them."""


def takes(function: Any, *given: str) -> Any:
    """Say which arguments of a function may be a caller's."""
    return function.with_attr(GIVEN, list(given))


def close_over(
    function: Any,
    parameters: Sequence[Any],
    *,
    before: int,
    name: str,
    given: Sequence[str] | None = None,
) -> Any:
    """Turn variables a function uses freely into parameters, placed `before` its last ones.

    `given` names other arguments that may be a caller's; if it is None, all may.
    """
    split = len(function.params) - before
    params = [*function.params[:split], *parameters, *function.params[split:]]
    closed = tirx.PrimFunc(params, function.body, function.ret_type, function.attrs)
    closed = _with_plain_names(closed.with_attr("global_symbol", name))
    tvm.s_tir.analysis.verify_well_formed(closed)
    return closed if given is None else takes(closed, *given, *(p.name for p in parameters))


def close_privately(function: Any, parameters: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Turn variables a private function uses freely into its last parameters.

    Such a function takes no tensors: of those it is given the data, and the sizes that are free.

    Returns
    -------
    function : PrimFunc
        Closed over `parameters`.
    arguments : list
        What a function that has `parameters` too calls it with, for them.
    """
    arrays = [p for p in parameters if hasattr(p, "shape")]
    scalars = [p for p in parameters if not hasattr(p, "shape")]
    free = (size for array in arrays for size in array.shape if isinstance(size, tirx.Var))
    sizes = list({id(size): size for size in free}.values())
    data = [tirx.Var(f"{array.name}_data", array.data.ty) for array in arrays]
    bound = [tirx.DeclBuffer(a, data=d) for a, d in zip(arrays, data, strict=True)]
    params = [*function.params, *scalars, *sizes, *data]
    body = tirx.SeqStmt([*bound, function.body]) if bound else function.body
    closed = tirx.PrimFunc(params, body, function.ret_type, function.attrs)
    return _with_plain_names(closed), [*scalars, *sizes, *map(pointer_to, arrays)]


def pointer_to(array: Any) -> Any:
    """Return the address of an array's first element."""
    return T.address_of(array[(0,) * len(array.shape)])


def _with_plain_names(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Name sblocks as written: every trace of an inline but its first numbers them (``qk_1``)."""

    def rename(sblock: Any) -> Any:
        name = sblock.name_hint.rstrip("0123456789").removesuffix("_")
        if name == sblock.name_hint:
            return sblock
        fields = (sblock.body, sblock.init, sblock.alloc_buffers, sblock.match_buffers)
        return SBlock(
            sblock.iter_vars, sblock.reads, sblock.writes, name, *fields, sblock.annotations
        )

    return tvm_ffi.structural_map(function, (SBlock, rename))
