"""The planner: its work lists are complete, even, and cut no more than they have to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.script import tirx as T

from tests.planning import (
    UNTOUCHED,
    Work,
    WorkList,
    call,
    check,
    check_even,
    compile_function,
    ints,
    long_word,
    run,
    verdict,
)
from tvm_attn.runtime import sizes
from tvm_attn.tir.planner_ints import LENGTH_LIMIT, Divisor, reciprocal
from tvm_attn.tir.planner_units import MIN_PIECE
from tvm_attn.worklist import Header, Item, Status


@st.composite
def works(draw: st.DrawFn, **fixed: Any) -> Work:
    """Small ragged batches, in which everything that can be empty sometimes is."""
    size = draw(st.integers(0, 7))
    lengths = st.integers(0, 60) | st.sampled_from([0, 1, 1, 500, 2000])
    qo_lens = draw(st.tuples(*[st.integers(0, 5) | st.sampled_from([1, 40])] * size))
    kv_lens = draw(st.tuples(*[lengths] * size))
    offsets = st.none() | st.tuples(*[st.integers(-30, 80)] * size)
    fields: dict[str, Any] = {
        "heads": st.sampled_from([1, 2, 3, 8]),
        "tokens_at_once": st.sampled_from([0, 1000]),
        "ctas": st.sampled_from([1, 2, 3, 8, 33]),
        "group": st.sampled_from([1, 3, 4]),
        "tile": st.sampled_from([1, 7, 16]),
        "block": st.sampled_from([1, 5, 16]),
        "overhead": st.sampled_from([0, 1, 3]),
        "split": st.just(0) | st.sampled_from([1, 7, 64, 10**6]),
        "mask": st.sampled_from(["full", "causal", "window", "limit"]),
        "window": st.sampled_from([0, 5, 100]),
        "q_pos": offsets,
        "kv_pos": offsets,
    }
    drawn = {name: draw(value) for name, value in fields.items() if name not in fixed}
    if drawn.get("split") == 1:  # a piece for each token: keep it short
        kv_lens = tuple(min(n, 60) for n in kv_lens)
    return Work(qo_lens, kv_lens, **drawn, **fixed)


@settings(max_examples=150)
@given(works())
def test_work_list_is_complete(work: Work) -> None:
    made = run(work)
    check(work, made)
    if not work.split:
        check_even(work, made)
    again = run(work, garbage=123)
    assert all((a == b).all() for a, b in zip(made.wholes, again.wholes, strict=True))


@settings(max_examples=60)
@given(works())
def test_every_row_meets_every_key_it_sees_once(work: Work) -> None:
    made = run(work)
    for b in range(len(work.qo_lens)):
        visible = work.sees(b)
        met = np.zeros((work.heads, *visible.shape), dtype=int)
        for request, head, row_begin, row_end, kv_begin, kv_end, *_ in made.rows():
            if request == b:
                met[head, row_begin:row_end, kv_begin:kv_end] += 1
        assert (met[:, visible] == 1).all()
        assert (met <= 1).all()


@settings(max_examples=60)
@given(works(), st.integers(1, 60))
def test_families_share_the_requests_out(work: Work, short_rows: int) -> None:
    rows = [n * work.group for n in work.qo_lens]
    families = [(1, short_rows), (short_rows + 1, 2**31 - 1)]
    for low, high in families:
        family = replace(work, rows=(low, high))
        made = run(family)
        check(family, made)
        expected = {b for b, r in enumerate(rows) if low <= r <= high}
        assert {row[Item.REQUEST] for row in made.rows()} == expected


@settings(max_examples=60)
@given(works(split=64), st.data())
def test_fixed_split_depends_on_the_request_alone(work: Work, data: st.DataObject) -> None:
    if not work.qo_lens:
        return
    b = data.draw(st.integers(0, len(work.qo_lens) - 1))
    alone = {
        **vars(work),
        "qo_lens": (work.qo_lens[b],),
        "kv_lens": (work.kv_lens[b],),
        "q_pos": (work.q_position(b),),
        "kv_pos": (work.kv_position(b),),
        "ctas": data.draw(st.sampled_from([1, 5])),
        "window": work.window * (b + 1 if work.mask == "limit" else 1),
    }

    def pieces(made: WorkList, request: int) -> list[tuple[list[int], bool]]:
        rows = [row for row in made.rows() if row[Item.REQUEST] == request]
        return sorted((row[Item.KV_HEAD : Item.SLOT], row[Item.SLOT] >= 0) for row in rows)

    together = pieces(run(work), b)
    assert together == pieces(run(Work(**alone)), 0)
    units = work.units()
    for (head, row_begin, row_end, kv_begin, kv_end), _ in together:
        low, high = units[b, head, row_begin, row_end]
        assert kv_begin == low or kv_begin % 64 == 0
        assert kv_end == min(high, (kv_begin // 64 + 1) * 64)


BATCHES = {
    "constant": lambda rng, n: np.full(n, 4096),
    "uniform": lambda rng, n: rng.integers(1, 8192, n),
    "zipf": lambda rng, n: 1 + 500_000 // np.arange(1, n + 1),
    "one giant": lambda rng, n: np.append(rng.integers(1, 2000, n - 1), 1_000_000),
}


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("ctas", [2, 8, 132])
@pytest.mark.parametrize("size", [1, 7, 140, 700])
@pytest.mark.parametrize("lengths", BATCHES)
def test_loads_are_even(lengths: str, size: int, ctas: int, heads: int) -> None:
    kv_lens = tuple(BATCHES[lengths](np.random.default_rng(0), size).tolist())
    work = Work((1,) * size, kv_lens, heads=heads, ctas=ctas)
    made = run(work)
    check(work, made)
    check_even(work, made)
    loads = made.loads(work)
    mean = sum(loads) / ctas
    if mean >= 20 * (MIN_PIECE + work.overhead):  # whole units and granules are no excuse
        assert max(loads) <= 1.1 * mean


def test_work_is_dealt_in_parts_that_share_a_cache() -> None:
    """CTAs that work at the same time read the K and V of a head of few requests."""
    shape = {"ctas": 132, "group": 4, "tile": 128, "tokens_at_once": 10_000}
    work = Work((4096, 3000, 900), (4096, 9000, 900), 4, **shape)
    made = run(work)
    check(work, made)
    check_even(work, made)
    assert made.header[Header.NUM_SLOTS] == 0
    queues = [made.rows()[a:b] for a, b in pairwise(made.cta_indptr.tolist())]
    parts = [[(item[Item.REQUEST] > 0, item[Item.KV_HEAD]) for item in queue] for queue in queues]
    assert all(a <= b for queue in parts for a, b in pairwise(queue))
    assert len({part for queue in parts for part in queue}) == 8


@pytest.mark.parametrize(
    ("size", "length", "heads", "at_once"), [(16, 1024, 16, 2), (8, 2048, 15, 4)]
)
def test_parts_of_one_head_that_are_uneven_become_larger(
    size: int, length: int, heads: int, at_once: int
) -> None:
    shape = {"ctas": 132, "tile": 128, "block": 112, "overhead": 1, "mask": "causal"}
    tokens = 10_922
    work = Work((length,) * size, (length,) * size, heads, tokens_at_once=tokens, **shape)
    made = run(work)
    check(work, made)
    loads, between = made.loads(work), tokens // length
    assert max(loads) * work.ctas <= 1.05 * sum(loads)
    for begin, end in pairwise(made.cta_indptr.tolist()):
        items = [i for i in made.rows()[begin:end] if i[Item.REQUEST] != between]
        parts = [(i[Item.REQUEST] > between, i[Item.KV_HEAD] // at_once) for i in items]
        assert parts == sorted(parts)


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize(
    ("qo_lens", "kv_lens"),
    [
        ((4096, 256), (4096, 60_000)),
        ((8192, 300), (8192, 40_000)),
        ((4096, 8192, 300, 2000), (4096, 8192, 40_000, 9000)),
        ((4096, 128, 2048, 256), (4096, 100_128, 2048, 60_256)),
        ((512, 2048), (30_512, 2048)),
    ],
)
def test_parts_do_not_make_loads_uneven(
    qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], heads: int
) -> None:
    shape = {"ctas": 132, "group": 32 // heads, "tile": 128, "block": 128, "overhead": 1}
    made = run(Work(qo_lens, kv_lens, heads, mask="causal", tokens_at_once=65_536, **shape))
    total = long_word(made.header, Header.TOTAL_LOAD_LO)
    assert made.header[Header.MAX_LOAD] * 132 <= 1.1 * total


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "is_cut"),
    [
        ((8192, 8192), (8192, 8192), True),  # 31 rounds and 4 units
        ((4096, 4096), (4096, 4096), False),  # 7 rounds and 100 units
        ((1024,) * 16, (1024,) * 16, False),  # a piece would be too short
        ((64,) * 132, (8192,) * 132, False),  # full rounds
    ],
)
def test_units_of_a_last_round_with_few_are_cut(
    qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], is_cut: bool
) -> None:
    shape = {"ctas": 132, "group": 4, "tile": 128, "block": 128, "overhead": 1}
    work = Work(qo_lens, kv_lens, 8, tokens_at_once=16_384, **shape)
    made = run(work)
    check(work, made)
    assert (made.header[Header.NUM_SLOTS] > 0) == is_cut
    loads = made.loads(work)
    if is_cut:
        assert max(loads) * 132 <= 1.005 * sum(loads)


def test_causal_prefill_is_even_and_whole() -> None:
    work = Work((4096, 3000), (4096, 9000), heads=8, ctas=132, group=4, tile=128, mask="causal")
    made = run(work)
    check(work, made)
    check_even(work, made)
    assert made.header[Header.NUM_SLOTS] == 0


def test_even_batches_are_not_cut() -> None:
    for size in (33, 66, 129, 132, 264, 500, 1000):
        made = run(Work((1,) * size, (5000,) * size, heads=8, ctas=132))
        assert made.header[Header.NUM_SLOTS] == 0


def test_only_what_is_longer_than_its_share_is_cut() -> None:
    work = Work((1,) * 1001, (100_000,) + (1000,) * 1000, heads=2, ctas=132)
    made = run(work)
    cut = {row[Item.REQUEST] for row in made.rows() if row[Item.SLOT] >= 0}
    assert cut == {0}
    check_even(work, made)


@pytest.mark.parametrize("kv_len", [16, 100, 128, 1000])
def test_short_units_are_not_worth_cutting(kv_len: int) -> None:
    work = Work((1,), (kv_len,), ctas=132)
    pieces = [row for row in run(work).rows() if row[Item.SLOT] >= 0]
    assert len(pieces) <= -(-kv_len // work.block) // MIN_PIECE
    for row in pieces:
        assert work.cost(row[Item.KV_BEGIN], row[Item.KV_END]) >= MIN_PIECE + work.overhead


def test_queues_are_longest_first() -> None:
    """Also where costs take all three digits of the sort, and totals pass int32."""
    rng = np.random.default_rng(0)
    kv_lens = [int(2**x) for x in rng.uniform(0, 30, 500)] + [LENGTH_LIMIT] * 8
    work = Work((1,) * 508, tuple(kv_lens), ctas=2, block=1, heads=2)
    made = run(work)
    check(work, made)
    assert sum(made.loads(work)) > 2**33
    costs = [work.cost(row[Item.KV_BEGIN], row[Item.KV_END]) for row in made.rows()]
    for begin, end in pairwise(made.cta_indptr.tolist()):
        assert costs[begin:end] == sorted(costs[begin:end], reverse=True)


CUT = Work((1, 1, 1), (5000, 300, 300), heads=2, ctas=8)


@pytest.mark.parametrize("split", [0, 128])
@pytest.mark.parametrize(
    ("buffer", "status", "word"),
    [
        ("items", Status.ITEMS_FULL, Header.NUM_ITEMS),
        ("slots", Status.SLOTS_FULL, Header.NUM_SLOTS),
        ("merges", Status.MERGES_FULL, Header.NUM_MERGES),
    ],
)
def test_full_buffer_is_named_and_nothing_is_written(
    split: int, buffer: str, status: Status, word: Header
) -> None:
    work = replace(CUT, split=split)
    needed = int(run(work).header[word])
    made = run(work, **{buffer: needed - 1})
    assert verdict(made.header) == (status, needed - 1, needed)
    assert made.header[word] == needed
    assert all((whole == UNTOUCHED).all() for whole in made.wholes[:-1])
    check(work, run(work, **{buffer: needed}))


@pytest.mark.parametrize(("split", "rows"), [(0, 2), (1, 2), (1, 40)])
def test_scratch_too_small_for_the_units_is_named(split: int, rows: int) -> None:
    """Of units, or of the pieces alone that these are cut in."""
    work = replace(CUT, split=split)
    made = run(work, scratch=sizes.scratch_words(rows, 0, 0) + 8 * work.ctas)
    assert verdict(made.header)[0] == Status.ITEMS_FULL
    assert all((whole == UNTOUCHED).all() for whole in made.wholes[:-1])


def test_scratch_too_small_for_the_machine_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="plan_work: cta_indptr or scratch is too small"):
        run(CUT, scratch=2048)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(1, LENGTH_LIMIT)), min_size=1))
def test_division_by_reciprocals_is_exact(pairs: list[tuple[int, int]]) -> None:
    pairs += [(k * d + e, d) for _, d in pairs for k in (1, 2**31 // d - 1) for e in (-1, 0)]
    pairs = [(a, d) for a, d in pairs if 0 <= a < 2**31]
    quotients = np.zeros(len(pairs), dtype=np.int32)
    call(dividing(), ints([a for a, _ in pairs]), ints([d for _, d in pairs]), quotients)
    assert quotients.tolist() == [a // d for a, d in pairs]


@cache
def dividing() -> Callable[..., None]:
    @T.prim_func(s_tir=True, check_well_formed=False)
    def divide(a_h: T.handle, d_h: T.handle, q_h: T.handle) -> None:
        n = T.int32()
        a = T.match_buffer(a_h, (n,), "int32", align=4)
        d = T.match_buffer(d_h, (n,), "int32", align=4)
        q = T.match_buffer(q_h, (n,), "int32", align=4)
        for i in T.serial(n):
            with T.sblock("divide"):
                vi = T.axis.spatial(n, i)
                q[vi] = Divisor(d[vi], reciprocal(d[vi])).div(a[vi])

    return compile_function(divide)
