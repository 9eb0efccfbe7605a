"""The planner as a parallel kernel: what `tvm_attn.tir.planner` makes, bit for bit, on a device.

The policy is that of the host, which is sums, sorts and searches: here all threads of a CTA do each
of them together. Every family's work is planned by some CTAs that all do the same, but share the
writing of its items; others copy the page ids and check them. No CTA waits for another: the one
that is done last plans again, for a batch without keys, if a page id was wrong.

Units that a cache should hold together (`tvm_attn.tir.planner_greedy`) are not planned here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir import device_batch as batches
from tvm_attn.tir.device_deal import spread_shared
from tvm_attn.tir.device_policy import TABLES, Plan, deal, decide, summarise
from tvm_attn.tir.device_units import Counts, Keys, Reciprocal, list_units
from tvm_attn.tir.planner_deal import WorkList
from tvm_attn.tir.planner_ints import (
    INT32_MAX,
    LENGTH_LIMIT,
    as_bit,
    assign,
    carve,
    ceil_div,
    div,
    scalar,
    scope,
    var,
    wide,
)
from tvm_attn.tir.planner_units import Family, KvBounds, Machine
from tvm_attn.worklist import (
    ALONE,
    ITEM_WORDS,
    MERGE_TOKENS,
    MERGE_WORDS,
    Job,
    Place,
    Role,
    Status,
)

AT_ONCE = 8
"""Page ids that a thread reads before it writes any."""

UNSIZED = 1 << 27
"""Entries of an array whose size is not known here: more than it has."""


@dataclass(frozen=True)
class Memory:
    """A plan's memory on a device: `block`, and where in it the arrays begin.

    `place` has a word of `Place` for each array of the batch, `jobs` a row of `Job` of each family.
    """

    block: Any
    place: Any
    jobs: Any

    def array(self, begin: Any, *row: int) -> Any:
        """View an array that begins at a word, of rows or of numbers."""
        at = scalar("int32")
        assign(at, begin)
        return carve(self.block, at, (UNSIZED, *row))

    def of_batch(self, place: Place) -> Any:
        """View an array of the batch."""
        return self.array(self.place[int(place)])

    def derived(self) -> batches.Derived:
        """View the arrays of a batch's requests, and allocate the variables of the whole."""
        indptrs = (Place.QO_INDPTR, Place.KV_INDPTR)
        places = (*indptrs, Place.KV_LEN, Place.Q_POS_OFFSET, Place.KV_POS_OFFSET)
        return batches.Derived(*map(self.of_batch, places), **batches.totals())

    def wide_word(self, job: Any, word: Job) -> Any:
        """Return the int64 of two words of a family."""
        low, high = (self.jobs[job, int(word) + i] for i in range(2))
        return T.shift_left(wide(high), T.int64(32)) + T.bitwise_and(wide(low), T.int64(2**32 - 1))

    def rows(self, job: Any) -> tuple[Any, Any]:
        """View the table of a family's units and their pieces, and return where these begin."""
        units, pieces = (self.jobs[job, int(word)] for word in (Job.UNIT_ROWS, Job.PIECE_ROWS))
        first_piece = scalar("int32")
        assign(first_piece, div(pieces - units, ITEM_WORDS))
        return self.array(units, ITEM_WORDS), first_piece

    def work_list(self, job: Any) -> WorkList:
        """View a family's work list."""
        words = (Job.ITEMS, Job.CTA_INDPTR, Job.MERGE_ITEMS, Job.MERGE_INDPTR)
        begins = (self.jobs[job, int(word)] for word in words)
        rows = ((ITEM_WORDS,), (), (MERGE_WORDS,), ())
        return WorkList(*(self.array(at, *row) for at, row in zip(begins, rows, strict=True)))


@dataclass(frozen=True)
class Clusters:
    """The family in clusters, and how it is chosen: `size` is 0 if there is none."""

    size: Any
    count: Any
    rows: Any


