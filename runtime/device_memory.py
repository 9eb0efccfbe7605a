"""A plan's arrays on its device, and the launches that read them.

The memory of a plan without limits goes from it to the next, and its launches with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tvm_attn.runtime.buffers import KEPT, Block, Layout
from tvm_attn.runtime.placement import Launch, pack
from tvm_attn.runtime.plan import BATCH, Dealt, Family, Plan, in_order, need_not_wait
from tvm_attn.runtime.shelf import rounded
from tvm_attn.runtime.staging import Room
from tvm_attn.runtime.workspace import LAST, partial_states, partial_words
from tvm_attn.spec import AttentionSpec
from tvm_attn.worklist import Header

if TYPE_CHECKING:
    from tvm_attn.runtime.accepted import AcceptedRun
    from tvm_attn.runtime.fixed import FixedMemory

States = tuple[torch.Tensor, torch.Tensor]
"""Room for partial outputs and LSEs."""
NUM_SLOTS = int(Header.NUM_SLOTS)
MOST_KEPT = 1 << 21
"""Float32 words of a family's partial states that go from a plan to the next."""


class DeviceMemory:
    """Memory of a device for the arrays of one plan.

    Parameters
    ----------
    spec : AttentionSpec
        Of the kernel.
    device : torch.device
        A GPU, or the CPU where there is none.
    layout : Layout
        Where the arrays are.

    Attributes
    ----------
    room : Room
        Where the arrays are.
    ids : int
        The word at which page ids begin.
    ones : torch.Tensor
        float32 ``[num_kv_heads]``.
    accepted : AcceptedRun, optional
        A run of launches that plans to come may have.
    """

    accepted: AcceptedRun | None = None

    def __init__(self, spec: AttentionSpec, device: torch.device, layout: Layout):
        self.device = device
        self.room = Room(device, layout)
        self.ids = layout.begins[LAST]
        self.ones = torch.ones(spec.num_kv_heads, dtype=torch.float32, device=device)
        self._batch = tuple(map(self.room.of, BATCH))
        self._heads = spec.num_qo_heads
        self._unread: torch.Tensor | None = None
        self._packed_unread: Any = None
        self._unread_rows = -1

    @property
    def fixed(self) -> FixedMemory | None:
        """Itself, if graphs may have captured it."""
        return None

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """What is here, but for partial states."""
        unread = () if self._unread is None else (self._unread,)
        return (self.room.block, self.ones, *unread)

    def unread_lse(self, rows: int) -> Any:
        """Return room for an LSE of so many rows at least that nobody reads, packed.

        It stays for all plans here: graphs write it.
        """
        if rows > self._unread_rows:
            shape = (rows, self._heads)
            self._unread = torch.empty(shape, dtype=torch.float32, device=self.device)
            self._packed_unread, self._unread_rows = pack(self._unread), rows
        return self._packed_unread

    def keep_run(self, accepted: AcceptedRun, launches: Sequence[Launch]) -> None:
        """Keep a run for the plans to come that have the same launches."""
        if self.stays(launches):
            accepted.source, self.accepted = launches, accepted

    def stays(self, launches: Sequence[Launch]) -> bool:
        """Whether plans to come may have these launches."""
        return False

    def run_of(self, plan: Plan, launches: Sequence[Launch]) -> AcceptedRun | None:
        """Return a run that was checked, if it is one of a plan with these launches."""
        accepted = self.accepted
        return accepted if accepted is not None and accepted.suits(plan, launches) else None

    def launch(self, family: Family, num_ctas: int, follows: bool, states: States) -> Launch:
        """Return the launch of a family with so many CTAs, after another or as the first."""
        names = self.room.layout.lists[family]
        items, cta_indptr, merge_items, merge_indptr = map(self.room.of, names)
        lists = (items, cta_indptr[: num_ctas + 1], merge_items, merge_indptr)
        arrivals = self.room.of((names[0][0], "arrivals"))
        told = family.arguments(follows)
        return Launch(family.name, (*lists, *self._batch), (*states, arrivals, *told))

    def fill(self, block: Block, families: frozenset[Family], pages: int, stream: Any) -> None:
        """Copy a plan, whose work is of some families, here from its block.

        On the current stream, which is `stream` on a GPU; nothing waits.
        """
        block.send(self.room.block, self.ids + pages, stream)


