"""From global to shared memory: query rows, and blocks of keys and values through BSR indices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.addresses import AddressedCopy, address_of, note_row
from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import (
    half_as_float,
    load_shared,
    load_word_if,
    pack,
    store_shared_pair,
)
from tvm_attn.schedules.primitives.shared import NOWHERE, SharedTiles
from tvm_attn.schedules.primitives.staging import copy_rows
from tvm_attn.schedules.primitives.widened import widen as widen_word
from tvm_attn.tir.access import to_float
from tvm_attn.variant import Expr

BYTES_OF_A_WORD = 4
"""Elements of one byte that are widened together."""


def offset(cache: Any, at: Sequence[Expr]) -> Expr:
    """Offset of an element in a strided tensor, in elements."""
    terms = [tirx.Cast("int64", i) * stride for i, stride in zip(at, cache.strides, strict=True)]
    return reduce(operator.add, terms)


def row_address(cache: Any, at: Sequence[Expr]) -> Expr:
    """Address of a row of a strided tensor."""
    origin = [0] * (len(cache.shape) - 1)
    return address_of(cache.ptr_to([*origin, offset(cache, (*at, 0))]))


@T.inline
def make_elements(cta, tile, element):
    """Make a tile of ``element(row, d)`` for each of its elements, dealt to threads."""
    for i in T.serial(tile.rows * tile.columns // cta.tile.threads):
        row: T.let[T.int32] = (i * cta.tile.threads + cta.thread) // tile.columns
        d: T.let[T.int32] = (i * cta.tile.threads + cta.thread) % tile.columns
        tile.buffer[tile.index(0, row, d)] = T.Cast(cta.dtype, element(row, d))


def transformed_query(cta: Cta, task: Any, q: Any) -> Callable[[Expr, Expr], Expr]:
    """Return what element `d` of the query row at a place of the tile is transformed to."""

    def element(place: Expr, d: Expr) -> Expr:
        row = task.row(place)
        token, head = task.index(row)
        return cta.scales.query_row(task.query(row), lambda e: to_float(q[token, head, e]), d)

    return element


@T.inline
def load_q(cta, task, q):
    """Load the query rows, as they are or transformed."""
    tile = T.meta_var(cta.shared.q)
    if cta.hooks.variant.query_transform is None:
        where = T.meta_var(lambda i: cta.shared.q_place[i])
        copy_rows(AddressedCopy(tile, 0, q, where, cta.thread, cta.tile.threads))
    else:
        make_elements(cta, tile, transformed_query(cta, task, q))


@T.inline
def locate_q(cta, task, q):
    """Note where the query rows are."""
    for i in T.unroll(-(-cta.tile.rows // cta.tile.threads)):
        row = T.meta_var(i * cta.tile.threads + cta.thread)
        if row < cta.tile.rows:
            cta.shared.q_place[row] = row_address(q, task.index(task.row(row)))


@T.inline
def look_up(cta, task, cache, pages, count, kv0, kv_end):
    """Look up the pages of `count` tokens, `NOWHERE` of those that there are not: nothing waits."""
    for i in T.unroll(-(-count // cta.tile.threads)):
        token = T.meta_var(i * cta.tile.threads + cta.thread)
        is_there = T.meta_var(T.And(token < count, kv0 + token < kv_end))
        entry = T.meta_var(cache.entry(task.request, kv0 + token)[0])
        if cta.spec.is_paged:
            pages[i] = NOWHERE
            load_word_if(pages[i], cache.indices.ptr_to([entry]), is_there)
        else:
            pages[i] = T.Select(is_there, entry, NOWHERE)


@T.inline
def note(cta, task, cache, pages, count, k, v, t, s, kv0, is_asked):
    """Note where the tokens are whose pages were looked up: from stream position `s` on.

    Without a branch, so that it can be done between multiplications: if it is not asked for,
    nothing is noted.
    """
    for i in T.unroll(-(-count // cta.tile.threads)):
        token = T.meta_var(i * cta.tile.threads + cta.thread)
        first = T.meta_var(SharedTiles.place(cta, t, s + token // cta.tile.block))
        place: T.let[T.int32] = first + token % cta.tile.block
        slot = T.meta_var(cache.entry(task.request, kv0 + token)[1])
        at = T.meta_var(cache.order(pages[i], slot, task.kv_head))
        is_row = T.meta_var(pages[i] != NOWHERE)
        is_noted = T.meta_var(T.And(token < count, is_asked))
        note_row(cta.shared.k_place, place, row_address(k, at), is_row, is_noted)
        note_row(cta.shared.v_place, place, row_address(v, at), is_row, is_noted)


def gather_k(cta: Cta, k: Any, t: Expr, s: Expr) -> AddressedCopy:
    """Return the copy of the keys of a block: that at position `s` of the stream, of item `t`."""
    return _gather(cta, cta.shared.k, cta.shared.k_place, k, t, s)


def gather_v(cta: Cta, v: Any, t: Expr, s: Expr) -> AddressedCopy:
    """Return the copy of the values of a block: that at position `s` of the stream, of item `t`."""
    return _gather(cta, cta.shared.v, cta.shared.v_place, v, t, s)


def _gather(cta: Cta, tile: Any, places: Any, cache: Any, t: Expr, s: Expr) -> AddressedCopy:
    first = SharedTiles.place(cta, t, s)
    return AddressedCopy(
        tile,
        s % cta.tile.stages,
        cache,
        lambda row: places[first + row],
        cta.thread,
        cta.tile.threads,
    )


def transformed(
    task: Any, ring: Any, transform: Callable[..., Expr], s: Expr, kv0: Expr, kv_end: Expr
) -> Callable[[Expr, Expr], Expr]:
    """Return what element `d` of a row of a gathered block is transformed to."""

    def element(row: Expr, d: Expr) -> Expr:
        key = task.key(tirx.min(kv0 + row, kv_end - 1))
        return transform(key, lambda e: to_float(ring.element(s % ring.stages, row, e)), d)

    return element


@T.inline
def widen(cta, ring, operand, s):
    """Make the operand of a block of what was gathered: four elements at a time, as they are."""
    word = T.alloc_local((1,), "uint32")
    pair = T.alloc_local((2,), "uint32")
    turns = T.meta_var(ring.rows * ring.columns // BYTES_OF_A_WORD)
    for i in T.serial(-(-turns // cta.tile.threads)):
        at: T.let[T.int32] = i * cta.tile.threads + cta.thread
        row: T.let[T.int32] = at * BYTES_OF_A_WORD // ring.columns
        d: T.let[T.int32] = at * BYTES_OF_A_WORD % ring.columns
        if at < turns:
            load_shared(word[0], ring.pointer(s % ring.stages, row, d))
            widen_word(ring.dtype, word[0], pair[0], pair[1])
            for half in T.unroll(2):
                if cta.dtype != "float16":
                    low = T.meta_var(half_as_float(pair[half], 0))
                    high = T.meta_var(half_as_float(pair[half], 1))
                    pack(cta.dtype, pair[half], low, high)
            store_shared_pair(operand.pointer(0, row, d), pair[0], pair[1])


@T.inline
def make(cta, task, ring, operand, transform, is_transformed, s, kv0, kv_end):
    """Make the operand of a block, unless it is what was gathered."""
    if is_transformed:
        make_elements(cta, operand, transformed(task, ring, transform, s, kv0, kv_end))
    elif operand is not ring:
        widen(cta, ring, operand, s)


@T.inline
def make_k(cta, task, s, kv0, kv_end):
    """Make the keys of a block, widened and transformed."""
    tiles = T.meta_var(cta.shared)
    is_transformed = T.meta_var(cta.hooks.variant.key_transform is not None)
    make(cta, task, tiles.k, tiles.k_operand, cta.scales.key, is_transformed, s, kv0, kv_end)


@T.inline
def make_v(cta, task, s, kv0, kv_end):
    """Make the values of a block, widened and transformed."""
    tiles = T.meta_var(cta.shared)
    is_transformed = T.meta_var(cta.hooks.variant.value_transform is not None)
    make(cta, task, tiles.v, tiles.v_operand, cta.scales.value, is_transformed, s, kv0, kv_end)
