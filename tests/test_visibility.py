"""Keys that all rows see, read off a mask: held against the mask itself, pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import sym, tirx
from tvm.script import tirx as T

from tvm_attn import variants
from tvm_attn.spec import Param
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.signature import close_over, ints
from tvm_attn.tir.visibility import ALL, NONE, Range, seen_by_all
from tvm_attn.variant import MAX_POSITION, AttentionVariant

WINDOW, HEADS, KV_LEN, BATCH = 7, 3, 30, 1
KEYS = range(-40, 60)
TRIALS = 200


@dataclass(frozen=True)
class Pair:
    """What masks may ask of a query row and of a key, as numbers."""

    qo_idx: int
    q_pos: int
    qo_head: int
    kv_idx: int
    kv_pos: int


@dataclass(frozen=True)
class Case:
    """A mask, and whether a pair is visible; `is_exact` if no visible key is left out."""

    variant: AttentionVariant
    sees: Callable[[Pair], bool]
    is_exact: bool = True


def masked(mask: Callable[[Any], Any], *params: Param) -> AttentionVariant:
    return AttentionVariant(mask=mask, params=params)


def same(mask: Callable[[Any], Any], *, is_exact: bool = True) -> Case:
    """Return the case of a mask that is the same function of expressions as of numbers."""
    return Case(masked(mask), mask, is_exact)


CASES = {
    "no mask": Case(AttentionVariant(), lambda x: True),
    "causal": Case(variants.causal(), lambda x: x.kv_pos <= x.q_pos),
    "window": Case(variants.sliding_window(), lambda x: x.kv_pos >= x.q_pos - WINDOW),
    "causal window": Case(
        variants.causal() & variants.sliding_window(),
        lambda x: x.q_pos - WINDOW <= x.kv_pos <= x.q_pos,
    ),
    "prefix": same(lambda x: x.kv_pos < 16),
    "index": same(lambda x: x.kv_idx + 4 > x.qo_idx),
    "length": Case(masked(lambda x: x.kv_idx < x.kv_len - 4), lambda x: x.kv_idx < KV_LEN - 4),
    "half": same(lambda x: 2 * x.kv_pos <= x.q_pos + 3),
    "third": same(lambda x: x.kv_pos * 3 > x.q_pos - 5),
    "mirrored": same(lambda x: 9 - x.kv_pos >= x.q_pos),
    "less": same(lambda x: x.kv_pos < x.q_pos),
    "greater": same(lambda x: x.kv_pos > x.q_pos - 3),
    "swapped": same(lambda x: x.q_pos > x.kv_pos),
    "rows only": same(lambda x: x.q_pos >= 12),
    "heads": same(lambda x: x.kv_pos >= x.q_pos - 2 * x.qo_head),
    "request": Case(masked(lambda x: x.batch < 2), lambda x: BATCH < 2),
    "two fields of a row": same(lambda x: x.kv_pos <= x.q_pos - x.qo_idx + 1, is_exact=False),
}
LIMIT = Param("limit", "tensor", "int32", ("length",))
NOT_TOLD = {
    "either": masked(lambda x: tirx.Or(x.kv_pos < 4, x.kv_pos <= x.q_pos)),
    "not": masked(lambda x: tirx.Not(tirx.And(x.kv_pos > x.q_pos, x.kv_pos > 3))),
    "equal": masked(lambda x: x.kv_pos == x.q_pos),
    "product": masked(lambda x: x.kv_pos * x.q_pos < 50),
    "square": masked(lambda x: x.kv_pos * x.kv_pos < 50),
    "larger": masked(lambda x: x.kv_pos <= tirx.max(x.q_pos, 4)),
    "chunks": masked(lambda x: tirx.floordiv(x.kv_pos, 4) <= tirx.floordiv(x.q_pos, 4)),
    "a tensor by row": masked(lambda x: x.kv_pos <= x.limit[x.q_pos], LIMIT),
    "a tensor by key": masked(lambda x: x.limit[x.kv_idx] <= x.q_pos, LIMIT),
    "a bitmap": variants.custom_mask(),
    "a causal bitmap": variants.causal() & variants.custom_mask(),
    "a run-time slope": masked(lambda x: x.kv_pos * x.slope <= 3, Param("slope", dtype="int32")),
    "floats": masked(lambda x: tirx.Cast("float32", x.kv_pos) <= tirx.Cast("float32", x.q_pos)),
    "int64": masked(lambda x: tirx.Cast("int64", x.kv_pos) <= tirx.Cast("int64", x.q_pos)),
}


def compiled(variant: AttentionVariant, window: int = WINDOW) -> Callable[..., tuple[int, int]]:
    """Return `seen_by_all` as a function of rows ``first..last``, first head and both shifts."""
    hooks = Hooks(variant)

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(given_h: T.handle, seen_h: T.handle) -> None:
        given = ints(given_h, "given")
        seen = ints(seen_h, "seen")
        fixed = T.meta_var({"batch": given[5], "kv_len": given[6]})
        tokens = T.meta_var(Range(given[0], given[1]))
        heads = T.meta_var(Range(given[2], given[2] + HEADS - 1))
        rows = T.meta_var({"qo_idx": tokens, "q_pos": tokens.plus(given[3]), "qo_head": heads})
        found = T.meta_var(seen_by_all(hooks, fixed, rows, given[4]))
        seen[0] = found.first
        seen[1] = found.last

    closed = close_over(definition, hooks.parameters(), before=1, name="seen")
    function = tvm.compile(tvm.IRModule({"seen": closed}), target="llvm")["seen"]
    params = [window for _ in hooks.parameters()]

    def call(*given: int) -> tuple[int, int]:
        seen = np.zeros(2, np.int32)
        function(np.array([*given, BATCH, KV_LEN], np.int32), *params, seen)
        return int(seen[0]), int(seen[1])

    return call


def trials() -> list[tuple[int, int, int, int, int]]:
    """Return rows ``first..last``, first head, shifts of queries and keys: the same every time."""
    random = Random(0)
    found = []
    for _ in range(TRIALS):
        first = random.randrange(20)
        last = first + random.choice((0, 0, 1, 5, 17))
        shifts = random.randrange(-9, 25), random.randrange(-9, 25)
        found.append((first, last, random.randrange(6), *shifts))
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_rows_see_the_keys_that_are_found(name: str) -> None:
    case = CASES[name]
    seen = compiled(case.variant)
    lengths = set()
    for first, last, head, q_shift, kv_shift in trials():
        low, high = seen(first, last, head, q_shift, kv_shift)
        rows = [
            (token, token + q_shift, h)
            for token, h in product(range(first, last + 1), range(head, head + HEADS))
        ]
        for key in KEYS:
            visible = all(case.sees(Pair(*row, key, key + kv_shift)) for row in rows)
            found = low <= key <= high
            assert visible or not found
            assert found or not visible or not case.is_exact
        lengths.add(high - low)
    assert max(lengths) >= 0, "nothing was found in any trial"


@pytest.mark.parametrize("name", NOT_TOLD)
def test_no_keys_where_it_cannot_be_told(name: str) -> None:
    row, key = tirx.Var("row", "int32"), tirx.Var("shift", "int32")
    rows = dict.fromkeys(("qo_idx", "q_pos", "qo_head"), Range(row, row + 3))
    fixed = {"batch": tirx.const(0, "int32"), "kv_len": tirx.const(KV_LEN, "int32")}
    found = seen_by_all(Hooks(NOT_TOLD[name]), fixed, rows, key)
    assert sym.Analyzer().can_prove(found.last < found.first)


def test_without_a_mask_all_keys_are_seen() -> None:
    assert seen_by_all(Hooks(AttentionVariant()), {}, {}, tirx.const(0, "int32")) == ALL
    assert (int(ALL.first), int(ALL.last)) == (-MAX_POSITION, MAX_POSITION)
    assert int(NONE.first) > int(NONE.last)


@pytest.mark.parametrize("shift", [64 - MAX_POSITION, 0, MAX_POSITION - 64])
@pytest.mark.parametrize("window", [0, WINDOW, MAX_POSITION])
def test_far_positions_and_wide_windows_do_not_overflow(shift: int, window: int) -> None:
    seen = compiled(variants.causal() & variants.sliding_window(), window)
    assert seen(3, 5, 0, shift, shift) == (5 - window, 3)
