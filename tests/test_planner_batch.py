"""The planner's first half: what it refuses, what it copies and derives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning import UNTOUCHED, Ints, call, compile_function, ints, long_word, prefix, verdict
from tvm_attn.tir.planner import batch_planner
from tvm_attn.tir.planner_ints import LENGTH_LIMIT
from tvm_attn.worklist import HEADER_WORDS, Header, Status


@cache
def plan_batch(paged: bool) -> Callable[..., None]:
    return compile_function(batch_planner(paged))


@dataclass
class Given:
    """The arguments of plan_batch; `last` None makes it ragged."""

    qo_indptr: Ints
    kv_indptr: Ints
    indices: Ints = field(default_factory=lambda: ints([]))
    last: Ints | None = None
    q_pos: Ints = field(default_factory=lambda: ints([]))
    kv_pos: Ints = field(default_factory=lambda: ints([]))
    page_size: int = 16
    group: int = 1
    short_rows: int = 16
    long_rows: int = 64

    def outputs(self) -> list[Ints]:
        size = len(self.qo_indptr)
        lengths = (size, size, len(self.indices), size - 1, size - 1, size - 1, HEADER_WORDS)
        return [np.full(n + 3 * (n != HEADER_WORDS), UNTOUCHED, dtype=np.int32) for n in lengths]

    def plan(self, outputs: list[Ints]) -> None:
        last = ints([]) if self.last is None else self.last
        arrays = self.qo_indptr, self.kv_indptr, self.indices, last, self.q_pos, self.kv_pos
        scalars = self.page_size, self.group, self.short_rows, self.long_rows
        call(plan_batch(self.last is not None), *arrays, *scalars, *outputs)


def paged(qo_lens: Any, kv_lens: Any, page_size: int = 16, **others: Any) -> Given:
    pages = [-(-n // page_size) for n in kv_lens]
    last = [(n - 1) % page_size + 1 for n in kv_lens]
    indices = np.random.default_rng(0).permutation(sum(pages))
    return Given(
        prefix(qo_lens), prefix(pages), ints(indices), ints(last), page_size=page_size, **others
    )


lens = st.integers(0, 40) | st.sampled_from([0, 1, 16, 64, 65])


@given(
    st.lists(st.tuples(lens, lens), max_size=9),
    st.integers(1, 20),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_batch_is_copied_and_derived(
    requests: list[tuple[int, int]], page_size: int, group: int, is_paged: bool, q: bool, kv: bool
) -> None:
    qo_lens, kv_lens = [r[0] for r in requests], [r[1] for r in requests]
    size, short_rows, long_rows = len(requests), 16, 64
    batch = paged(qo_lens, kv_lens, page_size, group=group)
    if not is_paged:
        batch = Given(prefix(qo_lens), prefix(kv_lens), group=group)
    batch.q_pos = ints(range(5, 5 + size)) if q else batch.q_pos
    batch.kv_pos = ints(range(-3, size - 3)) if kv else batch.kv_pos
    outputs = batch.outputs()
    batch.plan(outputs)

    *arrays, header = outputs
    q_pos = batch.q_pos if q else np.array(kv_lens, dtype=int) - np.array(qo_lens, dtype=int)
    kv_pos = batch.kv_pos if kv else np.zeros(size)
    expected = batch.qo_indptr, batch.kv_indptr, batch.indices, kv_lens, q_pos, kv_pos
    for array, values in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array[: len(values)], values)
        assert (array[len(values) :] == UNTOUCHED).all()
    rows = [n * group for n in qo_lens]
    assert verdict(header) == (Status.OK, 0, 0)
    assert header[Header.NNZ_QO] == sum(qo_lens)
    assert header[Header.MAX_PAGE] == max(batch.indices, default=-1)
    assert header[Header.MAX_QO_LEN] == max(qo_lens, default=0)
    assert header[Header.MAX_KV_LEN] == max(kv_lens, default=0)
    assert header[Header.UNITS_SHORT] == sum(0 < r <= short_rows for r in rows)
    assert header[Header.UNITS_LONG] == sum(-(-r // long_rows) for r in rows if r > short_rows)
    assert long_word(header, Header.NUM_TOKENS_LO) == sum(kv_lens)


def test_request_without_pages_has_no_keys_whatever_its_last_page_says() -> None:
    batch = paged([1, 1, 1], [20, 0, 5])
    batch.last[1] = -9
    outputs = batch.outputs()
    batch.plan(outputs)
    assert verdict(outputs[-1])[0] == Status.OK
    assert outputs[3][:3].tolist() == [20, 0, 5]


def test_tokens_of_a_batch_may_pass_int32() -> None:
    batch = paged([1] * 8, [LENGTH_LIMIT] * 8, page_size=LENGTH_LIMIT)
    outputs = batch.outputs()
    batch.plan(outputs)
    assert long_word(outputs[-1], Header.NUM_TOKENS_LO) == 8 * LENGTH_LIMIT


def broken(**arrays: Any) -> Given:
    """A good batch of three requests (40, 0 and 33 tokens in pages of 16), but for some arrays."""
    batch = paged([3, 1, 2], [40, 0, 33], q_pos=ints([37, -1, 31]), kv_pos=ints([0, 0, 0]))
    for name, value in arrays.items():
        setattr(batch, name, ints(value) if isinstance(value, list) else value)
    return batch


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (broken(qo_indptr=[1, 3, 4, 6]), (Status.QO_INDPTR, 0, 1)),
        (broken(qo_indptr=[0, 3, 2, 1]), (Status.QO_INDPTR, 2, 2)),
        (broken(kv_indptr=[-1, 3, 3, 6]), (Status.KV_INDPTR, 0, -1)),
        (broken(kv_indptr=[0, 3, 3, 2]), (Status.KV_INDPTR, 3, 2)),
        (broken(indices=[0, 1, 2, 3, 4]), (Status.KV_INDICES_SHORT, 5, 6)),
        (broken(indices=[0, 1, 2, 3, -5, -1]), (Status.KV_INDEX, 4, -5)),
        (broken(indices=[0, 1, -1, 3, 4, 5]), (Status.KV_INDEX, 2, -1)),
        (broken(last=[8, 16, 0]), (Status.LAST_PAGE_LEN, 2, 0)),
        (broken(last=[17, 16, 1]), (Status.LAST_PAGE_LEN, 0, 17)),
        (broken(qo_indptr=[0, 1, 1, 2**29], group=4), (Status.TOO_LONG, 2, 2**29 - 1)),
        (broken(page_size=2**29, last=[1, 1, 1]), (Status.TOO_LONG, 0, 3)),
        (broken(q_pos=[0, LENGTH_LIMIT, 0]), (Status.TOO_LONG, 1, LENGTH_LIMIT)),
        (broken(q_pos=[0, 0, -(2**31)]), (Status.TOO_LONG, 2, -(2**31))),
        (broken(kv_pos=[LENGTH_LIMIT - 1, 0, 0]), (Status.TOO_LONG, 0, LENGTH_LIMIT - 1)),
        # the first status of several, and of its culprits the first
        (broken(qo_indptr=[0, 3, 2, 1], kv_indptr=[1, 0, 0, 0]), (Status.QO_INDPTR, 2, 2)),
        (broken(kv_indptr=[0, 3, 1, 0], indices=[-1]), (Status.KV_INDPTR, 2, 1)),
        (broken(indices=[-1, 1, 2]), (Status.KV_INDICES_SHORT, 3, 6)),
        (broken(indices=[0, 1, 2, 3, 4, -6], last=[0, 0, 0]), (Status.KV_INDEX, 5, -6)),
        (broken(last=[8, 0, 99], q_pos=[LENGTH_LIMIT, 0, 0]), (Status.LAST_PAGE_LEN, 2, 99)),
        (Given(ints([0, 2]), ints([2, 1])), (Status.KV_INDPTR, 0, 2)),
        (Given(ints([0, 2]), ints([0, LENGTH_LIMIT + 1])), (Status.TOO_LONG, 0, LENGTH_LIMIT + 1)),
    ],
)
def test_bad_batch_is_named_and_nothing_but_page_ids_is_written(
    batch: Given, expected: tuple[Status, int, int]
) -> None:
    outputs = batch.outputs()
    batch.plan(outputs)
    assert verdict(outputs[-1]) == expected
    written = [output != UNTOUCHED for output in outputs]
    ids, is_id = outputs.pop(2), written.pop(2)
    assert not is_id[len(batch.indices) :].any()
    given = np.flatnonzero(is_id)
    assert np.array_equal(ids[given], batch.indices[given])
    assert not any(mask.any() for mask in written[:-1])
    assert written[-1].nonzero()[0].tolist() == [Header.STATUS, Header.WHERE, Header.VALUE]


def test_ids_behind_the_last_page_are_not_looked_at() -> None:
    batch = broken()
    batch.indices = np.append(batch.indices, ints([-1, 10**6]))
    outputs = batch.outputs()
    batch.plan(outputs)
    assert verdict(outputs[-1])[0] == Status.OK
    assert outputs[-1][Header.MAX_PAGE] == 5


@pytest.mark.parametrize("short", range(6))
def test_outputs_too_small_for_the_batch_are_an_error(short: int) -> None:
    batch = broken()
    outputs = batch.outputs()
    outputs[short] = outputs[short][:2].copy()
    with pytest.raises(RuntimeError, match=r"plan_batch: .* too small"):
        batch.plan(outputs)
