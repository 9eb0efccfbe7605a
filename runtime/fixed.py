"""Plans whose arrays stay where they are, so that a captured run sees what is planned later.

The memory is sized from limits once; a replan copies a batch's arrays into it. Every kernel that a
batch within the limits may need is launched by every run, be it with empty queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import PlanError
from tvm_attn.runtime.buffers import Block, Layout, Pool
from tvm_attn.runtime.device_memory import DeviceMemory, States, states_of
from tvm_attn.runtime.placement import Launch
from tvm_attn.runtime.plan import Family, in_order, need_not_wait
from tvm_attn.runtime.shelf import Most, Units
from tvm_attn.runtime.workspace import (
    LISTS,
    Counts,
    PlanLimits,
    batch_sizes,
    partial_states,
    scratch_sizes,
    work_sizes,
)
from tvm_attn.spec import AttentionSpec
from tvm_attn.worklist import HEADER_WORDS

if TYPE_CHECKING:
    from tvm_attn.runtime.device_plan import DevicePlanner

MOST_SHARING = 4
"""Multiprocessors whose CTAs share items at most, where that is fixed for all batches."""
WORDS = 4
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


class FixedMemory(DeviceMemory):
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
    counts : dict of Family to Counts
        As given.
    room : Room
        Where the arrays are; behind those that are copied, what planning on a device takes.
    pool : Pool
        Blocks that are laid out alike.
    launches : list of Launch
        One launch of each family.
    states : tuple of torch.Tensor
        Their partial states.
    queues : tuple of int, optional
        Queues of each family of the kernel, once a batch on the host has been planned.
    device_planner : DevicePlanner, optional
        Plans here, once a batch on the device has been planned.
    """

    queues: tuple[int, ...] | None = None
    device_planner: DevicePlanner | None = None

    def __init__(
        self,
        spec: AttentionSpec,
        terms: Terms,
        counts: dict[Family, Counts],
        device: torch.device,
        workspace: torch.Tensor | None,
    ):
        shapes: dict[Any, tuple[int, ...]] = {
            (family, name): shape
            for family, of_family in counts.items()
            for name, shape in work_sizes(of_family).items()
        }
        shapes.update(batch_sizes(spec, terms.limits))
        lists = {family: tuple((family, name) for name in LISTS) for family in counts}
        self.pool = Pool(Layout(shapes, lists), pinned=device.type == "cuda")
        shapes.update({"header": (HEADER_WORDS,), "words": (WORDS,)})
        for family, of_family in counts.items():
            for name, shape in scratch_sizes(of_family).items():
                shapes[family, name] = shape
        super().__init__(spec, device, Layout(shapes, lists))
        self.terms = terms
        self.counts = counts
        self._params: dict[str, list[Any]] | None = None
        slots = [(family, of_family.slots) for family, of_family in counts.items()]
        states = partial_states(spec, slots, workspace, device)
        self.launches = self._all_launches(dict(zip(counts, states, strict=True)))
        self.states = states_of(self.launches)

    def _all_launches(self, states: dict[Family, States]) -> list[Launch]:
        """Return a launch of each family, however little it has to do."""
        order = in_order(self.counts)
        return [
            self.launch(
                family,
                self.counts[family].num_ctas,
                need_not_wait(order[:place]),
                states[family],
            )
            for place, family in enumerate(order)
        ]

    @property
    def fixed(self) -> FixedMemory | None:
        """Itself."""
        return self

    @property
    def has_device_plans(self) -> bool:
        """Whether a device has planned here."""
        return self.device_planner is not None

    def stays(self, launches: Sequence[Launch]) -> bool:
        """Whether these are its own."""
        return launches is self.launches

    def unread_lse(self, rows: int) -> Any:
        """Return room for the LSE of any batch within the limits, packed."""
        return super().unread_lse(max(rows, self.terms.limits.max_qo_tokens))

    def fill(self, block: Block, families: frozenset[Family], pages: int, stream: Any) -> None:
        """Copy a plan here from its block; families that it has no work for get none."""
        if block.used is not families:
            for family in block.used - families:
                for array in block.lists[family][0]:
                    array[:] = 0
            block.used = families
        block.send(self.room.block, self.ids + pages, stream)

    def take(self, extent: tuple[int, int, tuple[int, ...]]) -> Block:
        """Return memory of the host for a batch within the limits."""
        return self.pool.take()

    def fitting(self, block: Block, units: Units) -> Block:
        """Return the block: it has room for the work of any batch within the limits."""
        return block

    def is_for_short(self, block: Block) -> bool:
        """Whether short requests are dealt at once: where there may be any, blocks have room."""
        return bool(self.counts)

    def most(self, page_size: int | None) -> Most:
        """Return the limits."""
        limits = self.terms.limits
        pages = limits.max_kv_tokens // (page_size or 1)
        return Most(limits.max_batch, limits.max_qo_tokens, pages)

    def check(self, bsr: BSR) -> None:
        """Raise `LimitError` if a batch is larger than the limits."""
        self.terms.limits.check(bsr)

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


def families_of(
    families: Sequence[Family],
    terms: Terms,
    group_size: int,
    num_kv_heads: int,
    ctas: Sequence[int],
) -> list[Family]:
    """Return the families that a batch may have work for.

    Where no batch has many units, one of those that take another's place takes them all.
    """
    longest = (terms.max_qo_len or terms.limits.max_qo_tokens) * group_size
    units = terms.limits.max_batch * num_kv_heads
    pairs = list(zip(families, ctas, strict=True))
    if not terms.split and (few := _for_few(pairs, units, longest)):
        return [few]
    found: list[Family] = []
    least = 1
    for family in families:
        if family.stands_in:
            continue
        if least <= longest:
            found.append(family)
        least = family.rows + 1
    return found


def _for_few(pairs: Sequence[tuple[Family, int]], units: int, longest: int) -> Family | None:
    """Return the family that takes all batches of no more units, of so many rows, if there is one.

    Of wide CTAs if there are any, in the largest clusters of which there are enough: so items are
    long, and few are cut.
    """
    fitting = [
        family
        for family, queues in pairs
        if family.stands_in and longest <= family.rows and units <= queues
        if family.sharers <= MOST_SHARING * family.residents
    ]
    return max(fitting, key=lambda family: (family.replaces, family.sharers), default=None)
