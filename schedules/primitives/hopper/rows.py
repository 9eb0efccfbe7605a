"""Query and output rows of a warpgroup, on their way through its slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import (
    HALVES,
    LEFT,
    load_matrices,
    over_row,
)
from tvm_attn.schedules.primitives.hopper.barriers import publish_to_copies
from tvm_attn.schedules.primitives.hopper.rounding import finish_state, round_tile, store_lse
from tvm_attn.schedules.primitives.hopper.runs import leaves_in_runs, store_runs
from tvm_attn.schedules.primitives.hopper.slots import (
    output_pointer,
    query_pointer,
    slot_of,
    stores_through_slot,
)
from tvm_attn.schedules.primitives.shapes import DEPTH
from tvm_attn.schedules.primitives.store import store_part, store_row
from tvm_attn.schedules.tiles_sm90 import (
    COLUMN_GROUP,
    ELEMENT_BYTES,
    WARPGROUP_ROWS,
    comes_in_boxes,
)
from tvm_attn.variant import Expr
from tvm_attn.worklist import NO_SLOT

SlotPointer = Callable[[Any, Expr, Expr, Expr], Expr]
"""Makes the address of an element in a slot, given its number, the row and the column."""


def matrix_address(cta: Cta, group: Any, pointer: SlotPointer, parity: Expr, step: int) -> Expr:
    """Return what the lane shows ``ldmatrix``: of 16 columns of the warp's 16 rows in a slot.

    Chunks are swizzled by exclusive or: addresses of all steps follow from one.
    """
    row, column = cta.lane.left_address()
    place = cta.first_place - group.index * WARPGROUP_ROWS + row
    slot = slot_of(cta.tile, group.index, parity)
    first = T.cuda.cvta_generic_to_shared(pointer(cta.shared, slot, place, column))
    steps = COLUMN_GROUP // DEPTH
    within = T.uint32(step % steps * DEPTH * ELEMENT_BYTES)
    across = T.uint32(step // steps * WARPGROUP_ROWS * COLUMN_GROUP * ELEMENT_BYTES)
    return tirx.bitwise_xor(first, within) + across


@T.inline
def hand_over_slot(cta, group, barriers):
    """Tell the warp that serves the slot that this one has done with it."""
    T.cuda.warp_sync()
    if cta.lane.index == 0:
        barriers.arrive(group.index)


@T.inline
def take_queries(cta, group, parity):
    """Wait for the queries of an item; take them into registers, if they are held there."""
    cta.shared.queries.wait(parity, group.index)
    if cta.tile.holds_queries:
        for step in T.unroll(cta.spec.head_dim_qk // DEPTH):
            address = T.meta_var(matrix_address(cta, group, query_pointer, parity, step))
            load_matrices(cta.registers.query, step * LEFT, address)
        hand_over_slot(cta, group, cta.shared.taken)
    elif not comes_in_boxes(cta.spec):
        publish_to_copies()


def store_matrices(pointer: Expr, registers: Any, first: Expr) -> Expr:
    """Store four 8x8 matrices of 16-bit elements."""
    name = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
    return T.ptx[name](pointer, *(registers[first + i] for i in range(LEFT)))


@T.inline
def set_rows_aside(cta):
    """Keep the state of an item's rows, for those of the next one to be opened."""
    r = T.meta_var(cta.registers)
    for i in T.unroll(HALVES):
        r.closing[i] = r.total[i]
        r.last[i] = r.peak[i]


@T.inline
def finish_rows(cta, task, outputs):
    """Round finished rows to what is stored, and store their LSE."""
    for i in T.unroll(HALVES):
        finish_state(cta, task, outputs, i)
        for n in T.unroll(cta.value_tiles):
            round_tile(cta, task, outputs, n, i)
        store_lse(cta, task, outputs, i)


@T.inline
def leave_rows(cta, group, parity):
    """Leave the rounded rows of an item of this parity in its slot."""
    for step in T.unroll(cta.spec.dim_vo // DEPTH):
        address = T.meta_var(matrix_address(cta, group, output_pointer, parity, step))
        store_matrices(address, cta.registers.right, step * LEFT)
    publish_to_copies()


@T.inline
def close_rows(cta, group, task, outputs, parity):
    """Close the rows that were set aside; store results, or partial states of a piece."""
    r, state = T.meta_var((cta.registers, cta.hooks.accumulation))
    for i in T.unroll(HALVES):
        r.closing[i] = r.closing[i] + over_row(r.closing[i], 1)
        r.closing[i] = r.closing[i] + over_row(r.closing[i], 2)
        r.best[i] = state.lse(state.reference(r.last[i]), r.closing[i])
        r.scale[i] = state.inverse(r.closing[i])
    if task.slot != NO_SLOT:
        for i in T.unroll(HALVES):
            if task.row0 + cta.place(i) < task.row_end:
                store_part(cta, task, outputs, i)
    elif stores_through_slot(cta):
        finish_rows(cta, task, outputs)
        leave_rows(cta, group, parity)
    elif leaves_in_runs(cta):
        store_runs(cta, task, outputs)
    else:
        for i in T.unroll(HALVES):
            if task.row0 + cta.place(i) < task.row_end:
                store_row(cta, task, outputs, i)
