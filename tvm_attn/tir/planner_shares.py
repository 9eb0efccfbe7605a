"""How few units are shared out: which family takes them, and where they are cut.

For each family and split it is estimated how long a run takes; `tvm_attn.runtime.sharing` has the
figures, as tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_ints import (
    LENGTH_LIMIT,
    Divisor,
    as_bit,
    assign,
    carve,
    ceil_div,
    div,
    low_word,
    reciprocal,
    scalar,
    var,
    wide,
)
from tvm_attn.worklist import CROWD

SHORTEST = 4
"""Granules of the shortest piece of a CTA alone, and at least so many for the CTAs of a cluster."""
SHORTEST_STRETCH = 5
"""Granules of the shortest stretch of a line that is a CTA's."""
FAR = 3.0e38
"""Microseconds that no run takes."""
FIRST_GAP = 121
"""Of a shell sort: each is three times the next, and one."""


class Cost(IntEnum):
    """Columns of the table of costs: float32, a row for each family."""

    CLUSTER = 0  # CTAs that share each item
    QUEUES = 1
    LAUNCH = 2  # microseconds of a run without work,
    ITEM = 3  # of every item of a queue after its first,
    CUT = 4  # of cutting units,
    PART = 5  # of every part of the longest one,
    TOKEN = 6  # and of a token that one queue reads alone
    BESIDE = 7  # how much longer reading takes where parts are written meanwhile


@dataclass(frozen=True)
class Batch:
    """What there is to read: int32 lengths of so many requests, each in so many heads.

    `longest`, and the `tokens` of all units, are variables.
    """

    kv_len: Any
    count: Any
    heads: Any
    longest: Any
    tokens: Any

    @staticmethod
    def of(kv_len: Any, count: Any, heads: Any) -> Batch:
        """Return a batch, with its variables."""
        return Batch(kv_len, count, heads, scalar("int32"), scalar("int64"))


@dataclass(frozen=True)
class Split:
    """A split: variables, its `size`, how many `pieces` it makes, and those of the longest unit.

    `rests` are what is left of requests behind whole pieces, `is_sorted` whether they are there,
    longest first; `load` has room for the queues.
    """

    size: Any
    pieces: Any
    parts: Any
    is_sorted: Any
    rests: Any
    load: Any

    @staticmethod
    def carve(scratch: Any, count: Any) -> Split:
        """Return a split of so many requests, with its variables."""
        rests = carve(scratch, 0, (count,))
        load = carve(scratch, count, (scratch.shape[0] - count,))
        size, pieces, parts, is_sorted = (scalar("int32") for _ in range(4))
        return Split(size, pieces, parts, is_sorted, rests, load)


@T.inline
def measure(batch):
    """Find the longest request, and how many tokens all units have."""
    assign(batch.longest, 0)
    assign(batch.tokens, T.int64(0))
    for i in T.serial(batch.count):
        assign(batch.longest, T.max(batch.longest, batch.kv_len[i]))
        assign(batch.tokens, batch.tokens + wide(batch.kv_len[i]))
    assign(batch.tokens, batch.tokens * wide(batch.heads))


@T.inline
def count_pieces(batch, split):
    """Find how many pieces a split makes."""
    magic = var(reciprocal(split.size))
    divisor = T.meta_var(Divisor(split.size, magic))
    assign(split.pieces, 0)
    for i in T.serial(batch.count):
        assign(split.pieces, split.pieces + divisor.ceil_div(batch.kv_len[i]))
    assign(split.pieces, split.pieces * batch.heads)
    assign(split.parts, ceil_div(batch.longest, split.size))
    assign(split.is_sorted, 0)


@T.inline
def sort_rests(batch, split):
    """Order what is left of requests behind whole pieces, longest first: a shell sort."""
    for i in T.serial(batch.count):
        split.rests[i] = T.truncmod(batch.kv_len[i], split.size)
    gap = var(FIRST_GAP)
    while gap > 0:
        for i in T.serial(T.max(batch.count - gap, 0)):
            held = var(split.rests[i + gap])
            place = var(i + gap)
            before = var(split.rests[i])
            while before < held:
                split.rests[place] = before
                place = place - gap
                before = T.Select(place >= gap, split.rests[T.max(place - gap, 0)], held)
            split.rests[place] = held
        gap = div(gap - 1, 3)


@T.inline
def deal(split, queues, size, count, place, back, longest):
    """Deal so many pieces of a size back and forth, from a place on."""
    for _ in T.serial(count):
        queue = var(T.Select(back == 0, place, queues - 1 - place))
        load = var(split.load[queue] + size)
        split.load[queue] = load
        longest = T.max(longest, load)
        place = place + 1
        if place == queues:
            place = 0
            back = 1 - back


