"""Pictures with matplotlib: how a plan deals its work, which pages a batch reads.

Needs the extra ``viz``. Without it, `Plan` and `BSR` draw themselves as text, and a plan as SVG.
"""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING

import numpy as np

from tvm_attn.bsr import BSR
from tvm_attn.errors import SpecError
from tvm_attn.runtime.gantt import Bar, bars, caption
from tvm_attn.runtime.plan import Plan, WorkList

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

GOLDEN_TURN = 0.381966
"""Turn of the colour wheel from one request to the next, which keeps neighbours apart."""


def draw_plan(plan: Plan) -> Figure:
    """Draw a plan as a Gantt chart: a lane per CTA, a bar per work item.

    Parameters
    ----------
    plan : Plan
        From `AttentionModule.plan`.

    Returns
    -------
    matplotlib.figure.Figure
        One axes per family of query tiles. A bar's width is its cost in KV blocks, its colour its
        request; pieces of cut units are hatched.
    """
    heights = [0.6 + 0.18 * min(work.num_ctas, 40) for work in plan.work] or [0.6]
    figure = _new_figure(sum(heights) + 0.9 * len(heights))
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, work in zip(axes, plan.work, strict=False):
        _draw_lanes(ax, work)
    if not plan.work:
        axes[0].set_title("an empty plan: no work")
    return figure


def draw_bsr(fmt: BSR) -> Figure:
    """Draw which pages each request of a batch reads, and in which order.

    Parameters
    ----------
    fmt : BSR
        A page table or a block mask: rows are requests, columns pages, the colour is the place of
        the page in the request. For ragged K/V the columns are tokens.

    Returns
    -------
    matplotlib.figure.Figure
        One axes and a colour bar.

    Raises
    ------
    SpecError
        If the batch has no request.
    """
    if not fmt.batch_size:
        raise SpecError("fmt has no requests; there is nothing to draw")
    places = _places(fmt)
    figure = _new_figure(min(1.6 + 0.3 * fmt.batch_size, 8.0))
    ax = figure.subplots()
    unit = "token" if fmt.kv_indices is None else "page"
    image = ax.imshow(places, aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(image, ax=ax, label=f"{unit} of the request")
    ax.set_xlabel("column block" if fmt.num_col_blocks is not None else unit)
    ax.set_ylabel("request")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(_whole_numbers())
    ax.set_title(str(fmt).splitlines()[0], fontsize="medium", loc="left")
    return figure


def _new_figure(height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"pictures need {error.name}; install it with: pip install 'tvm-attn[viz]'",
            name=error.name,
        ) from error
    return Figure(figsize=(9.0, height), layout="constrained")


def _whole_numbers() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _draw_lanes(ax: Axes, work: WorkList) -> None:
    for cta, lane in enumerate(bars(work)):
        for bar in lane:
            _draw_bar(ax, cta, bar, work.max_load)
    ax.set_xlim(0, max(work.max_load, 1))
    ax.set_ylim(work.num_ctas - 0.5, -0.5)
    ax.yaxis.set_major_locator(_whole_numbers())
    ax.set_ylabel("CTA")
    ax.set_xlabel("load (KV blocks)")
    ax.set_title("\n".join(caption(work)), fontsize="medium", loc="left")


def _draw_bar(ax: Axes, cta: int, bar: Bar, longest: int) -> None:
    width = bar.end - bar.begin
    ax.barh(
        cta,
        width,
        left=bar.begin,
        height=0.85,
        color=colorsys.hls_to_rgb(bar.item.request * GOLDEN_TURN % 1, 0.66, 0.6),
        edgecolor="black" if bar.is_cut else "white",
        linewidth=0.6,
        hatch="///" if bar.is_cut else None,
    )
    if width > 0.025 * longest:
        label = str(bar.item.request)
        halo = {"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 0.6}
        ax.text(bar.begin + width / 2, cta, label, ha="center", va="center", fontsize=8, bbox=halo)


def _places(fmt: BSR) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return ``[batch, columns]``: the place of a column in a request, NaN where it is not read."""
    indptr = fmt.kv_indptr.cpu().numpy()
    if fmt.kv_indices is None:
        columns = np.arange(indptr[-1])
    else:
        columns = fmt.kv_indices.cpu().numpy()[: indptr[-1]]
    num_columns = fmt.num_col_blocks or int(columns.max(initial=0)) + 1
    places = np.full((fmt.batch_size, num_columns), np.nan)
    requests = np.repeat(np.arange(fmt.batch_size), np.diff(indptr))
    places[requests, columns] = np.arange(len(columns)) - indptr[requests]
    return places
