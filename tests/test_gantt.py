"""Pictures of plans and formats: what they show is what is there."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib.colors
import numpy as np
import pytest

from tvm_attn.bsr import BSR
from tvm_attn.errors import SpecError
from tvm_attn.runtime import gantt
from tvm_attn.runtime.gantt import bars, caption, gantt_svg, gantt_text
from tvm_attn.runtime.plan import Family, WorkItem, WorkList
from tvm_attn.viz import draw_bsr, draw_plan
from tvm_attn.worklist import NO_SLOT

SVG = "{http://www.w3.org/2000/svg}"
FAMILY = Family("short", rows=16, block=64, overhead=2)


def work_list(queues: Sequence[Sequence[WorkItem]]) -> WorkList:
    """Return the work list of these queues, with its sums counted here."""
    items = [item for queue in queues for item in queue]
    loads = [sum(2 + -(-(i.kv_end - i.kv_begin) // 64) for i in queue) for queue in queues]
    ends = np.cumsum([0, *map(len, queues)])
    slots = sum(item.slot != NO_SLOT for item in items)
    return WorkList(
        family=FAMILY,
        items=np.array([[*item, 0] for item in items], np.int32).reshape(-1, 8),
        cta_indptr=ends.astype(np.int32),
        merge_items=np.zeros((slots // 2, 4), np.int32),
        merge_indptr=np.arange(0, slots + 1, 2, dtype=np.int32),
        num_slots=slots,
        max_load=max(loads, default=0),
        total_load=sum(loads),
    )


def item(request: int, kv_begin: int, kv_end: int, slot: int = NO_SLOT) -> WorkItem:
    return WorkItem(request, 0, 0, 4, kv_begin, kv_end, slot)


@pytest.fixture
def work() -> WorkList:
    """Two CTAs share a request of 640 tokens; loads are 10 and 8 + 2 blocks."""
    first = [item(0, 0, 128), item(1, 0, 256, slot=0)]  # 4 + 6 blocks
    second = [item(1, 256, 640, slot=1), item(2, 0, 1)]  # 8 + 3 blocks
    return work_list([first, second])


def test_bars_are_as_wide_as_their_cost(work: WorkList) -> None:
    lanes = [[(bar.begin, bar.end, bar.is_cut) for bar in lane] for lane in bars(work)]
    assert lanes == [[(0, 4, False), (4, 10, True)], [(0, 8, True), (8, 11, False)]]


def test_text_shows_every_item_and_load(work: WorkList) -> None:
    title, loads, *lines, legend = gantt_text(work, width=47).splitlines()
    assert title == "short tiles (16 rows): 4 items on 2 CTAs, 1 unit cut into 2 pieces"
    assert loads == "  load at most 11 blocks of 64 tokens, 10.5 on average: imbalance 1.05"
    assert lines == [
        "  cta 0 |" + "█" * 12 + "\\" * 18 + "   | 10",
        "  cta 1 |" + "/" * 24 + "▒" * 9 + "| 11",
    ]
    assert legend.endswith("pieces of cut units")


def test_clusters_say_why_nothing_is_cut(work: WorkList) -> None:
    whole = work_list([[item(0, 0, 640)], [item(1, 0, 128)]])
    shared, cut = (replace(one, family=replace(FAMILY, cluster=4)) for one in (whole, work))
    title, loads = caption(shared)
    assert title == "short tiles (16 rows): 2 items on 2 clusters of 4 CTAs"
    assert loads.endswith("imbalance 1.50; none is cut, the CTAs of a cluster share each item")
    assert caption(cut)[1].endswith("imbalance 1.05")


def test_text_is_as_wide_as_asked(work: WorkList) -> None:
    for width in (40, 72, 100):
        chart = [line for line in gantt_text(work, width).splitlines() if "|" in line]
        assert {len(line) for line in chart} == {width - 1}


def test_text_keeps_the_first_ctas_and_the_last() -> None:
    text = gantt_text(work_list([[item(cta, 0, 64 * (cta + 1))] for cta in range(40)]))
    shown = [int(cta) for cta in re.findall(r"cta +(\d+) \|", text)]
    assert shown == [*range(15), 39]
    assert "... 24 more ..." in text


def test_uncut_work_has_no_legend() -> None:
    assert "pieces" not in gantt_text(work_list([[item(0, 0, 64)]]))


def test_empty_work_is_drawn() -> None:
    nothing = work_list([[], []])
    assert caption(nothing)[0].endswith("0 items on 2 CTAs")
    assert gantt_text(nothing).count("cta") == 2
    ElementTree.fromstring(gantt_svg([nothing]))
    assert "no work" in gantt_svg([])


def test_svg_has_a_rectangle_and_a_tooltip_for_every_item(work: WorkList) -> None:
    root = ElementTree.fromstring(gantt_svg([work, work]))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "item"]
    pieces = [box for box in root.iter(f"{SVG}rect") if "piece" in box.get("class", "")]
    assert (len(boxes), len(pieces)) == (8, 4)
    unit = float(boxes[0].get("width", 0)) / 4
    widths = [float(box.get("width", 0)) / unit for box in boxes[:4]]
    assert np.allclose(widths, [4, 6, 8, 3], atol=0.01)
    tips = [title.text for title in root.iter(f"{SVG}title")][:4]
    assert tips[1] == (
        "request 1, KV head 0\nfused rows 0:4, KV tokens 0:256\ncost 6 blocks, partial state 0"
    )
    assert str(tips[3]).endswith("cost 3 blocks, whole unit")


def test_svg_colours_requests(work: WorkList) -> None:
    root = ElementTree.fromstring(gantt_svg([work]))
    fills = [box.get("fill") for box in root.iter(f"{SVG}rect") if box.get("class") == "item"]
    assert fills[1] == fills[2], "two pieces of one request"
    assert len(set(fills)) == 3


def test_svg_stays_inside_its_page_and_knows_dark_mode(work: WorkList) -> None:
    text = gantt_svg([work])
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter(f"{SVG}rect"):
        right = float(box.get("x", 0)) + float(box.get("width", 0))
        bottom = float(box.get("y", 0)) + float(box.get("height", 0))
        assert right <= width + 0.5 and bottom <= height + 0.5
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(href|src)=", text), "it loads nothing"


def test_svg_of_a_large_plan_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gantt, "SVG_ITEMS", 10)
    text = gantt_svg([work_list([[item(0, 0, 64)] * 3] * 5)])
    assert text.count("<title>") == 9
    assert "2 more CTAs are not drawn" in text


@pytest.mark.parametrize("longest", [1, 2, 7, 8, 9, 26, 140, 1234, 99_999])
def test_ticks_are_few_and_round(longest: int) -> None:
    ticks = gantt._ticks(longest)
    assert 2 <= len(ticks) <= 9 and ticks[0] == 0 and ticks[-1] <= longest
    assert str(ticks.step).rstrip("0") in ("1", "2", "5")


def test_figure_of_a_plan(work: WorkList) -> None:
    figure = draw_plan(SimpleNamespace(work=[work, work]))
    for ax in figure.axes:
        assert [bar.get_width() for bar in ax.patches] == [4, 6, 8, 3]
        assert [bool(bar.get_hatch()) for bar in ax.patches] == [False, True, True, False]
        colours = {matplotlib.colors.to_hex(bar.get_facecolor()) for bar in ax.patches}
        assert len(colours) == 3
    assert "no work" in draw_plan(SimpleNamespace(work=[])).axes[0].get_title()


def test_the_extra_is_named_where_it_is_missing(
    work: WorkList, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"tvm-attn\[viz\]"):
        draw_plan(SimpleNamespace(work=[work]))


def drawn(fmt: BSR) -> np.ndarray:
    (image,) = draw_bsr(fmt).axes[0].images
    return np.ma.filled(image.get_array().astype(float), np.nan)


def test_figure_of_a_page_table() -> None:
    fmt = BSR.from_page_table([0, 1, 2], [0, 2, 3], [3, 0, 3], [4, 1], page_size=4)
    nan = np.nan
    np.testing.assert_equal(drawn(fmt), [[1, nan, nan, 0], [nan, nan, nan, 0]])


def test_figure_of_other_formats() -> None:
    nan = np.nan
    ragged = BSR.from_ragged([0, 1, 2], [0, 1, 3])
    np.testing.assert_equal(drawn(ragged), [[0, nan, nan], [nan, 0, 1]])
    mask = BSR.from_block_mask([[True, False, False], [True, True, False]], 2, 2)
    np.testing.assert_equal(drawn(mask), [[0, nan, nan], [0, 1, nan]])
    with pytest.raises(SpecError, match="no requests"):
        draw_bsr(BSR.from_ragged([0], [0]))
