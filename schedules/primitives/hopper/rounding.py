"""Finished rows as they are stored: rounded, in registers, and their LSE in global memory."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.fragments import HALVES, pack


@T.inline
def finish_state(cta, task, outputs, i):
    """Count a variant's initial state in with that of a finished row."""
    r, hooks = T.meta_var((cta.registers, cta.hooks))
    row = T.meta_var(task.query(task.row(cta.place(i))))
    value_factor = T.meta_var(outputs.scales.value_factor(task.kv_head))
    r.scale[i] = r.scale[i] * hooks.share(row, r.best[i]) * value_factor
    r.best[i] = hooks.seeded(row, r.best[i])


@T.inline
def round_tile(cta, task, outputs, n, i):
    """Round a row's two elements of a tile of 8 columns."""
    r, hooks = T.meta_var((cta.registers, cta.hooks))
    row = T.meta_var(task.query(task.row(cta.place(i))))
    at = T.meta_var(cta.out(0, n, i))
    low = T.meta_var(hooks.output(row, r.out[at] * r.scale[i], r.best[i]))
    high = T.meta_var(hooks.output(row, r.out[at + 1] * r.scale[i], r.best[i]))
    pack(str(outputs.out.dtype), r.right[n * HALVES + i], low, high)


@T.inline
def store_lse(cta, task, outputs, i):
    """Store the LSE of a row, by one of its lanes."""
    if T.And(task.row0 + cta.place(i) < task.row_end, cta.lane.column(0) == 0):
        at = T.meta_var(task.index(task.row(cta.place(i))))
        outputs.lse[at[0], at[1]] = cta.registers.best[i] * outputs.lse_scale
