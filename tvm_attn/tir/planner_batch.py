"""The planner's first half: check a batch, copy its index arrays, derive lengths and positions.

Everything is checked before anything but ``header`` is written, except for page ids: there may be
many, and they are copied while they are checked. Loops over all entries carry reductions and no
branch, which is what a compiler vectorises; the culprit is looked for once there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_ints import (
    LENGTH_LIMIT,
    as_bit,
    bind,
    ceil_div,
    div,
    high_word,
    low_word,
    saturate,
    smallest,
    store,
    var,
    wide,
)
from tvm_attn.tir.signature import takes
from tvm_attn.worklist import HEADER_WORDS, Header, Status


@dataclass(frozen=True)
class Batch:
    """A batch as it is given, and what its entries for a request mean.

    With ragged K/V a page is a token: `paged` is False and `page_size` 1.
    """

    size: Any
    qo_indptr: Any
    kv_indptr: Any
    last_page_len: Any
    q_pos_offset: Any
    kv_pos_offset: Any
    page_size: Any
    group_size: Any
    paged: bool

    def qo_len(self, b: Any) -> Any:
        """Query tokens of a request."""
        return self.qo_indptr[b + 1] - self.qo_indptr[b]

    def pages(self, b: Any) -> Any:
        """Pages of a request."""
        return self.kv_indptr[b + 1] - self.kv_indptr[b]

    def kv_len(self, b: Any) -> Any:
        """KV tokens of a request: none without pages, whatever `last_page_len` says."""
        if not self.paged:
            return self.pages(b)
        tokens = (self.pages(b) - 1) * self.page_size + self.last_page_len[b]
        return as_bit(self.pages(b) > 0) * tokens

    def last_page_is_wrong(self, b: Any) -> Any:
        """Whether a request has pages, but not 1..page_size tokens in its last."""
        last = self.last_page_len[b]
        return T.And(self.pages(b) > 0, T.Or(last < 1, last > self.page_size))

    def has_too_many_rows(self, b: Any) -> Any:
        """Whether a request's fused rows pass the limit."""
        return self.qo_len(b) > div(LENGTH_LIMIT, self.group_size)

    def is_too_long(self, b: Any) -> Any:
        """Whether a request's fused rows or KV tokens pass the limit."""
        return T.Or(self.has_too_many_rows(b), self.pages(b) > div(LENGTH_LIMIT, self.page_size))

    def excess(self, b: Any) -> Any:
        """Return what is too long: a request's query tokens, or else its pages."""
        return T.Select(self.has_too_many_rows(b), self.qo_len(b), self.pages(b))


def is_far(position: Any) -> Any:
    """Whether a position is too large in magnitude."""
    return T.Or(position > LENGTH_LIMIT, position < -LENGTH_LIMIT)


def shortest(*arrays: Any) -> Any:
    """Return the length of the shortest array."""
    return smallest(*(array.shape[0] for array in arrays))


def has_one_each(
    batch_size: Any, last_page_len: Any, optional: tuple[Any, ...], paged: bool
) -> Any:
    """Whether arrays have an entry for each request, or are absent and may be."""
    absent_or_full = [T.Or(a.shape[0] == 0, a.shape[0] == batch_size) for a in optional]
    given = last_page_len.shape[0] == batch_size if paged else True
    return reduce(T.And, absent_or_full, given)


def report(verdict: Any, code: int, where: Any, value: Any) -> None:
    """Keep the first thing found wrong."""
    is_first = verdict[0] == int(Status.OK)
    for word, found in ((1, where), (2, value), (0, code)):
        store(verdict, word, T.Select(is_first, found, verdict[word]))


@T.inline
def check_each(count, is_wrong, code, where, value, verdict):
    """Report the first entry that is wrong."""
    wrong = var(0)
    for i in T.serial(count):
        wrong = T.bitwise_or(wrong, as_bit(is_wrong(i)))
    if wrong != 0:
        for i in T.serial(count):
            if is_wrong(i):
                report(verdict, code, where(i), value(i))


