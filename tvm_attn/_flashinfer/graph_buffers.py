"""Index buffers of the caller's, which FlashInfer's wrappers take in graph mode."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tvm_attn._flashinfer.arguments import check_buffer, last_page_len
from tvm_attn.errors import LimitError, ShapeError
from tvm_attn.runtime.plan import KV_LEN, Plan
from tvm_attn.runtime.staging import copy_there
from tvm_attn.runtime.workspace import PlanLimits

UNLIMITED = 1 << 62


@functools.lru_cache(maxsize=64)
def known_limits(max_batch: int, max_qo_tokens: int, max_kv_tokens: int) -> PlanLimits:
    """Return limits, checked once."""
    return PlanLimits(max_batch, max_qo_tokens, max_kv_tokens)


@dataclass(frozen=True)
class GraphBuffers:
    """Index buffers of the caller's: every plan is copied into them, and they bound the batch.

    Parameters
    ----------
    kv_indptr : torch.Tensor
        int32 ``[max_batch + 1]``.
    qo_indptr, kv_indices, last_page_len : torch.Tensor, optional
        int32 ``[max_batch + 1]``, ``[max_pages]`` and ``[max_batch]``, where a wrapper has them.
    custom_mask, mask_indptr : torch.Tensor, optional
        uint8 bits of the masks, and ``[max_batch + 1]``: the byte where each request's begin.
    """

    kv_indptr: torch.Tensor
    qo_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None

    @staticmethod
    def of(
        custom_mask: torch.Tensor | None = None,
        mask_indptr: torch.Tensor | None = None,
        **buffers: tuple[str, torch.Tensor | None],
    ) -> GraphBuffers:
        """Return the buffers, each that is required with the name of the caller's argument.

        Raises
        ------
        DTypeError
            If a buffer is missing or no tensor.
        ShapeError
            If two are for different numbers of requests.
        """
        given = {role: check_buffer(buffer, name) for role, (name, buffer) in buffers.items()}
        max_batch = len(given["kv_indptr"]) - 1
        for role, size in (("qo_indptr", max_batch + 1), ("last_page_len", max_batch)):
            if role in given and len(given[role]) != size:
                raise ShapeError(
                    f"{buffers[role][0]} has {len(given[role])} entries; {buffers['kv_indptr'][0]} "
                    f"is for {max_batch} requests, which take {size}"
                )
        return GraphBuffers(**given, custom_mask=custom_mask, mask_indptr=mask_indptr)

    @functools.cached_property
    def max_batch(self) -> int:
        """The most requests of a batch."""
        return len(self.kv_indptr) - 1

    @functools.cached_property
    def max_pages(self) -> int | None:
        """The most page ids, None if there is no buffer for them."""
        return None if self.kv_indices is None else len(self.kv_indices)

    def limits(self, max_qo_tokens: int, page_size: int) -> PlanLimits:
        """Return the limits that the buffers set."""
        pages = UNLIMITED if self.max_pages is None else self.max_pages * page_size
        return known_limits(self.max_batch, max_qo_tokens, pages)

    def check_mask(self, plan: Plan) -> None:
        """Raise `LimitError` if a plan's custom mask does not fit."""
        if "custom_mask" not in plan.params:
            return
        bits, indptr = plan.params["custom_mask"]
        for name, buffer, needed in (
            ("custom_mask_buf", self.custom_mask, len(bits)),
            ("mask_indptr_buf", self.mask_indptr, len(indptr)),
        ):
            if buffer is None:
                raise LimitError(
                    f"a custom mask in graph mode needs {name}; give it to the constructor"
                )
            if len(buffer) < needed:
                raise LimitError(f"{name} has {len(buffer)} entries, this batch needs {needed}")

    def store(self, plan: Plan, page_size: int) -> None:
        """Copy a plan's arrays in, waiting for nothing; what a buffer holds past them stays."""
        entries = plan.batch_size + 1
        for name, count in (
            ("qo_indptr", entries),
            ("kv_indptr", entries),
            ("kv_indices", plan.num_pages),
        ):
            buffer = getattr(self, name)
            if buffer is not None:
                copy_there(first(plan.placed(name), count), first(buffer, count))
        if self.last_page_len is not None:
            last = torch.from_numpy(last_page_len(plan.batch[KV_LEN], page_size))
            copy_there(last, first(self.last_page_len, plan.batch_size))
        mask = plan.params.get("custom_mask", ())
        for name, values in zip(("custom_mask", "mask_indptr"), mask, strict=False):
            buffer = getattr(self, name)
            if buffer is not None:
                copy_there(values, first(buffer, len(values)))


def first(array: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first entries of an array."""
    return array if array.shape[0] == count else array[:count]
