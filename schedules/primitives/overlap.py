"""Overlap with the kernel before: a CTA begins while that one ends, and waits before it matters.

Programmatic dependent launch (sm_90 on): what the kernel before may have written or may still read
is not touched until `wait_for_previous`. A plan's arrays are neither: copies brought them, or the
device's planner, which lets no kernel begin before it ends.

Kernels of one run have nothing to do with one another. One that `follows` another of its run begins
where that one leaves room: what came before the run is done by then, since the other's CTAs have
all begun when that was so, or waited for it. It waits when it ends, for kernels to come, which wait
for the last one alone.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn import _compat


@T.inline
def let_next_begin(cta):
    """Let the kernel after this one begin where there is room for it."""
    if cta.tile.overlaps:
        T.ptx.griddepcontrol.launch_dependents()


@T.inline
def wait_for_previous(cta):
    """Wait until the kernel before this one is done, unless this one follows it in a run."""
    if cta.tile.overlaps:
        if cta.follows == 0:
            T.ptx.griddepcontrol.wait()


@T.inline
def begin_after_previous(cta):
    """Wait until the kernel before this one is done if this one began early; then let others."""
    if cta.tile.waits:
        T.ptx.griddepcontrol.wait()
    let_next_begin(cta)


@T.inline
def end_after_previous(cta):
    """Wait until the kernel before this one is done, as it is if this one has waited for it."""
    if cta.tile.overlaps:
        T.ptx.griddepcontrol.wait()


def overlapping(function: Any, *, in_clusters: bool) -> Any:
    """Return a kernel that is launched so that it may begin early."""
    return function.with_attr(_compat.LAUNCH_PARAMS, _compat.early_launch(in_clusters))
