"""Which plans have CTAs share items in clusters: those with few units, cut only where that pays."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from tests.cases import kernel
from tests.test_runtime_cuda import SPEC
from tvm_attn.bsr import BSR
from tvm_attn.runtime.inspector import Inspector, RowBytes
from tvm_attn.runtime.plan import Family, Plan, WorkList
from tvm_attn.runtime.sharing import UNCUT, Work, share_out, ways

FAMILIES = (
    *(Family("decode", 16, 64, 1, 2, cluster=size) for size in (8, 4, 2, 1)),
    Family("short", 64, 64, 1, 2),
    Family("long", 128, 64, 1, 2),
)
BYTES = RowBytes(token=512, row=512)
QUEUES = [29, 59, 132, 264, 264, 264]


def planned(kv_lens: list[int], heads: int, qo_len: int = 1, split: int = 0) -> Plan:
    planner = kernel("full", SPEC)._libraries["planner"]
    inspector = Inspector(planner["plan_batch"], planner["plan_work"], FAMILIES, 4, heads, BYTES)
    pages = [-(-length // 16) for length in kv_lens]
    qo_indptr = [qo_len * n for n in range(len(kv_lens) + 1)]
    last = [(length - 1) % 16 + 1 for length in kv_lens]
    indptr = [0, *accumulate(pages)]
    fmt = BSR.from_page_table(qo_indptr, indptr, list(range(indptr[-1])), last, 16)
    return inspector.plan(None, fmt, lambda plan: {}, split, QUEUES)


def work_of(kv_lens: list[int], heads: int) -> WorkList:
    [work] = planned(kv_lens, heads).work
    assert work.family.name == "decode"
    return work


@pytest.mark.parametrize(
    ("kv_lens", "heads", "cluster", "cut"),
    [
        ([512], 8, 8, 0),
        ([8192], 8, 8, 0),
        ([32768], 1, 8, 1),
        ([2048] * 16, 1, 8, 0),
        ([2048] * 5, 8, 4, 0),
        ([2048] * 64, 1, 2, 0),
        ([512] * 16, 8, 1, 0),
        ([512] * 64, 8, 1, 0),
        ([131072] + [1024] * 15, 8, 2, 8),
        ([8192] + [512] * 63, 1, 1, 1),
        ([32768] + [512] * 255, 1, 1, 1),
        ([0] * 20, 1, 1, 0),
    ],
)
def test_few_units_are_shared(kv_lens: list[int], heads: int, cluster: int, cut: int) -> None:
    work = work_of(kv_lens, heads)
    assert (work.family.cluster, len(work.merge_items)) == (cluster, cut)
    assert work.num_ctas == QUEUES[[f.cluster for f in FAMILIES].index(cluster)]


@pytest.mark.parametrize("kv_lens", [[2048] * 64, [8192] + [512] * 63, [8000, 1, 300, 0, 4321]])
@pytest.mark.parametrize("split", [512, 1024, UNCUT])
def test_pieces_and_queues_are_foreseen(kv_lens: list[int], split: int) -> None:
    heads = 3
    [work] = planned(kv_lens, heads, split=split).work
    foreseen = Work(np.array(kv_lens), heads, *BYTES)
    queues = [sum(item.kv_end - item.kv_begin for item in queue) for queue in work.queues()]
    empty = heads * kv_lens.count(0)
    assert foreseen.pieces([split]) == [len(work.items) - empty]
    assert foreseen.longest_queue(split, QUEUES[3]) == max(queues)


def test_the_way_of_the_least_time_is_taken() -> None:
    queues = dict(zip(FAMILIES[:4], QUEUES, strict=False))
    for kv_lens in ([512], [32768], [65536] + [512] * 63, [1024] * 16):
        work = Work(np.array(kv_lens), 1, *BYTES)
        chosen = share_out(work, queues)
        times = {(way.family, way.split): way.estimate(work) for way in ways(work, queues)}
        assert times[chosen] == min(times.values())
        assert all(way.least(work) <= way.estimate(work) for way in ways(work, queues))


def test_every_key_is_attended_to_once() -> None:
    for kv_lens in ([32768], [8192, 0, 5], [65536] + [512] * 63):
        work = work_of(kv_lens, 1)
        seen = [0] * len(kv_lens)
        for item in (item for queue in work.queues() for item in queue):
            seen[item.request] += item.kv_end - item.kv_begin
        assert seen == kv_lens


def test_a_fixed_split_and_longer_requests_have_no_clusters() -> None:
    [fixed] = planned([512] * 4, 1, split=128).work
    assert fixed.family.cluster == 1
    mixed = planned([512] * 4, 1, qo_len=5)
    assert [(work.family.name, work.family.cluster) for work in mixed.work] == [("short", 0)]