class IdleStates:
    """Partial states of dead plans, for those to come on the same stream; any thread may use it."""

    def __init__(self) -> None:
        self._idle: dict[str, dict[int, States]] = {}

    def take(self, family: Family, slots: int, before: States | None) -> States | None:
        """Return room for so many of a family's, if there is some: what it had before, if idle."""
        idle = self._idle.get(family.name, {})
        for states in (before, *list(idle.values())):
            if states is None or len(states[0]) < slots:
                continue
            if idle.pop(id(states), None) is not None:
                return states
        return None

    def claim(self, name: str, states: States) -> bool:
        """Take these of a family, if they are idle."""
        idle = self._idle.get(name)
        return idle is not None and idle.pop(id(states), None) is not None

    def give(self, family: Family, states: States) -> None:
        """Take back what a dead plan had, unless there is enough."""
        idle = self._idle.setdefault(family.name, {})
        if len(idle) < KEPT:
            idle[id(states)] = states


class Alike(NamedTuple):
    """What a plan with a work list for so many CTAs of one family had, and others like it have."""

    single: tuple[Family, int]
    slots: int
    states: States
    held: dict[Family, States]
    launches: list[Launch]


class KeptMemory(DeviceMemory):
    """Memory of a plan without limits, and its launches, which go from it to the next.

    Parameters
    ----------
    spec, device, layout
        As for `DeviceMemory`.
    idle : IdleStates
        Of the stream.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device, layout: Layout, idle: IdleStates):
        super().__init__(spec, device, layout)
        self._spec = spec
        self._idle = idle
        self._states: dict[Family, States] = {}
        self._before: dict[Family, States] = {}
        self._launches: dict[tuple[Family, int, bool], Launch] = {}
        self._alike: Alike | None = None

    def stays(self, launches: Sequence[Launch]) -> bool:
        """Whether these are those of a plan that others are like."""
        return self._alike is not None and self._alike.launches is launches

    def launches_of(self, plan: Plan, workspace: torch.Tensor | None) -> list[Launch]:
        """Return a plan's launches: those of the plan before, if that was alike."""
        single, alike = plan.single, self._alike
        if single is None or workspace is not None or not plan.families:
            return self.launches(plan.dealt, workspace)
        slots = plan.header[NUM_SLOTS]
        if (
            alike is not None
            and alike.single == single
            and slots <= alike.slots
            and self._idle.claim(single[0].name, alike.states)
        ):
            self._states = alike.held
            return alike.launches
        launches = self.launches(plan.dealt, None)
        states = self._states.get(single[0])
        if states is not None:
            size = states[0].shape[0]
            self._alike = Alike(single, size, states, self._states, launches)
        return launches

    def launches(self, works: Sequence[Dealt], workspace: torch.Tensor | None) -> list[Launch]:
        """Return a launch of each work list, in the order of launches.

        Partial states are in the workspace, if there is one.
        """
        slots = [(work.family, work.num_slots) for work in works]
        if workspace is None:
            states = [self._states_of(*each) for each in slots]
        else:
            states = partial_states(self._spec, slots, workspace, self.device)
        given = {work.family: (work.num_ctas, of) for work, of in zip(works, states, strict=True)}
        order = in_order(given)
        return [
            self._kept_launch(family, need_not_wait(order[:place]), *given[family])
            for place, family in enumerate(order)
        ]

    def rest(self) -> None:
        """Leave partial states to other plans."""
        for family, states in self._states.items():
            self._idle.give(family, states)
        self._states = {}

    def _kept_launch(self, family: Family, follows: bool, num_ctas: int, states: States) -> Launch:
        """Return the launch of a plan before, if its partial states are the same."""
        key = (family, num_ctas, follows)
        launch = self._launches.get(key)
        if launch is None or launch.partials[0] is not states[0]:
            launch = self.launch(family, num_ctas, follows, states)
            if family in self._states:
                self._launches[key] = launch
        return launch

    def _states_of(self, family: Family, slots: int) -> States:
        """Return room for so many partial states: of a dead plan, unless they are many."""
        if slots * partial_words(self._spec, family) > MOST_KEPT:
            [states] = partial_states(self._spec, [(family, slots)], None, self.device)
            return states
        found = self._idle.take(family, slots, self._before.get(family))
        if found is None:
            size = rounded(max(slots, 1))
            [found] = partial_states(self._spec, [(family, size)], None, self.device)
        self._states[family] = self._before[family] = found
        return found


def states_of(launches: Sequence[Launch]) -> tuple[torch.Tensor, ...]:
    """Return the partial states that launches write."""
    if len(launches) == 1:
        states: tuple[torch.Tensor, ...] = launches[0].partials[:2]
        return states
    return tuple(states for launch in launches for states in launch.partials[:2])
