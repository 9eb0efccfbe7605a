"""The last of several CTAs: who merges the parts of a cut unit, without a second launch."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import load_word
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


def probe_step(low: Expr, high: Expr) -> Expr:
    """Return how far apart the places are that the lanes look at between two."""
    return (high - low + WARP - 1) // WARP


@T.inline
def narrow(probe, slot, step, low, high):
    """Narrow down where a slot belongs, given what each lane has found `step` from the last."""
    last: T.let[T.int32] = count_lanes(probe <= slot) - 1
    low[0] = T.min(low[0] + last * step, high[0] - 1)
    high[0] = T.min(low[0] + step, high[0])


@T.inline
def look_further(merge_indptr, slot, lane, low, high):
    """Find the unit that a slot belongs to: a warp looks at 32 places at a time."""
    while high[0] - low[0] > 1:
        step: T.let[T.int32] = probe_step(low[0], high[0])
        probe: T.let[T.int32] = merge_indptr[T.min(low[0] + lane * step, high[0] - 1)]
        narrow(probe, slot, step, low, high)


@T.inline
def find_unit(merge_indptr, slot, lane, low):
    """Find the unit that a slot belongs to."""
    high = T.alloc_local((1,), "int32")
    low[0] = 0
    high[0] = merge_indptr.shape[0] - 1
    look_further(merge_indptr, slot, lane, low, high)


@T.inline
def ask_for_units(merge_indptr, lane, probe):
    """Ask for where every few of the cut units begin, for `find_parts` to wait for."""
    count = T.meta_var(merge_indptr.shape[0] - 1)
    place = T.meta_var(T.min(lane * probe_step(0, count), T.max(count - 1, 0)))
    load_word(probe[0], merge_indptr.ptr_to([place]))


@T.inline
def find_parts(merge_indptr, slot, lane, probe, cut):
    """Find the cut unit that a slot belongs to: its number, and ask for its slots' first and end.

    `probe` is what `ask_for_units` has brought.
    """
    high = T.alloc_local((1,), "int32")
    cut[0] = 0
    high[0] = merge_indptr.shape[0] - 1
    narrow(probe[0], slot, probe_step(0, high[0]), cut, high)
    look_further(merge_indptr, slot, lane, cut, high)
    load_word(cut[1], merge_indptr.ptr_to([cut[0]]))
    load_word(cut[2], merge_indptr.ptr_to([cut[0] + 1]))


@T.inline
def count_in(counter, arrivals, cut, verdict, thread, meet):
    """Count this CTA's part of a cut unit in; ``verdict`` is the unit's slots if it was the last.

    The one thread that counts releases what all wrote before they met, and acquires what other CTAs
    released, for all that it meets after. The counter is 0 again for the next run.
    """
    before = T.alloc_local((1,), "int32")
    meet()
    if thread == 0:
        T.ptx["atom.acq_rel.gpu.global.add.s32"](before[0], arrivals.ptr_to([counter]), T.int32(1))
        verdict[0] = NOBODY
        if before[0] == cut[2] - cut[1] - 1:
            arrivals[counter] = 0
            verdict[0] = cut[1]
            verdict[1] = cut[2]
    meet()


@T.inline
def arrive(slot, merge_indptr, arrivals, verdict, thread, meet):
    """Count this CTA's part of a cut unit in; ``verdict[0]`` is the unit if it was the last.

    Its partial state is then visible to the last one, and the count is 0 again for the next run.
    `meet` waits for all threads that have a share in the part.
    """
    unit, before = T.meta_var([T.alloc_local((1,), "int32") for _ in range(2)])
    if thread < WARP:
        find_unit(merge_indptr, slot, thread, unit)
    meet()
    if thread == 0:
        count: T.let[T.int32] = merge_indptr[unit[0] + 1] - merge_indptr[unit[0]]
        T.ptx["atom.acq_rel.gpu.global.add.s32"](before[0], arrivals.ptr_to([unit[0]]), T.int32(1))
        verdict[0] = NOBODY
        if before[0] == count - 1:
            arrivals[unit[0]] = 0
            verdict[0] = unit[0]
    meet()
