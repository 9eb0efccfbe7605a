"""The estimate by which few units are shared out, compiled alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from tvm.script import tirx as T

from tests.planning import call, compile_function
from tvm_attn.runtime.buffers import pack_host
from tvm_attn.runtime.plan import Family
from tvm_attn.runtime.sharing import PARTS, Work, tables
from tvm_attn.tir.planner_ints import bind
from tvm_attn.tir.planner_shares import Batch, Cost, Split, share


@cache
def compiled() -> Callable[..., None]:
    @T.prim_func(s_tir=True, check_well_formed=False)
    def share_out(
        kv_len_h: T.handle,
        batch: T.int32,
        num_kv_heads: T.int32,
        block: T.int32,
        parts_h: T.handle,
        costs_h: T.handle,
        rates_h: T.handle,
        scratch_h: T.handle,
        choice_h: T.handle,
    ) -> None:
        num_families = T.int32()
        num_rates = T.int32()
        kv_len = bind(kv_len_h, "kv_len")
        parts = bind(parts_h, "parts")
        costs = T.match_buffer(costs_h, (num_families, len(Cost)), "float32", align=4)
        rates = T.match_buffer(rates_h, (num_families, num_rates), "float32", align=4)
        scratch = bind(scratch_h, "scratch")
        choice = T.match_buffer(choice_h, (2,), "int32", align=4)
        with T.sblock("share_out"):
            T.reads()
            T.writes()
            work = T.meta_var(Batch.of(kv_len, batch, num_kv_heads))
            split = T.meta_var(Split.carve(scratch, batch))
            share(work, split, block, parts, costs, rates, choice)

    return compile_function(share_out.with_attr("global_symbol", "share_out"))


def choose(
    kv_lens: Sequence[int], heads: int, families: Sequence[Family], queues: list[int], work: Work
) -> tuple[int, int]:
    """Return which family takes the least time, and with which split."""
    costs, rates = map(pack_host, tables(families, queues, work))
    scratch = np.empty(len(kv_lens) + max(queues), np.int32)
    choice = np.empty(2, np.int32)
    given: list[Any] = [
        *(np.array(kv_lens, np.int32), len(kv_lens), heads, families[0].block),
        *(PARTS, costs, rates, scratch, choice),
    ]
    call(compiled(), *given)
    family, split = choice.tolist()
    return family, split
