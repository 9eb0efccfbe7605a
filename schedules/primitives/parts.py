"""Merging the parts of a cut unit: each CTA of a cluster merges its share of the columns.

Threads take turns with four neighbouring elements of a row. Each copies what is its own of many
parts to shared memory, before it adds any: nobody waits for another. All is done in loops, whose
instructions are few: they are needed once in a run, and take as long to come as the parts do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.finish import QUAD, Joined, empty, store_quad
from tvm_attn.schedules.primitives.shares import Shares
from tvm_attn.schedules.primitives.staging import copy_chunk, copy_word
from tvm_attn.schedules.primitives.streams import StreamingCta
from tvm_attn.schedules.primitives.task import Task
from tvm_attn.variant import Expr
from tvm_attn.worklist import NO_SLOT

PART_WORDS = QUAD + 1
"""What a thread copies of a part: elements, and the row's LSE."""


class Whole(Task):
    """The rows of a task's unit, all of whose parts are there: what is stored is a result."""

    @staticmethod
    def at(task: Task) -> Whole:
        """Return the unit of a task."""
        return Whole(*(getattr(task, field.name) for field in fields(Task)))

    @property
    def slot(self) -> Expr:
        """No slot."""
        return tirx.const(NO_SLOT, "int32")


@dataclass(frozen=True)
class PartMemory:
    """Shared memory for `room` parts of each thread's four elements: float32, from a word on."""

    words: Any
    begin: Expr
    room: Expr
    threads: int
    thread: Expr

    @staticmethod
    def of(cta: StreamingCta, is_last: Expr) -> PartMemory:
        """Return the memory of states, and after a CTA's last item that of its rings too."""
        rings, total = cta.tile.ring_words(cta.spec), cta.tile.part_words(cta.spec)
        begin = T.Bind(tirx.Select(is_last, tirx.const(0, "int32"), tirx.const(rings, "int32")))
        room = T.Bind(tirx.floordiv(total - begin, PART_WORDS * cta.tile.threads))
        return PartMemory(cta.shared.parts, begin, room, cta.tile.threads, cta.thread)

    def quad(self, p: Expr) -> Expr:
        """Index of the elements of a part."""
        return self.begin + (p * self.threads + self.thread) * QUAD

    def lse(self, p: Expr) -> Expr:
        """Index of the LSE of a part, behind the elements of all."""
        return self.begin + (self.room * QUAD + p) * self.threads + self.thread


@T.inline
def copy_lses(outputs, memory, slot, count, place):
    """Copy the LSEs of a row of so many parts to shared memory."""
    for p in T.serial(count):
        source = T.meta_var(outputs.partial_lse.ptr_to([slot + p, place]))
        copy_word(memory.words.ptr_to([memory.lse(p)]), source)


@T.inline
def copy_parts(outputs, memory, slot, count, place, column):
    """Copy four elements of a row of so many parts to shared memory."""
    for p in T.serial(count):
        source = T.meta_var(outputs.partial_o.ptr_to([slot + p, place, column]))
        copy_chunk(memory.words.ptr_to([memory.quad(p)]), source, T.bool(True))


@T.inline
def raise_peak(cta, joined, memory, count):
    """Wait for what is copied, and have the peak no lower than the LSEs of so many parts."""
    T.ptx.cp.async_.commit_group()
    T.ptx.cp.async_.wait_group(0)
    for p in T.serial(count):
        lse = T.meta_var(memory.words[memory.lse(p)])
        joined.peak[0] = cta.hooks.accumulation.peak(joined.peak[0], lse)


@T.inline
def find_peak(cta, outputs, joined, memory, first, end, place):
    """Find the largest LSE of a row of all parts, if there is no room for these at once.

    What has room depends on which CTA came last. Relative to the largest of all, sums do not.
    """
    if end - first > memory.room:
        slot: T.int32 = first
        while slot < end:
            count: T.let[T.int32] = T.min(end - slot, memory.room)
            copy_lses(outputs, memory, slot, count, place)
            raise_peak(cta, joined, memory, count)
            slot = slot + count


@T.inline
def add_parts(cta, joined, memory, count):
    """Add so many parts that are in shared memory, in their order."""
    for p in T.serial(count):
        lse = T.meta_var(memory.words[memory.lse(p)])
        weight: T.let[T.float32] = cta.hooks.accumulation.weight(lse, joined.peak[0])
        joined.total[0] = joined.total[0] + weight
        for e in T.unroll(QUAD):
            joined.out[e] = joined.out[e] + memory.words[memory.quad(p) + e] * weight


@T.inline
def merge_unit(cta, task, outputs, first, end, is_last):
    """Merge the CTA's share of the parts in some slots, and store the rows.

    After its last item a CTA has room for more parts: nothing is copied to its rings any more.
    """
    joined, shares = T.meta_var((Joined.allocate(), Shares.of(cta)))
    whole, passes = T.meta_var((Whole.at(task), cta.tile.passes))
    memory = T.meta_var(PartMemory.of(cta, is_last))
    quads: T.let[T.int32] = shares.width // QUAD
    i: T.int32 = cta.thread
    while i < (task.row_end - task.row0) * quads * passes:
        place: T.let[T.int32] = i // (quads * passes)
        turn: T.let[T.int32] = i // quads % passes
        column: T.let[T.int32] = shares.column(i % quads * QUAD)
        at: T.let[T.int32] = turn * shares.columns + column
        if column < shares.columns:
            empty(cta, joined)
            find_peak(cta, outputs, joined, memory, first, end, place)
            slot: T.int32 = first
            while slot < end:
                count: T.let[T.int32] = T.min(end - slot, memory.room)
                copy_lses(outputs, memory, slot, count, place)
                copy_parts(outputs, memory, slot, count, place, at)
                raise_peak(cta, joined, memory, count)
                add_parts(cta, joined, memory, count)
                slot = slot + count
            store_quad(cta, whole, outputs, joined, place, at)
        i = i + cta.tile.threads
