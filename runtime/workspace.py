"""Limits of the batches a plan must be able to hold, and the exact size of what that takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import DTypeError, LimitError, ShapeError, SpecError, WorkspaceError
from tvm_attn.runtime import sizes
from tvm_attn.runtime.device import ROW_BYTES, check_device
from tvm_attn.runtime.plan import Family
from tvm_attn.spec import AttentionSpec, integer
from tvm_attn.worklist import HEADER_WORDS, ITEM_WORDS, MERGE_WORDS


@dataclass(frozen=True)
class PlanLimits:
    """The largest batch a plan must hold; it fixes every buffer's size.

    Parameters
    ----------
    max_batch : int
        Requests.
    max_qo_tokens : int
        Query tokens of the batch.
    max_kv_tokens : int
        KV tokens of the batch, counting whole pages.
    num_pages : int, optional
        Pages of the cache. A device that plans checks page ids for it; without it, it only checks
        that they are not negative.
    """

    max_batch: int
    max_qo_tokens: int
    max_kv_tokens: int
    num_pages: int | None = None

    def __post_init__(self) -> None:
        """Validate."""
        for name, value in [*vars(self).items()]:
            if name == "num_pages" and value is None:
                continue
            number = integer(value)
            if number is None or number < 0:
                raise SpecError(f"{name}={value!r} must be an integer of at least 0")
            object.__setattr__(self, name, number)

    def check(self, bsr: BSR) -> None:
        """Raise `LimitError` if a batch is larger.

        The last entries of the row pointers are trusted here; the planner checks the arrays.
        """
        qo_tokens = int(bsr.qo_indptr.numpy()[-1])
        kv_tokens = int(bsr.kv_indptr.numpy()[-1]) * (bsr.page_size or 1)
        if bsr.batch_size > self.max_batch:
            raise LimitError(self.excess("max_batch", bsr.batch_size))
        if qo_tokens > self.max_qo_tokens:
            raise LimitError(self.excess("max_qo_tokens", qo_tokens))
        if kv_tokens > self.max_kv_tokens:
            raise LimitError(self.excess("max_kv_tokens", kv_tokens))

    def excess(self, name: str, given: int) -> str:
        """Say that a batch needs more of something."""
        return (
            f"the batch needs {name}={given}, its plan was limited to {getattr(self, name)}; plan "
            "with larger limits"
        )


def workspace_size(
    spec: AttentionSpec,
    families: Sequence[Family],
    limits: PlanLimits,
    num_ctas: Sequence[int],
    fixed_split_size: int = 0,
) -> tuple[int, int]:
    """Return the bytes of (partial states, plan arrays) that any batch within the limits fits in.

    `num_ctas` are those of each family. Without `fixed_split_size` the first does not grow with the
    batch. One that takes another's place takes no more room.
    """
    counts = family_counts(spec, families, limits, num_ctas, fixed_split_size)
    floats, ints = 0, HEADER_WORDS
    for family, of_family in counts.items():
        if not family.stands_in:
            floats += of_family.slots * partial_words(spec, family)
            ints += sum(math.prod(shape) for shape in work_sizes(of_family).values())
    ints += sum(math.prod(shape) for shape in batch_sizes(spec, limits).values())
    return 4 * floats, 4 * ints


class Counts(NamedTuple):
    """Bounds of a family's work list, and of the units that it is cut from and their pieces.

    `sharers` are CTAs that share an item.
    """

    num_ctas: int
    items: int
    slots: int
    merges: int
    units: int
    rows: int
    sharers: int = 1

    @property
    def arrivals(self) -> int:
        """Counters of parts: one of each cut unit for each CTA that shares its items."""
        return self.merges * self.sharers


def family_counts(
    spec: AttentionSpec,
    families: Sequence[Family],
    limits: PlanLimits,
    num_ctas: Sequence[int],
    fixed_split_size: int = 0,
) -> dict[Family, Counts]:
    """Bound the work list of each family; arguments are those of `workspace_size`."""
    found = {}
    for family, ctas in zip(families, num_ctas, strict=True):
        is_last = family is families[-1]
        rows = limits.max_qo_tokens * spec.group_size
        units = limits.max_batch + is_last * (rows // family.rows)
        pieces = 0
        if fixed_split_size:
            tiles = -(-rows // family.rows) if is_last else 1
            pieces = sizes.split_pieces(units, tiles, limits.max_kv_tokens, fixed_split_size)
        found[family] = bounds_of(units, spec.num_kv_heads, ctas, pieces, family.sharers)
    return found


def bounds_of(
    units: int, num_kv_heads: int, num_ctas: int, pieces: int = 0, sharers: int = 1
) -> Counts:
    """Bound the work list of so many units; `pieces` are those of a fixed split, else 0."""
    counts = (units, num_kv_heads, num_ctas, pieces)
    bounds = (sizes.max_items(*counts), sizes.max_slots(*counts), sizes.max_merges(*counts))
    return Counts(num_ctas, *bounds, units, max(units + num_ctas, pieces), sharers)


LAST = "kv_indices"
"""The array that is copied last, since a batch may use little of it."""


def scratch_sizes(counts: Counts) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what planning a family's work on a device takes besides, int32."""
    return {
        "header": (HEADER_WORDS,),
        "unit_rows": (counts.units, ITEM_WORDS),
        "piece_rows": (counts.rows, ITEM_WORDS),
    }


