"""The device's planner, its threads one after another: the plans of the host, bit for bit."""

from __future__ import annotations

import pytest

from tests.device_planning import Setting, assert_same
from tvm_attn.runtime.workspace import PlanLimits

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
