"""Pairwise covering: every pair of values meets, in few rows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_attn._pairwise import Row, pairwise_rows, uncovered_pairs

FEW = settings(max_examples=15)
seeds = st.integers(0, 2**16)
factor_sizes = st.lists(st.integers(1, 5), min_size=2, max_size=5)


@FEW
@given(factor_sizes, seeds)
def test_pairwise_rows_cover_all_pairs(sizes: list[int], seed: int) -> None:
    factors = {f"factor{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    rows = pairwise_rows(factors, seed=seed)
    assert not uncovered_pairs(factors, rows)
    assert rows == pairwise_rows(factors, seed=seed)
    least, second = sorted(sizes)[-2:]
    assert least * second <= len(rows) <= math.prod(sizes)


@pytest.mark.parametrize("row", [{"a": 1, "b": 1}, {"a": 2, "b": 9}])
def test_rows_that_are_given_count(row: Row) -> None:
    factors = {"a": (0, 1), "b": (0, 1)}
    rows = pairwise_rows(factors, given=[row])
    assert rows[0] == row
    assert len(rows) == (4 if row == {"a": 1, "b": 1} else 5)
    assert len(uncovered_pairs(factors, rows[:1])) == len(rows) - 1
