"""The options of a FlashInfer plan, and the kernel that they take."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from tvm_attn import pipeline, variants
from tvm_attn._flashinfer.arguments import Result, check_buffer, check_layout, schedule_of
from tvm_attn._index_arrays import as_tensor, checked_size
from tvm_attn.errors import DTypeError, ShapeError, SpecError
from tvm_attn.runtime.device import CPU, on_device
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.runtime.params import float32
from tvm_attn.runtime.plan import Plan
from tvm_attn.spec import AttentionSpec, integer
from tvm_attn.variant import AttentionVariant

POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
UNCUT = 1 << 30
"""A fixed split that no request is longer than."""


class Features(NamedTuple):
    """What of a variant is compiled in; the values themselves are given at plan or run."""

    causal: bool
    window: bool
    soft_cap: bool
    alibi: bool
    custom_mask: bool

    def variant(self) -> AttentionVariant:
        """Return the variant that has them."""
        parts = {
            "causal": variants.causal,
            "window": variants.sliding_window,
            "soft_cap": variants.soft_cap,
            "alibi": variants.alibi,
            "custom_mask": variants.custom_mask,
        }
        chosen = [make() for name, make in parts.items() if getattr(self, name)]
        return functools.reduce(lambda a, b: a & b, chosen, AttentionVariant())


@functools.cache
def kernel_for(
    spec: AttentionSpec, features: Features, device: torch.device, schedule: str | None = None
) -> AttentionModule:
    """Return the kernel of a wrapper's plan, built once in a process for each of its devices."""
    return pipeline.build(spec, features.variant(), device, schedule=schedule)


@dataclass(frozen=True, eq=False)
class Options:
    """What FlashInfer's plan() says besides shapes and index arrays.

    `custom_mask` is bool values or uint8 bits (see `mask_of`); it replaces `causal`.
    """

    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = None
    pos_encoding_mode: str = "NONE"
    sm_scale: float | None = None
    custom_mask: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Validate the position encoding and the types of numbers."""
        if integer(self.window_left) is None:
            raise DTypeError(f"window_left={self.window_left!r} must be an integer; -1 is off")
        for name in ("logits_soft_cap", "sm_scale"):
            given = getattr(self, name)
            if not isinstance(given, Real | torch.Tensor | None):
                raise DTypeError(f"{name}={given!r} must be a number, or None")
            if isinstance(given, Real):
                float32(name, given)
        if not isinstance(self.causal, bool | int | np.bool_):
            raise DTypeError(f"causal={self.causal!r} must be True or False")
        if self.pos_encoding_mode not in POS_ENCODING_MODES:
            raise SpecError(
                f"pos_encoding_mode={self.pos_encoding_mode!r} must be one of {POS_ENCODING_MODES}"
            )
        if self.pos_encoding_mode == "ROPE_LLAMA":
            raise NotImplementedError(
                'pos_encoding_mode="ROPE_LLAMA" is not implemented; rotate queries and keys '
                'beforehand and leave it at "NONE"'
            )

    @functools.cached_property
    def features(self) -> Features:
        """What the kernel must have compiled in."""
        return Features(
            causal=bool(self.causal) and self.custom_mask is None,
            window=self.window_left >= 0,
            soft_cap=bool(self.logits_soft_cap and 0 < self.logits_soft_cap < math.inf),
            alibi=self.pos_encoding_mode == "ALIBI",
            custom_mask=self.custom_mask is not None,
        )

    def plan_params(self) -> dict[str, Any]:
        """Return the variant's arguments of `AttentionModule.plan`."""
        given: dict[str, Any] = {}
        if self.window_left >= 0:
            given["window_left"] = self.window_left
        if self.custom_mask is not None:
            given["custom_mask"] = self.custom_mask
        return given

    def run_params(self, num_qo_heads: int, device: torch.device) -> dict[str, Any]:
        """Return sm_scale and the variant's arguments of `AttentionModule.run` on a device."""
        given: dict[str, Any] = {"sm_scale": self.sm_scale}
        if self.features.soft_cap:
            given["logits_soft_cap"] = self.logits_soft_cap
        if self.features.alibi:
            given["alibi_slopes"] = alibi_slopes(num_qo_heads, device)
        return given


def options_of(
    causal: bool,
    window_left: int,
    logits_soft_cap: Any,
    pos_encoding_mode: str,
    sm_scale: Any,
) -> Options:
    """Return options without a mask, checked once."""
    given = (causal, window_left, logits_soft_cap, pos_encoding_mode, sm_scale)
    if isinstance(logits_soft_cap, torch.Tensor) or isinstance(sm_scale, torch.Tensor):
        return Options(*given)  # what a tensor holds may change
    try:
        return _known_options(*given)
    except TypeError:  # of a field that has no hash, or no type that it may have
        return Options(*given)


