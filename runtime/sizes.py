"""How much room a work list needs: bounds from counts alone, for buffers allocated before planning.

They hold for every batch with these counts. Without a fixed split the partial states are bounded by
the machine: cutting never makes more than `CROWD` pieces a CTA. With one they follow the batch.

A *unit* here is a (request, query tile) pair, before KV heads: what ``header`` counts as
``UNITS_SHORT`` and ``UNITS_LONG``.
"""

from __future__ import annotations

from tvm_attn.worklist import CROWD

_UNIT_WORDS = 24  # in two tables: a row, its cost, its rank, room to sort, what it sees
_CTA_WORDS = 8  # load, and a boundary's place on the line, unit, head and cut
_SORT_WORDS = 2048


def split_pieces(units: int, max_tiles: int, kv_tokens: int, split: int) -> int:
    """Bound the pieces that a fixed split makes of all units, before KV heads.

    Parameters
    ----------
    units : int
        (request, query tile) pairs.
    max_tiles : int
        Query tiles of the longest request.
    kv_tokens : int
        KV tokens of the whole batch.
    split : int
        `fixed_split_size` in tokens.
    """
    return units + max_tiles * (kv_tokens // split)


def max_items(units: int, num_kv_heads: int, num_ctas: int, pieces: int = 0) -> int:
    """Bound the rows of ``items``; `pieces` is that of `split_pieces`, 0 without a fixed split."""
    if pieces:
        return num_kv_heads * pieces
    return max(num_kv_heads * units + num_ctas, CROWD * num_ctas)


def max_slots(units: int, num_kv_heads: int, num_ctas: int, pieces: int = 0) -> int:
    """Bound the partial states; `pieces` is that of `split_pieces`, 0 without a fixed split."""
    return num_kv_heads * pieces if pieces else CROWD * num_ctas


def max_merges(units: int, num_kv_heads: int, num_ctas: int, pieces: int = 0) -> int:
    """Bound the cut units; `pieces` is that of `split_pieces`, 0 without a fixed split."""
    limit = num_kv_heads * pieces // 2 if pieces else num_ctas
    return min(limit, num_kv_heads * units)


def scratch_words(units: int, num_ctas: int, pieces: int = 0) -> int:
    """Return the int32 words of scratch that planning these units needs."""
    rows = max(units + num_ctas, CROWD * num_ctas, pieces)
    return _SORT_WORDS + _CTA_WORDS * (num_ctas + 1) + _UNIT_WORDS * rows
