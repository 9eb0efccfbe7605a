"""The function that makes a family's work list, which the planner's other functions call.

It is half of the planner's code, so that it is traced and compiled once for all of them. Nothing
outside of their module can call it: its arguments are plain pointers and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.tir.planner_bitmaps import Bitmaps
from tvm_attn.tir.planner_deal import WorkList
from tvm_attn.tir.planner_ints import Divisor, reciprocal, var
from tvm_attn.tir.planner_policy import Policy, Tables, plan_family
from tvm_attn.tir.planner_units import Family, KvBounds, Lengths, Machine
from tvm_attn.tir.signature import close_privately, pointer_to
from tvm_attn.worklist import HEADER_WORDS, ITEM_WORDS, MERGE_WORDS


class ListMaker:
    """Makes work lists of families: a private function, and calls of it.

    Parameters
    ----------
    kv_bounds : callable, optional
        Which key positions query positions can see, see `KvBounds`; None is all of them.
    extra_params : sequence of (Var or Buffer)
        What `kv_bounds` reads besides its arguments, and `bitmaps`, by closure conversion.
    bitmaps : Bitmaps, optional
        Bitmaps of the mask. Their words may be read up to `READ_BEYOND` bytes past the end.
    """

    def __init__(
        self,
        kv_bounds: KvBounds | None = None,
        extra_params: Sequence[Any] = (),
        bitmaps: Bitmaps | None = None,
    ):
        self.extra_params = tuple(extra_params)
        self._name = tvm.ir.GlobalVar("make_work_list")
        self._function, self._extra = close_privately(
            _make_work_list(kv_bounds, bitmaps), self.extra_params
        )

    def beside(self, functions: Mapping[str, Any]) -> dict[Any, Any]:
        """Return functions that call this one, and this one."""
        return {**functions, self._name: self._function}

    def make(
        self, lengths: Sequence[Any], scratch: Any, out: WorkList, header: Any, *numbers: Any
    ) -> None:
        """Call the function: `numbers` are scalars of `work_planner`, in its order."""
        outputs = (out.items, out.cta_indptr, out.merge_items, out.merge_indptr)
        pointers = map(pointer_to, (*lengths, scratch, *outputs, header))
        sizes = (array.shape[0] for array in (scratch, *outputs))
        values = [*pointers, *sizes, *numbers, *self._extra]
        T.evaluate(tvm.ir.Call(self._name, values, ret_ty=self._function.ret_type))


def _make_work_list(kv_bounds: KvBounds | None, bitmaps: Bitmaps | None) -> tirx.PrimFunc:
    """Return the function; see `tvm_attn.tir.planner.work_planner` for its arguments."""

    @T.prim_func(s_tir=True, check_well_formed=False, private=True)
    def make_work_list(
        qo_indptr_p: T.handle("int32"),
        kv_len_p: T.handle("int32"),
        q_pos_offset_p: T.handle("int32"),
        kv_pos_offset_p: T.handle("int32"),
        scratch_p: T.handle("int32"),
        items_p: T.handle("int32"),
        cta_indptr_p: T.handle("int32"),
        merge_items_p: T.handle("int32"),
        merge_indptr_p: T.handle("int32"),
        header_p: T.handle("int32"),
        scratch_words: T.int32,
        max_items: T.int32,
        cta_pointers: T.int32,
        max_merges: T.int32,
        merge_pointers: T.int32,
        batch: T.int32,
        num_kv_heads: T.int32,
        tokens_at_once: T.int32,
        num_ctas: T.int32,
        group_size: T.int32,
        row_min: T.int32,
        row_max: T.int32,
        tile_rows: T.int32,
        kv_block: T.int32,
        overhead: T.int32,
        fixed_split: T.int32,
        max_slots: T.int32,
    ):
        qo_indptr = T.decl_buffer((batch + 1,), "int32", data=qo_indptr_p)
        kv_len = T.decl_buffer((batch,), "int32", data=kv_len_p)
        q_pos_offset = T.decl_buffer((batch,), "int32", data=q_pos_offset_p)
        kv_pos_offset = T.decl_buffer((batch,), "int32", data=kv_pos_offset_p)
        scratch = T.decl_buffer((scratch_words,), "int32", data=scratch_p)
        items = T.decl_buffer((max_items, ITEM_WORDS), "int32", data=items_p)
        cta_indptr = T.decl_buffer((cta_pointers,), "int32", data=cta_indptr_p)
        merge_items = T.decl_buffer((max_merges, MERGE_WORDS), "int32", data=merge_items_p)
        merge_indptr = T.decl_buffer((merge_pointers,), "int32", data=merge_indptr_p)
        header = T.decl_buffer((HEADER_WORDS,), "int32", data=header_p)
        with T.sblock("make_work_list"):
            T.reads()
            T.writes()
            heads = T.meta_var(Divisor(num_kv_heads, var(reciprocal(num_kv_heads))))
            granule = T.meta_var(Divisor(kv_block, var(reciprocal(kv_block))))
            group = T.meta_var(Divisor(group_size, var(reciprocal(group_size))))
            machine = T.meta_var(Machine(num_ctas, heads, granule, overhead))
            family = T.meta_var(Family(group, row_min, row_max, tile_rows))
            lengths = T.meta_var(Lengths(batch, qo_indptr, kv_len, q_pos_offset, kv_pos_offset))
            out = T.meta_var(WorkList(items, cta_indptr, merge_items, merge_indptr))
            policy = T.meta_var(Policy(fixed_split, tokens_at_once, max_slots))
            tables = T.meta_var(Tables.carve(scratch, num_ctas))
            plan_family(
                tables, lengths, family, machine, policy, kv_bounds, bitmaps, scratch, out, header
            )

    return make_work_list
