"""Decoding on a GPU: every group size, page size and stored dtype, short and long, cut and whole.

Lengths are chosen for what the decode kernel does with them: fewer tokens than warps, a block and a
token more, items that end while the next one's first block is copied, one giant among many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.batches import Batch
from tests.cases import check, spec_of, variant
from tests.machine import Machine
from tests.test_semantics import assert_same_bits
from tvm_attn._pairwise import Row
from tvm_attn.runtime.inspector import Inspector
from tvm_attn.runtime.plan import Plan
from tvm_attn.spec import AttentionSpec
from tvm_attn.worklist import CROWD, Header

UNCUT = 2**29
"""A split that no request is longer than."""
GROUPS = (*range(1, 17), 32, 64)
PAGES = (1, 5, 16, 64, 128, None)
DTYPES = (
    *(("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float8_e4m3fn")),
    *(("float16", "float8_e5m2"), ("bfloat16", "float8_e5m2")),
)
DIMS = ((128, 128), (64, 64), (256, 256), (192, 128), (80, 112))
ROWS: list[Row] = [
    {
        "variant": ("causal", "full", "window_sink", "alibi", "soft_cap")[i % 5],
        "dtypes": DTYPES[i % len(DTYPES)],
        "layout": ("NHD", "HND")[i % 2],
        "page_size": PAGES[i % len(PAGES)],
        "group": group,
        "dims": DIMS[i // 2 % len(DIMS)],
    }
    for i, group in enumerate(GROUPS)
]
PLAIN: Row = {
    **{"variant": "causal", "dtypes": ("bfloat16", "bfloat16"), "layout": "NHD"},
    **{"page_size": 16, "group": 4, "dims": (128, 128)},
}
DRAFTS: list[Row] = [
    PLAIN,
    {**PLAIN, "dtypes": ("bfloat16", "float8_e4m3fn")},
    {**PLAIN, "dims": (192, 128), "page_size": 5, "variant": "window_sink"},
    {**PLAIN, "dims": (64, 64), "page_size": 1, "variant": "soft_cap"},
]
"""Hopper's own kernel serves drafts of the first and the last."""
KERNELS = [
    (spec, variant(row["variant"], spec)) for row in (*ROWS, *DRAFTS) for spec in [spec_of(row)]
]

EVEN = {n: [length] * n for n, length in ((1, 4000), (150, 40), (300, 300))}
LENS: dict[str, list[int]] = {
    "edges": [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 0, 0, 255, 257, 1000, 1025],
    "giant": [20000, *range(60)],
    "growing": [7 * n % 900 for n in range(400)],
    **{f"{n} alike": lens for n, lens in EVEN.items()},
}


def batch_of(machine: Machine, spec: AttentionSpec, kv_lens: list[int], qo_len: int = 1) -> Batch:
    return machine.batch(spec, [qo_len] * len(kv_lens), kv_lens, seed=len(kv_lens))


def plan_of(machine: Machine, batch: Batch, **given: Any) -> Plan:
    return machine.kernel("causal", batch.spec).plan(batch.fmt, **given)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"g{row['group']}")
def test_every_group_size(machine: Machine, row: Row) -> None:
    spec = spec_of(row)
    for kind in ("edges", "giant"):
        batch = batch_of(machine, spec, LENS[kind])
        for split in (None, 96):
            once = machine.check(row["variant"], batch, plan={"fixed_split_size": split})
            again = machine.check(row["variant"], batch, plan={"fixed_split_size": split})
            assert_same_bits(once, again)


@pytest.mark.parametrize("kind", LENS)
def test_every_kind_of_batch(machine: Machine, kind: str) -> None:
    spec = spec_of(PLAIN)
    batch = batch_of(machine, spec, LENS[kind])
    plan = plan_of(machine, batch)
    assert [work.family.schedule for work in plan.work] == ["decode"]
    assert_same_bits(machine.check("causal", batch), machine.check("causal", batch))


