"""What ``tvm-attn bench prefill`` measures, and what others were measured at on the same shapes.

The published figures are TFLOP/s on one NVIDIA H200 with bfloat16, torch 2.11.0 (cuDNN 9.19) and
FlashInfer 0.7.4, all of a row interleaved in one process, of 2026-11-29. Cards differ and get warm,
so a figure counts as a ratio to cuDNN's in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

DENSE_PEERS = ("flashinfer fa2", "torch fa2")
"""Kernels of the same instruction set, ``mma.sync``."""


@dataclass(frozen=True)
class Row:
    """One measurement: a batch of equal requests.

    Parameters
    ----------
    group : str
        ``"prefill"``, ``"paged"``, ``"append"`` or ``"variants"``.
    batch, qo_len, kv_len : int
        Requests, and tokens of each.
    num_qo_heads, num_kv_heads, head_dim : int
        The problem.
    variant : str
        A name in `tvm_attn.shipped.VARIANTS`.
    page_size : int, optional
        Of paged K and V; ragged if None.
    window : int
        Keys that a row of the window variant sees.
    peers : dict of str to int
        Published TFLOP/s of kernels that ours should be ahead of.
    cudnn : int, optional
        Published TFLOP/s of cuDNN on `dense`.
    dense : tuple of int, optional
        Requests and tokens of the dense batch that torch is measured on, where it is another one.
    """

    group: str
    batch: int
    qo_len: int
    kv_len: int
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    variant: str = "causal"
    page_size: int | None = None
    window: int = 0
    peers: dict[str, int] = field(default_factory=dict, hash=False)
    cudnn: int | None = None
    dense: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """Return what tells it from other rows."""
        queries = f"q{self.qo_len} kv" if self.group == "append" else "S"
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} d{self.head_dim}"
        pages = f" page{self.page_size}" if self.page_size else ""
        window = f"{self.window}" if self.window else ""
        return f"B{self.batch} {queries}{self.kv_len} {heads} {self.variant}{window}{pages}"

    @property
    def needed(self) -> float | None:
        """Return the ratio to cuDNN of the best peer."""
        return max(self.peers.values()) / self.cudnn if self.peers and self.cudnn else None

    @property
    def pairs(self) -> float:
        """Return the visible (query, key) pairs of a request, the diagonal counted by halves."""
        if self.variant == "full":
            return self.qo_len * self.kv_len
        seen = self.qo_len * (self.kv_len - self.qo_len / 2)
        if not self.window:
            return seen
        hidden = self.kv_len - self.window
        return seen - hidden**2 / 2

    @property
    def flops(self) -> float:
        """Return the floating-point operations of the batch that count."""
        return 4 * self.batch * self.pairs * self.num_qo_heads * self.head_dim


# Requests, tokens, variant, and TFLOP/s of FlashInfer's fa2, torch's fa2 and cuDNN, with 32/32 and
# with 32/8 heads.
_DIM_128 = (
    (16, 1024, "causal", (303, 268, 468), (321, 271, 477)),
    (8, 2048, "causal", (343, 308, 545), (353, 308, 553)),
    (4, 4096, "causal", (363, 326, 598), (371, 329, 604)),
    (2, 8192, "causal", (376, 339, 632), (378, 341, 635)),
    (1, 16384, "causal", (382, 347, 657), (386, 345, 655)),
    (16, 1024, "full", (389, 343, 626), (390, 344, 634)),
    (8, 2048, "full", (402, 355, 661), (402, 355, 659)),
    (4, 4096, "full", (406, 358, 675), (406, 358, 674)),
    (2, 8192, "full", (413, 363, 681), (410, 361, 681)),
    (1, 16384, "full", (399, 348, 679), (393, 345, 673)),
)
# The same with 64/8 heads of 64 and 16/2 heads of 256, where FlashInfer's fa2 has no figure.
_OTHER_DIMS = (
    (8, 2048, "causal", (297, 275, 413), (294, 605)),
    (2, 8192, "causal", (326, 306, 472), (311, 683)),
    (8, 2048, "full", (329, 307, 482), (325, 710)),
    (2, 8192, "full", (336, 312, 500), (329, 739)),
)
# Requests, tokens, and FlashInfer's fa2 with pages of 16 and of 1 (causal, 32/8 heads).
_PAGED = ((8, 2048, 319, 318), (2, 8192, 343, 344))
# Requests, KV tokens and the same for 512 queries.
_APPEND = ((8, 8192, 350, 352), (1, 8192, 272, 272), (1, 32768, 331, 330))
_CUDNN = {(batch, tokens): gqa[-1] for batch, tokens, variant, _, gqa in _DIM_128[:5]}
_APPEND_DENSE = (2, 8192)


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for batch, tokens, variant, *by_heads in _DIM_128:
        for kv_heads, (*peers, cudnn) in zip((32, 8), by_heads, strict=True):
            named = dict(zip(DENSE_PEERS, peers, strict=True))
            shape = (batch, tokens, tokens, 32, kv_heads, 128, variant)
            yield Row("prefill", *shape, peers=named, cudnn=cudnn)
    for batch, tokens, variant, *by_dim in _OTHER_DIMS:
        for heads, (*peers, cudnn) in zip(((64, 8, 64), (16, 2, 256)), by_dim, strict=True):
            named = dict(zip(DENSE_PEERS[-len(peers) :], peers, strict=True))
            yield Row("prefill", batch, tokens, tokens, *heads, variant, peers=named, cudnn=cudnn)
    for batch, tokens, *figures in _PAGED:
        for page_size, figure in zip((16, 1), figures, strict=True):
            yield _paged("paged", (batch, tokens, tokens), page_size, figure, (batch, tokens))
    for batch, tokens, *figures in _APPEND:
        for page_size, figure in zip((16, 1), figures, strict=True):
            yield _paged("append", (batch, 512, tokens), page_size, figure, _APPEND_DENSE)
    for variant in ("soft_cap", "alibi", "custom_mask"):
        yield Row("variants", 2, 8192, 8192, variant=variant)
    for batch, tokens in ((2, 8192), (1, 16384)):
        yield Row("variants", batch, tokens, tokens, variant="window", window=1024)


def _paged(
    group: str, shape: tuple[int, int, int], page_size: int, fa2: int, dense: tuple[int, int]
) -> Row:
    return Row(
        group,
        *shape,
        page_size=page_size,
        peers={DENSE_PEERS[0]: fa2},
        cudnn=_CUDNN[dense],
        dense=dense,
    )
