"""Work items ahead of time: one warp reads them, and tells the others of each once all is known."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.staging import settle_warp
from tvm_attn.schedules.primitives.task import (
    Task,
    TaskAccess,
    derive,
    read_item,
    read_request,
)
from tvm_attn.tir.access import CacheAccess
from tvm_attn.variant import Expr


def wait_for_item(cta: Cta, t: Expr, t0: Expr) -> Expr:
    """Wait until item `t` is known, of a queue that begins with `t0`."""
    parity = tirx.bitwise_and(tirx.floordiv(t - t0, cta.tile.tasks), 1)
    return cta.shared.known.wait(parity, t % cta.tile.tasks)


def task_access(cta: Cta, task: Task, batch: Any, cache: Any) -> TaskAccess:
    """Access to a task's tokens in the cache."""
    return TaskAccess.to(CacheAccess.of(cta.spec, batch, cache), task)


@T.inline
def make_known(cta, given, t):
    """Let the other warps know item `t`."""
    task = T.meta_var(Task.of(cta, given.batch, t))
    derive(cta, task, task.keys()[0], task.keys()[1])
    T.cuda.warp_sync()
    if cta.lane.index == 0:
        cta.shared.known.arrive(t % cta.tile.tasks)


@T.inline
def meet_first_items(cta, given, t0, end):
    """Read the first three items of a queue, and make the first one known."""
    for i in T.unroll(3):
        read_item(cta, given.work.items, t0 + i, end)
    settle_warp()
    for i in T.unroll(2):
        read_request(cta, given.batch, t0 + i, end)
    settle_warp()
    if t0 < end:
        make_known(cta, given, t0)


@T.inline
def meet_next_item(cta, given, t, end):
    """While item `t` is worked on, make the next one known, and read on."""
    settle_warp()
    if t + 1 < end:
        make_known(cta, given, t + 1)
    read_request(cta, given.batch, t + 2, end)
    read_item(cta, given.work.items, t + 3, end)
