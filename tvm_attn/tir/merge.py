"""Merging attention states: parts of a row are to a merge what keys are to attention.

A state is (o, lse) with a base 2 log-sum-exp; ``(0, -inf)`` is the identity. The sum runs over
parts in their order, so that the same parts give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.hooks import Context, Hooks
from tvm_attn.tir.outputs import Outputs
from tvm_attn.tir.rows import Rows
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr
from tvm_attn.worklist import Merge

PEAK, TOTAL, LSE, SHARE, WEIGHT = range(5)
"""What is kept of a row: its parts' peak and total, its log-sum-exp, the factor of its output, and
the weight of the part at hand."""
ROW_WORDS = 5


@dataclass(frozen=True)
class Parts:
    """The parts of a cut unit, in slots `first` on; words of several of its rows at a time.

    ``words [n, ROW_WORDS]`` are float32. Row `i` of them is at ``place(i)`` of the tile, and the
    unit's ``row(i)``, unless there is none at that place.
    """

    hooks: Hooks
    outputs: Outputs
    unit: Rows
    first: Expr
    count: Expr
    words: Any
    place: Any
    row: Any

    def query(self, i: Expr) -> Context:
        """Context of a row."""
        return self.unit.query(self.row(i))

    def index(self, i: Expr) -> tuple[Expr, Expr]:
        """Token and head of a row in out and lse."""
        return self.unit.index(self.row(i))

    def lse(self, i: Expr, s: Expr) -> Expr:
        """Log-sum-exp of part `s` of a row."""
        return self.outputs.partial_lse[self.first + s, self.place(i)]

    def element(self, i: Expr, s: Expr, d: Expr) -> Expr:
        """Element of part `s` of a row."""
        return self.outputs.partial_o[self.first + s, self.place(i), d]

    def pointer(self, i: Expr, s: Expr, d: Expr) -> Expr:
        """Address of an element of part `s` of a row."""
        return self.outputs.partial_o.ptr_to([self.first + s, self.place(i), d])

    def weight(self, i: Expr, s: Expr) -> Expr:
        """Weight of part `s` of a row whose peak is known."""
        state = self.hooks.accumulation
        return state.weight(self.lse(i, s), state.reference(self.words[i, PEAK]))

    def finish(self, i: Expr, o: Expr) -> Expr:
        """Return an element of `out` from the weighted sum of its parts."""
        words = self.words
        return self.outputs.finish(self.query(i), o * words[i, SHARE], words[i, LSE])


@T.inline
def close_row(parts, i):
    """Close a row whose parts' peak and total are known."""
    state, words, hooks = T.meta_var((parts.hooks.accumulation, parts.words, parts.hooks))
    words[i, LSE] = state.lse(state.reference(words[i, PEAK]), words[i, TOTAL])
    share = T.meta_var(hooks.share(parts.query(i), words[i, LSE]))
    words[i, SHARE] = share * state.inverse(words[i, TOTAL])
    words[i, LSE] = hooks.seeded(parts.query(i), words[i, LSE])


@T.inline
def close_rows(parts, rows):
    """Find what the parts of `rows` rows come to, side by side."""
    state, words = T.meta_var((parts.hooks.accumulation, parts.words))
    for i in T.unroll(rows):
        words[i, PEAK] = f32(state.hidden)
        words[i, TOTAL] = f32(0.0)
    for s in T.serial(parts.count):
        for i in T.unroll(rows):
            words[i, PEAK] = state.peak(words[i, PEAK], parts.lse(i, s))
    for s in T.serial(parts.count):
        for i in T.unroll(rows):
            words[i, TOTAL] = words[i, TOTAL] + parts.weight(i, s)
    for i in T.unroll(rows):
        close_row(parts, i)


@T.inline
def merge_unit(hooks, given, group_size, dim_vo, m):
    """Merge the parts of cut unit `m`, in slot order, and store its rows."""
    outputs = T.meta_var(given.outputs)
    merge_items, merge_indptr = T.meta_var((given.work.merge_items, given.work.merge_indptr))
    request: T.let[T.int32] = merge_items[m, Merge.REQUEST]
    kv_head: T.let[T.int32] = merge_items[m, Merge.KV_HEAD]
    unit = T.meta_var(Rows(hooks, group_size, given.batch, request, kv_head))
    row0: T.let[T.int32] = merge_items[m, Merge.ROW_BEGIN]
    first: T.let[T.int32] = merge_indptr[m]
    count: T.let[T.int32] = merge_indptr[m + 1] - first
    o = T.sblock_alloc_buffer((dim_vo,), "float32")
    words = T.sblock_alloc_buffer((1, ROW_WORDS), "float32")
    for place in T.serial(merge_items[m, Merge.ROW_END] - row0):
        where = T.meta_var((lambda _: place, lambda _: row0 + place))
        parts = T.meta_var(Parts(hooks, outputs, unit, first, count, words, *where))
        close_rows(parts, 1)
        for d in T.serial(dim_vo):
            o[d] = f32(0.0)
        for s in T.serial(count):
            words[0, WEIGHT] = parts.weight(0, s)
            for d in T.serial(dim_vo):
                o[d] = o[d] + words[0, WEIGHT] * parts.element(0, s, d)
        at = T.meta_var(parts.index(0))
        for d in T.serial(dim_vo):
            outputs.out[at[0], at[1], d] = parts.finish(0, o[d])
        outputs.lse[at[0], at[1]] = words[0, LSE] * outputs.lse_scale
