"""Sorting by a CTA: stable, from the lowest digit of the keys up."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.schedules.primitives.lanes import add_up_lanes, agree_in_warp
from tvm_attn.schedules.primitives.shapes import WARP
from tvm_attn.tir.parallel import added, spread
from tvm_attn.tir.planner_ints import as_bit, assign, ceil_div, high_word, low_word, var, wide

DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS
"""Of each warp, in 16 bits: how many of its keys have a digit, then where the next of them goes."""

ALIKE = "__device__ int lanes_alike(int x) { return __match_any_sync(~0u, x); }\n"
COUNT = "__device__ __forceinline__ int count_bits(int word) { return __popc(word); }\n"
SYNC = "__device__ __forceinline__ void meet_in_warp() { __syncwarp(); }\n"


def lanes_alike(number: Any) -> Any:
    """Return the lanes, as bits, that have the same number."""
    return T.cuda.func_call("lanes_alike", number, source_code=ALIKE, return_type="int32")


def count_bits(word: Any) -> Any:
    """Return how many bits are set."""
    return T.cuda.func_call("count_bits", word, source_code=COUNT, return_type="int32")


def meet_in_warp() -> None:
    """Wait for all lanes."""
    T.evaluate(T.cuda.func_call("meet_in_warp", source_code=SYNC, return_type="void"))


def digit_of(key: Any, low: Any, shift: Any) -> Any:
    """Return the digit of a key; it is 0 if the key is below `low`."""
    return T.bitwise_and(T.shift_right(T.max(high_word(key) - low, 0), shift), BINS - 1)


@T.inline
def visit_keys(cta, keys, first, count, low, shift, visit):
    """Give each key a number among its warp's with that digit: warps have keys in a row."""
    turns = var(ceil_div(count, cta.threads))
    begin = var(cta.warp * turns * WARP)
    end = var(T.min(begin + turns * WARP, count))
    while begin < end:
        i = var(begin + cta.lane)
        is_there = var(as_bit(i < end))
        key = var(keys[first + T.min(i, end - 1)])
        digit = var(digit_of(key, low, shift))
        alike = var(lanes_alike(T.Select(is_there != 0, digit, -1)))
        before = var(count_bits(T.bitwise_and(alike, T.shift_left(1, cta.lane) - 1)))
        place = var(cta.warp * BINS + digit)
        held = var(T.cast(cta.bins[place], "int32"))
        meet_in_warp()
        if is_there != 0:
            visit(held + before, key)
            if before == 0:
                cta.bins[place] = T.cast(held + count_bits(alike), "uint16")
        meet_in_warp()
        begin = begin + WARP


@T.inline
def open_bins(cta):
    """Replace the counts of the warps by where the first key of each warp and digit goes.

    Every thread has a digit, as long as there are digits.
    """
    total = var(0)
    ahead = var(0)
    cta.turn_over()
    if cta.warp < BINS // WARP:
        for warp in T.unroll(cta.threads // WARP):
            total = total + T.cast(cta.bins[warp * BINS + cta.thread], "int32")
        ahead = total
        add_up_lanes(ahead, cta.lane)
        if cta.lane == WARP - 1:
            cta.common[cta.turn + cta.warp] = wide(ahead)
    cta.meet()
    if cta.warp < BINS // WARP:
        of_warp = T.meta_var(low_word(cta.common[cta.turn + cta.lane]))
        before = var(T.if_then_else(cta.lane < cta.warp, of_warp, 0))
        agree_in_warp(before, added)
        before = before + ahead - total
        for warp in T.unroll(cta.threads // WARP):
            held = var(T.cast(cta.bins[warp * BINS + cta.thread], "int32"))
            cta.bins[warp * BINS + cta.thread] = T.cast(before, "uint16")
            before = before + held
    cta.meet()


@T.inline
def clear_bins(cta):
    """Empty a warp's bins."""
    for turn in T.unroll(BINS // 2 // WARP):
        cta.pairs_of_bins[cta.warp * (BINS // 2) + turn * WARP + cta.lane] = 0
    meet_in_warp()


@T.inline
def sort_few(cta, keys, first, count, low, shift):
    """Sort keys by a digit, each thread one."""
    is_there = var(as_bit(cta.thread < count))
    key = var(keys[first + T.min(cta.thread, count - 1)])
    digit = var(digit_of(key, low, shift))
    alike = var(lanes_alike(T.Select(is_there != 0, digit, -1)))
    before = var(count_bits(T.bitwise_and(alike, T.shift_left(1, cta.lane) - 1)))
    place = var(cta.warp * BINS + digit)
    clear_bins(cta)
    if T.And(is_there != 0, before == 0):
        cta.bins[place] = T.cast(count_bits(alike), "uint16")
    cta.meet()
    open_bins(cta)
    if is_there != 0:
        keys[first + T.cast(cta.bins[place], "int32") + before] = key


@T.inline
def sort_many(cta, keys, first, spare, count, low, shift):
    """Sort keys by a digit; `first` and `spare` are swapped."""

    @T.inline
    def count_key(place, key):
        pass

    @T.inline
    def move(place, key):
        keys[spare + place] = key

    clear_bins(cta)
    visit_keys(cta, keys, first, count, low, shift, count_key)
    cta.meet()
    open_bins(cta)
    visit_keys(cta, keys, first, count, low, shift, move)
    begin = var(first)
    assign(first, spare)
    assign(spare, begin)


@T.inline
def count_far(cta, keys, first, count, near, far):
    """Count keys that are not above `near`."""

    @T.inline
    def count_key(i):
        assign(far, far + as_bit(high_word(keys[first + i]) <= near))

    spread(cta, count, count_key)
    cta.agree([(far, added)])


@T.inline
def sort_far(cta, keys, first, far):
    """Sort the first keys, a warp's at most: each goes where there are as many before it."""
    key = var(keys[first + T.min(cta.lane, far - 1)])
    before = var(0)
    other = var(0)
    while other < far:
        passed = T.meta_var(high_word(keys[first + other]) - as_bit(other < cta.lane))
        before = before + as_bit(passed < high_word(key))
        other = other + 1
    meet_in_warp()
    if cta.lane < far:
        keys[first + before] = key


@T.inline
def sort(cta, keys, first, spare, count, low, high):
    """Sort int64 keys by their upper halves; `first` and `spare` may be swapped on the way.

    If few are far below the others, one digit says where these go; the few are sorted at last.
    """
    near = var(low)
    far = var(0)
    if high - low >= BINS:
        near = high - (BINS - 1)
        count_far(cta, keys, first, count, near, far)
        if far > WARP:
            near = low
            far = 0
    left = var(high - near)
    shift = var(0)
    while left > 0:
        if count <= cta.threads:
            sort_few(cta, keys, first, count, near, shift)
        else:
            sort_many(cta, keys, first, spare, count, near, shift)
        cta.meet()
        assign(left, T.shift_right(left, DIGIT_BITS))
        assign(shift, shift + DIGIT_BITS)
    if far > 1:
        if cta.warp == 0:
            sort_far(cta, keys, first, far)
        cta.meet()