@T.inline
def choose(derived, clusters, group_size, num_kv_heads, split, takes, whole):
    """Find whether the family in clusters takes few units (`takes`), and whether it cuts none."""
    units = T.meta_var(derived.units * num_kv_heads)
    is_decoding = T.meta_var(derived.max_qo_len * group_size <= clusters.rows)
    fits = T.meta_var(T.And(clusters.size > 0, units <= clusters.count))
    assign(takes, as_bit(T.And(T.And(split == 0, is_decoding), fits)))
    tokens = T.meta_var(derived.tokens * wide(num_kv_heads) + T.int64(MERGE_TOKENS + 1))
    alone = T.meta_var(wide(derived.max_kv_len) * T.int64(ALONE))
    assign(whole, as_bit(alone < tokens * wide(clusters.size)))


@T.inline
def plan_family(cta, memory, job, derived, lengths, scratch, problem):
    """Plan the work of a family."""
    jobs = T.meta_var(memory.jobs)
    group_size, num_kv_heads, split = T.meta_var(
        (problem.group_size, problem.num_kv_heads, problem.split)
    )
    clusters = T.meta_var(problem.clusters)
    num_ctas = var(jobs[job, int(Job.NUM_CTAS)])
    granule = var(jobs[job, int(Job.GRANULE)])
    role = var(jobs[job, int(Job.ROLE)])
    room = var(jobs[job, int(Job.MERGES)])
    overhead = var(jobs[job, int(Job.OVERHEAD)])
    tile_rows = var(jobs[job, int(Job.TILE_ROWS)])
    row_min = var(jobs[job, int(Job.ROW_MIN)])
    takes = var(0)
    whole = var(0)
    choose(derived, clusters, group_size, num_kv_heads, split, takes, whole)
    own_split = var(T.Select(T.And(role == int(Role.CLUSTERS), whole != 0), LENGTH_LIMIT, split))
    has_work = var(
        T.Select(
            role == int(Role.CLUSTERS),
            takes,
            T.Select(role == int(Role.REPLACED), 1 - takes, 1),
        )
    )
    machine = T.meta_var(
        Machine(
            num_ctas,
            Reciprocal.of(num_kv_heads, memory.wide_word(job, Job.OF_HEADS)),
            Reciprocal.of(granule, memory.wide_word(job, Job.OF_GRANULE)),
            overhead,
        )
    )
    row_max = var(jobs[job, int(Job.ROW_MAX)] * has_work)
    family = T.meta_var(
        Family(
            Reciprocal.of(group_size, memory.wide_word(job, Job.OF_GROUP)),
            row_min,
            row_max,
            tile_rows,
        )
    )
    rows, piece_rows = T.meta_var(memory.rows(job))
    out = T.meta_var(memory.work_list(job))
    plan = T.meta_var(Plan.allocate())
    table = T.meta_var(Keys.allocate(scratch.keys))
    units = T.meta_var(Keys.allocate(scratch.keys))
    parts = T.meta_var(Counts(scratch.parts))
    counts = T.meta_var(Counts(scratch.counts))
    line = T.meta_var(scratch.line())
    longest = T.meta_var(derived.max_qo_len * group_size)
    is_plain = var(
        as_bit(
            T.And(
                T.And(derived.units == derived.size, family.row_min == 1),
                longest <= T.min(row_max, family.tile_rows),
            )
        )
    )
    assign(table.first, 0)
    assign(table.spare, div(scratch.keys.shape[0], TABLES))
    list_units(cta, table, rows, lengths, family, machine, is_plain, problem.kv_bounds)
    decide(cta, plan, table, units, rows, piece_rows, parts, line, machine, own_split)
    deal(cta, plan, table, units, rows, parts, line, counts, machine, out, room)
    if cta.is_first():
        summarise(plan, memory.array(jobs[job, int(Job.HEADER)]))


@dataclass(frozen=True)
class Problem:
    """What a kernel's planner is given besides the batch: numbers, and what its hooks see."""

    limits: batches.Limits
    clusters: Clusters
    group_size: Any
    num_kv_heads: Any
    split: Any
    kv_bounds: KvBounds | None