@functools.lru_cache(maxsize=64, typed=True)
def _known_options(*fields: Any) -> Options:
    return Options(*fields)


def attend_once(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    options: Options,
    o_dtype: torch.dtype | None = None,
    backend: str = "auto",
    **given: Any,
) -> Result:
    """Plan and run one request; `given` are arguments of `AttentionModule.run`.

    q is ``[qo_len, num_qo_heads, head_dim_qk]``; k and v have 3 axes in their layout's order.
    """
    kernel, plan = plan_once(q, k, v, kv_layout, options, o_dtype, backend)
    return run_once(kernel, plan, q, k, v, options, **given)


def plan_once(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    options: Options,
    o_dtype: torch.dtype | None = None,
    backend: str = "auto",
    held: Plan | None = None,
) -> tuple[AttentionModule, Plan]:
    """Return the kernel and the plan of one request: `held`, if it is for one like it."""
    if check_buffer(q, "q").ndim != 3:
        raise ShapeError(f"q has shape {tuple(q.shape)}, expected [qo_len, num_qo_heads, head_dim]")
    for name, tensor in (("k", k), ("v", v)):
        if check_buffer(tensor, name).ndim != 3:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected 3 axes")
    token_axis, head_axis = (0, 1) if check_layout(kv_layout) == "NHD" else (1, 0)
    spec = AttentionSpec(
        q.shape[1],
        k.shape[head_axis],
        q.shape[2],
        v.shape[2],
        q_dtype=str(q.dtype),
        kv_dtype=str(k.dtype),
        o_dtype=None if o_dtype is None else str(o_dtype),
        kv_layout=kv_layout,
        page_size=None,
    )
    kernel = kernel_for(spec, options.features, q.device, schedule_of(backend, q.device))
    lengths = len(q), k.shape[token_axis]
    if held is not None and _serves(held, kernel, lengths, options):
        return kernel, held
    indptrs = (torch.tensor([0, n], dtype=torch.int32, device="cpu") for n in lengths)
    with on_device(q.device):
        return kernel, kernel.plan(*indptrs, **options.plan_params())


def _serves(
    held: Plan, kernel: AttentionModule, lengths: tuple[int, int], options: Options
) -> bool:
    """Whether the plan of one request is that of another."""
    if held.owner is not kernel or options.custom_mask is not None:
        return False
    window = held.params.get("window_left", [-1])
    return (held.nnz_qo, held.num_kv_tokens) == lengths and window == [options.window_left]


def run_once(
    kernel: AttentionModule,
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    **given: Any,
) -> Result:
    """Run one request that `plan_once` planned; `given` are arguments of `AttentionModule.run`."""
    params = options.run_params(kernel.spec.num_qo_heads, q.device)
    return kernel.run(plan, q, (k, v), **params, **given)


@functools.cache
def alibi_slopes(num_heads: int, device: torch.device = CPU) -> torch.Tensor:
    """Return FlashInfer's slopes, float32 ``[num_heads]`` (arXiv 2108.12409, section 3).

    Those of the largest power of two of heads come first, then every other one of twice as many.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    rest = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor([*first, *rest], dtype=torch.float32, device=device)


def mask_of(custom_mask: Any, packed_custom_mask: Any) -> torch.Tensor | None:
    """Return the mask a plan takes: uint8 bits where they are given, else bool values.

    Raises
    ------
    DTypeError
        If packed bits are not uint8.
    """
    if packed_custom_mask is not None:
        bits = as_tensor(packed_custom_mask, "packed_custom_mask")
        if bits.dtype != torch.uint8:
            raise DTypeError(f"packed_custom_mask has dtype {bits.dtype}, expected uint8")
        return bits
    if custom_mask is None:
        return None
    return as_tensor(custom_mask, "custom_mask").to(torch.bool).flatten()


def split_tokens(
    fixed_split_size: int | None, disable_split_kv: bool, page_size: int
) -> int | None:
    """Return `fixed_split_size` of our plan, in tokens, from FlashInfer's in pages (-1 is off)."""
    checked_size(page_size, "page_size")
    if disable_split_kv:
        return UNCUT
    if fixed_split_size is None or fixed_split_size == -1:
        return None
    return min(checked_size(fixed_split_size, "fixed_split_size") * page_size, UNCUT)
