"""What a prefill leaves to the decoding of its batch: half of a GPU, where that is faster."""

from __future__ import annotations

from itertools import accumulate

import pytest

from tests.test_cluster_plans import BYTES, compiled
from tvm_attn.bsr import BSR
from tvm_attn.runtime.inspector import Inspector
from tvm_attn.runtime.plan import Family, Plan, in_order, need_not_wait

DECODE, SHORT = Family("decode", 16, 64, 1, 2, "decode", cluster=1), Family("short", 64, 64, 1, 2)
LONG = Family("long", 128, 128, 1, 1, "sm90", 16384)
QUEUES = [264, 264, 132]


def planned(
    chunks: list[tuple[int, int]], decoding: list[int], long: Family = LONG, split: int = 0
) -> Plan:
    """A plan of chunks of so many query and KV tokens, and requests that decode; 32/8 heads."""
    inspector = Inspector(*compiled(), (DECODE, SHORT, long), 4, 8, BYTES)
    qo_lens, kv_lens = zip(*chunks, *((1, length) for length in decoding), strict=True)
    pages = [-(-length // 16) for length in kv_lens]
    last = [(length - 1) % 16 + 1 for length in kv_lens]
    indptr = [0, *accumulate(pages)]
    indices = list(range(indptr[-1]))
    fmt = BSR.from_page_table([0, *accumulate(qo_lens)], indptr, indices, last, 16)
    return inspector.plan(None, fmt, lambda plan: {}, split, QUEUES)


@pytest.mark.parametrize(
    ("chunks", "decoding", "queues"),
    [
        ([(512, 512)], [2048] * 63, 64),
        ([(512, 2048)], [2048] * 63, 64),
        ([(256, 2048)] * 2, [2048] * 63, 64),
        ([(512, 8192)], [8192] * 63, 64),
        ([(128, 512)], [2048] * 63, 32),
        ([(512, 8192)], [2048] * 63, 132),
        ([(4096, 4096)], [2048] * 63, 132),
        ([(512, 8192)], [2048], 132),
        ([(17, 65536)], [2048] * 63, 132),
    ],
)
def test_half_is_left_where_decoding_takes_longer(
    chunks: list[tuple[int, int]], decoding: list[int], queues: int
) -> None:
    plan = planned(chunks, decoding)
    assert [work.num_ctas for work in plan.work] == [264, queues]
    for work in plan.work:
        seen = {}
        for item in (item for queue in work.queues() for item in queue):
            unit = (item.request, item.kv_head, item.row_begin)
            seen[unit] = seen.get(unit, 0) + item.kv_end - item.kv_begin
        lengths = {unit: int(plan.batch[3][unit[0]]) for unit in seen}
        assert seen == lengths
    tiles = sum(-(-4 * qo_len // 128) for qo_len, _ in chunks)
    assert len(seen) == 8 * tiles


def test_without_decoding_beside_it_a_prefill_has_all() -> None:
    [alone] = planned([(512, 512)], []).work
    assert alone.num_ctas == 132
    other = Family("long", 128, 64, 1, 1, "sm80")
    assert planned([(512, 512)], [2048] * 63, other).work[-1].num_ctas == 132


def test_a_fixed_split_cuts_the_same_on_half() -> None:
    half, whole = (
        planned([(512, 2048)], [2048] * 63, long, split=256).work[-1]
        for long in (LONG, Family("long", 128, 128, 1, 1, "sm80", 16384))
    )
    assert (half.num_ctas, whole.num_ctas) == (64, 132)
    cuts = [sorted(item for queue in work.queues() for item in queue) for work in (half, whole)]
    assert cuts[0] == cuts[1]


def test_in_memory_for_all_multiprocessors_the_other_half_has_no_work() -> None:
    plan = planned([(512, 512)], [2048] * 63)
    work = plan.work[-1]
    assert plan.block is not None
    indptr = plan.block.arrays["long", "cta_indptr"]
    assert indptr[:65].tolist() == work.cta_indptr.tolist()
    assert indptr[65:].tolist() == [len(work.items)] * 68


def test_decoding_is_launched_last() -> None:
    assert in_order((DECODE, SHORT, LONG)) == [SHORT, LONG, DECODE]
    assert [family.arguments(follows=True) for family in (DECODE, LONG)] == [(1, 1), ()]


def test_a_kernel_waits_after_one_that_lets_it_begin_before_it_has_waited() -> None:
    draft = Family("draft", 32, 64, 1, 2, "decode", cluster=1)
    order = in_order((DECODE, draft, LONG))
    assert order == [LONG, DECODE, draft]
    assert [need_not_wait(order[:place]) for place in range(3)] == [False, True, True]
    assert [need_not_wait([DECODE, draft][:place]) for place in range(2)] == [False, False]
