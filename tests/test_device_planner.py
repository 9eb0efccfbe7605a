"""The device's planner, its threads one after another: the plans of the host, bit for bit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.device_planning import Setting, assert_same
from tvm_attn.bsr import BSR
from tvm_attn.errors import LimitError, PlanError
from tvm_attn.runtime.device_plan import Held, refuses
from tvm_attn.runtime.workspace import PlanLimits
from tvm_attn.spec import Param

DECODING = PlanLimits(60, 60, 20000)
SETTINGS = {
    "decoding": Setting(DECODING, max_qo_len=1),
    "clusters": Setting(PlanLimits(4, 4, 6000), max_qo_len=1),
    "one head": Setting(PlanLimits(20, 20, 9000), heads=1, max_qo_len=1),
    "drafts": Setting(PlanLimits(40, 160, 20000), max_qo_len=4, mask="window", window=1500),
    "short": Setting(PlanLimits(30, 200, 20000), max_qo_len=16, heads=3),
    "all": Setting(PlanLimits(30, 3000, 20000), mask="window", window=1500),
    "ragged": Setting(PlanLimits(30, 900, 9000), mask="full", paged=False),
    "fixed split": Setting(PlanLimits(30, 300, 9000), split=128),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_plans_are_those_of_the_host(name: str, backward: bool) -> None:
    setting = SETTINGS[name]
    kinds = set()
    for fmt in setting.batches(64, seed=len(name)):
        expected = setting.on_host(fmt)
        assert_same(expected, setting.on_device(fmt, backward).to_host())
        kinds |= {(work.family, work.num_slots > 0) for work in expected.work}
    assert len(kinds) > 1


def test_requests_without_keys_are_dealt_as_on_the_host() -> None:
    setting = SETTINGS["clusters"]
    fmt = setting.fmt([1, 1], [0, 0], np.random.default_rng(0))
    expected = setting.on_host(fmt)
    assert_same(expected, setting.on_device(fmt).to_host())
    assert [len(queue) for work in expected.work for queue in work.queues()].count(1) == 4


SMALL = Setting(PlanLimits(5, 12, 16 * 20, num_pages=900), max_qo_len=4)


def bad(**changes: tuple[int, int]) -> BSR:
    """Three requests of 40, 20 and 33 tokens; changes are (place, value) of an array."""
    arrays = {
        "qo_indptr": [0, 1, 2, 3],
        "kv_indptr": [0, 3, 5, 8],
        "kv_indices": list(range(8)),
        "kv_last_page_len": [8, 4, 1],
        "q_pos_offset": [39, 19, 32],
        "kv_pos_offset": [0, 0, 0],
    }
    for name, (place, value) in changes.items():
        arrays[name][place] = value
    offsets = {name: arrays.pop(name) for name in ("q_pos_offset", "kv_pos_offset")}
    return BSR.from_page_table(*arrays.values(), 16, **offsets)


OF_THE_HOST = [
    {"qo_indptr": (0, 1)},
    {"qo_indptr": (1, 3)},
    {"kv_indptr": (0, -1)},
    {"kv_indptr": (2, 2)},
    {"kv_indptr": (3, 9)},
    {"kv_indices": (6, -2)},
    {"kv_last_page_len": (1, 17)},
    {"kv_last_page_len": (2, 0)},
    {"q_pos_offset": (1, 2**29 + 1)},
    {"kv_pos_offset": (2, -(2**29) - 5)},
    {"qo_indptr": (2, -7), "kv_indptr": (1, -7)},
    {"kv_indices": (0, -1), "kv_last_page_len": (0, 0)},
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("changes", OF_THE_HOST, ids=str)
def test_what_is_wrong_is_what_the_host_finds(changes: dict[str, Any], backward: bool) -> None:
    with pytest.raises(PlanError) as found:
        SMALL.on_host(bad(**changes))
    with pytest.raises(PlanError, match=re.escape(str(found.value))):
        SMALL.on_device(bad(**changes), backward).check()
    assert_empty_states(SMALL)
    SMALL.on_device(bad()).check()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qo_indptr": (3, 14)}, LimitError, "max_qo_tokens=14, its plan was limited to 12"),
        ({"qo_indptr": (3, 7)}, PlanError, "max_qo_len=4, but a request has 5 queries"),
        ({"kv_indices": (7, 900)}, PlanError, r"kv_indices\[7\] is 900; .* num_pages=900"),
    ],
)
def test_a_batch_is_held_against_the_limits(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SMALL.on_device(bad(**changes)).check()
    assert_empty_states(SMALL)
    large = BSR.from_page_table([0, 1], [0, 21], list(range(21)), [3], 16)
    with pytest.raises(LimitError, match="max_kv_tokens=336, its plan was limited to 320"):
        SMALL.on_device(large).check()
    assert_empty_states(SMALL)


def assert_empty_states(setting: Setting) -> None:
    """Every row that the plan may have is an item's, in every head, and none has a key."""
    held = Held(setting.memory.room)
    indptr, seen = held.of("qo_indptr"), set()
    for family in setting.memory.counts:
        work = held.work(family)
        for item in (i for queue in work.queues() for i in queue) if work else ():
            assert item.kv_begin == item.kv_end == 0 and item.slot == -1
            first = int(indptr[item.request]) * setting.group
            rows = range(first + item.row_begin, first + item.row_end)
            seen |= {(item.kv_head, row) for row in rows}
    rows = setting.limits.max_qo_tokens * setting.group
    assert seen == {(head, row) for head in range(setting.heads) for row in range(rows)}


def test_what_a_device_does_not_plan() -> None:
    counts = Setting(PlanLimits(30, 3000, 20000)).memory.counts
    most = max(of_family.rows for of_family in counts.values())
    assert refuses(counts, (), 9999) == ""
    assert f"for {most} units and pieces of them, more than {most - 1}" in refuses(
        counts, (), most - 1
    )
    cached = {replace(family, cached_tokens=1): n for family, n in counts.items()}
    assert "dealt on the host; give a max_qo_len" in refuses(cached, (), 9999)
    crowd = {family: n._replace(num_ctas=1000) for family, n in counts.items()}
    assert "there are 1000 CTAs" in refuses(crowd, (), 9999)
    mask = Param("bits", kind="bitmap", at="plan")
    assert "bits is an array that is given at plan()" in refuses(counts, (mask,), 9999)