@T.inline
def copy_pages(cta, kv_indices, count, num_pages, copied, first_bad):
    """Copy page ids, and note the first that is negative or that the cache does not have.

    A thread reads several at once, from parts of the array that follow one another.
    """
    worst = var(0)
    pages = T.alloc_buffer((AT_ONCE,), "int32", scope=scope())
    part = var(ceil_div(count, AT_ONCE))

    @T.inline
    def copy_group(i):
        for k in T.unroll(AT_ONCE):
            at = T.meta_var(k * part + i)
            pages[k] = T.if_then_else(at < count, kv_indices[at], 0)
        for k in T.unroll(AT_ONCE):
            at = T.meta_var(k * part + i)
            if at < count:
                copied[at] = pages[k]
                if T.Or(pages[k] < 0, pages[k] >= num_pages):
                    assign(worst, T.max(worst, INT32_MAX - at))

    spread_shared(cta, part, copy_group)
    if worst > 0:
        cta.raise_to(first_bad, worst)


@T.inline
def plan_jobs(cta, batch, kv_indices, given, memory, problem, derived, scratch, job, stop, bad):
    """Plan the work of some families, `bad` being a fault of the page ids."""
    cta.prefetch(memory.jobs, job)
    batches.check(cta, batch, kv_indices.shape[0], problem.limits, given, derived)
    assign(derived.fault, T.min(derived.fault, bad))
    if T.And(job == 0, cta.is_first()):
        header = T.meta_var(memory.of_batch(Place.HEADER))
        batches.write_header(batch, kv_indices, derived, header)
    if derived.fault != T.int64(batches.NO_FAULT):
        batches.replace(cta, problem.limits, derived)
    else:
        if job == 0:
            batches.derive(cta, batch, given, derived)
    lengths = T.meta_var(batches.GivenLengths(batch, given, derived))
    while job < stop:
        plan_family(cta, memory, job, derived, lengths, scratch, problem)
        cta.meet()
        job = job + 1
    if T.Or(not batch.paged, bad != T.int64(batches.NO_FAULT)):
        cta.publish(cta)


@T.inline
def plan_on_device(cta, batch, kv_indices, given, memory, problem, scratch):
    """Do what one of the CTAs does: plan a family's work or copy pages; the last one looks back."""
    limits = T.meta_var(problem.limits)
    num_jobs = T.meta_var(memory.jobs.shape[0])
    derived = T.meta_var(memory.derived())
    words = T.meta_var(memory.of_batch(Place.FIRST_BAD))
    job = var(cta.job)
    stop = var(T.min(job + 1, num_jobs))
    bad = var(T.int64(batches.NO_FAULT))
    is_last = var(0)
    for attempt in T.serial(2 if batch.paged else 1):
        if job < stop:
            plan_jobs(
                cta, batch, kv_indices, given, memory, problem, derived, scratch, job, stop, bad
            )
        if T.And(batch.paged, attempt == 0):
            if cta.job == num_jobs:
                pages = T.meta_var(batch.kv_indptr[batch.size])
                most = T.meta_var(T.min(kv_indices.shape[0], limits.pages))
                copied = T.meta_var(memory.of_batch(Place.KV_INDICES))
                count = var(T.max(T.min(pages, most), 0))
                copy_pages(cta, kv_indices, count, limits.num_pages, copied, words)
            cta.arrive(cta, memory.of_batch(Place.ARRIVALS), is_last)
            if is_last != 0:
                worst = var(words[0])
                cta.meet()
                if worst > 0:
                    where = var(INT32_MAX - worst)
                    page = T.meta_var(kv_indices[where])
                    negative = T.meta_var(batches.fault_at(page < 0, Status.KV_INDEX, where))
                    missing = T.meta_var(batches.fault_at(page >= 0, Status.NO_PAGE, where))
                    bad = T.min(negative, missing)
                    job = 0
                    stop = num_jobs
                    cta.plan_alone()
                    words[0] = 0


def problem_of(numbers: Sequence[Any], kv_bounds: KvBounds | None) -> Problem:
    """Return the problem that numbers describe: its own, those of `Limits` and of `Clusters`."""
    group_size, num_kv_heads, split, *others = numbers
    limits, clusters = batches.Limits(*others[:5]), Clusters(*others[5:])
    return Problem(limits, clusters, group_size, num_kv_heads, split, kv_bounds)
