"""Rows that are merged or copied: on the cores of a CPU, and on the threads of a GPU.

The definitions are loops over tiles of rows (the sblock ``tile``), inside over rows (``row``), and
inside of these over the elements of a row. Little is computed, and everything is read once: all
that a mapping has to do is to keep memory busy. Neighbouring threads, or lanes of a vector
register, have neighbouring elements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import s_tir, tirx

from tvm_attn.target import BuildTarget

Schedule = Any
Block = Any
Loop = Any

CTA_THREADS = 128
"""Threads of a CTA, where rows are short enough to share one."""

ELEMENTWISE = {"clear", "copy", "add", "close"}
"""Phases of a row that go over its elements."""

ROW_THREADS = 256
"""Most threads of a row; each has several neighbouring elements if that is not enough."""


@dataclass(frozen=True)
class RowTile:
    """How rows are shared out.

    Parameters
    ----------
    rows : int
        Rows of a tile: of a CTA of a GPU; a core takes one at a time.
    threads : int
        Threads of a row.
    unit : int
        Elements that a thread reads or writes at once.
    on_gpu : bool
        Whether there are threads to bind loops to.
    """

    rows: int
    threads: int
    unit: int
    on_gpu: bool


def row_tile(dim: int, unit: int, target: BuildTarget) -> RowTile:
    """Return the tile for rows of at most `dim` elements.

    Parameters
    ----------
    dim : int
        Elements of the longest row.
    unit : int
        Elements whose address is known to allow one access; they divide every row.
    target : BuildTarget
        A CPU, where vectors need no alignment, or a GPU.
    """
    if target.arch is None:
        return RowTile(1, 1, dim, False)
    threads = min(dim // unit, ROW_THREADS)
    return RowTile(max(1, CTA_THREADS // threads), threads, unit, True)


def map_rows(
    define: Callable[[int], Mapping[str, tirx.PrimFunc]], dim: int, unit: int, target: BuildTarget
) -> dict[str, tirx.PrimFunc]:
    """Return definitions over tiles of rows, scheduled, by symbol.

    Parameters
    ----------
    define : callable
        Returns the definitions by symbol, for tiles of so many rows.
    dim, unit, target
        As in `row_tile`.
    """
    tile = row_tile(dim, unit, target)
    modules = {name: schedule(f, tile).mod for name, f in define(tile.rows).items()}
    return {name: next(iter(mod.functions.values())) for name, mod in modules.items()}


def schedule(function: tirx.PrimFunc, tile: RowTile) -> Schedule:
    """Schedule a definition over tiles of rows; one without tiles stays as it is.

    Parameters
    ----------
    function : tvm.tirx.PrimFunc
        Of `tvm_attn.tir.states_merge` or `tvm_attn.tir.append`.
    tile : RowTile
        From `row_tile`; a definition that has the rows of a tile as a parameter was given them.

    Returns
    -------
    tvm.s_tir.Schedule
        Its ``mod`` holds the scheduled function.
    """
    sch = s_tir.Schedule(function)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        if _name(sch, block) == "tile":
            (_on_threads if tile.on_gpu else _on_cores)(sch, block, tile)
    return sch


def _on_cores(sch: Schedule, cta: Block, tile: RowTile) -> None:
    """Share tiles out to cores, and put the elements of a row in vector registers."""
    sch.parallel(sch.get_loops(cta)[0])
    for phase in _phases(sch, cta):
        if _name(sch, phase) in ELEMENTWISE:
            sch.vectorize(sch.get_loops(phase)[-1])


def _on_threads(sch: Schedule, cta: Block, tile: RowTile) -> None:
    """Bind tiles to CTAs, rows to ``threadIdx.y`` and the elements of a row to ``threadIdx.x``.

    Before: ``for t: (for r: lse[r] = s[t, r]), (for r: for d: o[r, d] += w[r] * v[t, r, d])``.
    After, in CTA t and thread (x, y): ``if x == 0: lse[y] = s[t, y]``, a barrier, and ``for d1:
    o[d1] += w * v[t, y, x, d1]``, `unit` elements at once. What is said of a row as a whole, each
    of its threads computes for itself, and one stores.
    """
    sch.bind(sch.get_loops(cta)[0], "blockIdx.x")
    for block in sch.get_child_blocks(cta):
        _, row = sch.split(sch.get_loops(block)[0], [None, tile.rows])
        sch.bind(row, "threadIdx.y")
        if _name(sch, block) == "load_lse":
            sch.set_scope(block, 0, "shared")
            _on_first_thread(sch, block, tile)
    for phase in _phases(sch, cta):
        if sch.get(phase).writes:
            sch.set_scope(phase, 0, "local")
        if _name(sch, phase) == "store_lse":
            _on_first_thread(sch, phase, tile)
        elif _name(sch, phase) in ELEMENTWISE:
            _on_row(sch, phase, tile)


def _on_row(sch: Schedule, phase: Block, tile: RowTile) -> None:
    """Share the elements of a row out to its threads, each a run of neighbouring ones."""
    chunks, element = sch.split(sch.get_loops(phase)[-1], [None, tile.unit])
    thread, chunk = sch.split(chunks, [tile.threads, None])
    sch.bind(thread, "threadIdx.x")
    sch.unroll(chunk)
    if _name(sch, phase) == "copy":
        sch.vectorize(element)
    else:
        sch.unroll(element)


def _on_first_thread(sch: Schedule, block: Block, tile: RowTile) -> None:
    """Let one thread of a row do what concerns the row as a whole."""
    _, thread = sch.split(sch.add_unit_loop(block), [None, tile.threads])
    sch.bind(thread, "threadIdx.x")


def _phases(sch: Schedule, cta: Block) -> list[Block]:
    """Return the sblocks inside of a row."""
    [row] = (block for block in sch.get_child_blocks(cta) if _name(sch, block) == "row")
    return list(sch.get_child_blocks(row))


def _name(sch: Schedule, block: Block) -> str:
    """Return the name of an sblock, without the number that its further traces have."""
    return re.sub(r"_\d+$", "", sch.get(block).name_hint)
