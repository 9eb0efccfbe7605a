"""Arguments of decode's plan() that older callers give by position."""

from __future__ import annotations

import warnings
from typing import Any

POSITIONAL = (
    "pos_encoding_mode",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "data_type",
    "sm_scale",
    "rope_scale",
    "rope_theta",
    "non_blocking",
    "block_tables",
    "seq_lens",
    "fixed_split_size",
    "disable_split_kv",
    "q_len_per_req",
)
"""Arguments of plan() after page_size, in the order they may still be given by position."""


def with_positional(given: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of plan() with those that older callers give by position."""
    method = "BatchDecodeWithPagedKVCacheWrapper.plan()"
    if len(given) > len(POSITIONAL):
        raise TypeError(
            f"{method} takes at most {len(POSITIONAL)} arguments after page_size, got {len(given)}"
        )
    named = dict(zip(POSITIONAL, given, strict=False))
    twice = named.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"{method} got multiple values for argument {min(twice)!r}")
    warnings.warn(
        f"{method}: give the arguments after page_size by name", DeprecationWarning, stacklevel=3
    )
    return named | kwargs
