"""The kernels that are shipped: every configuration that has to compile, as data.

`core` is the product of what serving needs on every architecture; `sample` covers every pair of all
other choices, architectures included, in few configurations. All of them compile without spills,
without a stack and within a multiprocessor's registers and shared memory: CI compiles the sample,
``make compile-all`` everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm_attn import variants
from tvm_attn._pairwise import pairwise_rows
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.target import ARCHS
from tvm_attn.variant import AttentionVariant, Expr

TUNED_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
OTHER_DIMS = ((16, 16), (32, 32), (80, 80), (112, 112), (160, 160), (224, 224))
DTYPES = (
    *(("float16", "float16"), ("bfloat16", "bfloat16")),
    *(("float16", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")),
    *(("float16", "float8_e5m2"), ("bfloat16", "float8_e5m2")),
)
"""Of queries and of keys and values."""
HEADS = 2
"""KV heads of the specs; any number of them shares a kernel."""


def rotary(spec: AttentionSpec) -> AttentionVariant:
    """Return a variant with every transform: rotated queries and keys, mixed values, gated outputs.

    Rows are rotated by halves (NeoX), by tables whose rows are positions; those below 0, of queries
    without keys, count as 0.
    """
    half, dim_vo = spec.head_dim_qk // 2, spec.dim_vo

    def rotate(ctx: Any, x: Any, d: Expr, position: Expr) -> Expr:
        from tvm import tirx

        at, pair = tirx.max(position, 0), d % half
        other = tirx.Select(d < half, -x((d + half) % (2 * half)), x((d + half) % (2 * half)))
        return x(d) * ctx.cosine[at, pair] + other * ctx.sine[at, pair]

    return AttentionVariant(
        query_transform=lambda ctx, x, d: rotate(ctx, x, d, ctx.q_pos),
        key_transform=lambda ctx, x, d: rotate(ctx, x, d, ctx.kv_pos),
        value_transform=lambda ctx, x, d: (
            (x(d) + x((d + 1) % dim_vo)) * ctx.value_gain[ctx.kv_head]
        ),
        output_transform=lambda ctx, o, lse: o * ctx.gate[ctx.qo_head],
        params=(
            Param("cosine", kind="tensor", shape=("positions", half)),
            Param("sine", kind="tensor", shape=("positions", half)),
            Param("value_gain", kind="tensor", shape=("num_kv_heads",)),
            Param("gate", kind="tensor", shape=("num_qo_heads",)),
        ),
        name="rotary",
    )


VARIANTS: dict[str, Callable[[AttentionSpec], AttentionVariant]] = {
    "full": lambda spec: AttentionVariant(),
    "causal": lambda spec: variants.causal(),
    "window": lambda spec: variants.causal() & variants.sliding_window(),
    "soft_cap": lambda spec: variants.causal() & variants.soft_cap(30.0),
    "window_soft_cap": lambda spec: VARIANTS["window"](spec) & variants.soft_cap(30.0),
    "alibi": lambda spec: variants.causal() & variants.alibi(),
    "custom_mask": lambda spec: variants.custom_mask(),
    "custom_mask_window": lambda spec: variants.sliding_window() & variants.custom_mask(),
    "sink": lambda spec: variants.causal() & variants.sink(),
    "window_sink": lambda spec: VARIANTS["window"](spec) & variants.sink(),
    "sigmoid": lambda spec: variants.causal() & variants.sigmoid(),
    "rotary": lambda spec: variants.causal() & rotary(spec),
}


@dataclass(frozen=True)
class Configuration:
    """One `build` to compile: kernels of all schedules that serve it.

    Parameters
    ----------
    arch : str
        ``"sm_90"``, a name in `ARCHS`.
    dims : tuple of int
        Head dim of queries and keys, and of values.
    dtypes : tuple of str
        Of queries, and of keys and values.
    group : int
        Query heads per KV head.
    variant : str
        A name in `VARIANTS`.
    layout : {"NHD", "HND"}
        Of K and V.
    paged : bool
        Or ragged.
    """

    arch: str
    dims: tuple[int, int]
    dtypes: tuple[str, str]
    group: int
    variant: str
    layout: str = "NHD"
    paged: bool = True

    @property
    def target(self) -> str:
        """Return what it is built for."""
        return f"cuda -arch={self.arch}"

    @property
    def spec(self) -> AttentionSpec:
        """Return a spec whose kernel it is."""
        heads = (HEADS * self.group, HEADS)
        page_size = 16 if self.paged else None
        return AttentionSpec(
            *heads,
            *self.dims,
            *self.dtypes,
            kv_layout=self.layout,
            page_size=page_size,
        )

    def make_variant(self) -> AttentionVariant:
        """Return the variant."""
        return VARIANTS[self.variant](self.spec)

    def __str__(self) -> str:
        """Return a line that names it."""
        dims = "x".join(map(str, dict.fromkeys(self.dims)))
        dtypes = "-".join(dict.fromkeys(self.dtypes))
        kv = "paged" if self.paged else "ragged"
        return f"{self.arch} {self.variant} d{dims} {dtypes} g{self.group} {self.layout} {kv}"


@functools.cache
def core() -> tuple[Configuration, ...]:
    """Return what serving needs everywhere: each architecture, tuned head dim and dtype."""
    stored = product(
        ARCHS, TUNED_DIMS, DTYPES[:2], (4,), ("full", "causal"), ("NHD",), (True, False)
    )
    quantised = product(ARCHS, TUNED_DIMS, DTYPES[2:4], (8,), ("causal",))
    return tuple(Configuration(*values) for values in (*stored, *quantised))


@functools.cache
def sample() -> tuple[Configuration, ...]:
    """Return configurations in which any two choices meet: at least 12 of each architecture.

    Always the same ones. The head dims that are not tuned take turns in one place.
    """
    rows = pairwise_rows(
        {
            "arch": tuple(ARCHS),
            "dims": (*TUNED_DIMS, OTHER_DIMS[0]),
            "dtypes": DTYPES,
            "group": (1, 4, 5, 8, 16),
            "variant": tuple(VARIANTS),
            "layout": ("NHD", "HND"),
            "paged": (True, False),
        }
    )
    others = 0
    for row in rows:
        if row["dims"] in OTHER_DIMS:
            row["dims"] = OTHER_DIMS[others % len(OTHER_DIMS)]
            others += 1
    return tuple(Configuration(**row) for row in rows)


@functools.cache
def shipped() -> tuple[Configuration, ...]:
    """Return every configuration, each once."""
    return tuple(dict.fromkeys((*core(), *sample())))
