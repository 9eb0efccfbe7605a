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

from tvm_attn.tir.parallel import added, each, largest, least, spread
from tvm_attn.tir.planner_batch import Batch, is_far
from tvm_attn.tir.planner_ints import (
    LENGTH_LIMIT,
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
NO_FAULT = (1 << 62) - 1
PLAIN, OTHER, WRONG = range(3)
"""Kinds of batches: each request is one unit of a family, or not, or there is a fault."""


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


Fault = tuple[Any, Status, Any, int]
"""What may be wrong: whether it is, and what `fault_at` is told of it."""


def status_of(fault: Any) -> Any:
    """Status of a fault."""
    return T.Select(fault == T.int64(NO_FAULT), 0, high_word(fault) // ORDERS)


def faults_of_all(batch: Batch, num_indices: Any, limits: Limits) -> list[Fault]:
    """Return what may be wrong with a batch as a whole."""
    pages = batch.kv_indptr[batch.size]
    faults: list[Fault] = [
        (batch.qo_indptr[0] != 0, Status.QO_INDPTR, 0, 0),
        (batch.kv_indptr[0] != 0, Status.KV_INDPTR, 0, 0),
        (batch.qo_indptr[batch.size] > limits.qo_tokens, Status.QO_LIMIT, 0, 0),
        (pages > limits.pages, Status.KV_LIMIT, 0, 0),
    ]
    if batch.paged:
        faults.append((pages > num_indices, Status.KV_INDICES_SHORT, num_indices, 0))
    return faults


def is_too_long(batch: Batch, b: Any) -> Any:
    """Whether `Batch.is_too_long`: by products, which takes less time here than quotients."""
    rows = wide(batch.qo_len(b)) * wide(batch.group_size)
    tokens = wide(batch.pages(b)) * wide(batch.page_size)
    return T.max(rows, tokens) > T.int64(LENGTH_LIMIT)


def faults_of(batch: Batch, limits: Limits, b: Any) -> list[Fault]:
    """Return what may be wrong with a request but for its positions."""
    faults: list[Fault] = [
        (batch.qo_indptr[b] > batch.qo_indptr[b + 1], Status.QO_INDPTR, b + 1, 0),
        (batch.kv_indptr[b] > batch.kv_indptr[b + 1], Status.KV_INDPTR, b + 1, 0),
        (is_too_long(batch, b), Status.TOO_LONG, b, 0),
        (T.And(limits.qo_len > 0, batch.qo_len(b) > limits.qo_len), Status.QO_LEN, b, 0),
    ]
    if batch.paged:
        faults.append((batch.last_page_is_wrong(b), Status.LAST_PAGE_LEN, b, 0))
    return faults


def faults_of_positions(batch: Batch, given: tuple[Any, Any], b: Any) -> list[Fault]:
    """Return what may be wrong with a request's positions; `given` says whether there are any."""
    faults: list[Fault] = []
    q_pos, kv_pos = batch.q_pos_offset, batch.kv_pos_offset
    for order, (is_given, offsets, length) in enumerate(
        ((given[0], q_pos, batch.qo_len(b)), (given[1], kv_pos, batch.kv_len(b))), start=1
    ):
        offset = T.if_then_else(is_given, offsets[b], 0)
        wrong = T.Or(is_far(offset), is_far(offset + length))
        faults.append((T.And(is_given, wrong), Status.TOO_LONG, b, order))
    return faults


def is_any(faults: list[Fault]) -> Any:
    """Whether there is any fault, as a bit."""
    return reduce(T.bitwise_or, (as_bit(fault[0]) for fault in faults))


def first_of(faults: list[Fault]) -> Any:
    """Return the fault that the host would find first."""
    return reduce(T.min, (fault_at(*fault) for fault in faults))


@T.inline
def find_fault(cta, batch, num_indices, limits, given, out):
    """Find the fault that the host would find first."""

    @T.inline
    def check_entry(b):
        if b < batch.size:
            faults = T.meta_var(faults_of(batch, limits, b))
            of_positions = T.meta_var(faults_of_positions(batch, given, b))
            assign(out.fault, T.min(out.fault, first_of([*faults, *of_positions])))
        else:
            whole = T.meta_var(first_of(faults_of_all(batch, num_indices, limits)))
            assign(out.fault, T.min(out.fault, whole))

    spread(cta, batch.size + 1, check_entry)
    cta.agree([(out.fault, least)])


@T.inline
def check(cta, batch, num_indices, limits, given, out, kind, note):
    """Check requests, and note what is to know of each, as if all were right.

    `kind`, which `note` may raise, is `WRONG` if there is a fault. Threads do not know of one
    another yet, and each looks at the whole: by then that is in its cache.
    """
    assign(out.size, batch.size)
    assign(out.fault, T.int64(NO_FAULT))
    assign(kind, 0)

    @T.inline
    def check_entry(b):
        if b < batch.size:
            assign(kind, T.max(kind, WRONG * is_any(faults_of(batch, limits, b))))
            if T.Or(given[0], given[1]):
                assign(kind, T.max(kind, WRONG * is_any(faults_of_positions(batch, given, b))))
            note(b)
        whole = T.meta_var(is_any(faults_of_all(batch, num_indices, limits)))
        assign(kind, T.max(kind, WRONG * whole))

    spread(cta, T.max(batch.size, 1), check_entry)


@T.inline
def add_up_all(cta, batch, out):
    """Find what holds for all requests, as if they were right."""
    assign(out.max_qo_len, 0)
    assign(out.max_kv_len, 0)
    assign(out.tokens, T.int64(0))
    assign(out.units, 0)

    @T.inline
    def add_request(b):
        qo_len = var(batch.qo_len(b))
        kv_len = var(T.max(batch.kv_len(b), 0))
        assign(out.max_qo_len, T.max(out.max_qo_len, qo_len))
        assign(out.max_kv_len, T.max(out.max_kv_len, kv_len))
        assign(out.tokens, out.tokens + wide(kv_len))
        assign(out.units, out.units + as_bit(qo_len > 0))

    spread(cta, batch.size, add_request)
    cta.agree(
        [
            (out.max_qo_len, largest),
            (out.max_kv_len, largest),
            (out.tokens, added),
            (out.units, added),
        ]
    )


def q_position(batch: Batch, given: tuple[Any, Any], b: Any) -> Any:
    """Position of a request's first query."""
    ends = batch.kv_len(b) - batch.qo_len(b)
    return T.if_then_else(given[0], batch.q_pos_offset[b], ends)


def kv_position(batch: Batch, given: tuple[Any, Any], b: Any) -> Any:
    """Position of a request's first key."""
    return T.if_then_else(given[1], batch.kv_pos_offset[b], 0)


@T.inline
def derive(cta, batch, given, out):
    """Write lengths and positions of every request of a batch that is right."""

    @T.inline
    def derive_entry(b):
        out.qo_indptr[b] = batch.qo_indptr[b]
        out.kv_indptr[b] = batch.kv_indptr[b]
        if b < batch.size:
            kv_len = var(batch.kv_len(b))
            out.kv_len[b] = kv_len
            out.q_pos_offset[b] = q_position(batch, given, b)
            out.kv_pos_offset[b] = kv_position(batch, given, b)

    spread(cta, batch.size + 1, derive_entry)


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


@T.inline
def describe(cta, batch, kv_indices, limits, given, bad, out, header):
    """Check a batch, and write what there is to know of it, for kernels to come.

    `bad` is a fault of the page ids.
    """
    kind = var(0)

    @T.inline
    def note(b):
        pass

    check(cta, batch, kv_indices.shape[0], limits, given, out, kind, note)
    cta.agree([(kind, largest)])
    add_up_all(cta, batch, out)
    if kind == WRONG:
        find_fault(cta, batch, kv_indices.shape[0], limits, given, out)
    assign(out.fault, T.min(out.fault, bad))
    if cta.is_first():
        write_header(batch, kv_indices, out, header)
    if out.fault != T.int64(NO_FAULT):
        replace(cta, limits, out)
    else:
        derive(cta, batch, given, out)
