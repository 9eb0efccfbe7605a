"""Pictures of a plan as a Gantt chart: one lane per CTA, one bar per work item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from tvm_attn.worklist import NO_SLOT, Item

if TYPE_CHECKING:
    from tvm_attn.runtime.plan import WorkItem, WorkList

TEXT_CTAS = 16
WHOLE, CUT = "█▒", "/\\"

WIDTH, LEFT, RIGHT, TOP, BOTTOM, GAP = 860, 56, 24, 46, 38, 10
LANE_MIN, LANE_MAX, LANE_HATCHED, LANES_HEIGHT = 4, 18, 8, 420
SVG_ITEMS = 4000
LABEL_WIDTH = 16


class Bar(NamedTuple):
    """An item on the axis of its lane, in blocks."""

    begin: int
    end: int
    item: WorkItem

    @property
    def is_cut(self) -> bool:
        """Whether it is one of several pieces of a unit."""
        return self.item.slot != NO_SLOT


def bars(work: WorkList) -> Iterator[list[Bar]]:
    """Yield the bars of each CTA: its items one after the other, as wide as their cost.

    Parameters
    ----------
    work : WorkList
        The work of one family.
    """
    for queue in work.queues():
        ends = list(accumulate((work.cost(item) for item in queue), initial=0))
        yield [Bar(*bar) for bar in zip(ends, ends[1:], queue, strict=False)]


def caption(work: WorkList) -> tuple[str, str]:
    """Return two lines about a work list: what it holds, and how evenly it is dealt."""
    pieces, units = int((work.items[:, Item.SLOT] != NO_SLOT).sum()), len(work.merge_items)
    cut = f", {units} unit{'s'[: units > 1]} cut into {pieces} pieces" if pieces else ""
    mean = work.total_load / max(work.num_ctas, 1)
    lanes, whole = f"{work.num_ctas} CTAs", ""
    if work.family.cluster > 1:
        lanes = f"{work.num_ctas} clusters of {work.family.cluster} CTAs"
        whole = "" if pieces else "; none is cut, the CTAs of a cluster share each item"
    return (
        f"{work.family.name} tiles ({work.family.rows} rows): {len(work.items)} items on "
        f"{lanes}{cut}",
        f"load at most {work.max_load} blocks of {work.family.block} tokens, {mean:.1f} on "
        f"average: imbalance {work.imbalance:.2f}{whole}",
    )


def gantt_text(work: WorkList, width: int = 72) -> str:
    """Return a Gantt chart of characters, one line per CTA.

    Neighbouring items alternate between two shades; pieces of cut units are hatched. Where there
    are many CTAs, the first ones and the last are shown.

    Parameters
    ----------
    work : WorkList
        The work of one family.
    width : int
        Characters per line of the chart.
    """
    lanes = list(bars(work))
    shown = (
        range(len(lanes)) if len(lanes) <= TEXT_CTAS else [*range(TEXT_CTAS - 1), len(lanes) - 1]
    )
    label = len(str(max(len(lanes) - 1, 0)))
    load = len(str(work.max_load))
    columns = max(width - len("  cta  ") - len(" | |") - label - load, 1)
    lines = [
        f"  cta {cta:>{label}} |{_line(lanes[cta], columns, work.max_load)}| "
        f"{lanes[cta][-1].end if lanes[cta] else 0:>{load}}"
        for cta in shown
    ]
    if len(lanes) > len(shown):
        lines.insert(-1, f"  ... {len(lanes) - len(shown)} more ...")
    if work.num_slots:
        lines.append(f"  {WHOLE} whole units, {CUT} pieces of cut units")
    title, load_line = caption(work)
    return "\n".join([title, f"  {load_line}", *lines])


def _line(lane: list[Bar], columns: int, longest: int) -> str:
    """Draw a lane: each column shows the item at its middle."""
    line, place = "", 0
    for column in range(columns):
        middle = (column + 0.5) * longest / columns
        while place < len(lane) and lane[place].end <= middle:
            place += 1
        if place == len(lane):
            return line.ljust(columns)
        line += (CUT if lane[place].is_cut else WHOLE)[place % 2]
    return line


def gantt_svg(works: Sequence[WorkList]) -> str:
    """Return a standalone SVG: one chart per work list, one lane per CTA.

    A bar is an item; its width is its cost, its colour its request. Pieces of cut units are hatched
    and outlined, and a tooltip says what an item holds. The picture follows a reader's preference
    for light or dark and brings its own background. It draws at most `SVG_ITEMS` items of a work
    list, and says how many CTAs are left out.

    Parameters
    ----------
    works : sequence of WorkList
        As in `Plan.work`.
    """
    panels: list[str] = []
    y = float(GAP)
    for work in works:
        panel, height = _panel(work, y)
        panels.append(panel)
        y += height + GAP
    if not panels:
        panels.append(_text(WIDTH / 2, y + 20, "an empty plan: no work", "middle"))
        y += 40
    return "\n".join([_HEAD.format(width=WIDTH, height=y), *panels, "</svg>"])


def _panel(work: WorkList, y: float) -> tuple[str, float]:
    """Return the chart of one work list at height `y`, and how high it is."""
    lanes = _affordable(list(bars(work)))
    pitch = min(max(LANES_HEIGHT / max(len(lanes), 1), LANE_MIN), LANE_MAX)
    scale = (WIDTH - LEFT - RIGHT) / max(work.max_load, 1)
    bottom = y + TOP + pitch * len(lanes)
    title, load_line = caption(work)
    parts = [
        _text(LEFT, y + 18, title, "start", "caption"),
        _text(LEFT, y + 35, load_line, "start"),
    ]
    for tick in _ticks(work.max_load):
        x = LEFT + tick * scale
        parts.append(f'<path class="grid" d="M{x:.1f} {y + TOP:.1f}V{bottom + 4:.1f}"/>')
        parts.append(_text(x, bottom + 16, str(tick), "middle"))
    parts.append(_text(WIDTH - RIGHT, bottom + 30, "load (KV blocks)", "end"))
    every = max(round(16 / pitch), 1)
    for cta, lane in enumerate(lanes):
        top = y + TOP + pitch * cta
        if cta % every == 0:
            parts.append(_text(LEFT - 6, top + pitch / 2 + 4, f"cta {cta}", "end"))
        parts += [_rect(bar, top, pitch, scale, work.cost(bar.item)) for bar in lane]
    if len(lanes) < work.num_ctas:
        left_out = f"{work.num_ctas - len(lanes)} more CTAs are not drawn"
        parts.append(_text(LEFT, bottom + 30, left_out, "start"))
    return "\n".join(parts), bottom + BOTTOM - y


def _affordable(lanes: list[list[Bar]]) -> list[list[Bar]]:
    """Return the lanes that hold the first `SVG_ITEMS` items, at least one."""
    ends = accumulate(len(lane) for lane in lanes)
    return lanes[: max(sum(end <= SVG_ITEMS for end in ends), 1)]


def _rect(bar: Bar, top: float, pitch: float, scale: float, cost: int) -> str:
    """Return one item: its rectangle, the hatching of a piece, its label and tooltip."""
    item = bar.item
    x, width = LEFT + bar.begin * scale, (bar.end - bar.begin) * scale
    height = pitch - min(2, pitch / 4)
    box = f'x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"'
    tip = (
        f"request {item.request}, KV head {item.kv_head}\n"
        f"fused rows {item.row_begin}:{item.row_end}, KV tokens {item.kv_begin}:{item.kv_end}\n"
        f"cost {cost} blocks, {f'partial state {item.slot}' if bar.is_cut else 'whole unit'}"
    )
    hue = item.request * 137.508 % 360  # the golden angle keeps neighbours apart
    parts = [f'<rect class="item" {box} fill="hsl({hue:.0f} 62% 64%)"/>']
    if bar.is_cut:
        hatched = "piece" if height >= LANE_HATCHED else "piece thin"
        parts.append(f'<rect class="{hatched}" {box}/>')
    if width >= LABEL_WIDTH and height >= 10:
        label = _text(x + width / 2, top + height / 2 + 3.5, str(item.request), "middle", "label")
        parts.append(label)
    return f"<g><title>{escape(tip)}</title>{''.join(parts)}</g>"


def _ticks(longest: int) -> range:
    """Return about eight round numbers from 0 to `longest`."""
    step, decade = 1, 1
    while longest > 8 * step:
        step = next((decade * m for m in (2, 5, 10) if decade * m > step), 2 * decade)
        decade = 10 ** (len(str(step)) - 1)
    return range(0, longest + 1, step)


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    css = f' class="{style}"' if style else ""
    return f'<text{css} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" class="tvm-attn-gantt" role="img" \
width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}">
<style>
.tvm-attn-gantt text {{ font: 11px system-ui, sans-serif; fill: #57606a; }}
.tvm-attn-gantt text.caption {{ font-size: 13px; font-weight: 600; fill: #1f2328; }}
.tvm-attn-gantt text.label {{ font-size: 10px; fill: #10141a; pointer-events: none;
paint-order: stroke; stroke: #ffffff; stroke-opacity: 0.55; stroke-width: 3px; }}
.tvm-attn-gantt .page {{ fill: #ffffff; stroke: #d0d7de; }}
.tvm-attn-gantt .grid {{ stroke: #d8dee4; }}
.tvm-attn-gantt .item {{ stroke: #ffffff; stroke-width: 0.6; }}
.tvm-attn-gantt .piece {{ fill: url(#tvm-attn-cut); stroke: #24292f; stroke-width: 0.8; }}
.tvm-attn-gantt .thin {{ fill: none; stroke-width: 0.5; }}
@media (prefers-color-scheme: dark) {{
.tvm-attn-gantt text {{ fill: #9aa4b0; }}
.tvm-attn-gantt text.caption {{ fill: #e6edf3; }}
.tvm-attn-gantt .page {{ fill: #14181e; stroke: #30363d; }}
.tvm-attn-gantt .grid {{ stroke: #2d333b; }}
.tvm-attn-gantt .item {{ stroke: #14181e; }}
}}
</style>
<defs><pattern id="tvm-attn-cut" width="5" height="5" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><path d="M0 0V5" stroke="#24292f" stroke-opacity="0.45" \
stroke-width="1.5"/></pattern></defs>
<rect class="page" x="0.5" y="0.5" width="{width}" height="{height:.0f}" rx="6"/>"""