@pytest.mark.parametrize("split", [UNCUT, 512, 64])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["decode", "wide"])
@pytest.mark.parametrize("row", [PLAIN, *ROWS[1:16:4]], ids=lambda row: f"g{row['group']}")
def test_every_way_to_share_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, row: Row, kind: str, size: int, split: int
) -> None:
    """CTAs alone and in clusters, whole units and cut ones, one and several for each."""
    spec = spec_of(row)
    families = machine.kernel(row["variant"], spec).families
    found = [family for family in families if (family.name, family.cluster) == (kind, size)]
    if not found:
        pytest.skip(f"no {kind} CTAs in clusters of {size} here")

    def deal(
        inspector: Inspector, plan: Plan, words: list[int], values: Any, _: int, ctas: Sequence[int]
    ) -> None:
        queues, size = ctas[families.index(found[0])], split
        most = CROWD * queues // spec.num_kv_heads
        while size < UNCUT and sum(-(-plan.lengths[1] // size)) > most:  # no plan has so many
            size *= 2
        counts = (words[Header.UNITS_SHORT], spec.num_kv_heads, queues, 0)
        plan.dealt.append(inspector._deal(plan, found[0], 0, values, size, counts))
        plan.families = frozenset(found)

    def leave_to_deal(*arguments: Any) -> list[int]:
        words = attempt(*arguments)
        words[Header.FAMILY] = -1
        return words

    attempt = Inspector._attempt
    monkeypatch.setattr(Inspector, "_attempt", leave_to_deal)
    monkeypatch.setattr(Inspector, "_deal_all", deal)
    for lens in ([4000], LENS["edges"], [300 + 37 * n for n in range(70)]):
        batch = batch_of(machine, spec, lens)
        assert_same_bits(machine.check(row["variant"], batch), machine.check(row["variant"], batch))


@pytest.mark.parametrize("num_ctas", [1, 3])
@pytest.mark.parametrize("longest", [5, 20, 70])
def test_queues_of_many_short_items(machine: Machine, longest: int, num_ctas: int) -> None:
    """Some warps have no keys of many items in a row, and then some again."""
    spec = spec_of(PLAIN)
    lens = [n * n % (longest + 1) for n in range(500)]
    batch = batch_of(machine, spec, [*lens, 300, *lens])
    module = machine.kernel("causal", spec).with_ctas(num_ctas)
    check("causal", batch, module=module)


@pytest.mark.parametrize("lens", ["edges", "giant"])
@pytest.mark.parametrize("row", DRAFTS, ids=lambda row: f"{row['dtypes'][1]} {row['dims']}")
@pytest.mark.parametrize("qo_len", [1, 4, 5, 8, 9, 16])
def test_drafts_of_several_tokens(machine: Machine, row: Row, qo_len: int, lens: str) -> None:
    """Up to 16 rows they are decoded, of more they are drafts, or short."""
    spec = spec_of(row)
    batch = batch_of(machine, spec, [n + qo_len for n in LENS[lens]], qo_len)
    families = machine.kernel(row["variant"], spec).families
    rows = qo_len * spec.group_size
    [work] = machine.kernel(row["variant"], spec).plan(batch.fmt).work
    served = work.family.replaces or work.family.name
    assert served == next(each.name for each in families if rows <= each.rows)
    machine.check(row["variant"], batch)


def test_requests_of_every_family_in_one_batch(machine: Machine) -> None:
    spec = spec_of(PLAIN)
    batch = machine.batch(spec, [1, 70, 1, 9, 0, 1, 16], [900, 70, 0, 300, 5, 17, 400])
    names = [work.family.name for work in plan_of(machine, batch).work]
    assert names == ["decode", "short", "long"]
    machine.check("causal", batch)


@pytest.mark.parametrize("split", [64, 160])
def test_bits_do_not_depend_on_the_batch(machine: Machine, split: int) -> None:
    """Fifty requests alone, and each among four hundred."""
    spec = spec_of(PLAIN)
    batch = batch_of(machine, spec, LENS["growing"])
    out, _ = machine.check("causal", batch, plan={"fixed_split_size": split})
    module = machine.kernel("causal", spec)
    fmt = batch.fmt
    assert fmt.kv_indices is not None and fmt.kv_last_page_len is not None
    for request in (*range(0, 392, 8), 399):
        begin, end = fmt.kv_indptr[request : request + 2].tolist()
        last = fmt.kv_last_page_len[request : request + 1]
        table = ([0, 1], [0, end - begin], fmt.kv_indices[begin:end], last)
        alone = module.plan(*table, fixed_split_size=split)
        got = module.run(alone, batch.q[request : request + 1], batch.kv)
        assert torch.equal(got[0], out[request]), request
