"""What a warp keeps in registers of the item it works on, rather than read it for every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.task import LEAST_FACTOR, Derived, Task
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr


@dataclass(frozen=True)
class HeldTask(Task):
    """A task whose end, and which of whose keys all rows see, are at hand."""

    end: Expr
    seen_from: Expr
    seen_to: Expr

    @staticmethod
    def hold(task: Task) -> HeldTask:
        """Read them."""
        words = (Derived.END_KEY, Derived.FIRST_SEEN, Derived.LAST_SEEN)
        held = (T.Bind(task.words[task.first + word]) for word in words)
        fields = (task.hooks, task.group_size, task.batch, task.request, task.kv_head)
        return HeldTask(*fields, task.words, task.first, *held)

    @property
    def end_key(self) -> Expr:
        """One past the last key to attend to."""
        return self.end

    def sees_all(self, first: Expr, last: Expr) -> Expr:
        """Whether all rows see all of some keys."""
        return tirx.And(self.seen_from <= first, last <= self.seen_to)


def factor_of(cta: Any, task: Task) -> Expr:
    """Return the factor from a product to a score."""
    return tirx.max(cta.scales.product(task.kv_head), f32(LEAST_FACTOR))


@T.inline
def derive_keys(cta, task):
    """Keep what follows from a task: its keys, those that all rows see, and, for hooks, the factor.

    Without a hook for it the factor is read where it is needed: here, all would wait for it. Where
    there are no keys they end at 0, so that none is before the end in a run that begins earlier.
    """
    if cta.lane.index == 0:
        keys = T.meta_var(task.keys())
        seen = T.meta_var(task.seen(cta.tile.granule))
        task.words[task.first + Derived.FIRST_KEY] = keys[0]
        task.words[task.first + Derived.END_KEY] = T.Select(keys[0] < keys[1], keys[1], 0)
        task.words[task.first + Derived.FIRST_SEEN] = T.max(seen.first, keys[0])
        task.words[task.first + Derived.LAST_SEEN] = T.min(seen.last, keys[1] - 1)
        if cta.hooks.variant.logits_transform is not None:
            task.words[task.first + Derived.FACTOR] = T.reinterpret("int32", factor_of(cta, task))
