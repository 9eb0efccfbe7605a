"""Work items in shared memory: each is read ahead, while the one before it is worked on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.addresses import no_row
from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES, PARITIES, TASK_WORDS
from tvm_attn.schedules.primitives.staging import copy_chunk, copy_word
from tvm_attn.tir.access import CacheAccess
from tvm_attn.tir.rows import Rows
from tvm_attn.tir.states import f32
from tvm_attn.tir.visibility import Range, seen_by_all, seen_by_row, with_set_bits
from tvm_attn.variant import Expr
from tvm_attn.worklist import ITEM_WORDS, SEEN_BITS, Item

LEAST_FACTOR = 1e-30
"""What a factor of 0 becomes: a hidden key's -inf stays that, and all else is as good as 0."""


class Request(IntEnum):
    """Words of a task after those of its `Item`: what the batch's arrays say of its request."""

    QO_BEGIN = ITEM_WORDS
    QO_END = ITEM_WORDS + 1
    KV_BEGIN = ITEM_WORDS + 2
    KV_LEN = ITEM_WORDS + 3
    Q_SHIFT = ITEM_WORDS + 4
    KV_SHIFT = ITEM_WORDS + 5


class Derived(IntEnum):
    """Words of a task after those: what follows from them, computed once."""

    FIRST_KEY = ITEM_WORDS + 6  # to attend to
    END_KEY = ITEM_WORDS + 7
    FIRST_SEEN = ITEM_WORDS + 8  # of the keys that all rows see
    LAST_SEEN = ITEM_WORDS + 9
    FACTOR = ITEM_WORDS + 10  # from a product to a score, a float32
    RECIPROCAL = ITEM_WORDS + 11  # of the page size, times 2**32, rounded down


@dataclass(frozen=True)
class Task(Rows):
    """The rows of a work item, and the keys they attend to, read from shared memory."""

    words: Any
    first: Expr

    @staticmethod
    def of(cta: Any, batch: Any, t: Expr) -> Task:
        """Return the task of item `t`."""
        words, first = cta.shared.tasks, t % cta.tile.tasks * TASK_WORDS
        ids = (words[first + Item.REQUEST], words[first + Item.KV_HEAD])
        return Task(cta.hooks, cta.spec.group_size, batch, *ids, words, first)

    @property
    def row0(self) -> Expr:
        """First fused row."""
        return self.words[self.first + Item.ROW_BEGIN]

    @property
    def row_end(self) -> Expr:
        """One past the last fused row."""
        return self.words[self.first + Item.ROW_END]

    @property
    def slot(self) -> Expr:
        """Partial state to write, or NO_SLOT."""
        return self.words[self.first + Item.SLOT]

    @property
    def qo_begin(self) -> Expr:
        """First query token of the request in q."""
        return self.words[self.first + Request.QO_BEGIN]

    @property
    def qo_len(self) -> Expr:
        """Query tokens of the request."""
        return self.words[self.first + Request.QO_END] - self.qo_begin

    @property
    def kv_len(self) -> Expr:
        """KV tokens of the request."""
        return self.words[self.first + Request.KV_LEN]

    @property
    def q_shift(self) -> Expr:
        """Position of the request's first query."""
        return self.words[self.first + Request.Q_SHIFT]

    @property
    def kv_shift(self) -> Expr:
        """Position of the request's first key."""
        return self.words[self.first + Request.KV_SHIFT]

    def row(self, place: Expr) -> Expr:
        """Fused row at a place of the tile; beyond the item's, its last: hooks may index arrays."""
        return tirx.min(self.row0 + place, self.row_end - 1)

    def has_one_block(self, block: int) -> Expr:
        """Whether the keys, if there are any, fit one block."""
        return self.first_key + block >= self.end_key

    @property
    def first_key(self) -> Expr:
        """First key to attend to."""
        return self.words[self.first + Derived.FIRST_KEY]

    @property
    def end_key(self) -> Expr:
        """One past the last key to attend to."""
        return self.words[self.first + Derived.END_KEY]

    def sees_all(self, first: Expr, last: Expr) -> Expr:
        """Whether all rows see all of some keys."""
        begin, end = (self.words[self.first + w] for w in (Derived.FIRST_SEEN, Derived.LAST_SEEN))
        return tirx.And(begin <= first, last <= end)

    @property
    def factor(self) -> Expr:
        """Factor from a product to a score."""
        return tirx.reinterpret("float32", self.words[self.first + Derived.FACTOR])

    def keys(self) -> tuple[Expr, Expr]:
        """Derive the first key to attend to, and one past the last."""
        lo, hi = self.key_range(self.row0, self.row_end)
        begin, end = (self.words[self.first + w] for w in (Item.KV_BEGIN, Item.KV_END))
        return tirx.max(begin, lo), tirx.min(end, hi)

    def seen(self, granule: int) -> Range:
        """Derive the keys that all rows see; with bitmaps, of those whose bits are all set.

        The planner says which those are, in granules.
        """
        tokens = Range(self.token(self.row0), self.token(self.row_end - 1))
        heads = self.kv_head * self.group_size
        rows = {
            "qo_idx": tokens,
            "q_pos": tokens.plus(self.q_shift),
            "qo_head": Range(heads, heads + self.group_size - 1),
        }
        hooks = with_set_bits(self.hooks)
        seen = seen_by_all(hooks, self.request_fields(), rows, self.kv_shift)
        if not hooks.bitmaps():
            return seen
        word = self.words[self.first + Item.SEEN]
        first = tirx.bitwise_and(word, (1 << SEEN_BITS) - 1) * granule
        last = tirx.shift_right(word, SEEN_BITS) * granule - 1
        return Range(tirx.max(seen.first, first), tirx.min(seen.last, last))


