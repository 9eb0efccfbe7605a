"""The log-sum-exp of a finished state: digits where they count, and values that are no numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tvm_attn.tir.states import OnlineSoftmax, PlainSum

VALUES = 1 << 18
INF, NAN = math.inf, math.nan


@functools.cache
def compiled(accumulation: type) -> Callable[[Any, Any], np.ndarray]:
    """Return ``lse(reference, total)`` of vectors."""
    state = accumulation()

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(reference_h: T.handle, total_h: T.handle, lse_h: T.handle) -> None:
        n = T.int32()
        reference = T.match_buffer(reference_h, (n,), "float32", align=4)
        total = T.match_buffer(total_h, (n,), "float32", align=4)
        lse = T.match_buffer(lse_h, (n,), "float32", align=4)
        for i in T.serial(n):
            lse[i] = state.lse(reference[i], total[i])

    module = tvm.IRModule({"lse": definition.with_attr("global_symbol", "lse")})
    function = tvm.compile(module, target="llvm")["lse"]

    def call(reference: Any, total: Any) -> np.ndarray:
        given = [np.asarray(x, np.float32) for x in (reference, total)]
        lse = np.empty_like(given[1])
        function(*given, lse)
        return lse

    return call


def errors(reference: np.ndarray, total: np.ndarray, least: float = 0.0) -> np.ndarray:
    """Return errors in ulp of the result, or of `least` if that is larger."""
    reference, total = reference.astype(np.float32), total.astype(np.float32)
    exact = reference.astype(np.float64) + np.log2(total.astype(np.float64))
    ulp = np.spacing(np.maximum(np.abs(exact), least).astype(np.float32)).astype(np.float64)
    return np.abs(compiled(OnlineSoftmax)(reference, total) - exact) / ulp


@pytest.mark.parametrize(("low", "high"), [(63, 64), (63.6, 63.61), (70, 127), (61.5, 63)])
def test_a_reference_far_below_and_a_total_far_above(low: float, high: float) -> None:
    total = np.exp2(np.linspace(low, high, VALUES, endpoint=False))
    assert np.max(errors(np.full(VALUES, -60.3), total)) <= 2


def test_any_reference_and_any_total() -> None:
    """What is left of digits that cancel all the same is as good as those of a number near 1."""
    random = np.random.default_rng(0)
    reference = random.uniform(-200, 200, VALUES)
    total = np.exp2(random.uniform(-126, 127.9, VALUES))
    assert np.max(errors(reference, total, least=1.0)) <= 2


def test_whole_exponents_are_exact() -> None:
    exponent = np.arange(-126, 128)
    total = np.exp2(exponent)
    for reference in (0, -60.5, 1000, -exponent):
        assert np.max(errors(reference + 0.0 * total, total)) == 0


def test_the_smallest_totals() -> None:
    assert np.max(errors(np.zeros(4), np.array([2.0**-149, 1e-44, 1e-40, 2.0**-126]))) <= 2


@pytest.mark.parametrize(
    ("reference", "total", "expected"),
    [
        *((0.0, 0.0, -INF), (-3.0e38, 0.0, -INF), (60.0, 0.0, -INF), (-INF, 1.0, -INF)),
        *((0.0, INF, INF), (-60.3, INF, INF), (INF, 1.0, INF), (INF, INF, INF)),
        *((0.0, NAN, NAN), (NAN, 1.0, NAN), (NAN, 0.0, NAN), (INF, NAN, NAN), (0.0, -1.0, NAN)),
    ],
)
def test_values_that_are_no_numbers(reference: float, total: float, expected: float) -> None:
    lse = compiled(OnlineSoftmax)([reference], [total])
    np.testing.assert_array_equal(lse, np.array([expected], np.float32))


def test_a_plain_sum_has_the_lse_with_which_parts_weigh_1() -> None:
    assert compiled(PlainSum)([3.0], [7.0]).tolist() == [1.0]
