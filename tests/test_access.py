"""Reading stored elements: every dtype of a KV cache widens to float32 exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tvm_attn import _compat
from tvm_attn.runtime.library import Library
from tvm_attn.target import parse_target


def widen(dtype: str, codes: int) -> Any:
    """Return a compiled function that widens `codes` elements of `dtype`."""
    _compat.import_tvm()
    from tvm.script import tirx as T

    from tvm_attn.codegen.host import compile_host
    from tvm_attn.tir.access import to_float
    from tvm_attn.tir.signature import dense

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(stored_h: T.handle, wide_h: T.handle) -> None:
        stored = dense(stored_h, "stored", (codes,), dtype)
        wide = dense(wide_h, "wide", (codes,), "float32")
        for i in T.serial(codes):
            wide[i] = to_float(stored[i])

    return Library(compile_host({"widen": definition}, parse_target()).library)["widen"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_every_code_widens_exactly(dtype: str) -> None:
    kind = getattr(torch, dtype)
    codes = 2 ** (8 * kind.itemsize)
    bits = torch.arange(codes, dtype=torch.int32).to(
        {1: torch.uint8, 2: torch.int16}[kind.itemsize]
    )
    stored, wide = bits.view(kind), torch.empty(codes)
    widen(dtype, codes)(stored, wide)
    torch.testing.assert_close(wide, stored.float(), rtol=0, atol=0, equal_nan=True)