@T.inline
def measure_queues(batch, split, queues, longest):
    """Find the tokens of the longest queue, if pieces are dealt back and forth."""
    if split.is_sorted == 0:
        sort_rests(batch, split)
        assign(split.is_sorted, 1)
    place = var(0)
    back = var(0)
    rests = var(0)
    longest = 0
    for i in T.serial(queues):
        split.load[i] = 0
    for i in T.serial(batch.count):
        rests = rests + as_bit(split.rests[i] > 0)
    deal(split, queues, split.size, split.pieces - rests * batch.heads, place, back, longest)
    for i in T.serial(rests):
        deal(split, queues, split.rests[i], batch.heads, place, back, longest)


def estimate(batch: Batch, split: Split, costs: Any, rates: Any, family: Any, longest: Any) -> Any:
    """Return the microseconds of a run of a family whose longest queue has so many tokens.

    All that are busy read, then the longest queue goes on alone, at its own speed.
    """
    cost = {column: costs[family, int(column)] for column in Cost}
    queues, cluster = (T.cast(cost[column], "int32") for column in (Cost.QUEUES, Cost.CLUSTER))
    busy = T.min(split.pieces, queues)
    is_cut = split.parts > 1
    reading = as_float(batch.tokens) * rates[family, busy * cluster]
    reading = reading * T.Select(is_cut, cost[Cost.BESIDE], T.float32(1))
    cutting = cost[Cost.CUT] + as_float(split.parts) * cost[Cost.PART]
    alone = T.max(as_float(longest) - as_float(batch.tokens) / as_float(busy), T.float32(0))
    more = as_float(split.pieces) / as_float(busy) - T.float32(1)
    time = cost[Cost.LAUNCH] + reading + T.Select(is_cut, cutting, T.float32(0))
    return time + alone * cost[Cost.TOKEN] + more * cost[Cost.ITEM]


def as_float(value: Any) -> Any:
    """As float32."""
    return T.cast(value, "float32")


def may_be_good(batch: Batch, split: Split, costs: Any, family: Any, block: Any) -> Any:
    """Whether units are whole, or pieces are neither short nor a great many."""
    cluster, queues = (
        T.cast(costs[family, int(column)], "int32") for column in (Cost.CLUSTER, Cost.QUEUES)
    )
    shortest = block * T.max(cluster, SHORTEST)
    is_fair = T.And(split.size >= shortest, split.pieces <= CROWD * queues)
    return T.Or(split.size == LENGTH_LIMIT, is_fair)


@T.inline
def consider(batch, split, costs, rates, block, best, choice):
    """Compare the families with what is best so far, if units are split so."""
    longest = var(0)
    time = var(T.float32(0))
    for family in T.serial(costs.shape[0]):
        if may_be_good(batch, split, costs, family, block):
            longest = T.min(batch.longest, split.size)
            time = estimate(batch, split, costs, rates, family, longest)
            queues = var(T.cast(costs[family, int(Cost.QUEUES)], "int32"))
            if T.And(time < best, split.pieces > queues):
                measure_queues(batch, split, queues, longest)
                time = estimate(batch, split, costs, rates, family, longest)
            if time < best:
                best = time
                choice[0] = family
                choice[1] = split.size


@T.inline
def consider_line(batch, costs, rates, block, best, choice):
    """Compare sharing units out along a line, among CTAs alone, with what is best so far."""
    for family in T.serial(costs.shape[0]):
        queues = var(T.cast(costs[family, int(Cost.QUEUES)], "int32"))
        least = var(wide(block * SHORTEST_STRETCH))
        share = var(T.max(T.truncdiv(batch.tokens, wide(queues)), least))
        busy = var(T.max(low_word(T.truncdiv(batch.tokens, share)), 1))
        is_alone = T.meta_var(costs[family, int(Cost.CLUSTER)] == T.float32(1))
        if T.And(is_alone, wide(batch.longest) > share):
            parts = var(low_word(T.truncdiv(wide(batch.longest), share)) + 2)
            reading = var(as_float(batch.tokens) * rates[family, busy])
            time = var(costs[family, int(Cost.LAUNCH)] + costs[family, int(Cost.CUT)])
            time = time + reading * costs[family, int(Cost.BESIDE)]
            time = time + as_float(parts) * costs[family, int(Cost.PART)]
            items = T.meta_var(as_float(batch.count * batch.heads) / as_float(busy))
            time = time + items * costs[family, int(Cost.ITEM)]
            if time < best:
                best = time
                choice[0] = family
                choice[1] = 0


@T.inline
def share(batch, split, block, parts, costs, rates, choice):
    """Choose the family and the split that take the least time; a split of 0 is a line.

    Units may be cut in so many `parts`, at granules of `block` tokens; `costs` are as `Cost` says,
    and `rates` [families, CTAs + 1] microseconds of a token read while so many CTAs are busy.
    """
    best = var(T.float32(FAR))
    measure(batch)
    assign(split.size, LENGTH_LIMIT)
    for i in T.serial(parts.shape[0] + 1):
        if i > 0:
            granules = T.meta_var(ceil_div(batch.longest, parts[i - 1] * block))
            assign(split.size, granules * block)
        count_pieces(batch, split)
        consider(batch, split, costs, rates, block, best, choice)
    consider_line(batch, costs, rates, block, best, choice)
