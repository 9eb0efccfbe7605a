"""What the threads of a CTA do together: they visit, add up, search and sort.

A CTA is an object with

* ``own(count)``, ``behind(busy, count)``, ``last(count)``, ``shared(count)`` : the number that a
  thread visits first, and the step to its next: of a CTA's threads from the first on, from those
  behind the warps of the first `busy`, from the last back; and of the threads of all CTAs that do
  the same;
* ``is_inside(i, count)`` : whether it goes on with a number;
* ``meet()`` : a barrier;
* ``publish(cta)`` : makes what was written visible to all kernels to come;
* ``leave(cta, counter)`` : the same, and counts the CTA;
* ``wait_for_others(cta, counter, goal)`` : waits until so many have left;
* ``arrive(cta, counter, is_last)`` : the same as `leave`, and finds the last of those that do the
  same;
* ``agree(totals)`` : makes variables, each with its operator, the same in all threads, which meet
  once on the way; what is int64, or added up, is not negative;
* ``add_up(cta, value_of, sums, count, totals)`` : writes the sums of the int64 values before each,
  and of all behind them; totals are agreed on at the same time. Before the sums are written, a
  value may stand in their place;
* ``sort(cta, keys, first, spare, count, low, high)`` : sorts so many int64 keys from `first` on by
  their upper halves, which are from `low` to `high`; equal ones stay in their order.

What threads do between two barriers does not depend on their order: the plan has the same bits
with any number of them, and with one that does the work of all.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.tir.planner_ints import assign, var


@T.inline
def walk(cta, numbers, count, visit):
    """Visit numbers below `count`, given the first and the step from each to the next."""
    i = var(numbers[0])
    while cta.is_inside(i, count):
        visit(i)
        i = i + numbers[1]


@T.inline
def spread(cta, count, visit):
    """Visit every number below `count`, each by one thread."""
    walk(cta, cta.own(count), count, visit)


@T.inline
def spread_behind(cta, busy, count, visit):
    """Visit numbers as `spread`, while the first `busy` threads visit others."""
    walk(cta, cta.behind(busy, count), count, visit)


@T.inline
def spread_last(cta, count, visit):
    """Visit numbers as `spread`, by the last threads, while the first visit others."""
    walk(cta, cta.last(count), count, visit)


@T.inline
def spread_shared(cta, count, visit):
    """Visit numbers as `spread`; CTAs that do the same share them."""
    walk(cta, cta.shared(count), count, visit)


@T.inline
def each(cta, count, visit):
    """Visit every number below `count`, each by one thread; then all threads meet."""
    spread(cta, count, visit)
    cta.meet()


@T.inline
def find_last(value_of, count, limit, found):
    """Find the last of so many ascending values that is not above a limit: `found`, from 0 on.

    Few instructions count more than few steps.
    """
    step = var(T.shift_left(1, 31 - T.clz(T.max(count - 1, 1))))
    assign(found, 0)
    while step > 0:
        at = var(T.min(found + step, count - 1))
        if value_of(at) <= limit:
            assign(found, at)
        step = T.shift_right(step, 1)


def largest(a: Any, b: Any) -> Any:
    """Operator of a total that is a maximum."""
    return T.max(a, b)


def least(a: Any, b: Any) -> Any:
    """Operator of a total that is a minimum."""
    return T.min(a, b)


def added(a: Any, b: Any) -> Any:
    """Operator of a total that is a sum."""
    return a + b
