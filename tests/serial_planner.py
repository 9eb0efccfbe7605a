"""The device's planner on the host: one thread does the work of all, forwards or backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.device_planner import Memory, plan_on_device, problem_of
from tvm_attn.tir.device_policy import TABLES, carve_scratch
from tvm_attn.tir.planner_batch import Batch
from tvm_attn.tir.planner_ints import assign, bind, carve, high_word, store, var
from tvm_attn.tir.planner_units import KvBounds
from tvm_attn.tir.signature import close_over
from tvm_attn.worklist import JOB_WORDS


@T.inline
def arrive(cta: Any, counter: Any, is_last: Any) -> None:
    """Count a CTA in."""
    counter[0] = counter[0] + 1
    is_last = T.Select(counter[0] == cta.planners, 1, 0)
    if is_last != 0:
        counter[0] = 0


@T.inline
def publish(cta: Any) -> None:
    """It is seen already."""
    cta.meet()


@T.inline
def leave(cta: Any, counter: Any) -> None:
    """Count a CTA out."""
    counter[0] = counter[0] + 1


@T.inline
def wait_for_others(cta: Any, counter: Any, goal: Any) -> None:
    """They were there before."""
    assert counter[0] == goal, "others are still planning"


@T.inline
def add_up(cta: Any, value_of: Any, sums: Any, count: Any, totals: Any) -> None:
    """Write the sums of the values before each."""
    total = var(T.int64(0))
    for i in T.serial(count):
        value = var(value_of(i))
        sums[i] = total
        total = total + value
    sums[count] = total


@T.inline
def sort(cta: Any, keys: Any, first: Any, spare: Any, count: Any, low: Any, high: Any) -> None:
    """Sort keys by their upper halves: put each where it belongs among those before."""
    for i in T.serial(count):
        key = var(keys[first + i])
        place = var(i)
        while T.if_then_else(
            place > 0, high_word(keys[first + T.max(place - 1, 0)]) > high_word(key), False
        ):
            keys[first + place] = keys[first + place - 1]
            place = place - 1
        keys[first + place] = key


@dataclass(frozen=True)
class SerialCta:
    """A CTA whose threads take turns, at each number that is visited."""

    num_planning: Any
    planner: Any
    planners: Any
    job: Any
    backward: Any
    add_up: Any = add_up
    arrive: Any = arrive
    publish: Any = publish
    leave: Any = leave
    wait_for_others: Any = wait_for_others
    sort: Any = sort

    def _numbers(self, count: Any, first: Any, step: Any) -> tuple[Any, Any]:
        back = self.backward != 0
        return T.Select(back, count - 1 - first, first), T.Select(back, -step, step)

    def own(self, count: Any) -> tuple[Any, Any]:
        return self._numbers(count, 0, 1)

    def behind(self, busy: Any, count: Any) -> tuple[Any, Any]:
        return self.own(count)

    def last(self, count: Any) -> tuple[Any, Any]:
        return self.own(count)

    def shared(self, count: Any) -> tuple[Any, Any]:
        return self._numbers(count, self.planner, self.planners)

    def is_inside(self, i: Any, count: Any) -> Any:
        return T.And(i >= 0, i < count)

    def meet(self) -> None:
        """Nobody is late."""

    def agree(self, totals: Any) -> None:
        """There is nobody to disagree."""

    def is_first(self) -> Any:
        return self.planner == self.planners - 1

    def raise_to(self, words: Any, value: Any) -> None:
        store(words, 0, T.max(words[0], value))

    def plan_alone(self) -> None:
        assign(self.planner, 0)
        assign(self.planners, 1)


ROWS, CTAS = 700, 64


def serial_planner(
    paged: bool, kv_bounds: KvBounds | None = None, extra: Sequence[Any] = ()
) -> Any:
    """Return the PrimFunc ``plan_on_device``.

    Its parameters are those of the device's, then scratch, then whether threads go backwards.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def serial(
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
        longs_h: T.handle,
        ints_h: T.handle,
        backward: T.int32,
    ) -> None:
        qo_indptr = bind(qo_indptr_h, "qo_indptr")
        kv_indptr = bind(kv_indptr_h, "kv_indptr")
        kv_indices = bind(kv_indices_h, "kv_indices")
        last_page_len = bind(last_page_len_h, "last_page_len")
        q_pos_offset = bind(q_pos_offset_h, "q_pos_offset")
        kv_pos_offset = bind(kv_pos_offset_h, "kv_pos_offset")
        place = bind(place_h, "place")
        jobs = bind(jobs_h, "jobs", JOB_WORDS)
        block = bind(block_h, "block")
        longs = T.match_buffer(longs_h, (LONGS,), "int64", align=8)
        ints = T.match_buffer(ints_h, (INTS,), "int32", align=4)
        with T.sblock("plan_on_device"):
            T.reads()
            T.writes()
            taken = T.meta_var(Carver(longs, ints))
            scratch = T.meta_var(carve_scratch(taken.long, taken.int, ROWS, CTAS))
            numbers = T.meta_var(
                (
                    group_size,
                    num_kv_heads,
                    split,
                    max_batch,
                    max_qo_tokens,
                    max_pages,
                    max_qo_len,
                    num_pages,
                    cluster_size,
                    clusters,
                    cluster_rows,
                )
            )
            problem = T.meta_var(problem_of(numbers, kv_bounds))
            batch = T.meta_var(
                Batch(
                    qo_indptr.shape[0] - 1,
                    qo_indptr,
                    kv_indptr,
                    last_page_len,
                    q_pos_offset,
                    kv_pos_offset,
                    page_size if paged else 1,
                    group_size,
                    paged,
                )
            )
            given = T.meta_var((q_pos_offset.shape[0] > 0, kv_pos_offset.shape[0] > 0))
            planning = T.meta_var(jobs.shape[0] * planners)
            num_ctas = T.meta_var(planning + copiers)
            for number in T.serial(num_ctas):
                plans = T.meta_var(number < planning)
                planner = var(T.Select(plans, T.truncmod(number, planners), number - planning))
                together = var(T.Select(plans, planners, copiers))
                job = var(T.Select(plans, T.truncdiv(number, planners), jobs.shape[0]))
                cta = T.meta_var(SerialCta(planning, planner, together, job, backward))
                plan_on_device(
                    cta, batch, kv_indices, given, Memory(block, place, jobs), problem, scratch
                )

    return close_over(serial, extra, before=20, name="plan_on_device")


LONGS = (TABLES + 1) * (ROWS + 1) + 2 * (CTAS + 1)
INTS = 3 * (CTAS + 1)


class Carver:
    """Takes arrays one after another."""

    def __init__(self, longs: Any, ints: Any):
        self._buffers = {"int64": longs, "int32": ints}
        self._taken = {"int64": 0, "int32": 0}

    def _take(self, size: int, dtype: str) -> Any:
        begin = self._taken[dtype]
        self._taken[dtype] = begin + size
        return carve(self._buffers[dtype], begin, (size,), dtype)

    def long(self, size: int) -> Any:
        return self._take(size, "int64")

    def int(self, size: int) -> Any:
        return self._take(size, "int32")
