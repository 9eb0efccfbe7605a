"""``tvm-attn bench roofline``: a picture of measured rows beside what the card can do.

Reads the lines that ``tvm-attn bench prefill --json`` and ``bench decode --json`` print. A row lies
at the operations that count over the bytes of Q, K, V and O, each moved once. Rings are the best
published kernels on the same shapes: their ratio to cuDNN times cuDNN's speed in the run, or their
share of a plain read's. Needs the extra ``viz``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_attn.bench import decode_rows, prefill_rows
from tvm_attn.bench.decode import HEAD_DIM
from tvm_attn.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

READ, MULTIPLY = 4.458, 787.0
"""TB/s that a plain read of 2 GB reaches on an H200, and TFLOP/s of cuBLAS in bursts (bfloat16)."""
COLOURS = {
    "prefill": "#1f77b4",
    "paged": "#2ca02c",
    "append": "#9467bd",
    "lengths": "#ff7f0e",
    "variants": "#8c564b",
    "scaled": "#17becf",
    "decode": "#d62728",
}


@dataclass(frozen=True)
class Point:
    """A measured row.

    Attributes
    ----------
    group : str
        Of its benchmark.
    intensity : float
        Operations a byte.
    rate : float
        Measured TFLOP/s.
    peer : float or None
        TFLOP/s of the best published kernel, as this run has it.
    """

    group: str
    intensity: float
    rate: float
    peer: float | None


def points(results: Iterable[dict[str, Any]]) -> list[Point]:
    """Return the points of measured rows.

    Parameters
    ----------
    results : iterable of dict
        Rows of the two benchmarks, as their ``--json`` prints them. Those of other names and those
        without a time are left out.

    Returns
    -------
    list of Point
        In the order of the results.
    """
    prefill = {(row.group, row.name): row for row in prefill_rows.rows()}
    decode = {(row.group, row.name): row for row in decode_rows.rows()}
    found = []
    for result in results:
        name = (result["group"], result["row"])
        if "us" not in result:
            continue
        if "read" in result and name in decode:
            found.append(_decode_point(decode[name], result))
        elif name in prefill:
            found.append(_prefill_point(prefill[name], result))
    return found


def _prefill_point(row: prefill_rows.Row, result: dict[str, Any]) -> Point:
    qo_tokens = sum(qo for qo, _ in row.requests)
    kv_tokens = sum(kv for _, kv in row.requests)
    elements = qo_tokens * row.num_qo_heads + kv_tokens * row.num_kv_heads
    needed, cudnn = result.get("needed"), result.get("cuDNN")
    return Point(
        row.group,
        row.flops / (2 * 2 * elements * row.head_dim),
        row.flops / result["us"] / 1e6,
        needed * cudnn if needed and cudnn else None,
    )


def _decode_point(row: decode_rows.Row, result: dict[str, Any]) -> Point:
    tokens, queries = sum(row.kv_lens), len(row.kv_lens) * row.qo_len
    width = 1 if row.kv_dtype == decode_rows.FP8 else 2
    moved = 2 * HEAD_DIM * (width * tokens * row.num_kv_heads + 2 * queries * row.num_qo_heads)
    flops = 4 * tokens * row.qo_len * row.num_qo_heads * HEAD_DIM
    rate = flops / result["us"] / 1e6
    return Point("decode", flops / moved, rate, rate * result["needed"] / result["share"])


def draw(found: list[Point], title: str) -> Figure:
    """Draw points under the roofline of an H200.

    Parameters
    ----------
    found : list of Point
        From `points`.
    title : str
        Card, versions and date.

    Returns
    -------
    matplotlib.figure.Figure
        Both axes logarithmic.

    Raises
    ------
    SpecError
        If there is no point.
    ImportError
        If the extra is not there.
    """
    from matplotlib.figure import Figure

    if not found:
        raise SpecError("there are no rows to draw: none of those given was measured")
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    ax = figure.subplots()
    ax.set_xscale("log")
    ax.set_yscale("log")
    _draw_roof(ax, found)
    for group in dict.fromkeys(point.group for point in found):
        x, y = zip(*((p.intensity, p.rate) for p in found if p.group == group), strict=True)
        ax.plot(x, y, ".", color=COLOURS[group], markersize=7, label=group)
    rings = [(point.intensity, point.peer) for point in found if point.peer]
    if rings:
        x, y = zip(*rings, strict=True)
        ax.scatter(x, y, 60, "none", edgecolors="black", linewidths=0.6, label="best peer")
    ax.set_xlabel("operations per byte of Q, K, V and O")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(title, fontsize="medium", loc="left")
    ax.grid(visible=True, which="both", linewidth=0.2)
    ax.legend(loc="lower right")
    return figure


def _draw_roof(ax: Axes, found: list[Point]) -> None:
    ridge = MULTIPLY / READ
    low = min(min(point.intensity for point in found), ridge) / 1.5
    high = max(max(point.intensity for point in found), ridge) * 1.5
    ax.plot([low, ridge, high], [low * READ, MULTIPLY, MULTIPLY], color="black", linewidth=1.2)
    ax.text(ridge, MULTIPLY * 1.2, f"cuBLAS, {MULTIPLY:g} TFLOP/s", fontsize=8)
    ax.text(low * 1.1, low * READ * 1.8, f"read, {READ:g} TB/s", fontsize=8, rotation=38)


def main(argv: list[str] | None = None) -> int:
    """Draw the picture."""
    parser = argparse.ArgumentParser(prog="tvm-attn bench roofline", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="files of JSON lines")
    parser.add_argument("-o", "--output", type=Path, required=True, help="such as roofline.svg")
    parser.add_argument("--title", default="One NVIDIA H200, bfloat16", help="over the picture")
    options = parser.parse_args(argv)
    lines = (line for path in options.results for line in path.read_text().splitlines())
    results = [json.loads(line) for line in lines if line.startswith("{")]
    draw(points(results), options.title).savefig(options.output)
    return 0
