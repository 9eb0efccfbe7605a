"""Sizes that tiles, shared memory and fragments have in common."""

from __future__ import annotations

from tvm_attn.tir.signature import itemsize

WARP = 32
ROWS, COLUMNS, DEPTH = 16, 8, 16
"""Shape of one ``mma``: rows and columns of the product, and what it sums over."""
CHUNK_BYTES = 16
"""Bytes of one asynchronous copy, and of a row of the matrices ``ldmatrix`` loads."""
LINE_CHUNKS = 8
"""Chunks of a line of the L2 cache."""
WORD_BYTES = 4
TASKS = 4
"""Work items there is room for: the one at work, and three to come of which less and less is known.
"""
TASK_WORDS = 20
MERGED_ROWS = 4
"""Rows of a cut unit that a warp merges side by side: what it waits for is mostly loads."""
PARITIES = 2
"""Blocks of an item whose tokens are located at a time, and items that have such blocks."""


def pitch(columns: int, dtype: str) -> int:
    """Elements from one row of a tile in shared memory to the next: an odd number of chunks.

    Eight neighbouring rows then begin in eight different groups of shared memory banks, so that
    ``ldmatrix`` has no bank conflicts, at addresses that are sums with constants.
    """
    chunk = CHUNK_BYTES // itemsize(dtype)
    return (columns // chunk | 1) * chunk


def is_swizzled(columns: int, dtype: str) -> bool:
    """Whether rows of a tile are not padded, but have their chunks in orders of their own.

    Those of several whole lines: copies to padded rows took 2.6 times as many turns of shared
    memory. Rows of one line are read as fast as they come either way, at simpler addresses if they
    are padded.
    """
    lines, rest = divmod(columns * itemsize(dtype), LINE_CHUNKS * CHUNK_BYTES)
    return lines > 1 and rest == 0


def row_elements(columns: int, dtype: str) -> int:
    """Elements from one row of a tile in shared memory to the next, padded or not."""
    return columns if is_swizzled(columns, dtype) else pitch(columns, dtype)
