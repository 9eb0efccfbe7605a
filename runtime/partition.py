"""Kernels side by side: how many multiprocessors a prefill leaves to the decoding of its batch.

Decoding reads at the memory's speed with half of a GPU's multiprocessors, so a kernel that takes
one whole for each of its CTAs may have the other half for little. But as long as the memory is
busy, its blocks take twice as long: with much to do it is better off with all of them, before the
decoding. The constants were measured on one H200.
"""

from __future__ import annotations

from tvm_attn.runtime.plan import Family, WorkList

READ_IN_A_BLOCK = 13_600
"""Tokens of a head that memory delivers in the time that a CTA takes for a block, alone."""
SLOWER = 2.1
"""Time of a block over that, while the memory is busy."""
SPEED = 0.93
"""Of the memory, where half of the multiprocessors read."""


def overlaps(family: Family, decoding: Family) -> bool:
    """Whether the kernel of a family prefills on whole multiprocessors, and another decodes."""
    names = (family.name, family.schedule, decoding.schedule)
    return names == ("long", "sm90", "decode")


def queues_beside(work: WorkList, decoding: WorkList) -> int:
    """Return to how many CTAs a work list is to be dealt that stands for all multiprocessors.

    Parameters
    ----------
    work : WorkList
        Dealt to as many CTAs as there are multiprocessors.
    decoding : WorkList
        What comes after it in the same run.

    Returns
    -------
    int
        As many, or half of them: as few as share the units evenly.
    """
    units = len(work.items) - work.num_slots + len(work.merge_items)
    half = max(work.num_ctas // 2, 1)
    rounds = max(-(-units // half), 1)
    few = max(-(-units // rounds), 1)
    reading = decoding.total_load * decoding.family.block / READ_IN_A_BLOCK
    blocks = work.total_load / few
    busy = min(reading / SPEED, blocks * SLOWER)
    beside = busy + (reading - busy * SPEED) + (blocks - busy / SLOWER)
    return few if beside < work.max_load + reading else work.num_ctas
