"""The last of several CTAs: who merges the parts of a cut unit, without a second launch."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.shapes import WARP

Expr = Any

NOBODY = -1
COUNT_LANES = r"""
__device__ __forceinline__ int count_lanes(int holds) {
  return __popc(__ballot_sync(0xffffffffu, holds));
}
"""


def count_lanes(condition: Expr) -> Expr:
    """Return in how many lanes of the warp a condition holds."""
    given = {"source_code": COUNT_LANES, "return_type": "int32"}
    return T.cuda.func_call("count_lanes", T.Cast("int32", condition), **given)


@T.inline
def find_unit(merge_indptr, slot, lane, low):
    """Find the unit that a slot belongs to: a warp looks at 32 places at a time."""
    high: T.int32 = merge_indptr.shape[0] - 1
    low[0] = 0
    while high - low[0] > 1:
        step: T.let[T.int32] = (high - low[0] + WARP - 1) // WARP
        probe: T.let[T.int32] = T.min(low[0] + lane * step, high - 1)
        is_before: T.let[T.int32] = T.Cast("int32", merge_indptr[probe] <= slot)
        last: T.let[T.int32] = count_lanes(is_before) - 1
        low[0] = T.min(low[0] + last * step, high - 1)
        high = T.min(low[0] + step, high)


@T.inline
def arrive_together(ctas, slot, merge_indptr, arrivals, verdict, thread, meet):
    """Count in this one of so many CTAs with a share in a part of a cut unit, as `arrive` does.

    The one thread that counts releases what all wrote before they met, and acquires what other CTAs
    released, for all that it meets after.
    """
    unit, before = T.meta_var([T.alloc_local((1,), "int32") for _ in range(2)])
    if thread < WARP:
        find_unit(merge_indptr, slot, thread, unit)
    meet()
    if thread == 0:
        count: T.let[T.int32] = merge_indptr[unit[0] + 1] - merge_indptr[unit[0]]
        T.ptx["atom.acq_rel.gpu.global.add.s32"](before[0], arrivals.ptr_to([unit[0]]), T.int32(1))
        verdict[0] = NOBODY
        if before[0] == count * ctas - 1:
            arrivals[unit[0]] = 0
            verdict[0] = unit[0]
    meet()


@T.inline
def arrive(slot, merge_indptr, arrivals, verdict, thread, meet):
    """Count this CTA's part of a cut unit in; ``verdict[0]`` is the unit if it was the last.

    Its partial state is then visible to the last one, and the count is 0 again for the next run.
    `meet` waits for all threads that have a share in the part.
    """
    arrive_together(1, slot, merge_indptr, arrivals, verdict, thread, meet)
