"""The text picture of a BSR format, which ``print(fmt)`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tvm_attn.bsr import BSR

ROWS_SHOWN, PAGES_SHOWN, CELLS_SHOWN = 16, 8, 32
SHADES = "·░▒▓█"


def picture(fmt: BSR) -> str:
    """Return a line about the batch, then its requests or its block mask.

    A long list keeps its first entries and the last; a large block mask is drawn coarsely, darker
    cells keeping more of their blocks.
    """
    if fmt.num_col_blocks is None:
        shown = _ends(fmt.batch_size, ROWS_SHOWN)
        body = _with_gap(_rows(fmt, shown), fmt.batch_size - len(shown))
    else:
        body = _grid(fmt, fmt.num_col_blocks)
    return "\n".join([_header(fmt), *(f"  {line}" for line in body)])


def _header(fmt: BSR) -> str:
    parts = [
        f"BSR: batch {fmt.batch_size}, {fmt.nnz_qo} query tokens",
        f"{int(fmt.kv_len.sum())} KV tokens",
        "ragged" if fmt.page_size is None else f"{fmt.num_blocks} pages of {fmt.page_size}",
    ]
    if fmt.num_col_blocks is not None:
        cells = fmt.batch_size * fmt.num_col_blocks
        parts.append(f"sparsity {1 - fmt.num_blocks / max(cells, 1):.2%}")
    return ", ".join([*parts, *fmt.index_params])


def _rows(fmt: BSR, requests: Sequence[int]) -> list[str]:
    """Return one line per request: its number, lengths and blocks."""
    qo_lens, kv_lens = fmt.qo_len.tolist(), fmt.kv_len.tolist()
    width = max((len(str(b)) for b in requests), default=0)
    qo_width = max((len(str(qo_lens[b])) for b in requests), default=0)
    kv_width = max((len(str(kv_lens[b])) for b in requests), default=0)
    return [
        f"req {b:>{width}}  q {qo_lens[b]:>{qo_width}}  kv {kv_lens[b]:>{kv_width}} | "
        + " ".join(_blocks(fmt, b, kv_lens[b]) or ["-"])
        for b in requests
    ]


def _blocks(fmt: BSR, request: int, kv_len: int) -> list[str]:
    begin, end = fmt.kv_indptr[request : request + 2].tolist()
    if fmt.page_size is None or fmt.kv_indices is None:
        return [f"tokens {begin}:{end}"] if kv_len else []
    shown = _ends(end - begin, PAGES_SHOWN)
    pages = [f"p{int(fmt.kv_indices[begin + i])}" for i in shown]
    tail = kv_len - (end - begin - 1) * fmt.page_size
    if pages and tail != fmt.page_size:
        pages[-1] += f":{tail}/{fmt.page_size}"
    return _with_gap(pages, end - begin - len(shown))


def _grid(fmt: BSR, num_cols: int) -> list[str]:
    num_rows = fmt.batch_size
    height, width = min(num_rows, CELLS_SHOWN), min(num_cols, CELLS_SHOWN)
    if fmt.kv_indices is None or not height or not width:
        return []
    rows = np.repeat(np.arange(num_rows), fmt.kv_indptr.cpu().diff().numpy())
    cols = fmt.kv_indices.cpu().numpy()
    kept = np.zeros((height, width), dtype=np.int64)
    np.add.at(kept, (rows * height // num_rows, cols.astype(np.int64) * width // num_cols), 1)
    of_row = np.bincount(np.arange(num_rows) * height // num_rows)
    of_col = np.bincount(np.arange(num_cols) * width // num_cols)
    shades = kept * 3 // np.outer(of_row, of_col) + (kept > 0)
    return ["".join(SHADES[shade] * 2 for shade in row) for row in shades]


def _ends(count: int, limit: int) -> list[int]:
    """Return what is shown of `count` things: all, or the first few and the last."""
    return [*range(count)] if count <= limit else [*range(limit - 1), count - 1]


def _with_gap(shown: list[str], hidden: int) -> list[str]:
    """Say before the last thing shown how many are `hidden`."""
    return [*shown[:-1], f"... {hidden} more ...", shown[-1]] if hidden else shown