@T.inline
def check_indptr(indptr, batch, code, verdict):
    """Check that a row pointer starts at 0 and does not decrease."""
    if indptr[0] != 0:
        report(verdict, code, 0, indptr[0])
    check_each(
        batch.size,
        lambda b: indptr[b] > indptr[b + 1],
        code,
        lambda b: b + 1,
        lambda b: indptr[b + 1],
        verdict,
    )


@T.inline
def copy_indices(indices, out, count, max_page, verdict):
    """Copy page ids and check, meanwhile, that none is negative; as unsigned, one maximum tells."""
    top = var(T.uint32(0))
    for i in T.serial(count):
        out[i] = indices[i]
        top = T.max(top, T.reinterpret("uint32", indices[i]))
    max_page = T.Select(count > 0, T.reinterpret("int32", top), max_page)
    if top > T.uint32(0x7FFFFFFF):
        for i in T.serial(count):
            if indices[i] < 0:
                report(verdict, int(Status.KV_INDEX), i, indices[i])


@T.inline
def check_lengths(batch, verdict):
    """Check that last pages are neither empty nor overfull, and that nothing is too long."""
    if batch.paged:
        check_each(
            batch.size,
            batch.last_page_is_wrong,
            int(Status.LAST_PAGE_LEN),
            lambda b: b,
            lambda b: batch.last_page_len[b],
            verdict,
        )
    check_each(
        batch.size, batch.is_too_long, int(Status.TOO_LONG), lambda b: b, batch.excess, verdict
    )


@T.inline
def check_positions(offsets, is_given, lengths, batch, verdict):
    """Check that given positions stay in range from a request's first token to its last."""
    if is_given:
        check_each(
            batch.size,
            lambda b: T.Or(is_far(offsets[b]), is_far(offsets[b] + lengths(b))),
            int(Status.TOO_LONG),
            lambda b: b,
            lambda b: offsets[b],
            verdict,
        )


def copy(source: Any, target: Any, count: Any) -> None:
    """Copy the first `count` entries."""
    with T.serial(count) as i:
        store(target, i, source[i])


@T.inline
def derive_lengths(batch, kv_len_out, header):
    """Write the KV length of every request; largest lengths and the sum go to the header."""
    max_qo_len = var(0)
    max_kv_len = var(0)
    tokens = var(T.int64(0))
    for b in T.serial(batch.size):
        kv_len = var(batch.kv_len(b))
        kv_len_out[b] = kv_len
        max_qo_len = T.max(max_qo_len, batch.qo_len(b))
        max_kv_len = T.max(max_kv_len, kv_len)
        tokens = tokens + wide(kv_len)
    header[int(Header.MAX_QO_LEN)] = max_qo_len
    header[int(Header.MAX_KV_LEN)] = max_kv_len
    header[int(Header.NUM_TOKENS_LO)] = low_word(tokens)
    header[int(Header.NUM_TOKENS_HI)] = high_word(tokens)


@T.inline
def derive_positions(batch, q_given, kv_given, q_pos_out, kv_pos_out):
    """Write the positions of every request's first query (default: the last ones) and key."""
    if q_given:
        copy(batch.q_pos_offset, q_pos_out, batch.size)
    else:
        for b in T.serial(batch.size):
            q_pos_out[b] = batch.kv_len(b) - batch.qo_len(b)
    if kv_given:
        copy(batch.kv_pos_offset, kv_pos_out, batch.size)
    else:
        for b in T.serial(batch.size):
            kv_pos_out[b] = 0


@T.inline
def count_units(batch, short_rows, long_rows, header):
    """Count (request, query tile) pairs of both kernel families."""
    short = var(0)
    long = var(T.int64(0))
    for b in T.serial(batch.size):
        rows = var(batch.qo_len(b) * batch.group_size)
        if rows > short_rows:
            long = long + wide(ceil_div(rows, long_rows))
        else:
            short = short + as_bit(rows > 0)
    header[int(Header.UNITS_SHORT)] = short
    header[int(Header.UNITS_LONG)] = saturate(long)


