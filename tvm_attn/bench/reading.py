"""The yardstick of decoding: a kernel that reads some bytes and does nothing with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tvm_attn._compat import import_tvm
from tvm_attn.pipeline import build_kernel

THREADS = 256
LOADS = 8
"""Loads of 16 bytes that a thread has under way at a time."""
NEVER = 0x5EED5EED
"""What the bytes are as good as sure not to add up to: then the sum is stored."""


def define() -> Any:
    """Return a kernel that reads an array of 32-bit words, four at a time."""
    import_tvm()
    from tvm.script import tirx as T

    @T.prim_func(check_well_formed=False)  # type: ignore[untyped-decorator]
    def read(words_h: T.handle, out_h: T.handle) -> None:
        count = T.int64()
        words = T.match_buffer(words_h, (count, 4), "int32", align=16)
        out = T.match_buffer(out_h, (1,), "int32")
        T.device_entry()
        c = T.cta_id([T.Cast("int32", T.ceildiv(count, THREADS * LOADS))])
        thread = T.thread_id([THREADS])
        quads = T.alloc_local((LOADS * 4,), "uint32")
        total: T.uint32 = T.uint32(0)
        for i in T.unroll(LOADS):
            at: T.let[T.int64] = T.min(
                T.Cast("int64", c) * (THREADS * LOADS) + i * THREADS + thread, count - 1
            )
            T.ptx["ld.global.v4.b32"](
                quads[4 * i],
                quads[4 * i + 1],
                quads[4 * i + 2],
                quads[4 * i + 3],
                words.ptr_to([at, 0]),
            )
        for i in T.unroll(LOADS * 4):
            total = total + quads[i]
        if total == T.uint32(NEVER):
            out[0] = T.Cast("int32", total)

    return read


@functools.cache
def reader(target: str) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Compile the kernel, and return what launches it on ``int32 [n, 4]`` and ``int32 [1]``."""
    library = build_kernel("read", define, target)
    library.load_device_code()
    launch: Callable[[torch.Tensor, torch.Tensor], Any] = library["read"]
    return launch


def read_all(target: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that reads each of some contiguous tensors once, in a launch each."""
    launch = reader(target)
    words = [tensor.view(torch.uint8).view(-1, 16).view(torch.int32) for tensor in tensors]
    out = torch.zeros(1, dtype=torch.int32, device=tensors[0].device)

    def work() -> None:
        for each in words:
            launch(each, out)

    return work
