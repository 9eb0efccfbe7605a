"""What ``tvm-attn bench prefill`` measures, and what others were measured at on the same shapes.

The published figures are TFLOP/s on one NVIDIA H200 with bfloat16, torch 2.11.0 (cuDNN 9.19),
FlashInfer 0.7.4, FlashAttention-3 of vllm 0.20.2 and FlashAttention-4 4.0.0b36, all of a row
interleaved in one process, of 2026-11-29. Cards differ and get warm, so a figure counts as a ratio
to cuDNN's in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tvm_attn.bench.decode_rows import lengths

MMA_SYNC = ("flashinfer fa2", "torch fa2")
"""Kernels of the same instruction set as ``schedule="sm80"``."""
_PEERS = ("flashinfer fa3", "flashinfer fa2", "fa3", "fa4", "cudnn", "torch fa2")
_Table = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Row:
    """One measurement: a batch of requests, which are equal unless lengths are given.

    Parameters
    ----------
    group : str
        ``"prefill"``, ``"paged"``, ``"append"``, ``"lengths"``, ``"variants"`` or ``"scaled"``.
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
        Published TFLOP/s of others, cuDNN among them where it has a figure.
    cudnn : int, optional
        Published TFLOP/s of cuDNN on `dense`.
    dense : tuple of int, optional
        Requests and tokens of the dense batch that torch is measured on, where it is another one.
    lens : tuple of int
        Tokens of each request, whose queries are as many as its keys.
    lens_name : str
        Of such lengths.
    limit : float, optional
        Time over plain causal attention that a variant should not exceed.
    scale : float
        Factor of the queries.
    head_dim_vo : int, optional
        Head dim of values, where it is another one.
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
    lens: tuple[int, ...] = ()
    lens_name: str = ""
    limit: float | None = None
    scale: float = 1.0
    head_dim_vo: int | None = None

    @property
    def name(self) -> str:
        """Return what tells it from other rows."""
        queries = f"q{self.qo_len} kv" if self.group == "append" else "S"
        tokens = self.lens_name or f"{queries}{self.kv_len}"
        values = f"-{self.head_dim_vo}" if self.head_dim_vo else ""
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} d{self.head_dim}{values}"
        pages = f" page{self.page_size}" if self.page_size else ""
        window = f"{self.window}" if self.window else ""
        scale = f" q x{self.scale:g}" if self.scale != 1 else ""
        return f"B{self.batch} {tokens} {heads} {self.variant}{window}{pages}{scale}"

    @property
    def requests(self) -> list[tuple[int, int]]:
        """Return query and KV tokens of each request."""
        if self.lens:
            return [(length, length) for length in self.lens]
        return [(self.qo_len, self.kv_len)] * self.batch

    @property
    def beside_torch(self) -> bool:
        """Return whether torch's attention is timed beside it."""
        return self.group == "prefill" or self.cudnn is not None

    def needed(self, schedule: str | None = None) -> float | None:
        """Return the ratio to cuDNN of the best peer that a schedule is held against.

        Without published figures that is cuDNN itself, for kernels of the card's own generation.
        """
        names = MMA_SYNC if schedule == "sm80" else _PEERS
        figures = [figure for name, figure in self.peers.items() if name in names]
        if figures and self.cudnn:
            return max(figures) / self.cudnn
        return 1.0 if self.beside_torch and schedule != "sm80" else None

    def pairs(self, qo_len: int, kv_len: int) -> float:
        """Return the visible (query, key) pairs of a request, the diagonal counted by halves."""
        if self.variant == "full":
            return qo_len * kv_len
        seen = qo_len * (kv_len - qo_len / 2)
        if not self.window:
            return seen
        return seen - (kv_len - self.window) ** 2 / 2

    @property
    def flops(self) -> float:
        """Return the floating-point operations of the batch that count."""
        pairs = sum(self.pairs(*request) for request in self.requests)
        columns = self.head_dim + (self.head_dim_vo or self.head_dim)
        return 2 * pairs * self.num_qo_heads * columns