@dataclass(frozen=True)
class Derived:
    """Arrays that have room for a batch: copies, and what is derived of it."""

    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    kv_len: Any
    q_pos_offset: Any
    kv_pos_offset: Any


@T.inline
def derive(batch, kv_indices, out, short_rows, long_rows, header):
    """Check a batch, copy it and derive what plans need of it."""
    verdict = T.alloc_buffer((3,), "int32")
    max_page = var(-1)
    pages = var(batch.kv_indptr[batch.size])
    q_given = T.meta_var(batch.q_pos_offset.shape[0] > 0)
    kv_given = T.meta_var(batch.kv_pos_offset.shape[0] > 0)
    for i in T.serial(3):
        verdict[i] = 0

    check_indptr(batch.qo_indptr, batch, int(Status.QO_INDPTR), verdict)
    check_indptr(batch.kv_indptr, batch, int(Status.KV_INDPTR), verdict)
    if batch.paged:
        if pages > kv_indices.shape[0]:
            report(verdict, int(Status.KV_INDICES_SHORT), kv_indices.shape[0], pages)
        if verdict[0] == int(Status.OK):
            assert out.kv_indices.shape[0] >= pages, (
                "plan_batch: kv_indices_out is too small for the batch"
            )
            copy_indices(kv_indices, out.kv_indices, pages, max_page, verdict)
    if verdict[0] == int(Status.OK):
        check_lengths(batch, verdict)
        check_positions(batch.q_pos_offset, q_given, batch.qo_len, batch, verdict)
        check_positions(batch.kv_pos_offset, kv_given, batch.kv_len, batch, verdict)
    for i in T.serial(3):
        header[i] = verdict[i]

    if verdict[0] == int(Status.OK):
        copy(batch.qo_indptr, out.qo_indptr, batch.size + 1)
        copy(batch.kv_indptr, out.kv_indptr, batch.size + 1)
        derive_lengths(batch, out.kv_len, header)
        derive_positions(batch, q_given, kv_given, out.q_pos_offset, out.kv_pos_offset)
        count_units(batch, short_rows, long_rows, header)
        header[int(Header.NNZ_QO)] = batch.qo_indptr[batch.size]
        header[int(Header.MAX_PAGE)] = max_page
        header[int(Header.NUM_PAGES)] = pages if batch.paged else 0


