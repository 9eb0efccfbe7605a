"""The picture of measured rows under the roofline: where points lie, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tvm_attn.bench import roofline
from tvm_attn.errors import SpecError

PREFILL = {
    "group": "prefill",
    "row": "B2 S8192 32/8 d128 full",
    "us": 1000.0,
    "cuDNN": 600.0,
    "needed": 1.1,
}
DECODE = {
    "group": "decode",
    "row": "b16 kv2048 32/8 page16",
    "us": 40.0,
    "read": 32.0,
    "share": 0.8,
    "needed": 0.76,
}


def test_points_lie_where_operations_and_bytes_say() -> None:
    prefill, decode = roofline.points([PREFILL, DECODE])
    flops = 4 * 2 * 8192**2 * 32 * 128
    assert prefill.intensity == pytest.approx(flops / (2 * 2 * 8192 * 2 * 128 * (32 + 8)))
    assert prefill.rate == pytest.approx(flops / 1e-3 / 1e12)
    assert prefill.peer == pytest.approx(660.0)
    flops = 4 * 16 * 2048 * 32 * 128
    moved = 2 * 16 * 2048 * 8 * 128 * 2 + 2 * 16 * 32 * 128 * 2
    assert decode.intensity == pytest.approx(flops / moved)
    assert decode.rate == pytest.approx(flops / 40e-6 / 1e12)
    assert decode.peer == pytest.approx(decode.rate * 0.76 / 0.8)


def test_float8_moves_half_of_the_bytes() -> None:
    row = {**DECODE, "group": "fp8", "row": "b16 kv2048 32/8 page16 e4m3"}
    wide, narrow = roofline.points([DECODE, row])
    assert narrow.intensity / wide.intensity == pytest.approx(2, rel=0.01)


def test_rows_without_a_time_or_of_another_name_are_left_out() -> None:
    wrong = {"group": "prefill", "row": PREFILL["row"], "error": "off", "verdict": "WRONG"}
    assert roofline.points([wrong, {**PREFILL, "row": "B3 S5"}]) == []
    with pytest.raises(SpecError, match="no rows"):
        roofline.draw([], "")


def test_a_picture_is_drawn_from_lines(tmp_path: Path) -> None:
    lines = tmp_path / "rows.json"
    lines.write_text("a card\n" + "\n".join(json.dumps(row) for row in (PREFILL, DECODE)))
    picture = tmp_path / "roofline.svg"
    assert roofline.main([str(lines), "-o", str(picture), "--title", "a card"]) == 0
    assert picture.read_text(encoding="utf-8").count("<svg") == 1
