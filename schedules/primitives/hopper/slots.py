"""The slots of the warpgroups: queries come through them, outputs leave through them.

Two warps serve them. A slot holds the queries of the next item until its warpgroup has them in
registers, then the outputs of this one until they are stored. Where queries stay in the slot while
they are used, a warpgroup has two: those of items of even and of odd parity, counted along its
queue; or, where there is no room, one, which only queries come through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import of_lane
from tvm_attn.schedules.primitives.gather import offset
from tvm_attn.schedules.primitives.hopper.barriers import publish_to_copies
from tvm_attn.schedules.primitives.hopper.feeding import feed_blocks, feed_last_block
from tvm_attn.schedules.primitives.hopper.items import wait_for_item
from tvm_attn.schedules.primitives.hopper.shared import tile_index
from tvm_attn.schedules.primitives.hopper.tensor_maps import (
    TensorMap,
    close_stores,
    encode,
    is_elected,
    wait_for_stores,
)
from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES, WARP
from tvm_attn.schedules.primitives.staging import copy_chunk
from tvm_attn.schedules.primitives.task import Task
from tvm_attn.schedules.tiles_sm90 import (
    COLUMN_GROUP,
    ELEMENT_BYTES,
    WARPGROUP_ROWS,
    HopperTile,
    comes_in_boxes,
    padded,
)
from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr
from tvm_attn.worklist import NO_SLOT

CHUNK = CHUNK_BYTES // ELEMENT_BYTES
"""Elements of 16 bytes."""
SERVERS = 2
"""Warps that serve the slots."""
ENOUGH = 40
"""Registers of a lane that has four chunks under way."""
SHARES = WARPGROUP_ROWS // WARP
"""Rows of a slot whose offsets a lane has."""


def stores_through_slot(cta: Cta) -> bool:
    """Whether outputs leave through the slots, in 16 bytes at a time."""
    return bool(cta.tile.slots_outputs) and itemsize(str(cta.spec.o_dtype)) == ELEMENT_BYTES


def slot_of(tile: HopperTile, index: Expr, parity: Expr) -> Expr:
    """Return which slot a warpgroup has for an item of this parity."""
    return index if tile.slots == 1 else index * tile.slots + parity


def query_pointer(shared: Any, slot: Expr, row: Expr, column: Expr) -> Expr:
    """Address of an element in a slot of queries."""
    origin = slot * (WARPGROUP_ROWS * shared.dim_slot)
    return shared.q.ptr_to([origin + tile_index(WARPGROUP_ROWS, row, column)])


def output_pointer(shared: Any, slot: Expr, row: Expr, column: Expr) -> Expr:
    """Address of an element in a slot of outputs."""
    origin = slot * (WARPGROUP_ROWS * shared.dim_out)
    return shared.o.ptr_to([origin + tile_index(WARPGROUP_ROWS, row, column)])


def row_offsets(tensor: Any, task: Task, place: Expr) -> Any:
    """Return registers with the offsets of two of a slot's rows, 32 apart, in a strided tensor."""
    offsets = T.alloc_local((SHARES,), "int64")
    for share in range(SHARES):
        row = task.row(place + share * WARP)
        T.buffer_store(offsets, offset(tensor, (*task.index(row), 0)), [share])
    return offsets


def at_once(tile: HopperTile, chunks: int) -> int:
    """Chunks that a lane has under way, of a row of so many: registers are few."""
    return 4 if chunks in (8, 16, 32) and tile.copying >= ENOUGH else 2


