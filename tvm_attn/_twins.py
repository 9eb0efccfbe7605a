"""Torch twins of the ready-made variants, for `tvm_attn.reference` to compute with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch

from tvm_attn.bsr import BSR
from tvm_attn.errors import VariantError

LogitsFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(s, q_pos, kv_pos, head) -> s``, broadcast over ``[num_qo_heads, qo_len, kv_len]``."""
MaskFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(q_idx, kv_idx, q_pos, kv_pos) -> bool``, broadcast over ``[qo_len, kv_len]``."""


def of_request(hook: Callable[..., torch.Tensor], request: int) -> Callable[..., torch.Tensor]:
    """Return ``hook.at(request)`` where `hook` differs from request to request, else `hook`."""
    bind: Callable[[int], Callable[..., torch.Tensor]] | None = getattr(hook, "at", None)
    return hook if bind is None else bind(request)


@dataclass(frozen=True)
class Mask:
    """The torch twin of a variant's mask: a `MaskFn`; ``a & b`` keeps what both keep."""

    parts: tuple[MaskFn, ...]

    def __call__(
        self, q_idx: torch.Tensor, kv_idx: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor
    ) -> torch.Tensor:
        """Return which pairs are visible."""
        kept = (part(q_idx, kv_idx, q_pos, kv_pos) for part in self.parts)
        return reduce(torch.logical_and, kept)

    def __and__(self, other: Mask) -> Mask:
        """Keep what both keep."""
        return Mask(self.parts + other.parts)

    def at(self, request: int) -> Mask:
        """Return the mask of one request of a batch."""
        return Mask(tuple(of_request(part, request) for part in self.parts))


@dataclass(frozen=True)
class Logits:
    """The torch twin of a variant's logits transform; ``a & b`` applies ``a``, then ``b``."""

    parts: tuple[LogitsFn, ...]

    def __call__(
        self, s: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor, head: torch.Tensor
    ) -> torch.Tensor:
        """Return the transformed logits."""
        return reduce(lambda logit, part: part(logit, q_pos, kv_pos, head), self.parts, s)

    def __and__(self, other: Logits) -> Logits:
        """Apply this one, then `other`."""
        return Logits(self.parts + other.parts)


def causal() -> Mask:
    """Visible when ``kv_pos <= q_pos``."""
    return Mask((lambda q_idx, kv_idx, q_pos, kv_pos: kv_pos <= q_pos,))


def sliding_window(window_left: int) -> Mask:
    """Visible when ``kv_pos >= q_pos - window_left``; -1 is off."""
    if window_left < 0:
        return Mask((lambda q_idx, kv_idx, q_pos, kv_pos: kv_pos == kv_pos,))
    return Mask((lambda q_idx, kv_idx, q_pos, kv_pos: kv_pos >= q_pos - window_left,))


def custom_mask(mask: torch.Tensor, fmt: BSR) -> Mask:
    """Visible where `mask` is True: ``[qo_len, kv_len]`` of each request of `fmt`, flattened."""
    return Mask((_CustomMask(mask.bool(), fmt),))


@dataclass(frozen=True)
class _CustomMask:
    mask: torch.Tensor
    fmt: BSR

    def at(self, request: int) -> MaskFn:
        begin = int((self.fmt.qo_len * self.fmt.kv_len)[:request].sum())
        kv_len = int(self.fmt.kv_len[request])
        return lambda q_idx, kv_idx, q_pos, kv_pos: self.mask[begin + q_idx * kv_len + kv_idx]

    def __call__(self, *indices: torch.Tensor) -> torch.Tensor:
        raise VariantError("a custom mask belongs to a request; take its .at(request)")


def soft_cap(cap: float) -> Logits:
    """``cap * tanh(s / cap)``."""
    return Logits((lambda s, q_pos, kv_pos, head: cap * torch.tanh(s / cap),))


def sigmoid(bias: float = 0.0) -> Logits:
    """``sigmoid(s + bias)``, to be used with ``use_softmax=False``."""
    return Logits((lambda s, q_pos, kv_pos, head: torch.sigmoid(s + bias),))


def alibi(slopes: torch.Tensor) -> Logits:
    """``s + slopes[head] * (kv_pos - q_pos)``, slopes ``[num_qo_heads]``."""

    def add_bias(
        s: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor, head: torch.Tensor
    ) -> torch.Tensor:
        return s + slopes.to(s)[head] * (kv_pos - q_pos).to(s)

    return Logits((add_bias,))


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return float32 ``[num_heads]``: the geometric series of the ALiBi paper (2108.12409)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes + between, dtype=torch.float32, device="cpu")
