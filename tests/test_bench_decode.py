"""The decode benchmark as far as it goes without a GPU: rows, what it checks, how it reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from tvm_attn import pipeline, reference
from tvm_attn.bench import decode, mixed
from tvm_attn.bench.decode_rows import FP8, Row, rows
from tvm_attn.bench.timing import Work
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.variants import causal, sliding_window

SMALL = Row("decode", "b3", (40, 1, 100), 4, 2, floor=3.0, peer=4.0)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on the CPU, without graphs, where a call of ours takes 1.25 times as long as a read."""

    def times(works: Mapping[str, Work], rounds: int) -> dict[str, float]:
        for work in works.values():
            work()
        return {"ours": 2.5e-3, "read": 2e-3}

    monkeypatch.setattr(decode, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(decode, "ROTATED_BYTES", 2**18)
    monkeypatch.setattr(decode, "in_graph", lambda work: work)
    monkeypatch.setattr(decode, "read_all", lambda target, tensors: lambda: None)
    monkeypatch.setattr(decode, "bursts", times)


def build(row: Row) -> AttentionModule:
    return pipeline.build(decode.spec_of(row), causal())


def test_rows_have_names_and_published_figures() -> None:
    every = list(rows())
    assert len({row.name for row in every}) == len(every) == 75
    by_name = {row.name: row for row in every}
    assert by_name["b16 kv512 8/1 page16"].needed == pytest.approx(2.9 / 8.4)
    assert by_name["1x64k+63x512 32/8 page16"].needed == pytest.approx(90.6 / 107.5)
    assert by_name["b64 kv2048 8/1 page16 e4m3"].needed == pytest.approx(9.3 / 17.3)
    assert sum(row.kv_dtype == FP8 for row in every) == 14
    assert sum(by_name["1x32k+255x512 8/1 page16"].kv_lens) == 32768 + 255 * 512


@pytest.mark.parametrize("name", ["const1024 b16", "unif512-1024 b16", "zipf1024 b16"])
def test_lengths_have_the_mean_they_are_named_after(name: str) -> None:
    [row, _] = [row for row in rows() if row.batch == name]
    mean = 768 if name.startswith("unif") else 1024
    assert len(row.kv_lens) == 16
    assert sum(row.kv_lens) / 16 == pytest.approx(mean, rel=0.01)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("change", [{}, {"kv_dtype": FP8}, {"page_size": 5}, {"qo_len": 3}])
def test_a_row_is_measured_beside_a_read(change: dict[str, object]) -> None:
    result = decode.measure(replace(SMALL, **change), build, "llvm", rounds=1)  # type: ignore[arg-type]
    assert (result["share"], result["needed"], result["ahead"]) == (0.8, 0.75, 1.07)
    assert decode.line(result).endswith("OK")
    behind = replace(SMALL, peer=3.5)
    assert decode.measure(behind, build, "llvm", rounds=1)["verdict"] == "behind"


@pytest.mark.usefixtures("on_cpu")
def test_caches_are_rotated() -> None:
    problem = decode.problem_of(SMALL)
    sizes = [x.numel() * x.element_size() for cache in problem.caches for x in cache]
    assert sum(sizes) >= 2**18 and len({x.data_ptr() for x in problem.caches[0]}) == 2
    assert len(problem.caches) > 1


@pytest.mark.usefixtures("on_cpu")
def test_wrong_results_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = causal() & sliding_window(3)
    monkeypatch.setattr(decode, "rows", lambda: iter([SMALL]))
    monkeypatch.setattr(
        decode, "builder", lambda *_: lambda row: pipeline.build(decode.spec_of(row), wrong)
    )
    assert decode.main(["--target", "sm_90", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "WRONG"


def test_rows_are_selected(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--list", "--only", "skew", "--match", "8/1", "--most", "10"]) == 0
    assert capsys.readouterr().out == "skew     1x8k+63x512 8/1 page16\n"


def test_groups_are_summed_up() -> None:
    results = [{"group": "a", "ahead": 1.0}, {"group": "a", "ahead": 4.0}, {"group": "b"}]
    assert decode.summary(results) == [
        "a        2.00 of the best peer's share in 2 rows, 1.00 at least"
    ]


def test_no_read_is_smaller_than_the_published_ones() -> None:
    small, large = (torch.zeros(4, size, dtype=torch.bfloat16) for size in (2**10, 2**18))
    read = decode._joined([(small, small), (large, large)])
    assert [len(x) for x in read] == [decode.LEAST_READ, 2 * large.nbytes]


def test_mixed_rows_are_decoding_with_a_chunk() -> None:
    every = list(mixed.rows())
    assert [row.name for row in every][:2] == [
        "1x512@512+63x2048 32/8 page16",
        "1x512@8192+63x2048 32/8 page16",
    ]
    assert all(row.qo_lens == [row.chunk, *[1] * 63] for row in every)
    assert every[1].needed == pytest.approx(126.1 / 244.4)


@pytest.mark.usefixtures("on_cpu")
def test_a_mixed_row_is_measured_and_all_its_queries_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(SMALL, group="mixed", chunk=30)
    checked: list[int] = []
    check = reference.check_accuracy

    def spy(out: torch.Tensor, *args: torch.Tensor, name: str) -> None:
        checked.append(len(out))
        check(out, *args, name=name)

    monkeypatch.setattr(reference, "check_accuracy", spy)
    monkeypatch.setattr(mixed, "rows", lambda: iter([small]))
    assert mixed.main(["--target", "llvm", "--rounds", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "OK"
    assert sorted(checked) == [1, 30]
