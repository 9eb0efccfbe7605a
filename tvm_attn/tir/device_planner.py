"""The planner as a parallel kernel: what `tvm_attn.tir.planner` makes, bit for bit, on a device.

The policy is that of the host, which is sums, sorts and searches: here all threads of a CTA do each
of them together. Every family's work is planned by some CTAs that all do the same, but share the
writing of its items; others copy the page ids and check them. No CTA waits for another: the one
that is done last plans again, for a batch without keys, if a page id was wrong.

Units that a cache should hold together (`tvm_attn.tir.planner_greedy`) are not planned here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir import device_batch as batches
from tvm_attn.tir.device_policy import TABLES, Plan, deal, decide
from tvm_attn.tir.device_units import (
    Counts,
    DeviceMachine,
    GivenLengths,
    Keys,
    Reciprocal,
    Row,
    Rows,
    begin_table,
    describe,
    list_units,
    note_cost,
    totals_of,
)
from tvm_attn.tir.parallel import largest, spread_shared
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
from tvm_attn.tir.planner_units import Family, KvBounds
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

    def job(self, job: Any) -> dict[Job, Any]:
        """Read the words of a family; of reciprocals, which are below 2**32, the lower ones."""
        words = {word: scalar("int32") for word in Job}
        for word, variable in words.items():
            assign(variable, self.jobs[job, int(word)])
        return words

    def rows(self, words: Mapping[Job, Any], *others: Any) -> Rows:
        """View the table of a family's units and their pieces."""
        begin = words[Job.UNIT_ROWS]
        first_piece = scalar("int32")
        assign(first_piece, div(words[Job.PIECE_ROWS] - begin, ITEM_WORDS))
        return Rows(self.array(begin, ITEM_WORDS), first_piece, *others)

    def work_list(self, words: Mapping[Job, Any]) -> WorkList:
        """View a family's work list."""
        names = (Job.ITEMS, Job.CTA_INDPTR, Job.MERGE_ITEMS, Job.MERGE_INDPTR)
        shapes = ((ITEM_WORDS,), (), (MERGE_WORDS,), ())
        pairs = zip(names, shapes, strict=True)
        return WorkList(*(self.array(words[name], *row) for name, row in pairs))


def machine_of(words: Mapping[Job, Any], num_kv_heads: Any) -> DeviceMachine:
    """Return what a family's work is dealt to."""
    heads = Reciprocal.of(num_kv_heads, words[Job.OF_HEADS])
    granule = Reciprocal.of(words[Job.GRANULE], words[Job.OF_GRANULE])
    ctas = Reciprocal.of(words[Job.NUM_CTAS], words[Job.OF_CTAS])
    return DeviceMachine(ctas.value, heads, granule, words[Job.OVERHEAD], ctas)


def family_of(words: Mapping[Job, Any], group_size: Any, row_max: Any) -> Family:
    """Return which requests a family takes."""
    group = Reciprocal.of(group_size, words[Job.OF_GROUP])
    return Family(group, words[Job.ROW_MIN], row_max, words[Job.TILE_ROWS])


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
    fits = T.meta_var(units <= clusters.count)
    assign(takes, as_bit(T.And(T.And(split == 0, is_decoding), fits)))
    tokens = T.meta_var(derived.tokens * wide(num_kv_heads) + T.int64(MERGE_TOKENS + 1))
    alone = T.meta_var(wide(derived.max_kv_len) * T.int64(ALONE))
    assign(whole, as_bit(alone < tokens * wide(clusters.size)))


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
def check_and_list(cta, batch, kv_indices, given, problem, derived, table, rows, machine, bad):
    """Check a batch, and list a unit for each request, as if all had just one: if they have.

    `bad` is a fault of the page ids.
    """
    limits = T.meta_var(problem.limits)
    family = T.meta_var(rows.family)
    kind = var(0)

    @T.inline
    def list_request(request):
        row = T.meta_var(Row.allocate())
        describe(row, rows, request, 0)
        cost = var(machine.cost(row.kv_begin, row.kv_end))
        note_cost(table, request, cost, request)
        of_request = T.meta_var(rows.lengths.qo_len(request) * family.group.value)
        most = T.meta_var(T.min(family.row_max, family.tile_rows))
        is_other = T.meta_var(T.Or(of_request < 1, of_request > most))
        assign(kind, T.max(kind, as_bit(is_other)))

    begin_table(table, batch.size)
    batches.check(cta, batch, kv_indices.shape[0], limits, given, derived, kind, list_request)
    cta.agree([(kind, largest), *totals_of(table)])
    assign(rows.is_plain, as_bit(T.And(kind == batches.PLAIN, family.row_min == 1)))
    if problem.clusters.size > 0:
        batches.add_up_all(cta, batch, derived)
    if T.Or(kind == batches.WRONG, bad != T.int64(batches.NO_FAULT)):
        batches.find_fault(cta, batch, kv_indices.shape[0], limits, given, derived)
        assign(derived.fault, T.min(derived.fault, bad))
        batches.replace(cta, limits, derived)
        assign(rows.is_plain, 0)


@T.inline
def settle_role(derived, problem, role, row_max, own_split):
    """Leave a family no rows if its role is not to take this batch, and find where it is cut."""
    takes = var(0)
    whole = var(0)
    if problem.clusters.size > 0:
        choose(
            derived,
            problem.clusters,
            problem.group_size,
            problem.num_kv_heads,
            problem.split,
            takes,
            whole,
        )
    is_cluster = T.meta_var(role == int(Role.CLUSTERS))
    assign(row_max, row_max * T.Select(is_cluster, takes, 1))
    is_whole = T.meta_var(T.And(is_cluster, whole != 0))
    assign(own_split, T.Select(is_whole, LENGTH_LIMIT, problem.split))


