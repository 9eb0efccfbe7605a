"""From registers to global memory: finished rows, and partial states of cut units."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import HALVES, over_row, pack, store_pair
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.worklist import NO_SLOT


@T.inline
def store_row(cta, task, outputs, i):
    """Store a finished row."""
    r, hooks = T.meta_var((cta.registers, cta.hooks))
    at = T.meta_var(task.index(task.row(cta.place(i))))
    row = T.meta_var(task.query(task.row(cta.place(i))))
    for n in T.unroll(cta.value_tiles):
        o = T.meta_var(cta.out(i // HALVES, n, i % HALVES))
        low = T.meta_var(hooks.output(row, r.out[o] * r.scale[i], r.best[i]))
        high = T.meta_var(hooks.output(row, r.out[o + 1] * r.scale[i], r.best[i]))
        place = T.meta_var([*at, n * COLUMNS + cta.lane.column(0)])
        if str(outputs.out.dtype) == "float32":
            outputs.out[place[0], place[1], place[2]] = low
            outputs.out[place[0], place[1], place[2] + 1] = high
        else:
            pack(str(outputs.out.dtype), r.right[0], low, high)
            store_pair(outputs.out.ptr_to(place), r.right[0])
    if cta.lane.column(0) == 0:
        outputs.lse[at[0], at[1]] = r.best[i] * outputs.lse_scale


@T.inline
def store_part(cta, task, outputs, i):
    """Store the partial state of a row."""
    r = T.meta_var(cta.registers)
    row = T.meta_var(cta.place(i))
    for n in T.unroll(cta.value_tiles):
        for e in T.unroll(2):
            o = T.meta_var(cta.out(i // HALVES, n, i % HALVES, e))
            d = T.meta_var(n * COLUMNS + cta.lane.column(e))
            outputs.partial_o[task.slot, row, d] = r.out[o] * r.scale[i]
    if cta.lane.column(0) == 0:
        outputs.partial_lse[task.slot, row] = r.best[i]


@T.inline
def close_rows(cta):
    """Add up the totals of the lane's rows, side by side, and see what follows from them."""
    r, state = T.meta_var((cta.registers, cta.hooks.accumulation))
    for lanes in T.unroll(2):
        for i in T.unroll(cta.rows):
            r.total[i] = r.total[i] + over_row(r.total[i], 1 + lanes)
    for i in T.unroll(cta.rows):
        r.best[i] = state.lse(r.reference[i], r.total[i])
        r.scale[i] = state.inverse(r.total[i])


@T.inline
def finish_rows(cta, task, value_factor):
    """Work out what outputs are multiplied with, and the LSEs, of results."""
    r, hooks = T.meta_var((cta.registers, cta.hooks))
    for i in T.unroll(cta.rows):
        row = T.meta_var(task.query(task.row(cta.place(i))))
        r.scale[i] = r.scale[i] * hooks.share(row, r.best[i]) * value_factor
        r.best[i] = hooks.seeded(row, r.best[i])


@T.inline
def store_state(cta, task, outputs):
    """Close the rows and store them: results of a whole unit, a partial state of a piece."""
    value_factor: T.float32 = outputs.scales.value_factor(task.kv_head)
    close_rows(cta)
    if task.slot == NO_SLOT:
        finish_rows(cta, task, value_factor)
    for i in T.unroll(cta.rows):
        if task.row0 + cta.place(i) < task.row_end:
            if task.slot == NO_SLOT:
                store_row(cta, task, outputs, i)
            else:
                store_part(cta, task, outputs, i)
