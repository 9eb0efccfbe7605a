"""Merging the parts of a cut unit: a CTA's warps take turns with them as they do with keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.join import store_state
from tvm_attn.schedules.primitives.scores import init_state
from tvm_attn.schedules.primitives.streams import StreamingCta
from tvm_attn.tir.rows import Rows
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr
from tvm_attn.worklist import NO_SLOT, Merge


@dataclass(frozen=True)
class Whole(Rows):
    """The rows of a unit that was cut: results, once its parts are merged."""

    words: Any
    m: Expr

    @staticmethod
    def of(cta: Any, given: Any, m: Expr) -> Whole:
        """Return cut unit `m`."""
        words = given.work.merge_items
        ids = (words[m, Merge.REQUEST], words[m, Merge.KV_HEAD])
        return Whole(cta.hooks, cta.spec.group_size, given.batch, *ids, words, m)

    @property
    def row0(self) -> Expr:
        """First fused row."""
        return self.words[self.m, Merge.ROW_BEGIN]

    @property
    def row_end(self) -> Expr:
        """One past the last fused row."""
        return self.words[self.m, Merge.ROW_END]

    @property
    def slot(self) -> Expr:
        """No slot: what is stored is a result."""
        return tirx.const(NO_SLOT, "int32")


TILES = 16
"""Tiles of columns that are loaded at a time."""


def at_once(cta: StreamingCta) -> int:
    """Return how many parts a warp loads before it adds them: as many as leave registers."""
    return 4 if cta.row_tiles * cta.value_tiles <= TILES else 1


def place_of(cta: StreamingCta, slot: Expr, end: Expr, j: Expr) -> Expr:
    """Slot of one of the warp's next parts; the last part stands for those that there are not."""
    return tirx.min(slot + j * cta.tile.warps, end - 1)


@T.inline
def load_parts(cta, outputs, parts, slot, end, i, c):
    """Begin to load columns of the lane's row `i` of the warp's next parts: the `c`-th tiles."""
    for j in T.unroll(at_once(cta)):
        for p in T.unroll(min(TILES, cta.value_tiles)):
            tile = T.meta_var(c * TILES + p)
            if tile < cta.value_tiles:
                at = T.meta_var((place_of(cta, slot, end, j), cta.place(i), cta.pair(tile, i)[2]))
                first = T.meta_var((j * TILES + p) * 2)
                pointer = T.meta_var(outputs.partial_o.ptr_to(list(at)))
                T.ptx["ld.global.v2.f32"](parts[first], parts[first + 1], pointer)


@T.inline
def weigh_parts(cta, lses, i):
    """Turn the LSEs of parts into weights, and move what they are relative to."""
    r, state = T.meta_var((cta.registers, cta.hooks.accumulation))
    r.best[i] = r.reference[i]
    for j in T.unroll(at_once(cta)):
        r.best[i] = state.peak(r.best[i], lses[j])
    r.scale[i] = state.rescale(r.reference[i], r.best[i])
    r.reference[i] = r.best[i]
    r.total[i] = r.total[i] * r.scale[i]
    for j in T.unroll(at_once(cta)):
        lses[j] = state.weight(lses[j], r.best[i])
        r.total[i] = r.total[i] + lses[j]


@T.inline
def add_parts(cta, outputs, slot, end, i):
    """Add the lane's row `i` of the warp's next parts to its state."""
    r = T.meta_var(cta.registers)
    parts = T.alloc_local((at_once(cta) * 2 * TILES,), "float32")
    lses = T.alloc_local((at_once(cta),), "float32")
    for j in T.unroll(at_once(cta)):
        is_there = T.meta_var(slot + j * cta.tile.warps < end)
        lse = T.meta_var(outputs.partial_lse[place_of(cta, slot, end, j), cta.place(i)])
        lses[j] = T.Select(is_there, lse, f32(cta.hooks.accumulation.hidden))
    for c in T.unroll(-(-cta.value_tiles // TILES)):
        load_parts(cta, outputs, parts, slot, end, i, c)
        if c == 0:
            weigh_parts(cta, lses, i)
        for p in T.unroll(min(TILES, cta.value_tiles)):
            if c * TILES + p < cta.value_tiles:
                at = T.meta_var(cta.pair(c * TILES + p, i))
                r.out[at[0]] = r.out[at[0]] * r.scale[i]
                r.out[at[1]] = r.out[at[1]] * r.scale[i]
                for j in T.unroll(at_once(cta)):
                    first = T.meta_var((j * TILES + p) * 2)
                    r.out[at[0]] = r.out[at[0]] + lses[j] * parts[first]
                    r.out[at[1]] = r.out[at[1]] + lses[j] * parts[first + 1]


@T.inline
def merge_unit(cta, given, m):
    """Merge the parts of cut unit `m`, each warp its own in slot order, and store the rows."""
    r = T.meta_var(cta.registers)
    whole = T.meta_var(Whole.of(cta, given, m))
    count: T.let[T.int32] = whole.row_end - whole.row0
    end: T.let[T.int32] = given.work.merge_indptr[m + 1]
    slot: T.int32 = given.work.merge_indptr[m] + cta.warp
    init_state(cta)
    while slot < end:
        for i in T.unroll(cta.rows):
            if cta.place(i) < count:
                add_parts(cta, given.outputs, slot, end, i)
        slot = slot + at_once(cta) * cta.tile.warps
    for i in T.unroll(cta.rows):
        if cta.lane.column(0) != 0:  # a row's lanes have the same total, which is summed over them
            r.total[i] = f32(0.0)
    store_state(cta.alone, whole, given.outputs)