@dataclass(frozen=True)
class LaneRows(Task):
    """The rows of a task that a lane holds, by their number among the lane's: all in registers."""

    tokens: Any
    heads: Any

    def token(self, row: Expr) -> Expr:
        """Query token of one of the lane's rows."""
        return self.tokens[row]

    def head(self, row: Expr) -> Expr:
        """Query head of one of the lane's rows."""
        return self.heads[row]

    def seen_by_row(self, row: int) -> Range | None:
        """Return the keys that one of the lane's rows sees, if the mask is that of a range.

        With bitmaps, of those whose bits are all set.
        """
        fields = {**self.request_fields(), **self.query_fields(row)}
        return seen_by_row(with_set_bits(self.hooks), fields, self.kv_shift)


def in_registers(task: Task) -> Task:
    """Read what may be asked of a task into registers; what is not asked for vanishes."""
    words = T.alloc_local((TASK_WORDS,), "int32")
    for word in (*Item, *Request, *Derived):
        if word not in (Item.SEEN, Derived.RECIPROCAL):
            T.buffer_store(words, task.words[task.first + word], [word])
    ids = (words[Item.REQUEST], words[Item.KV_HEAD])
    return Task(task.hooks, task.group_size, task.batch, *ids, words, tirx.const(0, "int32"))


def at_hand(cta: Any, task: Task) -> LaneRows:
    """Read what hooks may ask of a task into registers."""
    tokens, heads = T.alloc_local((cta.rows,), "int32"), T.alloc_local((cta.rows,), "int32")
    held = in_registers(task)
    for i in range(cta.rows):
        row = held.row(cta.place(i))
        T.buffer_store(tokens, held.token(row), [i])
        T.buffer_store(heads, held.head(row), [i])
    ids = (held.request, held.kv_head)
    fields = (held.hooks, held.group_size, held.batch, *ids, held.words, held.first)
    return LaneRows(*fields, tokens, heads)


@dataclass(frozen=True)
class TaskAccess(CacheAccess):
    """Access to the tokens of a task's request, whose place in the page table is at hand."""

    task: Task

    @staticmethod
    def to(cache: CacheAccess, task: Task) -> TaskAccess:
        """Access to a cache for a task."""
        return TaskAccess(cache.spec, cache.indptr, cache.indices, cache.page_size, task)

    def begin(self, request: Expr) -> Expr:
        """First page of the request in the page table, or its first token if K/V are ragged."""
        return self.task.words[self.task.first + Request.KV_BEGIN]

    def split(self, token: Expr) -> tuple[Expr, Expr]:
        """Divide by the page size."""
        reciprocal = self.task.words[self.task.first + Derived.RECIPROCAL]
        return split_token(token, tirx.Cast("uint32", reciprocal), self.page_size)


