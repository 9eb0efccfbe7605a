"""The planner on a GPU: `tvm_attn.tir.device_planner`, in one launch of a few CTAs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.block import COMMON, THREADS, WARPS, Block
from tvm_attn.schedules.primitives.block_sort import BINS
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.target import Arch
from tvm_attn.tir.device_planner import Memory, plan_on_device, problem_of
from tvm_attn.tir.device_policy import carve_scratch
from tvm_attn.tir.planner_batch import Batch
from tvm_attn.tir.planner_ints import var, variables_in
from tvm_attn.tir.planner_units import KvBounds
from tvm_attn.tir.signature import close_over, ints
from tvm_attn.worklist import DEVICE_CTAS, JOB_WORDS

NUM_OTHERS = 17
"""Parameters behind those of a variant."""


ROW_BYTES = 32
"""Shared memory of a unit, or a piece of one: its keys, and sums over those before it."""
CTA_BYTES = 28
MOST_ROWS = 6144


def rows_of(arch: Arch) -> int:
    """Return how many units and pieces the shared memory of an architecture holds."""
    words = COMMON + ROW_BYTES
    rest = arch.shared_memory_per_block - 8 * words - 2 * WARPS * BINS
    rest -= CTA_BYTES * (DEVICE_CTAS + 1)
    return min(rest // ROW_BYTES, MOST_ROWS)


def device_planner(
    paged: bool, rows: int, kv_bounds: KvBounds | None = None, extra_params: Sequence[Any] = ()
) -> tirx.PrimFunc:
    """Return the kernel ``plan_on_device``: check a batch and plan the work of every family.

    Parameters of the function, in order, arrays int32 and on the device:

    ===================  ==================  =====================================================
    qo_indptr            [batch + 1]         ) as of `tvm_attn.tir.planner_batch.batch_planner`
    kv_indptr            [batch + 1]         )
    kv_indices           [any]               )
    last_page_len        [batch]             )
    q_pos_offset         [0] or [batch]      )
    kv_pos_offset        [0] or [batch]      )
    *extra_params                            what `kv_bounds` reads
    place                [PLACE_WORDS]       where the arrays of the batch are in `block`
    jobs                 [families, 16]      rows of `tvm_attn.worklist.Job`
    page_size            scalar              at least 1; ragged: not used
    group_size           scalar              query heads that share a KV head
    num_kv_heads         scalar
    split                scalar              0, or KV tokens at whose multiples all units are cut
    max_batch            scalar              ) the largest batch; `max_pages` are those of a batch
    max_qo_tokens        scalar              )
    max_pages            scalar              )
    max_qo_len           scalar              0 if it is not known
    num_pages            scalar              pages of the cache
    cluster_size         scalar              CTAs of a cluster of the family in clusters, or 0
    clusters             scalar              how many of them there are
    cluster_rows         scalar              fused rows of a query tile there
    planners, copiers    scalars             CTAs for each family, and to copy page ids
    block                [any]               the plan's memory
    ===================  ==================  =====================================================

    Parameters
    ----------
    paged : bool
        Whether K/V are paged; else they are ragged.
    rows : int
        Most units, and pieces of them, of a family.
    kv_bounds, extra_params
        As of `tvm_attn.tir.planner.work_planner`.
    """
    with variables_in("local"):

        @T.prim_func(check_well_formed=False)
        def plan(
            qo_indptr_h: T.handle,
            kv_indptr_h: T.handle,
            kv_indices_h: T.handle,
            last_page_len_h: T.handle,
            q_pos_offset_h: T.handle,
            kv_pos_offset_h: T.handle,
            place_h: T.handle,
            jobs_h: T.handle,
            page_size: T.int32,
            group_size: T.int32,
            num_kv_heads: T.int32,
            split: T.int32,
            max_batch: T.int32,
            max_qo_tokens: T.int32,
            max_pages: T.int32,
            max_qo_len: T.int32,
            num_pages: T.int32,
            cluster_size: T.int32,
            clusters: T.int32,
            cluster_rows: T.int32,
            planners: T.int32,
            copiers: T.int32,
            block_h: T.handle,
        ):
            qo_indptr = ints(qo_indptr_h, "qo_indptr")
            kv_indptr = ints(kv_indptr_h, "kv_indptr")
            kv_indices = ints(kv_indices_h, "kv_indices")
            last_page_len = ints(last_page_len_h, "last_page_len")
            q_pos_offset = ints(q_pos_offset_h, "q_pos_offset")
            kv_pos_offset = ints(kv_pos_offset_h, "kv_pos_offset")
            place = ints(place_h, "place")
            jobs = ints(jobs_h, "jobs", JOB_WORDS)
            block = ints(block_h, "block")
            T.device_entry()
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            planning = T.meta_var(jobs.shape[0] * planners)
            number = T.cta_id([planning + copiers])
            thread = T.thread_id([THREADS])
            pool = T.meta_var(T.SMEMPool())
            common = T.meta_var(pool.alloc((COMMON,), "int64", align=8))
            bins = T.meta_var(pool.alloc((WARPS * BINS,), "uint16", align=8))
            scratch = T.meta_var(
                carve_scratch(
                    lambda size: pool.alloc((size,), "int64", align=8),
                    lambda size: pool.alloc((size,), "int32", align=4),
                    rows,
                    DEVICE_CTAS,
                )
            )
            pool.commit()
            job = var(0)
            planner = var(number)
            together = var(planners)
            while T.And(job < jobs.shape[0], planner >= planners):
                planner = planner - planners
                job = job + 1
            if job == jobs.shape[0]:
                together = copiers
            numbers = T.meta_var(
                (
                    *(group_size, num_kv_heads, split),
                    *(max_batch, max_qo_tokens, max_pages, max_qo_len, num_pages),
                    *(cluster_size, clusters, cluster_rows),
                )
            )
            cta = T.meta_var(
                Block(
                    *(thread, thread // WARP, thread % WARP, planning),
                    *(planner, together, job, common, var(0), bins),
                )
            )
            batch = T.meta_var(
                Batch(
                    size=qo_indptr.shape[0] - 1,
                    qo_indptr=qo_indptr,
                    kv_indptr=kv_indptr,
                    last_page_len=last_page_len,
                    q_pos_offset=q_pos_offset,
                    kv_pos_offset=kv_pos_offset,
                    page_size=page_size if paged else 1,
                    group_size=group_size,
                    paged=paged,
                )
            )
            given = T.meta_var((q_pos_offset.shape[0] > 0, kv_pos_offset.shape[0] > 0))
            memory = T.meta_var(Memory(block, place, jobs))
            plan_on_device(
                cta, batch, kv_indices, given, memory, problem_of(numbers, kv_bounds), scratch
            )

    return close_over(plan, extra_params, before=NUM_OTHERS, name="plan_on_device")
