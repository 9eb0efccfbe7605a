"""A batch on a device: checked, its lengths and positions derived, by the threads of a CTA.

What `tvm_attn.tir.planner_batch` does on the host. A batch that is wrong, or larger than what the
plan was made for, is replaced by one in which requests without keys share all query tokens: every
row of the output is then an empty state, and nothing is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.parallel import added, each, largest, least
from tvm_attn.tir.planner_batch import Batch, is_far
from tvm_attn.tir.planner_ints import (
    as_bit,
    assign,
    ceil_div,
    high_word,
    low_word,
    scalar,
    var,
    wide,
)
from tvm_attn.worklist import Header, Status

ORDERS = 4
"""Kinds of fault that share a status, one looked for after another."""
NO_FAULT = (1 << 63) - 1


@dataclass(frozen=True)
class Limits:
    """The largest batch a plan was made for: numbers, `pages` of a batch, `num_pages` of the cache.

    `qo_len` is 0 if the longest query is not known.
    """

    batch: Any
    qo_tokens: Any
    pages: Any
    qo_len: Any
    num_pages: Any


@dataclass(frozen=True)
class Derived:
    """What is derived of each request, in arrays; and of all of them, in variables.

    `size` is the number of requests. `fault` is the first thing found wrong, as `fault_at` has it.
    """

    qo_indptr: Any
    kv_indptr: Any
    kv_len: Any
    q_pos_offset: Any
    kv_pos_offset: Any
    size: Any
    fault: Any
    max_qo_len: Any
    max_kv_len: Any
    tokens: Any
    units: Any


def totals() -> dict[str, Any]:
    """Allocate the variables of a `Derived`."""
    dtypes = {"fault": "int64", "tokens": "int64"}
    names = ("size", "fault", "max_qo_len", "max_kv_len", "tokens", "units")
    return {name: scalar(dtypes.get(name, "int32")) for name in names}


def fault_at(is_wrong: Any, status: Status, where: Any, order: int = 0) -> Any:
    """Return what is the less, the sooner the host would find it, if there is something wrong."""
    code = T.shift_left(T.int64(ORDERS * int(status) + order), T.int64(32))
    return T.Select(is_wrong, code + wide(where), T.int64(NO_FAULT))


def status_of(fault: Any) -> Any:
    """Status of a fault."""
    return T.Select(fault == T.int64(NO_FAULT), 0, high_word(fault) // ORDERS)


def first_of(*faults: Any) -> Any:
    """Return the fault that the host would find first."""
    return reduce(T.min, faults)


def fault_of_all(batch: Batch, num_indices: Any, limits: Limits) -> Any:
    """Return what is wrong with a batch as a whole."""
    pages = batch.kv_indptr[batch.size]
    faults = [
        fault_at(batch.qo_indptr[0] != 0, Status.QO_INDPTR, 0),
        fault_at(batch.kv_indptr[0] != 0, Status.KV_INDPTR, 0),
        fault_at(batch.qo_indptr[batch.size] > limits.qo_tokens, Status.QO_LIMIT, 0),
        fault_at(pages > limits.pages, Status.KV_LIMIT, 0),
    ]
    if batch.paged:
        faults.append(fault_at(pages > num_indices, Status.KV_INDICES_SHORT, num_indices))
    return first_of(*faults)


def fault_of(batch: Batch, limits: Limits, given: tuple[Any, Any], b: Any) -> Any:
    """Return what is wrong with a request; `given` says whether its positions are given."""
    q_pos, kv_pos = batch.q_pos_offset, batch.kv_pos_offset
    faults = [
        fault_at(batch.qo_indptr[b] > batch.qo_indptr[b + 1], Status.QO_INDPTR, b + 1),
        fault_at(batch.kv_indptr[b] > batch.kv_indptr[b + 1], Status.KV_INDPTR, b + 1),
        fault_at(batch.is_too_long(b), Status.TOO_LONG, b),
        fault_at(T.And(limits.qo_len > 0, batch.qo_len(b) > limits.qo_len), Status.QO_LEN, b),
    ]
    if batch.paged:
        faults.append(fault_at(batch.last_page_is_wrong(b), Status.LAST_PAGE_LEN, b))
    for order, (is_given, offsets, length) in enumerate(
        ((given[0], q_pos, batch.qo_len(b)), (given[1], kv_pos, batch.kv_len(b))), start=1
    ):
        offset = T.if_then_else(is_given, offsets[b], 0)
        wrong = T.Or(is_far(offset), is_far(offset + length))
        faults.append(fault_at(T.And(is_given, wrong), Status.TOO_LONG, b, order))
    return first_of(*faults)


@T.inline
def check(cta, batch, num_indices, limits, given, out):
    """Check a batch, and derive what holds for all of it, as if it were right."""
    assign(out.size, batch.size)
    assign(out.fault, T.int64(NO_FAULT))
    assign(out.max_qo_len, 0)
    assign(out.max_kv_len, 0)
    assign(out.tokens, T.int64(0))
    assign(out.units, 0)

    @T.inline
    def check_request(b):
        qo_len = var(batch.qo_len(b))
        kv_len = var(batch.kv_len(b))
        assign(out.fault, first_of(out.fault, fault_of(batch, limits, given, b)))
        assign(out.max_qo_len, T.max(out.max_qo_len, qo_len))
        assign(out.max_kv_len, T.max(out.max_kv_len, kv_len))
        assign(out.tokens, out.tokens + wide(kv_len))
        assign(out.units, out.units + as_bit(qo_len > 0))

    @T.inline
    def check_entry(b):
        if b < batch.size:
            check_request(b)
        else:
            assign(out.fault, first_of(out.fault, fault_of_all(batch, num_indices, limits)))

    each(cta, batch.size + 1, check_entry)
    cta.agree(
        [
            (out.fault, least),
            (out.max_qo_len, largest),
            (out.max_kv_len, largest),
            (out.tokens, added),
            (out.units, added),
        ]
    )


@T.inline
def derive(cta, batch, given, out):
    """Derive lengths and positions of every request.

    CTAs that plan the same batch write to the same arrays: only once they know that it is right.
    """

    @T.inline
    def derive_entry(b):
        out.qo_indptr[b] = batch.qo_indptr[b]
        out.kv_indptr[b] = batch.kv_indptr[b]
        if b < batch.size:
            kv_len = var(batch.kv_len(b))
            ends = T.meta_var(kv_len - batch.qo_len(b))
            out.kv_len[b] = kv_len
            out.q_pos_offset[b] = T.if_then_else(given[0], batch.q_pos_offset[b], ends)
            out.kv_pos_offset[b] = T.if_then_else(given[1], batch.kv_pos_offset[b], 0)

    each(cta, batch.size + 1, derive_entry)


@T.inline
def replace(cta, limits, out):
    """Replace a bad batch by one without keys, whose requests share all query tokens."""
    assign(out.size, limits.batch)
    even = var(ceil_div(limits.qo_tokens, T.max(limits.batch, 1)))
    most = var(T.Select(limits.qo_len > 0, T.min(even, limits.qo_len), even))
    assign(out.max_qo_len, T.Select(limits.batch > 0, most, 0))
    assign(out.max_kv_len, 0)
    assign(out.tokens, T.int64(0))
    assign(out.units, T.min(limits.batch, ceil_div(limits.qo_tokens, T.max(most, 1))))

    @T.inline
    def replace_request(b):
        begin = var(low_word(T.min(wide(b) * wide(most), wide(limits.qo_tokens))))
        out.qo_indptr[b] = begin
        out.kv_indptr[b] = 0
        if b < limits.batch:
            out.kv_len[b] = 0
            out.q_pos_offset[b] = 0
            out.kv_pos_offset[b] = 0

    each(cta, limits.batch + 1, replace_request)


def value_at(batch: Batch, kv_indices: Any, status: Any, order: Any, where: Any) -> Any:
    """Return the value that a status speaks of, as the host's planner reports it."""
    last = batch.last_page_len[where] if batch.paged else 0
    position = T.if_then_else(
        order == 1,
        batch.q_pos_offset[where],
        T.if_then_else(order == 2, batch.kv_pos_offset[where], 0),
    )
    found = T.if_then_else(order > 0, position, batch.excess(where))
    page = T.int32(0)
    if batch.paged:
        of_page = T.Or(status == int(Status.KV_INDEX), status == int(Status.NO_PAGE))
        page = T.if_then_else(of_page, kv_indices[where], 0)
    values = {
        Status.QO_INDPTR: batch.qo_indptr[where],
        Status.KV_INDPTR: batch.kv_indptr[where],
        Status.KV_INDICES_SHORT: batch.kv_indptr[batch.size],
        Status.LAST_PAGE_LEN: last,
        Status.TOO_LONG: found,
        Status.QO_LIMIT: batch.qo_indptr[batch.size],
        Status.KV_LIMIT: batch.kv_indptr[batch.size],
        Status.QO_LEN: batch.qo_len(where),
    }
    return reduce(
        lambda rest, case: T.if_then_else(status == int(case[0]), case[1], rest),
        values.items(),
        page,
    )


@T.inline
def write_header(batch, kv_indices, out, header):
    """Write the verdict, and what the batch holds, to a header: by one thread."""
    fault = var(out.fault)
    status = var(status_of(fault))
    order = var(high_word(fault) % ORDERS)
    where = var(T.Select(status == 0, 0, low_word(fault)))
    header[int(Header.WHERE)] = where
    header[int(Header.VALUE)] = value_at(batch, kv_indices, status, order, where)
    header[int(Header.STATUS)] = status
    header[int(Header.NNZ_QO)] = batch.qo_indptr[batch.size]
    header[int(Header.MAX_QO_LEN)] = out.max_qo_len
    header[int(Header.MAX_KV_LEN)] = out.max_kv_len
    header[int(Header.NUM_TOKENS_LO)] = low_word(out.tokens)
    header[int(Header.NUM_TOKENS_HI)] = high_word(out.tokens)
