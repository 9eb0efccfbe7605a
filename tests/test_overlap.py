"""When kernels begin and wait: on Hopper decoding follows a prefill where it leaves room."""

from __future__ import annotations

import re

import pytest

from tests.generating import generate_kernel
from tvm_attn.schedules.families import tiles_to_try
from tvm_attn.schedules.tiles_sm90 import short_tiles_to_try
from tvm_attn.schedules.tiles_sm90 import tiles_to_try as hopper_tiles
from tvm_attn.shipped import VARIANTS
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target

SPEC = AttentionSpec(8, 2, 128, q_dtype="bfloat16", page_size=16)
BEGIN_NEXT, WAIT = "griddepcontrol_launch_dependents()", "griddepcontrol_wait()"


def body_of(family: str, arch: str) -> str:
    target = parse_target(arch)
    if arch == "sm_90" and family != "decode":
        tile, *_ = hopper_tiles(SPEC) if family == "long" else short_tiles_to_try(SPEC)
    else:
        tile, *_ = tiles_to_try(SPEC, target, family, (False, False))
    return generate_kernel(SPEC, VARIANTS["causal"](SPEC), tile, target).body


def test_a_prefill_lets_decoding_begin_and_waits_for_nothing() -> None:
    body = body_of("long", "sm_90")
    assert (body.count(BEGIN_NEXT), body.count(WAIT)) == (1, 0)


def test_short_requests_wait_before_decoding_may_begin() -> None:
    body = body_of("short", "sm_90")
    assert (body.count(BEGIN_NEXT), body.count(WAIT)) == (1, 1)
    assert body.index(WAIT) < body.index(BEGIN_NEXT) < body.index("while (")


def test_decoding_waits_when_it_begins_unless_it_follows_and_always_when_it_ends() -> None:
    body = body_of("decode", "sm_90")
    assert (body.count(BEGIN_NEXT), body.count(WAIT)) == (1, 3)
    begins = list(re.finditer(rf"if \(follows == 0\) {{\s*\w*{re.escape(WAIT)}", body))
    assert len(begins) == 2, "with items, and without"
    assert body.rindex(WAIT) > body.rindex("while (") > begins[-1].end()


@pytest.mark.parametrize("family", ["decode", "short"])
def test_older_cards_have_neither(family: str) -> None:
    assert "griddepcontrol" not in body_of(family, "sm_80")
