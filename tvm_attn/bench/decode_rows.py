"""What ``tvm-attn bench decode`` measures, and what others were measured at on the same shapes.

The published figures are microseconds on one NVIDIA H200 with bfloat16 queries, torch 2.11.0, by
the fastest of FlashInfer 0.7.4, FlashAttention-3, vLLM's and SGLang's Triton kernels, and those of
a plain read of the same bytes, of 2026-11-29. Cards differ and get warm, so a figure counts as a
share of what the read takes in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

FP8 = "float8_e4m3fn"
_Table = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Parameters
    ----------
    group : str
        ``"decode"``, ``"mixed"``, ``"skew"``, ``"lengths"``, ``"pages"``, ``"heads"``,
        ``"draft"`` or ``"fp8"``.
    batch : str
        Its name.
    kv_lens : tuple of int
        KV tokens of each request.
    num_qo_heads, num_kv_heads : int
        The problem, with a head dim of 128.
    floor, peer : float
        Published microseconds of a plain read, and of the best peer.
    kv_dtype : str
        Of K and V.
    page_size : int
        Of the cache.
    qo_len : int
        Query tokens of each request.
    chunk : int
        Query tokens of the first request, if it is a chunk of a prefill.
    """

    group: str
    batch: str
    kv_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    floor: float
    peer: float
    kv_dtype: str = "bfloat16"
    page_size: int = 16
    qo_len: int = 1
    chunk: int = 0

    @property
    def qo_lens(self) -> list[int]:
        """Return the query tokens of each request."""
        first, *others = (self.qo_len for _ in self.kv_lens)
        return [self.chunk or first, *others]

    @property
    def name(self) -> str:
        """Return what tells it from other rows."""
        dtype = " e4m3" if self.kv_dtype == FP8 else ""
        heads = f"{self.num_qo_heads}/{self.num_kv_heads}"
        return f"{self.batch} {heads} page{self.page_size}{dtype}"

    @property
    def needed(self) -> float:
        """Return the share of a plain read's speed that the best peer reaches."""
        return self.floor / self.peer


# Requests, KV tokens, and a plain read and the best peer with 32/8 and with 8/1 heads.
_EVEN: _Table = (
    (1, 512, (2.4, 7.8), (2.4, 6.4)),
    (16, 512, (9.3, 12.6), (2.9, 8.4)),
    (64, 512, (32.0, 42.6), (5.7, 10.5)),
    (256, 512, (120.4, 144.6), (17.0, 24.8)),
    (1, 2048, (3.9, 9.8), (2.4, 8.6)),
    (16, 2048, (32.0, 42.0), (5.7, 11.1)),
    (64, 2048, (120.4, 135.1), (17.0, 25.5)),
    (256, 2048, (481.7, 498.9), (61.9, 72.7)),
    (1, 8192, (9.3, 16.6), (2.9, 10.2)),
    (16, 8192, (120.4, 133.6), (17.0, 25.5)),
    (64, 8192, (481.7, 492.0), (61.9, 75.4)),
    (256, 8192, (1926.7, 1926.1), (240.8, 254.0)),
    (1, 32768, (32.0, 43.9), (5.7, 18.4)),
    (16, 32768, (481.7, 494.7), (61.9, 75.5)),
    (64, 32768, (1926.7, 1920.2), (240.8, 255.1)),
    (256, 32768, (7706.6, 7704.3), (963.3, 977.0)),
)
_FP8: _Table = (
    (1, 8192, (5.7, 14.4), (2.4, 13.6)),
    (16, 2048, (17.0, 27.9), (3.9, 9.0)),
    (16, 8192, (61.9, 96.1), (9.3, 20.5)),
    (64, 2048, (61.9, 86.3), (9.3, 17.3)),
    (64, 8192, (240.8, 315.0), (32.0, 50.3)),
    (64, 32768, (963.3, 1233.1), (120.4, 178.0)),
    (256, 2048, (240.8, 278.0), (32.0, 38.7)),
)
# A few long requests, many short ones, and the same.
_SKEW: _Table = (
    ("1x64k+63x512", (1, 65536), (63, 512), (90.6, 107.5), (13.1, 25.7)),
    ("1x8k+63x512", (1, 8192), (63, 512), (39.0, 55.4), (6.5, 16.7)),
    ("4x16k+60x512", (4, 16384), (60, 512), (89.2, 104.7), (12.9, 24.5)),
    ("1x128k+15x1k", (1, 131072), (15, 1024), (134.5, 149.3), (18.7, 34.1)),
    ("1x32k+255x512", (1, 32768), (255, 512), (150.0, 176.8), (20.6, 40.5)),
)
_LENGTHS: _Table = (
    ("const1024 b16", (17.0, 22.4), (3.9, 9.5)),
    ("unif512-1024 b16", (13.1, 19.8), (3.4, 9.3)),
    ("zipf1024 b16", (17.0, 28.1), (3.9, 12.6)),
)
# Query heads, KV heads, requests, and a plain read and the best peer at 2048 KV tokens.
_HEADS: _Table = (
    (32, 32, 16, 120.2, 128.4),
    (64, 8, 64, 120.4, 135.3),
    (28, 4, 64, 61.9, 72.4),
    (40, 8, 64, 120.4, 134.9),
    (16, 2, 64, 32.0, 42.1),
    (32, 32, 64, 481.7, 490.5),
    (32, 1, 64, 17.0, 27.4),
)
# Requests, query tokens, KV tokens, and the same.
_DRAFT: _Table = (
    (64, 2, 2048, 120.4, 135.3),
    (64, 4, 8192, 481.7, 497.5),
    (64, 8, 2048, 120.4, 142.5),
    (16, 16, 8192, 120.4, 135.7),
)
_PAGES: _Table = ((1, 481.7, 497.2), (64, 481.7, 486.8))


def lengths(name: str) -> tuple[int, ...]:
    """Draw the KV lengths of a distribution with a mean of about 1024, the same in every run."""
    rng = np.random.default_rng(0)
    if name.startswith("const"):
        return (1024,) * 16
    if name.startswith("unif"):
        return tuple(int(length) for length in rng.integers(512, 1025, 16))
    draws = rng.zipf(1.5, 16).clip(max=64).astype(float)
    return tuple(max(int(length), 1) for length in draws * 1024 / draws.mean())


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for column, heads in enumerate(((32, 8), (8, 1))):
        for group, table, dtype in (("decode", _EVEN, "bfloat16"), ("fp8", _FP8, FP8)):
            for batch, kv_len, *figures in table:
                name, lens = f"b{batch} kv{kv_len}", (kv_len,) * batch
                floor, peer = figures[column]
                yield Row(group, name, lens, *heads, floor, peer, dtype)
        for name, (few, long), (many, short), *figures in _SKEW:
            yield Row("skew", name, (long,) * few + (short,) * many, *heads, *figures[column])
        for name, *figures in _LENGTHS:
            yield Row("lengths", name, lengths(name), *heads, *figures[column])
    for page_size, floor, peer in _PAGES:
        lens = (8192,) * 64
        yield Row("pages", "b64 kv8192", lens, 32, 8, floor, peer, page_size=page_size)
    for qo_heads, kv_heads, batch, floor, peer in _HEADS:
        lens = (2048,) * batch
        yield Row("heads", f"b{batch} kv2048", lens, qo_heads, kv_heads, floor, peer)
    for batch, qo_len, kv_len, floor, peer in _DRAFT:
        name, lens = f"b{batch} q{qo_len} kv{kv_len}", (kv_len,) * batch
        yield Row("draft", name, lens, 32, 8, floor, peer, qo_len=qo_len)
