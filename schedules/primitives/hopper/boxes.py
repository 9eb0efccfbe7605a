"""Blocks of K and V as boxes that the copy engine (TMA) brings: of ragged tensors, or of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.hopper.barriers import publish_to_copies
from tvm_attn.schedules.primitives.hopper.tensor_maps import TensorMap, encode, is_elected
from tvm_attn.schedules.primitives.places import page_and_slot
from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES, WARP
from tvm_attn.schedules.tiles_sm90 import COLUMN_GROUP, HopperTile
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir.signature import itemsize
from tvm_attn.variant import Expr


def block_map(spec: AttentionSpec, tile: HopperTile, handle: Any, cache: Any) -> TensorMap:
    """Encode the map of K or V: ``(dim, token, head)``, of pages ``(dim, slot, head, page)``."""
    page, slot, head, dim = (0, 2, 1, 3) if spec.kv_layout == "HND" else (0, 1, 2, 3)
    if not spec.is_paged:
        return encode(handle, cache, (dim, page, head), (COLUMN_GROUP, tile.box, 1))
    return encode(handle, cache, (dim, slot, head, page), (COLUMN_GROUP, tile.box, 1, 1))


@T.inline
def copy_ragged(feed, begin, head, kv0, barrier):
    """Begin to copy a block of ragged K or V, of a request that begins with token `begin`."""
    if is_elected():
        for group in T.unroll(feed.groups):
            feed.source.map.load(
                feed.pointer(group, 0), (group * COLUMN_GROUP, begin + kv0, head), barrier
            )


@T.inline
def copy_pages(feed, head, where, barrier):
    """Begin to copy a block of pages: each lane the box that it looked up."""
    tile, lane = T.meta_var((feed.cta.tile, feed.cta.lane.index))
    if lane < tile.boxes:
        for group in T.unroll(feed.groups):
            feed.source.map.load(
                feed.pointer(group, lane * tile.box),
                (group * COLUMN_GROUP, where[1] if tile.box < tile.page else 0, head, where[0]),
                barrier,
            )
    T.cuda.warp_sync()


@T.inline
def look_up_box(feed, task, access, kv0, where):
    """Look up a lane's box of a block, its page and slot: outside if nothing of it is needed."""
    tile = T.meta_var(feed.cta.tile)
    token: T.let[T.int32] = kv0 + feed.cta.lane.index * tile.box
    where[0] = T.Cast("int32", feed.source.num_pages)
    where[1] = 0
    if T.And(token < task.end_key, token + tile.box > task.first_key):
        page, slot = T.meta_var(page_and_slot(token, tile.page))
        where[0] = access.indices[access.begin(task.request) + T.Cast("int32", page)]
        where[1] = T.Cast("int32", slot)


def zero_chunk(pointer: Expr) -> Expr:
    """Zero 16 bytes of shared memory."""
    return T.ptx["st.shared.v4.b32"](pointer, *[T.uint32(0)] * 4)


@T.inline
def zero_rows(feed, first, end):
    """Zero the rows of a block outside of `first` to `end`: what is there may be no number."""
    chunks = T.meta_var(COLUMN_GROUP * itemsize(feed.cta.dtype) // CHUNK_BYTES)
    elements = T.meta_var(CHUNK_BYTES // itemsize(feed.cta.dtype))
    per_turn = T.meta_var(WARP // chunks)
    row: T.int32 = feed.cta.lane.index // chunks
    while row < feed.cta.tile.block:
        if T.Or(row < first, row >= end):
            for group in T.unroll(feed.groups):
                zero_chunk(feed.pointer(group, row, feed.cta.lane.index % chunks * elements))
        row = row + per_turn


@T.inline
def copy_boxes(feed, task, access, head, kv0, barrier):
    """Begin to copy a block, once its stage is empty, to where it announces its bytes."""
    where = T.alloc_local((2,), "int32")
    if feed.cta.spec.is_paged:
        look_up_box(feed, task, access, kv0, where)
    feed.pipe.empty.wait(feed.at.parity, feed.at.stage)
    if is_elected():
        T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier, T.uint32(feed.block_bytes))
    if feed.cta.spec.is_paged:
        copy_pages(feed, head, where, barrier)
    else:
        copy_ragged(feed, access.begin(task.request), head, kv0, barrier)


@T.inline
def copy_keys(feed, task, access, head, kv0):
    """Begin to copy a block of keys: what is not the item's is hidden in any case."""
    copy_boxes(feed, task, access, head, kv0, feed.pipe.full.pointer(feed.at.stage))


@T.inline
def copy_values(feed, task, access, head, kv0):
    """Copy a block of values. What the item does not have is zeroed: 0 times it is 0.

    That is what comes before its first key, and after the request's last one.
    """
    shared, block, parity = T.meta_var(
        (feed.cta.shared, feed.cta.tile.block, feed.source.landing_parity)
    )
    is_whole: T.let[T.bool] = T.And(task.first_key <= kv0, kv0 + block <= task.kv_len)
    lands: T.let[T.int32] = T.Select(
        is_whole, feed.pipe.full.first + feed.at.stage, shared.landing.first
    )
    copy_boxes(feed, task, access, head, kv0, shared.landing.words.ptr_to([lands]))
    if T.Not(is_whole):
        shared.landing.wait(parity[0])
        parity[0] = T.bitwise_xor(parity[0], 1)
        zero_rows(feed, task.first_key - kv0, task.kv_len - kv0)
        publish_to_copies()
        T.cuda.warp_sync()
        if feed.cta.lane.index == 0:
            feed.pipe.full.arrive(feed.at.stage)


@dataclass(frozen=True)
class Boxes:
    """K or V, of which boxes are copied.

    Parameters
    ----------
    map : TensorMap
        Of the tensor.
    num_pages : Expr
        Its first size: a page of this number is outside.
    landing_parity : Buffer
        An int32 register: the phase in which the next block lands that is mended.
    """

    map: TensorMap
    num_pages: Expr
    landing_parity: Any

    copy_keys = staticmethod(copy_keys)
    copy_values = staticmethod(copy_values)

    @staticmethod
    def of_cache(map: TensorMap, cache: Any) -> Boxes:
        """Return the boxes of K or V."""
        parity = T.alloc_local((1,), "int32")
        T.buffer_store(parity, T.int32(0), [0])
        return Boxes(map, cache.shape[0], parity)
