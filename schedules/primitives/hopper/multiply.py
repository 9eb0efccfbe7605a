"""The two products of a block, begun and waited for, in the turns of the warpgroups."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.hopper.barriers import advance, publish_to_copies
from tvm_attn.schedules.primitives.hopper.slots import slot_of
from tvm_attn.schedules.primitives.hopper.warpgroup import Warpgroup
from tvm_attn.schedules.primitives.hopper.wgmma import (
    close_group,
    hold,
    multiply_keys,
    multiply_shared,
    multiply_values,
    open_group,
    wait_for_groups,
)
from tvm_attn.variant import Expr


def queries_at_hand(cta: Cta, group: Warpgroup, parity: Expr) -> Any:
    """Return a register with the descriptor of the queries of an item of this parity.

    Where a warpgroup has one slot it is made anew: else the compiler would keep those of all steps
    from block to block, in more registers than there are.
    """
    if cta.tile.slots > 1:
        return group.q.at_stage(slot_of(cta.tile, group.index, parity))
    index = T.alloc_local((1,), "int32")
    T.buffer_store(index, group.index, [0])
    hold(index)
    return group.q.at_stage(index[0])


def begin_qk(cta: Cta, group: Warpgroup, parity: Expr) -> None:
    """Begin queries, of an item of this parity, times the keys of the next stage."""
    r, keys = cta.registers, group.k.at_stage(group.k_at.stage)
    hold(r.score)
    if cta.tile.holds_queries:
        hold(r.query)
    T.evaluate(open_group())
    if cta.tile.holds_queries:
        multiply_keys(cta.dtype, r.score, r.query, keys, group.k, cta.spec.head_dim_qk)
    else:
        queries = queries_at_hand(cta, group, parity)
        dim = cta.spec.head_dim_qk
        multiply_shared(cta.dtype, r.score, queries, group.q, keys, group.k, dim)
    T.evaluate(close_group())


def begin_pv(cta: Cta, group: Warpgroup) -> None:
    """Begin weights times the values of the next stage, and pass the turn."""
    r, values = cta.registers, group.v.at_stage(group.v_at.stage)
    hold(r.out)
    hold(r.weight)
    T.evaluate(open_group())
    multiply_values(cta.dtype, r.out, r.weight, values, cta.tile.block, group.flags.adds)
    T.evaluate(close_group())
    group.flags.set("adds", T.bool(True))
    T.evaluate(group.pass_turn())


@T.inline
def wait_for_qk(cta, group, pending):
    """Wait for the scores, and let their keys be replaced."""
    wait_for_groups(pending)
    hold(cta.registers.score)
    if cta.lane.index == 0:
        cta.shared.keys.empty.arrive(group.k_at.stage)
    advance(group.k_at)


@T.inline
def wait_for_pv(cta, group):
    """Wait for the outputs, and let the values be replaced."""
    wait_for_groups(0)
    hold(cta.registers.out)
    hold(cta.registers.weight)
    if cta.lane.index == 0:
        cta.shared.values.empty.arrive(group.v_at.stage)
    advance(group.v_at)


@T.inline
def wait_for_keys(cta, group):
    """Wait for the keys of the next stage."""
    cta.shared.keys.full.wait(group.k_at.parity, group.k_at.stage)
    if cta.tile.gathers:
        publish_to_copies()


@T.inline
def wait_for_values(cta, group):
    """Wait for the values of the next stage."""
    cta.shared.values.full.wait(group.v_at.parity, group.v_at.stage)
    if cta.tile.gathers:
        publish_to_copies()
