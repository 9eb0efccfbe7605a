"""The last of several CTAs: who merges the parts of a cut unit, without a second launch."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

Expr = Any

NOBODY = -1


@T.inline
def arrive_together(ctas, slot, merge_indptr, arrivals, verdict, thread, meet):
    """Count in this one of so many CTAs with a share in a part of a cut unit, as `arrive` does."""
    T.cuda.thread_fence()
    meet()
    if thread == 0:
        low: T.int32 = 0
        high: T.int32 = merge_indptr.shape[0] - 1
        while high - low > 1:
            middle: T.let[T.int32] = (low + high) // 2
            if merge_indptr[middle] <= slot:
                low = middle
            else:
                high = middle
        before: T.int32 = T.cuda.atomic_add(arrivals.ptr_to([low]), T.int32(1))
        verdict[0] = NOBODY
        if before == (merge_indptr[low + 1] - merge_indptr[low]) * ctas - 1:
            arrivals[low] = 0
            verdict[0] = low
    meet()
    T.cuda.thread_fence()


@T.inline
def arrive(slot, merge_indptr, arrivals, verdict, thread, meet):
    """Count this CTA's part of a cut unit in; ``verdict[0]`` is the unit if it was the last.

    Its partial state is then visible to the last one, and the count is 0 again for the next run.
    `meet` waits for all threads that have a share in the part.
    """
    arrive_together(1, slot, merge_indptr, arrivals, verdict, thread, meet)
