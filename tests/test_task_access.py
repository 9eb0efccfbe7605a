"""Pages of tokens on a GPU: dividing by the page size without a division."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.task import Derived, TaskAccess
from tvm_attn.spec import MAX_PAGE_SIZE, AttentionSpec
from tvm_attn.tir.access import CacheAccess
from tvm_attn.tir.signature import ints

SPEC = AttentionSpec(8, 2, 64)
LAST = 2**31 - 1


@pytest.fixture(scope="module")
def split() -> Callable[..., None]:
    """A function of tokens and of a page size: pages and slots, as a kernel finds them."""

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(
        words_h: T.handle,
        tokens_h: T.handle,
        page_size: T.int32,
        pages_h: T.handle,
        slots_h: T.handle,
    ) -> None:
        words = ints(words_h, "words")
        tokens = ints(tokens_h, "tokens")
        pages = ints(pages_h, "pages")
        slots = ints(slots_h, "slots")
        task = T.meta_var(SimpleNamespace(words=words, first=0))
        cache = T.meta_var(TaskAccess.to(CacheAccess(SPEC, None, None, page_size), task))
        for i in T.serial(tokens.shape[0]):
            pages[i] = cache.split(tokens[i])[0]
            slots[i] = cache.split(tokens[i])[1]

    module = tvm.IRModule({"split": definition.with_attr("global_symbol", "split")})
    return tvm.compile(module, target="llvm")["split"]


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 48, 64, 1000, 65536, 999983, MAX_PAGE_SIZE])
def test_tokens_are_divided_by_any_page_size(split: Callable[..., None], page_size: int) -> None:
    random = np.random.default_rng(page_size)
    multiples = random.integers(0, LAST // page_size, 5000) * page_size
    edges = np.concatenate([multiples, multiples + page_size - 1, np.arange(2000)])
    edges = np.concatenate([edges, [LAST - page_size, LAST - 1, LAST]])
    tokens = np.concatenate([edges, random.integers(0, LAST, 5000)]).astype(np.int32)
    words = np.zeros(max(Derived) + 1, np.uint32)
    words[Derived.RECIPROCAL] = 0xFFFFFFFF // page_size
    pages, slots = np.empty_like(tokens), np.empty_like(tokens)
    split(words.view(np.int32), tokens, page_size, pages, slots)
    np.testing.assert_array_equal(pages, tokens // page_size)
    np.testing.assert_array_equal(slots, tokens % page_size)
