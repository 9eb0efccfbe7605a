"""``tvm-attn bench mixed``: batches of decoding with a chunk of a prefill in them.

They are measured as those of `tvm_attn.bench.decode`: beside a plain read of the same K and V, in
graphs, results checked first. The published figures, of the same day and card as there, are those
of the fastest of FlashInfer's `BatchAttention` and its two wrappers one after the other,
FlashAttention-3 and vLLM's Triton kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm_attn.bench import decode
from tvm_attn.bench.decode_rows import Row

DECODING = 63
"""Requests of one query token each."""
# Query and KV tokens of the chunk, KV tokens of the others, and a plain read and the best peer.
_MIXED = (
    (512, 512, 2048, 118.8, 144.9),
    (512, 8192, 2048, 126.1, 244.4),
    (512, 8192, 8192, 481.7, 610.9),
    (2048, 2048, 2048, 120.4, 211.8),
)


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for chunk, kv_len, others, floor, peer in _MIXED:
        name = f"1x{chunk}@{kv_len}+{DECODING}x{others}"
        kv_lens = (kv_len, *(others,) * DECODING)
        yield Row("mixed", name, kv_lens, 32, 8, floor, peer, chunk=chunk)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print its rows; returns 1 if one of them is behind or wrong."""
    return decode.run("tvm-attn bench mixed", list(rows()), argv)