def split_token(token: Expr, reciprocal: Expr, page_size: Expr) -> tuple[Expr, Expr]:
    """Return page and slot of a token: a product with the reciprocal is the page, or 1 less."""
    product = tirx.Cast("int64", token) * tirx.Cast("int64", reciprocal)
    quotient = tirx.Cast("int32", tirx.shift_right(product, tirx.const(32, "int64")))
    rest = token - quotient * page_size
    more = tirx.Cast("int32", rest >= page_size)
    return quotient + more, rest - more * page_size


@T.inline
def read_item(cta, items, t, end):
    """Begin to read item `t`, if there is one."""
    words = T.meta_var(CHUNK_BYTES // 4)
    if T.And(t < end, cta.thread < ITEM_WORDS // words):
        first = T.meta_var(cta.thread * words)
        at = T.meta_var(t % cta.tile.tasks * TASK_WORDS + first)
        copy_chunk(cta.shared.tasks.ptr_to([at]), items.ptr_to([t, first]), T.bool(True))


def copy_request(words: Any, task: Expr, batch: Any, request: Expr) -> None:
    """Begin to copy the words of a `Request`."""
    sources = {
        Request.QO_BEGIN: (batch.qo_indptr, request),
        Request.QO_END: (batch.qo_indptr, request + 1),
        Request.KV_BEGIN: (batch.kv_indptr, request),
        Request.KV_LEN: (batch.kv_len, request),
        Request.Q_SHIFT: (batch.q_pos_offset, request),
        Request.KV_SHIFT: (batch.kv_pos_offset, request),
    }
    for word, (array, index) in sources.items():
        T.evaluate(copy_word(words.ptr_to([task + word]), array.ptr_to([index])))


@T.inline
def read_request(cta, batch, t, end):
    """Begin to read what the batch's arrays say of the request of item `t`, which is there."""
    if T.And(t < end, cta.thread == 0):
        task: T.let[T.int32] = t % cta.tile.tasks * TASK_WORDS
        request: T.let[T.int32] = cta.shared.tasks[task + Item.REQUEST]
        copy_request(cta.shared.tasks, task, batch, request)


@T.inline
def derive(cta, task, kv_begin, kv_end):
    """Keep what follows from a task: its keys, those that all rows see, the factor of scores."""
    if cta.thread == 0:
        factor = T.meta_var(T.max(cta.scales.product(task.kv_head), f32(LEAST_FACTOR)))
        seen = T.meta_var(task.seen(cta.tile.granule))
        task.words[task.first + Derived.FIRST_KEY] = kv_begin
        task.words[task.first + Derived.END_KEY] = kv_end
        task.words[task.first + Derived.FIRST_SEEN] = T.max(seen.first, kv_begin)
        task.words[task.first + Derived.LAST_SEEN] = T.min(seen.last, kv_end - 1)
        task.words[task.first + Derived.FACTOR] = T.reinterpret("int32", factor)


@T.inline
def divide_by_page_size(cta, cache):
    """Keep the reciprocal of the page size in every task."""
    if cta.thread < cta.tile.tasks:
        at = T.meta_var(cta.thread * TASK_WORDS + Derived.RECIPROCAL)
        reciprocal = T.meta_var(T.uint32(0xFFFFFFFF) // T.Cast("uint32", cache.page_size))
        cta.shared.tasks[at] = T.Cast("int32", reciprocal)


@T.inline
def forget_places(cta):
    """Let no place be that of a token."""
    places = T.meta_var(PARITIES * PARITIES * cta.tile.block)
    for i in T.unroll(-(-places // cta.tile.threads)):
        place = T.meta_var(i * cta.tile.threads + cta.thread)
        if place < places:
            cta.shared.k_place[place] = no_row()
            cta.shared.v_place[place] = no_row()