@T.inline
def plan_family(cta, batch, kv_indices, given, memory, job, derived, scratch, problem, bad):
    """Plan the work of a family."""
    words = T.meta_var(memory.job(job))
    row_max = var(words[Job.ROW_MAX])
    own_split = var(0)
    is_plain = var(1)
    machine = T.meta_var(machine_of(words, problem.num_kv_heads))
    family = T.meta_var(family_of(words, problem.group_size, row_max))
    lengths = T.meta_var(GivenLengths(batch, given, derived))
    table = T.meta_var(Keys.allocate(scratch.keys))
    units = T.meta_var(Keys.allocate(scratch.keys))
    rows = T.meta_var(memory.rows(words, is_plain, lengths, family, problem.kv_bounds))
    plan = T.meta_var(Plan.allocate())
    parts = T.meta_var(Counts(scratch.parts))
    counts = T.meta_var(Counts(scratch.counts))
    line = T.meta_var(scratch.line())
    out = T.meta_var(memory.work_list(words))
    header = T.meta_var(memory.array(words[Job.HEADER]))
    assign(table.first, 0)
    assign(table.spare, div(scratch.keys.shape[0], TABLES))
    check_and_list(cta, batch, kv_indices, given, problem, derived, table, rows, machine, bad)
    settle_role(derived, problem, words[Job.ROLE], row_max, own_split)
    is_plain = is_plain * as_bit(row_max > 0)
    if is_plain != 0:
        table.total = table.total * wide(machine.heads.value)
    else:
        list_units(cta, table, rows, lengths, family, machine)
    decide(cta, plan, table, units, rows, parts, line, counts, machine, own_split)
    room = T.meta_var(words[Job.MERGES])
    deal(cta, plan, table, units, rows, parts, line, counts, machine, out, room, header)


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
def look_back(cta, kv_indices, memory, bad):
    """Find the fault of the page ids, once all have been looked at; wait if there is one."""
    words = T.meta_var(memory.of_batch(Place.FIRST_BAD))
    expected = T.meta_var(memory.of_batch(Place.EXPECTED))
    goal = var(expected[0] + cta.num_planning)
    worst = var(words[0])
    cta.meet()
    expected[0] = goal
    if worst > 0:
        where = var(INT32_MAX - worst)
        page = T.meta_var(kv_indices[where])
        negative = T.meta_var(batches.fault_at(page < 0, Status.KV_INDEX, where))
        missing = T.meta_var(batches.fault_at(page >= 0, Status.NO_PAGE, where))
        assign(bad, T.min(negative, missing))
        words[0] = 0
        cta.wait_for_others(cta, memory.of_batch(Place.PLANNED), goal)
        cta.plan_alone()


@T.inline
def copy_and_check(cta, batch, kv_indices, memory, limits, bad):
    """Copy page ids; the last CTA to do so finds the fault there is among all."""
    pages = T.meta_var(batch.kv_indptr[batch.size])
    most = T.meta_var(T.min(kv_indices.shape[0], limits.pages))
    copied = T.meta_var(memory.of_batch(Place.KV_INDICES))
    first_bad = T.meta_var(memory.of_batch(Place.FIRST_BAD))
    count = var(T.max(T.min(pages, most), 0))
    is_last = var(0)
    copy_pages(cta, kv_indices, count, limits.num_pages, copied, first_bad)
    cta.arrive(cta, memory.of_batch(Place.ARRIVALS), is_last)
    if is_last != 0:
        look_back(cta, kv_indices, memory, bad)


@T.inline
def plan_on_device(cta, batch, kv_indices, given, memory, problem, scratch):
    """Do what one of the CTAs does: plan a family's work, or describe the batch and copy pages.

    The last to copy plans all families once more, for a batch without keys, if an id is wrong: when
    all others are done.
    """
    num_jobs = T.meta_var(memory.jobs.shape[0])
    limits = T.meta_var(problem.limits)
    derived = T.meta_var(memory.derived())
    header = T.meta_var(memory.of_batch(Place.HEADER))
    bad = var(T.int64(batches.NO_FAULT))
    job = var(cta.job)
    stop = var(T.min(job + 1, num_jobs))
    is_planning = var(as_bit(job < num_jobs))
    describes = var(as_bit(T.And(is_planning == 0, cta.planner == cta.planners - 1)))
    copies = var(as_bit(T.And(is_planning == 0, batch.paged)))
    goes_on = var(1)
    while goes_on != 0:
        if describes != 0:
            batches.describe(cta, batch, kv_indices, limits, given, bad, derived, header)
        while job < stop:
            plan_family(cta, batch, kv_indices, given, memory, job, derived, scratch, problem, bad)
            job = job + 1
            if job < stop:
                cta.meet()
        goes_on = 0
        if copies != 0:
            copies = 0
            copy_and_check(cta, batch, kv_indices, memory, limits, bad)
            if bad != T.int64(batches.NO_FAULT):
                goes_on = 1
                describes = 1
                job = 0
                stop = num_jobs
    if is_planning != 0:
        cta.leave(cta, memory.of_batch(Place.PLANNED))
    else:
        cta.publish(cta)


def problem_of(numbers: Sequence[Any], kv_bounds: KvBounds | None) -> Problem:
    """Return the problem that numbers describe: its own, those of `Limits` and of `Clusters`."""
    group_size, num_kv_heads, split, *others = numbers
    limits, clusters = batches.Limits(*others[:5]), Clusters(*others[5:])
    return Problem(limits, clusters, group_size, num_kv_heads, split, kv_bounds)
