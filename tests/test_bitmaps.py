"""Bits of a block of keys in registers, as a lane of a tensor-core kernel has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

import tvm_attn as ta
from tvm_attn.schedules.primitives import bitmaps
from tvm_attn.schedules.primitives.bitmaps import keep_range, load_bits
from tvm_attn.schedules.primitives.fragments import Lane
from tvm_attn.tir.hooks import Hooks
from tvm_attn.worklist import READ_BEYOND

ROWS, BLOCK, WORDS = 4, 64, 2


def words_of_a_lane() -> Any:
    """Compile for this CPU what a lane does: words, indptr, tokens, (batch, kv_len, kv0, lane).

    At the end of its arguments are the first and the last key of each row, from its first column.
    """

    @T.prim_func(s_tir=True, check_well_formed=False)
    def lane_words(
        words_h: T.handle,
        indptr_h: T.handle,
        tokens_h: T.handle,
        at_h: T.handle,
        range_h: T.handle,
        out_h: T.handle,
    ) -> None:
        words = T.match_buffer(words_h, (T.int64(),), "uint32")
        indptr = T.match_buffer(indptr_h, (T.int64(),), "int64")
        tokens = T.match_buffer(tokens_h, (ROWS,), "int32")
        at = T.match_buffer(at_h, (4,), "int32")
        kept = T.match_buffer(range_h, (2,), "int32")
        out = T.match_buffer(out_h, (WORDS * ROWS,), "uint32")
        with T.sblock("load"):
            T.reads()
            T.writes()
            cta = T.meta_var(_cta(words, indptr, at))
            _load_rows(cta, tokens, at, kept, out)

    return tvm.compile(tvm.IRModule({"lane_words": lane_words}), target="llvm")["lane_words"]


def _load_rows(cta: Any, tokens: Any, at: Any, kept: Any, out: Any) -> None:
    keys = {"first_key": 0, "end_key": at[1]}
    rows = SimpleNamespace(token=lambda i: tokens[i], kv_len=at[1], request=at[0], **keys)
    for i in range(ROWS):
        bits = load_bits(cta, rows, i, at[2])
        keep_range(cta, bits, kept[0], kept[1])
        [words] = bits.all
        for w in range(WORDS):
            T.buffer_store(out, words[w], [i * WORDS + w])


def _cta(words: Any, indptr: Any, at: Any) -> Any:
    bitmap = SimpleNamespace(ptr_to=lambda index: (words, index[0]))
    hooks = SimpleNamespace(bitmaps=lambda: {"mask": (bitmap, indptr)})
    tile = SimpleNamespace(block=BLOCK)
    return SimpleNamespace(hooks=hooks, rows=ROWS, lane=Lane(at[3]), tile=tile)


def _load(register: Any, pointer: tuple[Any, Any]) -> Any:
    words, byte = pointer
    value = words[tirx.floordiv(byte, 4)]
    T.buffer_store(register.source, value, list(register.indices))
    return tirx.const(0, "int32")


def test_bits_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every offset: of requests in the bitmap, of rows in a request, of blocks and columns."""
    monkeypatch.setattr(bitmaps, "load_word", _load)
    function = words_of_a_lane()
    rng = np.random.default_rng(0)
    qo_len, kv_len = np.array([5, 3, 9]), np.array([130, 61, 7])
    masks = [rng.random((q, k)) < 0.5 for q, k in zip(qo_len, kv_len, strict=True)]
    packed = [np.packbits(m.reshape(-1), bitorder="little") for m in masks]
    indptr = np.concatenate([[0], np.cumsum([len(p) for p in packed])]).astype(np.int64)
    content = np.concatenate(packed)
    beyond = np.full(READ_BEYOND + -len(content) % 4, 255, np.uint8)
    words = np.concatenate([content, beyond]).view(np.uint32)
    for request, mask in enumerate(masks):
        for kv0 in range(0, int(kv_len[request]), 17):
            lane = int(rng.integers(32))
            tokens = rng.integers(qo_len[request], size=ROWS).astype(np.int32)
            at = np.array([request, kv_len[request], kv0, lane], np.int32)
            kept = np.sort(rng.integers(-5, BLOCK + 5, 2)).astype(np.int32)
            out = np.zeros(WORDS * ROWS, np.uint32)
            function(words, indptr, tokens, at, kept, out)
            rows = out.view(np.uint64)
            for i, token in enumerate(tokens):
                for n in range(BLOCK // 8):
                    for e in range(2):
                        key = kv0 + 8 * n + 2 * (lane % 4) + e
                        place = 8 * n + e
                        inside = kept[0] <= place <= kept[1]
                        if key < kv_len[request]:
                            shown = inside and mask[token, key]
                            assert (int(rows[i]) >> place) & 1 == shown


def test_hooks_read_the_values_they_are_given() -> None:
    hooks = Hooks(ta.variants.causal() & ta.variants.custom_mask())
    assert list(hooks.bitmaps()) == ["custom_mask"]
    yes = hooks.reading({"custom_mask": tirx.const(True, "bool")})
    context = yes.context(batch=0, qo_idx=0, kv_idx=0, kv_len=1)
    assert context.custom_mask.value == 1
    assert not isinstance(hooks.context(batch=0).__dict__.get("custom_mask"), tirx.IntImm)