LISTS = ("items", "cta_indptr", "merge_items", "merge_indptr")
"""Arrays of a work list, in the order in which kernels take them."""


def work_sizes(counts: Counts) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a work list's arrays on a device, int32."""
    return {
        "items": (counts.items, ITEM_WORDS),
        "cta_indptr": (counts.num_ctas + 1,),
        "merge_items": (counts.merges, MERGE_WORDS),
        "merge_indptr": (counts.merges + 1,),
        "arrivals": (counts.arrivals,),
    }


def batch_sizes(spec: AttentionSpec, limits: PlanLimits) -> dict[str, tuple[int]]:
    """Return the shapes of a batch's arrays on a device, int32."""
    pages = limits.max_kv_tokens // (spec.page_size or 1) if spec.is_paged else 0
    return batch_shapes(limits.max_batch, pages)


def batch_shapes(requests: int, pages: int) -> dict[str, tuple[int]]:
    """Return the shapes of the arrays of so many requests and page ids: these come last.

    A batch may use little of the room for page ids, and what is behind its last is not copied.
    """
    indptr = dict.fromkeys(("qo_indptr", "kv_indptr"), (requests + 1,))
    of_each = dict.fromkeys(("kv_len", "q_pos_offset", "kv_pos_offset"), (requests,))
    return {**indptr, **of_each, LAST: (pages,)}


def partial_words(spec: AttentionSpec, family: Family) -> int:
    """Return the float32 words of one partial state."""
    return family.rows * (spec.dim_vo + 1)


def partial_states(
    spec: AttentionSpec,
    slots: Sequence[tuple[Family, int]],
    workspace: torch.Tensor | None,
    device: torch.device,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ``partial_o [slots, rows, head_dim_vo]`` and ``partial_lse [slots, rows]``, float32.

    `slots` are those of each family, whose kernels may run at the same time. They are taken from
    the caller's `workspace` if there is one; there, a family in clusters has another's place.

    Raises
    ------
    WorkspaceError
        If `workspace` is too small; the message has both sizes in bytes.
    """
    if workspace is None:
        return [_states(spec, family, count, device, None) for family, count in slots]
    _check_workspace(workspace, device)
    words: dict[str, int] = {}
    for family, count in slots:
        size = count * partial_words(spec, family)
        words[family.name] = max(words.get(family.name, 0), size)
    parts = torch.split(_as_floats(workspace, sum(words.values())), list(words.values()))
    by_name = dict(zip(words, parts, strict=True))
    return [_states(spec, family, count, device, by_name[family.name]) for family, count in slots]


def _states(
    spec: AttentionSpec,
    family: Family,
    slots: int,
    device: torch.device,
    memory: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the partial states of one family, in memory of its own or in what is given."""
    if slots == 0:
        return _no_states(family.rows, spec.dim_vo, device)
    size, split = slots * partial_words(spec, family), slots * family.rows * spec.dim_vo
    flat = torch.empty(size, dtype=torch.float32, device=device) if memory is None else memory
    o = flat[:split].view(slots, family.rows, spec.dim_vo)
    return o, flat[split:size].view(slots, family.rows)


@functools.cache
def _no_states(rows: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(0, rows, dim, device=device), torch.empty(0, rows, device=device)


def _check_workspace(workspace: object, device: torch.device) -> None:
    if not isinstance(workspace, torch.Tensor):
        raise DTypeError(f"workspace must be a torch tensor, got {type(workspace).__name__}")
    check_device("workspace", workspace, device)
    aligned = ROW_BYTES if device.type == "cuda" else 4
    if not workspace.is_contiguous() or workspace.data_ptr() % aligned:
        raise ShapeError(
            f"workspace must be contiguous and aligned to {aligned} bytes; allocate it anew"
        )


def _as_floats(workspace: torch.Tensor, words: int) -> torch.Tensor:
    have = workspace.numel() * workspace.element_size()
    if have < 4 * words:
        raise WorkspaceError(
            f"workspace has {have} bytes, this plan needs {4 * words}; "
            "size it with workspace_size(limits)"
        )
    return workspace.reshape(-1).view(torch.uint8)[: 4 * words].view(torch.float32)
