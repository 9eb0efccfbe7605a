"""What the planner reads off bitmaps: held against the masks themselves, granule by granule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tvm import tirx

from tests.planning import call, compile_function, ints, prefix, room
from tvm_attn import variants
from tvm_attn.runtime import sizes
from tvm_attn.spec import Param
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.planner import work_planner
from tvm_attn.tir.planner_bitmaps import Bitmaps
from tvm_attn.tir.planner_lists import ListMaker
from tvm_attn.tir.visibility import clear_bits_hide
from tvm_attn.variant import AttentionVariant
from tvm_attn.worklist import (
    HEADER_WORDS,
    ITEM_WORDS,
    MAX_SEEN,
    READ_BEYOND,
    SEEN_BITS,
    Header,
    Item,
    Status,
)

HEADS, CTAS, GROUP, TILE, OVERHEAD = 2, 6, 2, 16, 1
Mask = np.ndarray
MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda q, k: q < 0,
    "everything": lambda q, k: k >= 0,
    "causal": lambda q, k: k <= q + 40,
    "window": lambda q, k: abs(k - q - 20) < 15,
    "prefix": lambda q, k: k < 50,
    "sink and window": lambda q, k: (k < 3) | (abs(k - 2 * q) < 4),
    "one key": lambda q, k: k == 77,
    "one row": lambda q, k: q == 5,
    "all but one": lambda q, k: (q != 5) | (k != 77),
}


@cache
def planner() -> Callable[..., None]:
    hooks = Hooks(variants.custom_mask())
    extra = hooks.parameters(at="plan")
    maker = ListMaker(hooks.key_positions, extra, Bitmaps.of(hooks))
    return compile_function(work_planner(maker), maker)


def plan(masks: list[Mask], block: int) -> list[list[int]]:
    """Plan a batch of masks ``[qo_len, kv_len]``; return its items, of which none is cut."""
    packed = [np.packbits(mask.reshape(-1), bitorder="little") for mask in masks]
    beyond = np.full(READ_BEYOND, 255, np.uint8)
    bits = torch.from_numpy(np.concatenate([*packed, beyond]))[:-READ_BEYOND]
    indptr = torch.from_numpy(np.cumsum([0, *map(len, packed)], dtype=np.int64))
    qo_lens, kv_lens = ([mask.shape[axis] for mask in masks] for axis in (0, 1))
    units = sum(-(-n * GROUP // TILE) for n in qo_lens)
    counts = (units, HEADS, CTAS)
    num_items, num_merges = sizes.max_items(*counts), sizes.max_merges(*counts)
    shapes = [(num_items, ITEM_WORDS), (CTAS + 1,), (num_merges, 4), (num_merges + 1,)]
    outputs = [room(*shape)[0] for shape in (*shapes, (HEADER_WORDS,))]
    scratch = room(sizes.scratch_words(units, CTAS))[0]
    call(
        planner(),
        *(prefix(qo_lens), ints(kv_lens), ints(kv_lens) - ints(qo_lens), ints(kv_lens) * 0),
        *(bits, indptr, len(masks), HEADS, 0, CTAS, GROUP, 1, 2**31 - 1, TILE, block),
        *(OVERHEAD, 2**29, sizes.max_slots(*counts), scratch, *outputs),
    )
    header = outputs[-1]
    assert Status(header[Header.STATUS]) == Status.OK
    items: list[list[int]] = outputs[0][: header[Header.NUM_ITEMS]].tolist()
    assert len(items) == HEADS * units
    return items


def check(masks: list[Mask], block: int) -> None:
    """A unit's range begins and ends with granules it needs; all see the longest full run."""
    for item in plan(masks, block):
        mask = masks[item[Item.REQUEST]]
        rows = item[Item.ROW_BEGIN] // GROUP, (item[Item.ROW_END] - 1) // GROUP + 1
        tile = mask[slice(*rows)]
        parts = [tile[:, first : first + block] for first in range(0, tile.shape[1], block)]
        needed = [i for i, part in enumerate(parts) if part.any()]
        begin = needed[0] * block if needed else 0
        end = min(needed[-1] * block + block, mask.shape[1]) if needed else 0
        assert (item[Item.KV_BEGIN], item[Item.KV_END]) == (begin, end)
        full = [bool(part.all()) for part in parts]
        runs = [len(run) for run in "".join("01"[f] for f in full).split("0")]
        first, last = item[Item.SEEN] & (2**SEEN_BITS - 1), item[Item.SEEN] >> SEEN_BITS
        assert last - first == max(runs)
        assert all(full[first:last])


@pytest.mark.parametrize("block", [16, 48, 128])
@pytest.mark.parametrize("name", MASKS)
def test_ranges_of_masks(name: str, block: int) -> None:
    """Of several requests, with lengths that are no multiples of words, one of them empty."""
    shapes = ((33, 130), (0, 9), (5, 0), (9, 63), (20, 257))
    check([MASKS[name](*np.ogrid[:q, :k]) & np.ones((q, k), bool) for q, k in shapes], block)


def test_ranges_of_random_masks() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        shapes = rng.integers(1, 150, (int(rng.integers(1, 4)), 2))
        masks = [rng.random(shape) < rng.choice([0.002, 0.1, 0.998]) for shape in shapes]
        check(masks, int(rng.choice([16, 32, 64, 80])))


def test_runs_of_more_granules_than_can_be_told_are_told_in_part() -> None:
    [item, *_] = plan([np.ones((1, MAX_SEEN + 9), bool)], 1)
    assert item[Item.SEEN] >> SEEN_BITS == MAX_SEEN and item[Item.KV_END] == MAX_SEEN + 9


def test_which_bits_hide() -> None:
    bits = Param("custom_mask", kind="bitmap", at="plan")
    hides = {
        "custom": variants.custom_mask(),
        "causal": variants.causal() & variants.custom_mask(),
        "inverted": AttentionVariant(mask=lambda ctx: tirx.Not(ctx.custom_mask), params=(bits,)),
        "either": AttentionVariant(
            mask=lambda ctx: tirx.Or(ctx.custom_mask, ctx.kv_pos <= ctx.q_pos), params=(bits,)
        ),
        "of logits": AttentionVariant(
            logits_transform=lambda ctx, s: tirx.Select(ctx.custom_mask, s, 2 * s), params=(bits,)
        ),
    }
    found = {name: clear_bits_hide(Hooks(v), "custom_mask") for name, v in hides.items()}
    assert found == {
        "custom": True,
        "causal": True,
        "inverted": False,
        "either": False,
        "of logits": False,
    }
    assert Bitmaps.of(Hooks(hides["of logits"])) is None
    assert Bitmaps.of(Hooks(variants.causal())) is None
