"""What the threads of a CTA do together: they visit, add up, search and sort.

A CTA is an object with

* ``threads`` : int, of which each has a word of the int64 array ``partial``;
* ``turns(count)``, ``index(turn, count)`` : what `each` visits, thread by thread;
* ``meet()`` : a barrier;
* ``prefetch(rows, row)`` : begins to read words that are needed later;
* ``publish(cta)`` : makes what was written visible to all kernels to come;
* ``arrive(cta, counter, is_last)`` : the same, and finds the last of several CTAs;
* ``agree(totals)`` : makes variables, each with its operator, the same in all threads;
* ``add_up_partials(cta)`` : replaces ``partial`` by the sums of the entries before each.

What threads do between two barriers does not depend on their order: the plan has the same bits
with any number of them, and with one that does the work of all.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_ints import as_bit, assign, ceil_div, var

BLOCK_BITS = 4
BLOCK = 1 << BLOCK_BITS
"""Keys whose order is found by comparing all with all."""


@T.inline
def spread(cta, count, visit):
    """Visit every number below `count`, each by one thread."""
    for turn in T.serial(cta.turns(count)):
        i = var(cta.index(turn, count))
        if i < count:
            visit(i)


@T.inline
def each(cta, count, visit):
    """Visit every number below `count`, each by one thread; then all threads meet."""
    spread(cta, count, visit)
    cta.meet()


@T.inline
def add_up(cta, values, count):
    """Replace int64 values by the sum of those before each; the sum of all comes behind them."""
    run = var(ceil_div(count, cta.threads))

    @T.inline
    def sum_run(thread):
        total = var(T.int64(0))
        for k in T.serial(run):
            at = var(thread * run + k)
            if at < count:
                total = total + values[at]
        cta.partial[thread] = total

    @T.inline
    def replace_run(thread):
        total = var(cta.partial[thread])
        for k in T.serial(run):
            at = var(thread * run + k)
            if at < count:
                value = var(values[at])
                values[at] = total
                total = total + value
        if thread == cta.threads - 1:
            values[count] = total

    each(cta, cta.threads, sum_run)
    cta.add_up_partials(cta)
    each(cta, cta.threads, replace_run)


@T.inline
def find_last(value_of, count, limit, found):
    """Find the last of so many ascending values that is not above a limit: `found`, from 0 on."""
    high = var(count)
    assign(found, 0)
    while high - found > 1:
        middle = var(T.shift_right(found + high, 1))
        if value_of(middle) <= limit:
            assign(found, middle)
        else:
            high = middle


@T.inline
def rank_in_blocks(cta, source, target, count):
    """Sort blocks of `BLOCK` keys, each key counting those of its block that are less."""

    @T.inline
    def move(i):
        key = var(source[i])
        begin = var(i // BLOCK * BLOCK)
        rank = var(begin)
        for k in T.unroll(BLOCK):
            other = T.meta_var(source[T.min(begin + k, count - 1)])
            rank = rank + as_bit(T.And(begin + k < count, other < key))
        target[rank] = key

    each(cta, count, move)


@T.inline
def merge_runs(cta, source, target, count, bits):
    """Merge pairs of runs of ``2**bits`` keys: each counts those of the other run that are less."""

    @T.inline
    def move(i):
        key = var(source[i])
        size = var(T.shift_left(1, bits))
        other = var(T.bitwise_xor(T.bitwise_and(i, -size), size))
        most = var(T.max(T.min(count - other, size), 0))
        less = var(0)
        for step in T.serial(bits + 1):
            half = var(T.max(T.shift_right(size, step + 1), 1))
            at = var(less + half - 1)
            if at < most:
                if source[other + at] < key:
                    less = less + half
        target[T.bitwise_and(i, -2 * size) + T.bitwise_and(i, size - 1) + less] = key

    each(cta, count, move)


@T.inline
def sort(cta, keys, spare, count):
    """Sort int64 keys, no two alike, with as many words to spare."""
    rank_in_blocks(cta, keys, spare, count)
    merged = var(BLOCK_BITS)
    is_spare = var(1)
    while T.shift_left(1, merged) < count:
        if is_spare != 0:
            merge_runs(cta, spare, keys, count, merged)
        else:
            merge_runs(cta, keys, spare, count, merged)
        is_spare = 1 - is_spare
        merged = merged + 1

    @T.inline
    def copy(i):
        keys[i] = spare[i]

    if is_spare != 0:
        each(cta, count, copy)


def largest(a: Any, b: Any) -> Any:
    """Operator of a total that is a maximum."""
    return T.max(a, b)


def least(a: Any, b: Any) -> Any:
    """Operator of a total that is a minimum."""
    return T.min(a, b)


def added(a: Any, b: Any) -> Any:
    """Operator of a total that is a sum."""
    return a + b