def batch_planner(paged: bool) -> Any:
    """Return the PrimFunc ``plan_batch``: check a batch, copy it, derive what `work_planner` needs.

    Parameters of the function, in order, arrays int32 and on the host:

    ===================  ==================  =====================================================
    qo_indptr            [batch + 1]         query tokens of each request
    kv_indptr            [batch + 1]         pages of each request; ragged: its KV tokens
    kv_indices           [any]               page ids; ragged: length 0
    last_page_len        [batch]             tokens in the last page; ragged: length 0
    q_pos_offset         [0] or [batch]      position of the first query; empty: kv_len - qo_len
    kv_pos_offset        [0] or [batch]      position of the first key; empty: 0
    page_size            scalar              at least 1; ragged: not used
    group_size           scalar              query heads that share a KV head
    short_rows           scalar              most fused rows of a request of the short family
    long_rows            scalar              fused rows of a tile of the long family
    qo_indptr_out        [>= batch + 1]      copy
    kv_indptr_out        [>= batch + 1]      copy
    kv_indices_out       [>= pages]          copy of the ``kv_indptr[batch]`` ids in use
    kv_len_out           [>= batch]          KV tokens of each request
    q_pos_offset_out     [>= batch]          as given, or the default
    kv_pos_offset_out    [>= batch]          as given, or the default
    header               [HEADER_WORDS]      verdict and totals
    ===================  ==================  =====================================================

    A bad batch sets ``STATUS``, ``WHERE`` and ``VALUE`` of `header`, and nothing else but page ids.
    ``WHERE`` is a position in the array of an indptr or index status (for ``KV_INDICES_SHORT``: how
    many ids there are), else a request; ``VALUE`` is what stands there (for ``KV_INDICES_SHORT``:
    how many ids are needed; for ``TOO_LONG``: query tokens, else pages, else the offset that is too
    large).

    Parameters
    ----------
    paged : bool
        Whether K/V are paged; else they are ragged.

    Returns
    -------
    PrimFunc
        Raises RuntimeError when an output is too small to hold the batch.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def plan_batch(
        qo_indptr_h: T.handle,
        kv_indptr_h: T.handle,
        kv_indices_h: T.handle,
        last_page_len_h: T.handle,
        q_pos_offset_h: T.handle,
        kv_pos_offset_h: T.handle,
        page_size: T.int32,
        group_size: T.int32,
        short_rows: T.int32,
        long_rows: T.int32,
        qo_indptr_out_h: T.handle,
        kv_indptr_out_h: T.handle,
        kv_indices_out_h: T.handle,
        kv_len_out_h: T.handle,
        q_pos_offset_out_h: T.handle,
        kv_pos_offset_out_h: T.handle,
        header_h: T.handle,
    ):
        qo_indptr = bind(qo_indptr_h, "qo_indptr")
        kv_indptr = T.match_buffer(kv_indptr_h, (qo_indptr.shape[0],), "int32", align=4)
        kv_indices = bind(kv_indices_h, "kv_indices")
        last_page_len = bind(last_page_len_h, "last_page_len")
        q_pos_offset = bind(q_pos_offset_h, "q_pos_offset")
        kv_pos_offset = bind(kv_pos_offset_h, "kv_pos_offset")
        qo_indptr_out = bind(qo_indptr_out_h, "qo_indptr_out")
        kv_indptr_out = bind(kv_indptr_out_h, "kv_indptr_out")
        kv_indices_out = bind(kv_indices_out_h, "kv_indices_out")
        kv_len_out = bind(kv_len_out_h, "kv_len_out")
        q_pos_offset_out = bind(q_pos_offset_out_h, "q_pos_offset_out")
        kv_pos_offset_out = bind(kv_pos_offset_out_h, "kv_pos_offset_out")
        header = T.match_buffer(header_h, (HEADER_WORDS,), "int32", align=4)
        batch_size = T.meta_var(qo_indptr.shape[0] - 1)
        assert smallest(page_size, group_size, long_rows) > 0, (
            "plan_batch: page_size, group_size and long_rows must be positive"
        )
        assert has_one_each(batch_size, last_page_len, (q_pos_offset, kv_pos_offset), paged), (
            "plan_batch: last_page_len, q_pos_offset or kv_pos_offset is not one per request"
        )
        assert T.And(
            shortest(qo_indptr_out, kv_indptr_out) > batch_size,
            shortest(kv_len_out, q_pos_offset_out, kv_pos_offset_out) >= batch_size,
        ), "plan_batch: an output is too small for the batch"
        with T.sblock("plan_batch"):
            T.reads()
            T.writes()
            batch = T.meta_var(
                Batch(
                    size=batch_size,
                    qo_indptr=qo_indptr,
                    kv_indptr=kv_indptr,
                    last_page_len=last_page_len,
                    q_pos_offset=q_pos_offset,
                    kv_pos_offset=kv_pos_offset,
                    page_size=page_size if paged else 1,
                    group_size=group_size,
                    paged=paged,
                )
            )
            out = T.meta_var(
                Derived(
                    *(qo_indptr_out, kv_indptr_out, kv_indices_out),
                    *(kv_len_out, q_pos_offset_out, kv_pos_offset_out),
                )
            )
            derive(batch, kv_indices, out, short_rows, long_rows, header)

    given = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
    named = plan_batch.with_attr("global_symbol", "plan_batch")
    return takes(named, *given, "q_pos_offset", "kv_pos_offset")
