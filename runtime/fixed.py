"""Plans whose arrays stay where they are, so that a captured run sees what is planned later.

The memory is sized from limits once; a replan copies a batch's arrays into it. Every kernel that a
batch within the limits may need is launched by every run, be it with empty queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tvm_attn.errors import PlanError
from tvm_attn.runtime.buffers import Ints
from tvm_attn.runtime.placement import Launch
from tvm_attn.runtime.plan import Family, Plan, WorkList, in_order
from tvm_attn.runtime.staging import Room
from tvm_attn.runtime.workspace import (
    BATCH,
    Counts,
    PlanLimits,
    batch_sizes,
    partial_states,
    scratch_sizes,
    work_sizes,
)
from tvm_attn.spec import AttentionSpec
from tvm_attn.worklist import HEADER_WORDS, MERGE_WORDS

if TYPE_CHECKING:
    from tvm_attn.runtime.device_plan import DevicePlanner

LAST = "kv_indices"
"""The array that is copied last, since a batch may use little of it."""
WORDS = 2
"""Words that the CTAs of a device's planner share."""


@dataclass(frozen=True)
class Terms:
    """What a plan was fixed for, and stays fixed for when it is replanned.

    Parameters
    ----------
    limits : PlanLimits
        The largest batch.
    split : int
        Its fixed split, 0 for none.
    max_qo_len : int
        The longest query; 0 if that is not known.
    """

    limits: PlanLimits
    split: int
    max_qo_len: int


class FixedMemory:
    """The device memory of a plan with limits.

    Parameters
    ----------
    spec : AttentionSpec
        Of the kernel.
    terms : Terms
        What it has to hold.
    counts : dict of Family to Counts
        Families that may have work, and how much.
    device : torch.device
        A GPU, or the CPU where there is none.
    workspace : torch.Tensor, optional
        Memory for partial states.

    Attributes
    ----------
    families : tuple of Family
        Those of `counts`.
    counts : dict of Family to Counts
        As given.
    room : Room
        Where the arrays are; behind those that are copied, what planning on a device takes.
    ones : torch.Tensor
        float32 ``[num_kv_heads]``.
    device_planner : DevicePlanner, optional
        Plans here, once a batch on the device has been planned.
    """

    device_planner: DevicePlanner | None = None

    def __init__(
        self,
        spec: AttentionSpec,
        terms: Terms,
        counts: dict[Family, Counts],
        device: torch.device,
        workspace: torch.Tensor | None,
    ):
        self.terms = terms
        self.device = device
        self.ones = torch.ones(spec.num_kv_heads, dtype=torch.float32, device=device)
        self.families = tuple(counts)
        self.counts = counts
        self._params: dict[str, list[Any]] | None = None
        shapes: dict[Any, tuple[int, ...]] = {
            (family, name): shape
            for family, of_family in counts.items()
            for name, shape in work_sizes(of_family).items()
        }
        batch = batch_sizes(spec, terms.limits)
        shapes.update({name: batch[name] for name in BATCH if name != LAST})
        shapes[LAST] = batch[LAST]
        shapes.update({"header": (HEADER_WORDS,), "words": (WORDS,)})
        for family, of_family in counts.items():
            for name, shape in scratch_sizes(of_family).items():
                shapes[family, name] = shape
        self.room = Room(device, shapes)
        slots = [(family, of_family.slots) for family, of_family in counts.items()]
        states = partial_states(spec, slots, workspace, device)
        self._partials = dict(zip(counts, states, strict=True))

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """What the plan owns."""
        states = [state for pair in self._partials.values() for state in pair]
        return (self.room.block, self.ones, *states)

    @property
    def launches(self) -> list[Launch]:
        """One launch of each family, which reads what is copied here."""
        of = self.room.of
        batch = tuple(of(name) for name in BATCH)
        lists = ("items", "cta_indptr", "merge_items", "merge_indptr")
        return [
            Launch(
                family.name,
                (*(of((family, name)) for name in lists), *batch),
                (
                    *self._partials[family],
                    of((family, "arrivals")),
                    *family.arguments(follows=place > 0),
                ),
            )
            for place, family in enumerate(in_order(self.counts))
        ]

    def fill(self, plan: Plan) -> None:
        """Copy a plan's arrays here, on the current stream, without waiting for anything.

        Raises
        ------
        PlanError
            If it has parameters that a captured kernel would not see.
        """
        self.check_params(plan.params)
        arrays: dict[Any, Ints] = dict(zip(BATCH, plan.batch, strict=True))
        work = {each.family: each for each in plan.work}
        for family, of_family in self.counts.items():
            for name, array in _work_arrays(work.get(family), of_family).items():
                arrays[family, name] = array
        self.room.fill(arrays)

    def check_params(self, params: dict[str, list[Any]]) -> None:
        """Raise `PlanError` if a kernel that was captured would not see a plan's parameters."""
        for name, values in params.items():
            if any(isinstance(value, torch.Tensor) for value in values):
                raise PlanError(f"{name}: a plan with limits has no arrays like it; leave it out")
            if self._params is not None and self._params[name] != values:
                raise PlanError(
                    f"{name}={values[0]}, but graphs may have captured this plan's "
                    f"{name}={self._params[name][0]}; make another plan"
                )
        self._params = params


def _work_arrays(work: WorkList | None, counts: Counts) -> dict[str, Ints]:
    """Return the arrays of a work list as kernels read them however many units are cut."""
    merge_items = np.zeros((counts.merges, MERGE_WORDS), np.int32)
    merge_indptr = np.zeros(counts.merges + 1, np.int32)
    arrays = {
        "merge_items": merge_items,
        "cta_indptr": np.zeros(counts.num_ctas + 1, np.int32),
        "merge_indptr": merge_indptr,
        "arrivals": np.zeros(counts.arrivals, np.int32),
    }
    if work is None:
        return arrays
    used = len(work.merge_items)
    merge_items[:used] = work.merge_items
    merge_indptr[: used + 1] = work.merge_indptr
    merge_indptr[used + 1 :] = work.num_slots
    arrays["cta_indptr"][: work.num_ctas] = work.cta_indptr[:-1]
    arrays["cta_indptr"][work.num_ctas :] = work.cta_indptr[-1]
    return {**arrays, "items": work.items}


def families_of(
    families: Sequence[Family],
    terms: Terms,
    group_size: int,
    num_kv_heads: int,
    ctas: Sequence[int],
) -> list[Family]:
    """Return the families that a batch may have work for.

    One in clusters is among them if the largest batch has no more units than there are clusters:
    that of the largest ones.
    """
    longest = (terms.max_qo_len or terms.limits.max_qo_tokens) * group_size
    found: list[Family] = []
    least = 1
    for family, queues in zip(families, ctas, strict=True):
        if family.stands_in:
            fits = family.cluster > 1 and not family.replaces
            fits = fits and terms.limits.max_batch * num_kv_heads <= queues
            if longest <= family.rows and fits and not found:
                found.append(family)
            continue
        if least <= longest:
            found.append(family)
        least = family.rows + 1
    return found