@T.inline
def fetch_queries(cta, given, index, slot, t):
    """Begin to copy the queries of item `t`; their barrier waits for them."""
    task = T.meta_var(Task.of(cta, given.batch, t))
    chunks = T.meta_var(cta.spec.head_dim_qk // CHUNK)
    offsets = T.meta_var(row_offsets(given.q, task, index * WARPGROUP_ROWS + cta.lane.index))
    for share in T.unroll(SHARES):
        first: T.int32 = cta.lane.index
        while first < chunks * WARP:
            for i in T.unroll(at_once(cta.tile, chunks)):
                at = T.meta_var(first + i * WARP)
                column = T.meta_var(at % chunks * CHUNK)
                copy_chunk(
                    query_pointer(cta.shared, slot, share * WARP + at // chunks, column),
                    given.q.ptr_to([0, 0, of_lane(offsets[share], at // chunks) + column]),
                    T.bool(True),
                )
            first = first + at_once(cta.tile, chunks) * WARP
    cta.shared.queries.arrive_with_copies(index)


def load_four(words: Any, first: Expr, pointer: Expr) -> Expr:
    """Load 16 bytes from shared memory."""
    return T.ptx["ld.shared.v4.b32"](*(words[first + i] for i in range(4)), pointer)


def store_four(pointer: Expr, words: Any, first: Expr) -> Expr:
    """Store 16 bytes to global memory."""
    return T.ptx["st.global.v4.b32"](pointer, *(words[first + i] for i in range(4)))


@T.inline
def store_outputs(cta, given, index, slot, t):
    """Store the outputs of item `t` that its warpgroup left in a slot."""
    task = T.meta_var(Task.of(cta, given.batch, t))
    out = T.meta_var(given.outputs.out)
    chunks = T.meta_var(cta.spec.dim_vo // CHUNK)
    words = T.alloc_local((at_once(cta.tile, chunks) * 4,), "uint32")
    offsets = T.meta_var(row_offsets(out, task, index * WARPGROUP_ROWS + cta.lane.index))
    rows: T.int32 = task.row_end - task.row0 - index * WARPGROUP_ROWS
    for share in T.unroll(SHARES):
        first: T.int32 = cta.lane.index
        while first < chunks * WARP:
            for i in T.unroll(at_once(cta.tile, chunks)):
                at = T.meta_var(first + i * WARP)
                row = T.meta_var(share * WARP + at // chunks)
                load_four(words, i * 4, output_pointer(cta.shared, slot, row, at % chunks * CHUNK))
            for i in T.unroll(at_once(cta.tile, chunks)):
                at = T.meta_var(first + i * WARP)
                origin: T.let[T.int64] = of_lane(offsets[share], at // chunks)
                if share * WARP + at // chunks < rows:
                    store_four(out.ptr_to([0, 0, origin + at % chunks * CHUNK]), words, i * 4)
            first = first + at_once(cta.tile, chunks) * WARP


def rows_map(handle: Any, tensor: Any, group_size: int) -> TensorMap:
    """Encode the map of q or out, ``(dim, head, token)``: a box has all of a slot's fused rows."""
    tokens = WARPGROUP_ROWS // group_size
    return encode(handle, tensor, (2, 1, 0), (COLUMN_GROUP, group_size, tokens))


def box_of_slot(task: Task, index: Expr, column: Expr) -> tuple[Expr, Expr, Expr]:
    """Coordinates of the box of a slot's rows that begins with a column."""
    token, head = task.index(task.row0 + index * WARPGROUP_ROWS)
    return column, head, token


@T.inline
def begin_queries(cta, given, maps, index, slot, t):
    """Begin to copy the queries of item `t`; their barrier waits for them."""
    if comes_in_boxes(cta.spec):
        task = T.meta_var(Task.of(cta, given.batch, t))
        if is_elected():
            columns = T.meta_var(padded(cta.spec.head_dim_qk))
            barriers = T.meta_var(cta.shared.queries)
            barriers.expect(WARPGROUP_ROWS * columns * ELEMENT_BYTES, index)
            for group in T.unroll(columns // COLUMN_GROUP):
                column = T.meta_var(group * COLUMN_GROUP)
                maps.q.load(
                    query_pointer(cta.shared, slot, 0, column),
                    box_of_slot(task, index, column),
                    barriers.pointer(index),
                )
    else:
        fetch_queries(cta, given, index, slot, t)


@T.inline
def finish_outputs(cta, given, maps, index, slot, t):
    """Store the outputs of item `t`, and wait until the slot may be used again."""
    task = T.meta_var(Task.of(cta, given.batch, t))
    if comes_in_boxes(cta.spec):
        if task.row_end - task.row0 >= (index + 1) * WARPGROUP_ROWS:
            if is_elected():
                for group in T.unroll(padded(cta.spec.dim_vo) // COLUMN_GROUP):
                    column = T.meta_var(group * COLUMN_GROUP)
                    source = T.meta_var(output_pointer(cta.shared, slot, 0, column))
                    maps.out.store(box_of_slot(task, index, column), source)
                close_stores()
                wait_for_stores()
        else:
            store_outputs(cta, given, index, slot, t)
            publish_to_copies()
    else:
        store_outputs(cta, given, index, slot, t)


@T.inline
def one_after_another(tile, first, serve):
    """Do something for warpgroup `first`, and every second one after it."""
    index: T.int32 = first
    while index < tile.multipliers:
        serve(index)
        index = index + SERVERS


def of_each(tile: HopperTile, first: Expr, serve: Callable[[Expr], None]) -> None:
    """Do something for each warpgroup that a warp serves, of which `first` is the first."""
    if tile.multipliers == SERVERS:
        serve(first)
    else:
        one_after_another(tile, first, serve)


@T.inline
def follow_outputs(cta, given, maps, index, slot, t, parity):
    """Wait for the outputs of item `t`, and store them."""
    cta.shared.outputs.wait(parity, index)
    task = T.meta_var(Task.of(cta, given.batch, t))
    if stores_through_slot(cta):
        if task.slot == NO_SLOT:
            finish_outputs(cta, given, maps, index, slot, t)
    T.cuda.warp_sync()
    if not cta.tile.shares_slots:
        if cta.lane.index == 0:
            cta.shared.stored.arrive(index)


@T.inline
def replace_queries(cta, given, maps, index, t, barriers, parity):
    """Copy the queries of item `t` once those of the item before it are not needed."""
    barriers.wait(parity, index)
    begin_queries(cta, given, maps, index, index, t)


@T.inline
def end_queries(cta, index):
    """Say that no more queries will come."""
    if T.Or(T.bool(not comes_in_boxes(cta.spec)), cta.lane.index == 0):
        cta.shared.queries.arrive(index)


@T.inline
def take_turns(cta, given, maps, each, feed, t0, end):
    """Serve slots that outputs share with their queries.

    A warpgroup has the next queries, or knows that there are none, before it hands over outputs: so
    it is never ahead by two phases of a barrier, the second of which would hide the first.
    """
    shared, slot = T.meta_var((cta.shared, partial(slot_of, cta.tile)))
    parity: T.int32 = 1
    t: T.int32 = t0
    each(lambda index: T.evaluate(shared.outputs.wait(0, index)))
    while t < end:
        if t + 1 < end:
            wait_for_item(cta, t + 1, t0)
            each(lambda i: begin_queries(cta, given, maps, i, slot(i, parity), t + 1))
        else:
            each(lambda i: end_queries(cta, i))
        feed_blocks(feed, given.batch, t, 1)
        if t + 1 < end:
            feed_last_block(feed, given.batch, t + 1)
        own = T.meta_var(T.bitwise_xor(parity, 1))
        each(lambda i: follow_outputs(cta, given, maps, i, slot(i, own), t, parity))
        parity = T.bitwise_xor(parity, 1)
        t = t + 1


@T.inline
def follow_taken(cta, given, maps, each, t, t0, end):
    """Once the queries of item `t` have been taken, begin to copy those of the next one."""
    if t + 1 < end:
        taken, parity = T.meta_var((cta.shared.taken, T.bitwise_and(t - t0, 1)))
        wait_for_item(cta, t + 1, t0)
        each(lambda index: replace_queries(cta, given, maps, index, t + 1, taken, parity))


@T.inline
def run_ahead(cta, given, maps, each, feed, t0, end):
    """Serve slots of queries, which are taken early, and slots of outputs."""
    t: T.int32 = t0
    follow_taken(cta, given, maps, each, t, t0, end)
    while t < end:
        feed_blocks(feed, given.batch, t, 1)
        if t + 1 < end:
            feed_last_block(feed, given.batch, t + 1)
            follow_taken(cta, given, maps, each, t + 1, t0, end)
        parity = T.meta_var(T.bitwise_and(t - t0, 1))
        each(lambda index: follow_outputs(cta, given, maps, index, index, t, parity))
        t = t + 1


@T.inline
def keep_queries(cta, given, maps, each, feed, t0, end):
    """Serve slots of queries that stay there while they are used."""
    t: T.int32 = t0
    while t < end:
        if t + 1 < end:
            wait_for_item(cta, t + 1, t0)
        feed_blocks(feed, given.batch, t, 1)
        if t + 1 < end:
            done, parity = T.meta_var((cta.shared.outputs, T.bitwise_and(t - t0, 1)))
            each(lambda index: replace_queries(cta, given, maps, index, t + 1, done, parity))
            feed_last_block(feed, given.batch, t + 1)
        t = t + 1


@T.inline
def serve_slots(cta, given, maps, first, t0, end, feed):
    """Serve slots through all items; feed blocks between, if that is the warp's task as well.

    Outputs of an item come after the first block of the next one was attended to, so that is fed
    before they are waited for.
    """
    each = T.meta_var(partial(of_each, cta.tile, first))
    slot = T.meta_var(partial(slot_of, cta.tile))
    cta.shared.known.wait(0, t0 % cta.tile.tasks)
    each(lambda index: begin_queries(cta, given, maps, index, slot(index, 0), t0))
    feed_last_block(feed, given.batch, t0)
    if cta.tile.shares_slots:
        take_turns(cta, given, maps, each, feed, t0, end)
    elif cta.tile.holds_queries:
        run_ahead(cta, given, maps, each, feed, t0, end)
    else:
        keep_queries(cta, given, maps, each, feed, t0, end)
