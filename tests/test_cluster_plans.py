"""Which plans share items in clusters or take wide CTAs: those with few units; cut if that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest

from tests.cases import kernel
from tests.sharing import choose
from tests.test_runtime_cuda import SPEC
from tvm_attn.bsr import BSR
from tvm_attn.runtime import short
from tvm_attn.runtime.inspector import Inspector
from tvm_attn.runtime.plan import Family, Plan, WorkList
from tvm_attn.runtime.sharing import PARTS, Floats, Work, tables
from tvm_attn.runtime.short import RowBytes
from tvm_attn.tir.planner_shares import SHORTEST, SHORTEST_STRETCH, Cost
from tvm_attn.worklist import CROWD, Item

UNCUT = 2**29
SIZES = (8, 4, 2, 1)
DECODE = [Family("decode", 16, 64, 1, 2, cluster=size) for size in SIZES]
WIDE = [Family("wide", 16, 64, 1, 1, cluster=size, replaces="decode") for size in SIZES]
SHARERS = (*DECODE[:3], *WIDE, DECODE[3])
FAMILIES = (*DECODE, *WIDE, Family("short", 64, 64, 1, 2), Family("long", 128, 64, 1, 2))
BYTES = RowBytes(token=512, row=512)
QUEUES = dict(zip(FAMILIES, [29, 59, 132, 264, 14, 29, 66, 132, 264, 264], strict=True))


def compiled() -> list[Any]:
    planner = kernel("full", SPEC)._libraries["planner"]
    return [planner[name] for name in ("plan_short", "plan_batch", "plan_work")]


def cut_by(family: Family, families: Any, queues: Any, work: Work) -> tuple[Floats, Floats]:
    """Tables by which a family is the fastest, if it cuts units."""
    costs, rates = tables(families, queues, work)
    costs[:, Cost.LAUNCH :] = 0
    costs[:, Cost.LAUNCH] = [1e9 * (other != family) for other in families]
    costs[:, Cost.BESIDE] = 0.5
    return costs, np.ones_like(rates)


def planned(
    kv_lens: list[int],
    heads: int,
    qo_len: int = 1,
    split: int = 0,
    queues: Sequence[int] = tuple(QUEUES.values()),
) -> Plan:
    inspector = Inspector(*compiled(), FAMILIES, 4, heads, BYTES)
    pages = [-(-length // 16) for length in kv_lens]
    qo_indptr = [qo_len * n for n in range(len(kv_lens) + 1)]
    last = [(length - 1) % 16 + 1 for length in kv_lens]
    indptr = [0, *accumulate(pages)]
    fmt = BSR.from_page_table(qo_indptr, indptr, list(range(indptr[-1])), last, 16)
    return inspector.plan(None, fmt, None, split, list(queues))


def work_of(kv_lens: list[int], heads: int) -> WorkList:
    [work] = planned(kv_lens, heads).work
    return work


def pieces_of(kv_lens: list[int], heads: int, split: int) -> list[int]:
    """The pieces that a split makes of all units, longest first."""
    pieces = [min(split, n - at) for n in kv_lens for at in range(0, n, split)]
    return [size for size in sorted(pieces, reverse=True) for _ in range(heads)]


def longest_queue(pieces: list[int], queues: int) -> int:
    """The tokens of the longest queue, if pieces are dealt back and forth."""
    load = [0] * queues
    for n, size in enumerate(pieces):
        turn, place = divmod(n, queues)
        load[place if turn % 2 == 0 else queues - 1 - place] += size
    return max(load)


def ways(kv_lens: list[int], heads: int, work: Work) -> Iterator[tuple[float, Family, int]]:
    """Every way to share units out, and how long it is estimated to take."""
    block, longest, tokens = 64, max(kv_lens), sum(kv_lens) * heads
    splits = [UNCUT, *(-(-longest // (int(parts) * block)) * block for parts in PARTS)]
    costs, rates = tables(SHARERS, [QUEUES[family] for family in SHARERS], work)
    for split in dict.fromkeys(splits):
        pieces = pieces_of(kv_lens, heads, split)
        for family, cost, rate in zip(SHARERS, costs, rates, strict=True):
            queues = QUEUES[family]
            if split != UNCUT and (
                split < block * max(SHORTEST, family.cluster) or len(pieces) > CROWD * queues
            ):
                continue
            busy, parts = min(len(pieces), queues), -(-longest // split)
            time = tokens * rate[busy * family.cluster]
            if parts > 1:
                time = time * cost[Cost.BESIDE] + cost[Cost.CUT] + parts * cost[Cost.PART]
            rest = longest_queue(pieces, queues) - tokens / busy
            time += cost[Cost.LAUNCH] + rest * cost[Cost.TOKEN]
            yield time + (len(pieces) / busy - 1) * cost[Cost.ITEM], family, split
    for family, cost, rate in zip(SHARERS, costs, rates, strict=True):
        share = max(tokens // QUEUES[family], block * SHORTEST_STRETCH)
        if family.cluster == 1 and longest > share:
            busy = max(tokens // share, 1)
            time = cost[Cost.LAUNCH] + tokens * rate[busy] * cost[Cost.BESIDE]
            time += cost[Cost.CUT] + (longest // share + 2) * cost[Cost.PART]
            yield time + len(kv_lens) * heads / busy * cost[Cost.ITEM], family, 0


@pytest.mark.parametrize("family", SHARERS, ids=lambda family: f"{family.name}{family.cluster}")
@pytest.mark.parametrize(("heads", "requests"), [(1, 1), (1, 7), (8, 1), (3, 2)])
def test_there_is_room_for_as_many_pieces_as_there_may_be(
    monkeypatch: pytest.MonkeyPatch, family: Family, heads: int, requests: int
) -> None:
    split = 64 * max(SHORTEST, family.cluster)
    pieces = CROWD * QUEUES[family] // heads // requests
    monkeypatch.setattr(short, "tables", partial(cut_by, family))
    monkeypatch.setattr(short, "PARTS", np.array([pieces], np.int32))
    work = work_of([pieces * split] * requests, heads)
    assert work.family == family and len(work.items) == pieces * requests * heads
    columns = [Item.REQUEST, Item.KV_HEAD, Item.KV_BEGIN]
    found = {tuple(item) for item in work.items[:, columns].tolist()}
    places = product(range(requests), range(heads), range(0, pieces * split, split))
    assert found == set(places)


@pytest.mark.parametrize(
    ("kv_lens", "heads", "family", "cut"),
    [
        ([512], 8, DECODE[0], 0),
        ([8192], 8, WIDE[0], 0),
        ([32768], 1, WIDE[1], 1),
        ([2048] * 16, 1, DECODE[0], 0),
        ([2048] * 64, 1, WIDE[2], 0),
        ([512] * 16, 8, WIDE[3], 0),
        ([512] * 64, 1, WIDE[3], 0),
        ([512] * 256, 1, DECODE[3], 0),
        ([131072] + [1024] * 15, 1, DECODE[1], 1),
        ([8192] + [512] * 63, 1, WIDE[3], 1),
        ([32768] + [512] * 255, 1, WIDE[3], 11),
        ([0] * 20, 1, DECODE[3], 0),
    ],
)
def test_few_units_are_shared(kv_lens: list[int], heads: int, family: Family, cut: int) -> None:
    work = work_of(kv_lens, heads)
    assert (work.family, len(work.merge_items)) == (family, cut)
    assert work.num_ctas == QUEUES[family]


@pytest.mark.parametrize("kv_lens", [[2048] * 64, [8192] + [512] * 63, [8000, 1, 300, 0, 4321]])
@pytest.mark.parametrize("split", [512, 1024, UNCUT])
def test_pieces_and_queues_are_foreseen(kv_lens: list[int], split: int) -> None:
    heads = 3
    [work] = planned(kv_lens, heads, split=split).work
    pieces = pieces_of(kv_lens, heads, split)
    queues = [sum(item.kv_end - item.kv_begin for item in queue) for queue in work.queues()]
    empty = heads * kv_lens.count(0)
    assert len(pieces) == len(work.items) - empty
    assert longest_queue(pieces, QUEUES[DECODE[3]]) == max(queues)


def test_the_way_of_the_least_time_is_taken() -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 4000, size).tolist() for size in (1, 7, 64, 150, 264)]
    for kv_lens in ([512], [32768], [65536] + [512] * 63, [1024] * 16, [1] * 100, *drawn):
        for heads in (heads for heads in (1, 4) if len(kv_lens) * heads <= 264 and max(kv_lens)):
            work = Work(512, 2048)
            queues = [QUEUES[family] for family in SHARERS]
            family, split = choose(kv_lens, heads, SHARERS, queues, work)
            times = {way[1:]: way[0] for way in ways(kv_lens, heads, work)}
            least = pytest.approx(min(times.values()), rel=1e-5)
            assert times[SHARERS[family], split] == least


@pytest.mark.parametrize("only", SHARERS[:-1], ids=lambda family: f"{family.name}{family.cluster}")
def test_a_plan_for_one_family_takes_its_best_cut(only: Family) -> None:
    """As plans with limits are, whose launches graphs have captured."""
    queues = [QUEUES[family] if family == only else 0 for family in FAMILIES]
    work = Work(BYTES.token, 4 * BYTES.row)
    for kv_lens in ([512], [8192] * 3, [60000] + [512] * 13, [1] * 14):
        of_sharers = [QUEUES[family] if family == only else 0 for family in SHARERS]
        chosen, split = choose(kv_lens, 1, SHARERS, of_sharers, work)
        times = {way[2]: way[0] for way in ways(kv_lens, 1, work) if way[1] == only}
        assert SHARERS[chosen] == only
        assert times[split] == pytest.approx(min(times.values()), rel=1e-5)
        [dealt] = planned(kv_lens, 1, queues=queues).work
        assert dealt.family == only and dealt.num_ctas == QUEUES[only]
        if split:
            assert len(dealt.items) == len(pieces_of(kv_lens, 1, split))


def test_every_key_is_attended_to_once() -> None:
    for kv_lens in ([32768], [8192, 0, 5], [65536] + [512] * 63):
        work = work_of(kv_lens, 1)
        seen = [0] * len(kv_lens)
        for item in (item for queue in work.queues() for item in queue):
            seen[item.request] += item.kv_end - item.kv_begin
        assert seen == kv_lens


def test_a_fixed_split_and_longer_requests_have_no_clusters() -> None:
    [fixed] = planned([512] * 4, 1, split=128).work
    assert fixed.family == DECODE[3]
    mixed = planned([512] * 4, 1, qo_len=5)
    assert [(work.family.name, work.family.cluster) for work in mixed.work] == [("short", 0)]
