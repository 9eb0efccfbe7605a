"""Plans with the planner in buffers of exact size, and checks what any work list must satisfy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import tvm
from tvm import tirx

from tvm_attn.codegen.host import BRANCHING
from tvm_attn.runtime import sizes
from tvm_attn.target import portable_host
from tvm_attn.tir.planner import work_planner
from tvm_attn.tir.planner_lists import ListMaker
from tvm_attn.tir.planner_units import MIN_PIECE
from tvm_attn.worklist import HEADER_WORDS, Header, Item, Merge, Status

UNTOUCHED = -77777
Ints = np.ndarray


def compile_function(function: Any, maker: ListMaker | None = None) -> Callable[..., None]:
    functions = {function.attrs["global_symbol"]: function}
    module = tvm.IRModule(maker.beside(functions) if maker else functions)
    with tvm.transform.PassContext(**BRANCHING):
        executable = tvm.compile(module, target=portable_host().to_tvm())
    assert "AllocWorkspace" not in executable.mod.inspect_source(), "a variable is on the heap"
    return executable[function.attrs["global_symbol"]]


@cache
def plan_work(mask: str) -> Callable[..., None]:
    """``"window"`` takes a scalar ``window_left`` more, ``"limit"`` an array ``limits``."""
    left = tirx.Var("window_left", "int32")
    limits = tirx.decl_buffer((tirx.Var("num_limits", "int32"),), "int32", name="limits")
    bounds, extra = {
        "full": (None, ()),
        "limit": (lambda request, qo_len, kv_len, q_lo, q_hi: (None, limits[request]), (limits,)),
        "causal": (lambda request, qo_len, kv_len, q_lo, q_hi: (None, q_hi + 1), ()),
        "window": (lambda request, qo_len, kv_len, q_lo, q_hi: (q_lo - left, q_hi + 1), (left,)),
    }[mask]
    maker = ListMaker(bounds, extra)
    return compile_function(work_planner(maker), maker)


def ints(values: Any) -> Ints:
    return np.array(values, dtype=np.int32)


def prefix(lengths: Any) -> Ints:
    return ints(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def call(function: Callable[..., None], *arguments: Any) -> None:
    """Numpy arrays share their memory with the function."""

    def tensor(array: Ints) -> torch.Tensor:
        return (
            torch.from_numpy(array) if array.size else torch.empty(array.shape, dtype=torch.int32)
        )

    function(*(tensor(a) if isinstance(a, np.ndarray) else a for a in arguments))


def room(*shape: int) -> tuple[Ints, Ints]:
    """An array inside a larger one, to see what is written around it; and the larger one.

    Its address is a multiple of 4 bytes, and of no more.
    """
    size, pad = int(np.prod(shape)), 63
    whole = np.full(size + 2 * pad, UNTOUCHED, dtype=np.int32)
    return whole[pad : pad + size].reshape(shape), whole


def verdict(header: Ints) -> tuple[Status, int, int]:
    return Status(header[Header.STATUS]), int(header[Header.WHERE]), int(header[Header.VALUE])


def long_word(header: Ints, low: Header) -> int:
    return (int(header[low + 1]) << 32) + (int(header[low]) & 0xFFFFFFFF)


@dataclass(frozen=True)
class Work:
    """A batch and a machine. Fields default to what most tests want."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int = 1
    tokens_at_once: int = 0
    ctas: int = 8
    group: int = 1
    rows: tuple[int, int] = (1, 2**31 - 1)
    tile: int = 16
    block: int = 16
    overhead: int = 2
    split: int = 0
    mask: str = "full"
    window: int = 0
    q_pos: tuple[int, ...] | None = None
    kv_pos: tuple[int, ...] | None = None

    def q_position(self, b: int) -> int:
        return self.kv_lens[b] - self.qo_lens[b] if self.q_pos is None else self.q_pos[b]

    def kv_position(self, b: int) -> int:
        return 0 if self.kv_pos is None else self.kv_pos[b]

    def sees(self, b: int) -> Ints:
        """Which keys each fused row of a request sees."""
        q = np.arange(self.qo_lens[b] * self.group)[:, None] // self.group + self.q_position(b)
        k = np.arange(self.kv_lens[b])[None] + self.kv_position(b)
        low, high = self.bounds_of(b, q, q)
        return (k >= low) & (k < high)

    def bounds_of(self, b: int, q_lo: Any, q_hi: Any) -> tuple[Any, Any]:
        """Key positions that query positions see; for every key, bounds of the request's own."""
        first = self.kv_position(b) + 0 * q_lo
        last = first + self.kv_lens[b]
        return {
            "full": (first, last),
            "limit": (first, 0 * q_lo + self.window * (b + 1)),
            "causal": (first, q_hi + 1),
            "window": (q_lo - self.window, q_hi + 1),
        }[self.mask]

    def extra(self) -> list[Any]:
        """The arguments that the mask takes."""
        limits = ints([self.window * (b + 1) for b in range(len(self.qo_lens))])
        return {"window": [self.window], "limit": [limits]}.get(self.mask, [])

    def units(self) -> dict[tuple[int, int, int, int], tuple[int, int]]:
        """(request, head, first and last row) -> KV range, by the bounds of the tile's rows."""
        units = {}
        for b, (qo_len, kv_len) in enumerate(zip(self.qo_lens, self.kv_lens, strict=True)):
            rows = qo_len * self.group
            for begin in range(0, rows, self.tile) if self.rows[0] <= rows <= self.rows[1] else ():
                end = min(begin + self.tile, rows)
                rows_seen = begin // self.group, (end - 1) // self.group
                seen = self.bounds_of(b, *(self.q_position(b) + r for r in rows_seen))
                first, last = (min(max(x - self.kv_position(b), 0), kv_len) for x in seen)
                for head in range(self.heads):
                    units[b, head, begin, end] = (first, last) if first < last else (0, 0)
        return units

    def cost(self, begin: int, end: int) -> int:
        return -(-end // self.block) - begin // self.block + self.overhead

    def bounds(self) -> tuple[int, int, int, int]:
        """The arguments of the functions in `sizes`."""
        tiles = [-(-n * self.group // self.tile) for n in self.qo_lens]
        if not self.split:
            return sum(tiles), self.heads, self.ctas, 0
        longest = max(tiles, default=0)
        pieces = sizes.split_pieces(sum(tiles), longest, sum(self.kv_lens), self.split)
        return sum(tiles), self.heads, self.ctas, pieces


@dataclass
class WorkList:
    """A work list as plan_work wrote it, and the arrays that its arrays lie in."""

    items: Ints
    cta_indptr: Ints
    merge_items: Ints
    merge_indptr: Ints
    header: Ints
    wholes: list[Ints]

    def rows(self) -> list[list[int]]:
        return self.items[: self.header[Header.NUM_ITEMS]].tolist()

    def loads(self, work: Work) -> list[int]:
        costs = [work.cost(row[Item.KV_BEGIN], row[Item.KV_END]) for row in self.rows()]
        return [sum(costs[begin:end]) for begin, end in pairwise(self.cta_indptr.tolist())]


def run(work: Work, **sized: int) -> WorkList:
    """Plan with buffers of exactly the size that `sizes` gives, or as given.

    Scratch holds `garbage` at first.
    """
    bounds = work.bounds()
    units, _, ctas, pieces = bounds
    num_items = sized.get("items", sizes.max_items(*bounds))
    num_merges = sized.get("merges", sizes.max_merges(*bounds))
    shapes = [(num_items, 8), (ctas + 1,), (num_merges, 4), (num_merges + 1,), (HEADER_WORDS,)]
    outputs, wholes = zip(*(room(*shape) for shape in shapes), strict=True)
    scratch, around = room(sized.get("scratch", sizes.scratch_words(units, ctas, pieces)))
    scratch[:] = sized.get("garbage", 0)
    call(
        plan_work(work.mask),
        prefix(work.qo_lens),
        ints(work.kv_lens),
        ints([work.q_position(b) for b in range(len(work.qo_lens))]),
        ints([work.kv_position(b) for b in range(len(work.qo_lens))]),
        *work.extra(),
        *(
            len(work.qo_lens),
            work.heads,
            work.tokens_at_once,
            work.ctas,
            work.group,
        ),
        *(*work.rows, work.tile, work.block),
        *(work.overhead, work.split, sized.get("slots", sizes.max_slots(*bounds))),
        *(scratch, *outputs),
    )
    for array, whole in zip((*outputs, scratch), (*wholes, around), strict=True):
        pad = (whole.size - array.size) // 2
        assert (whole[:pad] == UNTOUCHED).all() and (whole[pad + array.size :] == UNTOUCHED).all()
    return WorkList(*outputs, list(wholes))


def check(work: Work, made: WorkList) -> None:
    """All that must hold of a work list, whatever the policy."""
    header, items = made.header, made.rows()
    assert verdict(header)[0] == Status.OK
    indptr = made.cta_indptr.tolist()
    assert indptr[0] == 0 and indptr[-1] == len(items) and indptr == sorted(indptr)
    assert all(row[Item.SEEN] == 0 for row in items)
    loads = made.loads(work)
    assert header[Header.MAX_LOAD] == min(max(loads), 2**31 - 1)
    assert long_word(header, Header.TOTAL_LOAD_LO) == sum(loads)
    check_cover(work, items, header)
    check_merges(made, items)


def check_cover(work: Work, items: list[list[int]], header: Ints) -> None:
    """The pieces of each unit make up its KV range, in KV order one slot after another."""
    pieces: dict[Any, list[Any]] = {}
    for request, head, row_begin, row_end, *piece, _ in items:
        pieces.setdefault((request, head, row_begin, row_end), []).append(piece)
    units = work.units()
    assert pieces.keys() == units.keys()
    uncut = [0]
    for unit, (begin, end) in units.items():
        parts = sorted(pieces[unit])
        edges = [begin, *(part[1] for part in parts)]
        assert [part[:2] for part in parts] == [list(edge) for edge in pairwise(edges)]
        assert edges[-1] == end
        assert len(parts) == 1 or all(low < high for low, high in pairwise(edges))
        slots = [part[2] for part in parts]
        if len(parts) == 1:
            assert slots == [-1]
            uncut.append(work.cost(begin, end))
        else:
            assert slots == list(range(slots[0], slots[0] + len(slots)))
    assert header[Header.MAX_UNIT] == max(uncut)


def check_merges(made: WorkList, items: list[list[int]]) -> None:
    """The merge map has every cut unit with its slots, and every slot once."""
    num_slots, num_merges = made.header[Header.NUM_SLOTS], made.header[Header.NUM_MERGES]
    indptr = made.merge_indptr[: num_merges + 1].tolist()
    assert indptr[0] == 0 and indptr[-1] == num_slots
    unit_of = {row[Item.SLOT]: row[:4] for row in items if row[Item.SLOT] >= 0}
    assert sorted(unit_of) == list(range(num_slots))
    merges = made.merge_items[:num_merges].tolist()
    for merge, (begin, end) in zip(merges, pairwise(indptr), strict=True):
        assert end - begin >= 2
        for slot in range(begin, end):
            assert unit_of[slot] == [merge[m] for m in Merge]


def check_even(work: Work, made: WorkList) -> None:
    """The promise: 1.1 times the mean, or a unit left whole, or (short loads) a few granules."""
    loads = made.loads(work)
    mean = sum(loads) / len(loads)
    slack = (4 if mean < MIN_PIECE + work.overhead else 2) * (MIN_PIECE + work.overhead)
    assert max(loads) <= max(1.1 * mean, made.header[Header.MAX_UNIT], mean + slack)
    assert made.header[Header.NUM_SLOTS] <= 2 * work.ctas
