"""What the threads of a CTA do together: they visit, add up, search and sort.

A CTA is an object with

* ``threads`` : int, of which each has a word of the int64 array ``partial``;
* ``turns(count)``, ``index(turn, count)`` : what `each` visits, thread by thread;
* ``meet(near)`` : a barrier; if `near` is not 0, of threads whose numbers differ in 5 bits;
* ``agree(totals)`` : makes variables, each with its operator, the same in all threads;
* ``add_up_partials(cta)`` : replaces ``partial`` by the sums of the entries before each.

What threads do between two barriers does not depend on their order: the plan has the same bits
with any number of them, and with one that does the work of all.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_ints import as_bit, assign, ceil_div, var

NEAR_BITS = 5


@T.inline
def each(cta, count, visit):
    """Visit every number below `count`, each by one thread; then all threads meet."""
    for turn in T.serial(cta.turns(count)):
        i = var(cta.index(turn, count))
        if i < count:
            visit(i)
    cta.meet(0)


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
def compare_pairs(cta, keys, count, pairs, bits, flips):
    """Order each key and its partner: in blocks of ``2**bits``, from the middle out or half on."""

    @T.inline
    def order(pair):
        half = T.meta_var(T.shift_left(1, bits - 1))
        place = var(T.bitwise_and(pair, half - 1))
        first = var(T.shift_left(T.shift_right(pair, bits - 1), bits) + place)
        second = var(first + T.Select(flips != 0, 2 * (half - place) - 1, half))
        if second < count:
            low = var(keys[first])
            high = var(keys[second])
            if high < low:
                keys[first] = high
                keys[second] = low

    for turn in T.serial(cta.turns(pairs)):
        pair = var(cta.index(turn, pairs))
        if pair < pairs:
            order(pair)


@T.inline
def sort(cta, keys, count):
    """Sort int64 keys, no two alike: a bitonic network in which all pairs ascend.

    Keys behind the last one would be the largest and stay where they are, so there need be none.
    """
    levels = var(32 - T.clz(T.max(count - 1, 0)))
    pairs = var(T.shift_left(1, T.max(levels - 1, 0)))
    for level in T.serial(levels):
        for step in T.serial(level + 1):
            bits = var(level + 1 - step)
            is_near = var(as_bit(bits <= NEAR_BITS + 1))
            if T.And(is_near == 0, step == 0):
                cta.meet(0)
            compare_pairs(cta, keys, count, pairs, bits, as_bit(step == 0))
            cta.meet(is_near)
    cta.meet(0)


def largest(a: Any, b: Any) -> Any:
    """Operator of a total that is a maximum."""
    return T.max(a, b)


def least(a: Any, b: Any) -> Any:
    """Operator of a total that is a minimum."""
    return T.min(a, b)


def added(a: Any, b: Any) -> Any:
    """Operator of a total that is a sum."""
    return a + b