# Requests, tokens, variant, and TFLOP/s of the peers in order, with 32/32 and with 32/8 heads.
_DIM_128: _Table = (
    (16, 1024, "causal", (467, 303, 410, 430, 468, 268), (477, 321, 444, 434, 477, 271)),
    (8, 2048, "causal", (563, 343, 537, 561, 545, 308), (574, 353, 563, 561, 553, 308)),
    (4, 4096, "causal", (638, 363, 627, 644, 598, 326), (645, 371, 655, 648, 604, 329)),
    (2, 8192, "causal", (683, 376, 686, 695, 632, 339), (685, 378, 705, 706, 635, 341)),
    (1, 16384, "causal", (722, 382, 720, 724, 657, 347), (722, 386, 734, 736, 655, 345)),
    (16, 1024, "full", (539, 389, 559, 609, 626, 343), (550, 390, 578, 616, 634, 344)),
    (8, 2048, "full", (643, 402, 664, 685, 661, 355), (652, 402, 676, 686, 659, 355)),
    (4, 4096, "full", (683, 406, 702, 719, 675, 358), (685, 406, 709, 718, 674, 358)),
    (2, 8192, "full", (716, 413, 721, 737, 681, 363), (716, 410, 728, 735, 681, 361)),
    (1, 16384, "full", (725, 399, 737, 731, 679, 348), (726, 393, 745, 743, 673, 345)),
)
# The same with 64/8 heads of 64 and 16/2 heads of 256, where FlashInfer's fa2 has no figure (0).
_OTHER_DIMS: _Table = (
    (8, 2048, "causal", (383, 297, 417, 432, 413, 275), (615, 0, 669, 645, 605, 294)),
    (2, 8192, "causal", (502, 326, 542, 559, 472, 306), (719, 0, 786, 791, 683, 311)),
    (8, 2048, "full", (498, 329, 512, 538, 482, 307), (710, 0, 741, 743, 710, 325)),
    (2, 8192, "full", (545, 336, 576, 593, 500, 312), (761, 0, 797, 800, 739, 329)),
)
# Heads, head dim, and that of values where it is another, of which there are no published figures.
_UNPUBLISHED = (((32, 8, 96), None), ((16, 16, 192), None), ((16, 16, 192), 128))
# Requests, tokens, and FlashInfer's fa3 and fa2 and FlashAttention-3 with pages of 1, 16 and 64
# (causal, 32/8 heads).
_PAGED: _Table = (
    (8, 2048, (472, 318, 526), (475, 319, 526), (476, 319, 526)),
    (2, 8192, (573, 344, 647), (574, 343, 648), (574, 344, 647)),
)
# Requests, query and KV tokens, and the same.
_APPEND: _Table = (
    (8, 512, 8192, (570, 352, 647), (581, 350, 646), (579, 350, 647)),
    (1, 512, 8192, (548, 272, 578), (551, 272, 585), (547, 271, 580)),
    (1, 512, 32768, (588, 330, 655), (598, 331, 653), (591, 332, 653)),
)
_SHORT: _Table = ((8, 64, 8192, (279, 270, 543)), (16, 16, 8192, (71, 204, 253)))
_PAGE_SIZES = (1, 16, 64)
_PAGED_PEERS = ("flashinfer fa3", "flashinfer fa2", "fa3")
# Distributions of 16 lengths, and the same with pages of 16.
_LENGTHS: _Table = (
    ("const1024", (388, 268, 416)),
    ("unif512-1024", (298, 248, 353)),
    ("zipf1024", (461, 285, 530)),
)
_CUDNN = {(batch, tokens): gqa[4] for batch, tokens, variant, _, gqa in _DIM_128[:5]}
_LONG, _SHORTER = (2, 8192), (16, 1024)
_WINDOW = ((2, 8192, 482), (1, 16384, 477))
"""Requests, tokens, and FlashAttention-3 with a window of 1024, which counts its own operations."""


def rows() -> Iterator[Row]:
    """Yield all rows."""
    yield from _dense(_DIM_128, ((32, 32, 128), (32, 8, 128)))
    yield from _dense(_OTHER_DIMS, ((64, 8, 64), (16, 2, 256)))
    for heads, dim_vo in _UNPUBLISHED:
        for batch, tokens, variant, *_ in (*_DIM_128[:1], *_OTHER_DIMS):
            yield Row("prefill", batch, tokens, tokens, *heads, variant, head_dim_vo=dim_vo)
    for batch, tokens, *figures in _PAGED:
        shape = (batch, tokens, tokens)
        for page_size, one in zip(_PAGE_SIZES, figures, strict=True):
            yield _paged("paged", shape, page_size, one, (batch, tokens))
    for batch, qo_len, tokens, *figures in _APPEND:
        for page_size, one in zip(_PAGE_SIZES, figures, strict=True):
            yield _paged("append", (batch, qo_len, tokens), page_size, one, _LONG)
    for batch, qo_len, tokens, one in _SHORT:
        yield _paged("append", (batch, qo_len, tokens), 16, one, _LONG)
    for name, one in _LENGTHS:
        lens = lengths(name)
        shape = (len(lens), max(lens), max(lens))
        row = _paged("lengths", shape, 16, one, _SHORTER)
        yield replace(row, lens=lens, lens_name=name)
    for variant in ("soft_cap", "alibi", "custom_mask"):
        yield Row("variants", 2, 8192, 8192, variant=variant, limit=1.1)
    for batch, tokens, figure in _WINDOW:
        row = Row("variants", batch, tokens, tokens, variant="window", window=1024)
        yield replace(row, peers={"fa3": figure}, cudnn=_CUDNN[_LONG], dense=_LONG)
    for scale in (3.0, 10.0, 40.0):
        yield Row("scaled", 4, 4096, 4096, limit=1.15, scale=scale)


def _dense(table: _Table, heads: tuple[tuple[int, int, int], ...]) -> Iterator[Row]:
    for batch, tokens, variant, *by_heads in table:
        for each, figures in zip(heads, by_heads, strict=True):
            peers = dict(zip(_PEERS, figures, strict=True))
            shape = (batch, tokens, tokens, *each, variant)
            yield Row("prefill", *shape, peers=peers, cudnn=peers["cudnn"])


def _paged(
    group: str,
    shape: tuple[int, int, int],
    page_size: int,
    figures: tuple[int, ...],
    dense: tuple[int, int],
) -> Row:
    peers = dict(zip(_PAGED_PEERS, figures, strict=True))
    cudnn = _CUDNN[dense]
    return Row(group, *shape, page_size=page_size, peers=peers, cudnn=cudnn, dense=dense)
