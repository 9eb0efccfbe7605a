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
from tvm_attn.schedules.primitives.bitmaps import BlockBits, load_bits
from tvm_attn.schedules.primitives.fragments import Lane
from tvm_attn.tir.hooks import Hooks

ROWS, BLOCK, WORDS = 4, 64, 2


def words_of_a_lane() -> Any:
    """Compile for this CPU what a lane does: words, indptr, tokens, (batch, kv_len, kv0, lane)."""

    @T.prim_func(s_tir=True, check_well_formed=False)
    def lane_words(
        words_h: T.handle, indptr_h: T.handle, tokens_h: T.handle, at_h: T.handle, out_h: T.handle
    ) -> None:
        words = T.match_buffer(words_h, (T.int64(),), "uint32")
        indptr = T.match_buffer(indptr_h, (T.int64(),), "int64")
        tokens = T.match_buffer(tokens_h, (ROWS,), "int32")
        at = T.match_buffer(at_h, (4,), "int32")
        out = T.match_buffer(out_h, (2 * ROWS,), "uint32")
        with T.sblock("load"):
            T.reads()
            T.writes()
            cta = T.meta_var(_cta(words, indptr, at))
            rows = T.meta_var(
                SimpleNamespace(token=lambda i: tokens[i], kv_len=at[1], request=at[0])
            )
            bits = T.meta_var(BlockBits({"mask": out}, WORDS))
            load_bits(cta, rows, bits, at[2])

    return tvm.compile(tvm.IRModule({"lane_words": lane_words}), target="llvm")["lane_words"]


def _cta(words: Any, indptr: Any, at: Any) -> Any:
    def bitmap() -> Any:
        size = words.shape[0] * 4
        return SimpleNamespace(shape=(size,), ptr_to=lambda index: (words, index[0]))

    hooks = SimpleNamespace(bitmaps=lambda: {"mask": (bitmap(), indptr)})
    return SimpleNamespace(hooks=hooks, rows=ROWS, lane=Lane(at[3]))


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
    words = np.concatenate([content, np.zeros(-len(content) % 4, np.uint8)]).view(np.uint32)
    for request, mask in enumerate(masks):
        for kv0 in range(0, int(kv_len[request]), 17):
            lane = int(rng.integers(32))
            tokens = rng.integers(qo_len[request], size=ROWS).astype(np.int32)
            at = np.array([request, kv_len[request], kv0, lane], np.int32)
            out = np.zeros(2 * ROWS, np.uint32)
            function(words, indptr, tokens, at, out)
            rows = out.view(np.uint64)
            for i, token in enumerate(tokens):
                for n in range(BLOCK // 8):
                    for e in range(2):
                        key = kv0 + 8 * n + 2 * (lane % 4) + e
                        if key < kv_len[request]:
                            assert (int(rows[i]) >> (8 * n + e)) & 1 == mask[token, key]


def test_hooks_read_the_values_they_are_given() -> None:
    hooks = Hooks(ta.variants.causal() & ta.variants.custom_mask())
    assert list(hooks.bitmaps()) == ["custom_mask"]
    yes = hooks.reading({"custom_mask": tirx.const(True, "bool")})
    context = yes.context(batch=0, qo_idx=0, kv_idx=0, kv_len=1)
    assert context.custom_mask.value == 1
    assert not isinstance(hooks.context(batch=0).__dict__.get("custom_mask"), tirx.IntImm)
