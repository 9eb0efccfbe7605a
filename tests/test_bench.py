"""The GPU benchmark as far as it goes without a GPU: its rows, what it checks, how it reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from tvm_attn import pipeline
from tvm_attn.bench import prefill
from tvm_attn.bench.prefill_rows import Row, rows
from tvm_attn.bench.timing import Work
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.shipped import VARIANTS

SMALL = Row(
    "prefill",
    2,
    48,
    48,
    4,
    2,
    32,
    "causal",
    peers={"flashinfer fa2": 50, "torch fa2": 40},
    cudnn=80,
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on the CPU, where a call of ours takes half as long as one of torch's."""

    def times(works: Mapping[str, Work], rounds: int) -> dict[str, float]:
        for work in works.values():
            work()
        return {name: 1e-3 if name == "ours" else 2e-3 for name in works}

    monkeypatch.setattr(prefill, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(prefill, "TORCH", dict.fromkeys(prefill.TORCH, SDPBackend.MATH))
    monkeypatch.setattr(prefill, "bursts", times)


def build(row: Row) -> AttentionModule:
    spec = prefill.spec_of(row)
    return pipeline.build(spec, VARIANTS[row.variant](spec))


def test_rows_have_names_and_published_figures() -> None:
    every = list(rows())
    assert len({row.name for row in every}) == len(every)
    by_name = {row.name: row for row in every}
    needed = {
        "B2 S8192 32/8 d128 causal": (706 / 635, 378 / 635),
        "B16 S1024 32/32 d128 causal": (1.0, 303 / 468),
        "B8 S2048 16/2 d256 full": (743 / 710, 325 / 710),
        "B1 q512 kv8192 32/8 d128 causal page16": (585 / 635, 272 / 635),
        "B16 zipf1024 32/8 d128 causal page16": (530 / 477, 285 / 477),
    }
    for name, (ours, portable) in needed.items():
        assert by_name[name].needed() == pytest.approx(ours)
        assert by_name[name].needed("sm80") == pytest.approx(portable)
    unpublished = by_name["B2 S8192 16/16 d192-128 causal"]
    assert unpublished.needed() == 1.0
    assert unpublished.needed("sm80") is None
    assert all(row.limit or row.needed() for row in every)


@pytest.mark.parametrize(
    ("name", "rate", "microseconds"),
    [
        ("B8 q512 kv8192 32/8 d128 causal page16", 350, 1523),
        ("B1 S16384 32/8 d128 window1024", 317, 840),
        ("B1 S16384 32/8 d128 causal", 430, 5119),
        ("B8 S2048 16/16 d192-128 causal", 514, 334),
    ],
)
def test_operations_are_counted_as_published(name: str, rate: int, microseconds: int) -> None:
    [row] = [row for row in rows() if row.name == name]
    assert row.flops == pytest.approx(rate * microseconds * 1e6, rel=3e-3)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("variant", ["full", "causal"])
def test_a_row_is_measured_beside_torch(variant: str, page_size: int | None) -> None:
    row = replace(SMALL, variant=variant, page_size=page_size)
    result = prefill.measure(row, build, rounds=1)
    assert result["ratio to cuDNN"] == 2.0
    assert result["needed"] == 0.625
    assert result["verdict"] == "OK"
    assert prefill.line(result).endswith("OK")


@pytest.mark.usefixtures("on_cpu")
def test_values_narrower_than_keys_stand_beside_the_backends_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(prefill.TORCH, "torch fa2", SDPBackend.FLASH_ATTENTION)
    row = replace(SMALL, head_dim=64, head_dim_vo=32, peers={}, cudnn=None)
    result = prefill.measure(row, build, rounds=1)
    assert result["needed"] == 1.0
    assert result["ratio to cuDNN"] == 2.0
    assert "torch fa2" not in result


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("variant", ["soft_cap", "alibi", "custom_mask", "window"])
def test_a_variant_is_measured_beside_plain_causal_attention(variant: str) -> None:
    window = 20 if variant == "window" else 0
    row = replace(SMALL, group="variants", variant=variant, window=window, peers={}, cudnn=None)
    assert prefill.measure(row, build, rounds=1)["time over plain causal"] == 0.5


@pytest.mark.usefixtures("on_cpu")
def test_an_append_is_measured_beside_a_dense_batch() -> None:
    row = replace(SMALL, group="append", qo_len=24, kv_len=100, page_size=16, dense=(1, 64))
    result = prefill.measure(row, build, rounds=1)
    dense = 4 * 64**2 / 2 * 4 * 32
    assert result["cuDNN"] == round(dense / 2e-3 / 1e12, 1)
    assert result["verdict"] == "OK"


@pytest.mark.usefixtures("on_cpu")
def test_wrong_results_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = replace(SMALL, variant="full")
    with pytest.raises(AssertionError, match="S48"):
        prefill.measure(SMALL, lambda row: build(full), rounds=1)
    monkeypatch.setattr(prefill, "rows", lambda: iter([SMALL]))
    monkeypatch.setattr(prefill, "builder", lambda *given: lambda row: build(full))
    assert prefill.main(["--target", "sm_90", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "WRONG"


def test_rows_are_selected(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefill.main(["--list", "--only", "paged", "--match", "page1$"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [
        "paged     B8 S2048 32/8 d128 causal page1",
        "paged     B2 S8192 32/8 d128 causal page1",
    ]


def test_kernels_are_built_by_the_schedule_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[tuple[list[object], str | None]] = []

    def build_many(requests: Iterable[object], *, schedule: str | None = None) -> None:
        built.append((list(requests), schedule))

    monkeypatch.setattr(pipeline, "build_many", build_many)
    monkeypatch.setattr(pipeline, "build", lambda *request, schedule: ([request], schedule))
    found: object = prefill.builder([SMALL], "cuda -arch=sm_90a", "sm80")(SMALL)
    assert built == [found]
    assert built[0][1] == "sm80"
