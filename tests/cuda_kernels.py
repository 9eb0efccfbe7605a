"""Small kernels for tests of the CUDA code generator, in both dialects of TensorIR."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

THREADS = 128
BYTES = 4 * THREADS
"""Of shared memory, which `staged_sum` asks for at launch."""


def staged_sum(shared_bytes: int = BYTES) -> Any:
    """Return a tirx kernel that adds two vectors, one of which goes through shared memory."""

    @T.prim_func
    def kernel(a_h: T.handle, b_h: T.handle, c_h: T.handle) -> None:
        blocks = T.int32()
        a = T.match_buffer(a_h, (blocks, THREADS), "float32", align=16)
        b = T.match_buffer(b_h, (blocks, THREADS), "float32", align=16)
        c = T.match_buffer(c_h, (blocks, THREADS), "float32", align=16)
        T.device_entry()
        block = T.cta_id([blocks])
        thread = T.thread_id([THREADS])
        pool = T.SMEMPool()
        staged = pool.alloc((shared_bytes // 4,), "float32", align=128)
        pool.commit()
        T.ptx["cp.async.ca.shared.global"](
            staged.ptr_to([thread]), a.ptr_to([block, thread]), 4, T.uint32(4)
        )
        T.ptx.cp.async_.commit_group()
        T.ptx.cp.async_.wait_group(0)
        T.cuda.cta_sync()
        c[block, thread] = staged[thread] + b[block, thread]

    return kernel


def scheduled_sum() -> Any:
    """Return the same in the s_tir dialect, with a static array in shared memory."""

    @T.prim_func(s_tir=True, check_well_formed=False)
    def kernel(a_h: T.handle, b_h: T.handle, c_h: T.handle) -> None:
        blocks = T.int32()
        a = T.match_buffer(a_h, (blocks, THREADS), "float32")
        b = T.match_buffer(b_h, (blocks, THREADS), "float32")
        c = T.match_buffer(c_h, (blocks, THREADS), "float32")
        for block in T.thread_binding(blocks, thread="blockIdx.x"):
            for thread in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("sum"):
                    i, j = T.axis.remap("SS", [block, thread])
                    staged = T.sblock_alloc_buffer((THREADS,), "float32", scope="shared")
                    staged[j] = a[i, j]
                    c[i, j] = staged[j] + b[i, j]

    return kernel


def indexed_stack() -> Any:
    """Return a kernel with an array that has to be in local memory, to be indexed at run time."""

    @T.prim_func
    def kernel(a_h: T.handle, at_h: T.handle, c_h: T.handle) -> None:
        blocks = T.int32()
        a = T.match_buffer(a_h, (blocks, THREADS), "float32")
        at = T.match_buffer(at_h, (blocks, THREADS), "int32")
        c = T.match_buffer(c_h, (blocks, THREADS), "float32")
        T.device_entry()
        block = T.cta_id([blocks])
        thread = T.thread_id([THREADS])
        row = T.alloc_local((512,), "float32")
        for i in T.serial(512):
            row[i] = T.float32(0)
        for i in T.serial(THREADS):
            row[at[block, i]] = row[at[block, i]] + a[block, i] * T.Cast("float32", thread)
        c[block, thread] = row[at[block, thread]]

    return kernel


def foreign_code(source: str) -> Any:
    """Return a kernel that calls the CUDA function ``foreign`` of a source."""

    @T.prim_func
    def kernel(c_h: T.handle) -> None:
        blocks = T.int32()
        c = T.match_buffer(c_h, (blocks, THREADS), "float32")
        T.device_entry()
        block = T.cta_id([blocks])
        thread = T.thread_id([THREADS])
        c[block, thread] = T.cuda.func_call(
            "foreign", c[block, thread], source_code=source, return_type="float32"
        )

    return kernel
