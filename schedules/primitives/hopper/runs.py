"""Rounded rows from registers to global memory, 16 bytes of a lane at a time.

A lane has two neighbouring columns of every 8. The four lanes of a row exchange what they have of
four such tiles: then each has a whole one, and a row is written 64 bytes at a time.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import HALVES, over_row
from tvm_attn.schedules.primitives.hopper.rounding import finish_state, round_tile, store_lse
from tvm_attn.schedules.primitives.hopper.slots import store_four
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.schedules.tiles_sm90 import ELEMENT_BYTES
from tvm_attn.tir.signature import itemsize

LANES = 4
"""Of a row, and tiles that they exchange."""


def leaves_in_runs(cta: Cta) -> bool:
    """Whether rows are whole runs, of 16-bit elements."""
    return itemsize(str(cta.spec.o_dtype)) == ELEMENT_BYTES and cta.value_tiles % LANES == 0


def exchange(cta: Cta, words: Any) -> None:
    """Transpose four registers of the four lanes of a row: lane `i` gets all registers `i`."""
    for bit in (1, 2):
        is_upper = tirx.Not(tirx.bitwise_and(cta.lane.index, bit) == 0)
        for low in (0, 3 - bit):
            high = low + bit
            theirs = T.alloc_local((1,), "uint32")
            T.buffer_store(theirs, tirx.Select(is_upper, words[low], words[high]), [0])
            T.buffer_store(theirs, over_row(theirs[0], bit), [0])
            T.buffer_store(words, tirx.Select(is_upper, theirs[0], words[low]), [low])
            T.buffer_store(words, tirx.Select(is_upper, words[high], theirs[0]), [high])


@T.inline
def store_runs(cta, task, outputs):
    """Round and store finished rows, and their LSE."""
    words = T.meta_var(cta.registers.right)
    run = T.alloc_local((LANES,), "uint32")
    for i in T.unroll(HALVES):
        finish_state(cta, task, outputs, i)
        store_lse(cta, task, outputs, i)
    for n in T.unroll(cta.value_tiles // LANES):
        for i in T.unroll(HALVES):
            for k in T.unroll(LANES):
                round_tile(cta, task, outputs, n * LANES + k, i)
                run[k] = words[(n * LANES + k) * HALVES + i]
            exchange(cta, run)
            if task.row0 + cta.place(i) < task.row_end:
                at = T.meta_var(task.index(task.row(cta.place(i))))
                column = T.meta_var(n * LANES * COLUMNS + cta.lane.column(0) * (COLUMNS // 2))
                store_four(outputs.out.ptr_to([*at, column]), run, 0)
