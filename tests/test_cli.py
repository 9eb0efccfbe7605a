"""The command line: what each command prints, and how errors end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import tvm_attn as ta
import tvm_attn.bench.cpu
from tvm_attn import bench, cli, env
from tvm_attn.errors import VariantError

SMALL = ["--num-qo-heads", "8", "--num-kv-heads", "2", "--head-dim", "64"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return its exit status, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, printed.err

    return run


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in ("demo", "build", "show", "plan", "bench", "cache", "info"):
        assert command in out


def test_it_runs_as_a_module(run_python: Callable[..., str]) -> None:
    printed = run_python(
        """
        import runpy, sys
        sys.argv = ["tvm_attn", "--help"]
        runpy.run_module("tvm_attn", run_name="__main__")
        """
    )
    assert "tvm-attn" in printed


def test_the_extra_is_named_where_it_is_missing(run_python: Callable[..., str]) -> None:
    printed = run_python(
        """
        import sys
        sys.modules["typer"] = None
        try:
            import tvm_attn.cli
        except SystemExit as stop:
            print(stop)
        """
    )
    assert "pip install 'tvm-attn[cli]'" in printed


def test_build_prints_and_exports(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kernel.tar"
    code, out, _ = run("build", *SMALL, "--variant", "causal", "--export", path)
    assert code == 0
    assert "causal" in out and "8/2 heads, head dim 64" in out and "bytes" in out
    assert str(ta.load(path)) in out


@pytest.mark.parametrize("what", ["tir", "scheduled", "source"])
def test_show_prints_the_text(run: Run, what: str) -> None:
    code, out, _ = run("show", what, *SMALL, "--variant", "causal")
    kernel = ta.build(
        cli.make_spec(num_qo_heads=8, num_kv_heads=2, head_dim=64), ta.variants.causal()
    )
    assert code == 0
    assert out == getattr(kernel, what) + "\n"


def test_show_resources(run: Run) -> None:
    code, out, _ = run("show", "resources", *SMALL, "--variant", "causal")
    assert code == 0 and json.loads(out)["threads"] >= 1


def test_show_tiles_of_this_cpu(run: Run) -> None:
    code, out, _ = run("show", "tiles", *SMALL, "--variant", "causal")
    assert code == 0
    title, columns, *rows = out.splitlines()
    assert title.startswith("llvm -mcpu=") and "query rows" in columns
    assert [row.split()[0] for row in rows] == ["short", "long"]


def test_show_tiles_of_a_gpu_and_why_they_are_chosen(run: Run) -> None:
    options = ("--head-dim", "256", "--target", "cuda -arch=sm_86")
    code, out, _ = run("show", "tiles", *options)
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines()]
    assert sum(line.endswith("chosen") for line in lines) == 3
    [card] = [line for line in lines if line.startswith("a CTA")]
    assert "101,376" in card and "65,536" in card
    for reason in ("no block copied ahead", "blocks under 32 keys", "too much shared memory"):
        assert any(line.endswith(reason) for line in lines), reason
    families = ("decode family", "short family", "long family")
    assert sum(line.startswith(families) for line in lines) == len(families)


@pytest.mark.parametrize("what", ["ptx", "sass"])
def test_a_cpu_kernel_has_no_gpu_code(run: Run, what: str) -> None:
    code, _, err = run("show", what, *SMALL, "--variant", "causal")
    assert code == 2
    assert err.startswith("tvm-attn: TargetError: ") and what.upper() in err


def test_plan_prints_draws_and_saves(run: Run, tmp_path: Path) -> None:
    lengths = ["--qo-lens", "1, 1,70", "--kv-lens", "400,80,70"]
    code, out, _ = run("plan", *SMALL, *lengths)
    assert code == 0
    assert "3 requests, 72 query tokens, 550 KV tokens" in out and "cta 0 |" in out
    svg = tmp_path / "plan.svg"
    code, out, _ = run("plan", *SMALL, *lengths, "--svg", svg, "--json")
    assert code == 0
    assert json.loads(out)["batch"]["kv_len"] == [400, 80, 70]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_plan_for_another_machine(run: Run) -> None:
    code, out, _ = run("plan", *SMALL, "--qo-lens", "1", "--kv-lens", "4000", "--ctas", "6")
    assert code == 0
    assert "cta 5 |" in out and "pieces of cut units" in out
    code, _, err = run("plan", *SMALL, "--ctas", "0")
    assert code == 2 and "num_ctas=0" in err


def test_plan_of_ragged_kv(run: Run) -> None:
    lengths = ["--qo-lens", "3", "--kv-lens", "5", "--page-size", "0", "--json"]
    code, out, _ = run("plan", *SMALL, *lengths)
    assert code == 0 and json.loads(out)["batch"]["kv_indptr"] == [0, 5]


@pytest.mark.parametrize("option", ["--qo-lens", "--kv-lens"])
def test_lengths_that_no_plan_has_are_refused_before_anything_is_made(
    run: Run, option: str
) -> None:
    other = {"--qo-lens": "1", "--kv-lens": "1", option: "99999999999"}
    code, _, message = run("plan", *(word for pair in other.items() for word in pair))
    assert code == 2 and f"PlanError: {option} has 99999999999 tokens" in message


def test_bench_passes_its_arguments_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def main(arguments: list[str]) -> int:
        given.append(arguments)
        return 3

    monkeypatch.setattr(tvm_attn.bench.cpu, "main", main)
    assert run("bench", "cpu", "--quick", "-n", "2")[0] == 3
    assert run("bench")[0] == 3
    assert given == [["--quick", "-n", "2"], []]


def test_bench_knows_its_names(run: Run) -> None:
    code, _, err = run("bench", "nothing")
    assert code == 2 and "cpu" in err
    names = [module.name for module in cli._modules_of(bench)]
    assert "tvm_attn.bench.cpu" in names


def test_cache_lists_and_clears_its_own_files(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    kernel = tmp_path / f"attention-{'0123456789abcdef' * 2}.tar"
    other = tmp_path / "thesis.tar"
    for path in (kernel, Path(f"{kernel}.lock"), other):
        path.write_bytes(b"12345")
    code, out, _ = run("cache", "list")
    assert code == 0 and "1 kernel, 5 bytes" in out and kernel.name in out
    assert json.loads(run("cache", "list", "--json")[1])["files"] == {kernel.name: 5}
    code, out, _ = run("cache", "clear")
    assert code == 0 and "1 kernel deleted" in out
    assert list(tmp_path.iterdir()) == [other]


def test_cache_commands_do_without_a_directory(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "none"))
    assert "0 kernels" in run("cache", "list")[1]
    assert "0 kernels deleted" in run("cache", "clear")[1]


def test_a_built_kernel_is_in_the_list(run: Run) -> None:
    ta.build(cli.make_spec(num_qo_heads=8, num_kv_heads=2, head_dim=64), ta.variants.causal())
    files = json.loads(run("cache", "list", "--json")[1])["files"]
    assert any(name.startswith("attention-") for name in files)


def test_info_has_versions_machine_and_settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.NUM_THREADS.name, "1")
    code, out, _ = run("info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["target"].startswith("llvm -mcpu=") and facts["threads"] == "1"
    assert facts[env.NUM_THREADS.name] == "1" and facts[env.DUMP.name] == "(unset)"
    assert {"apache-tvm", "torch", "cache"} <= set(facts)
    assert facts["target"] in run("info")[1]


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        (["build", "--head-dim", "100"], "SpecError", "head_dim_qk=100"),
        (["build", "--variant", "casual"], "VariantError", "'casual' is none of"),
        (["build", "--target", "sm_1"], "TargetError", "sm_1"),
        (["show", "tiles", "--dtype", "float32", "--target", "sm_90"], "TargetError", "float32"),
        (["demo", "--requests", "0"], "SpecError", "requests=0"),
        (["plan", "--qo-lens", "1", "--kv-lens", "1,2"], "PlanError", "1 lengths"),
        (["plan", "--qo-lens", "-1", "--kv-lens", "1"], "PlanError", "'-1'"),
        (["plan", *SMALL, "--svg", "/nowhere/plan.svg"], "FileNotFoundError", "/nowhere"),
    ],
)
def test_errors_are_one_line_and_status_2(
    run: Run, arguments: list[str], error: str, word: str
) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith(f"tvm-attn: {error}: ") and word in err
    assert err.count("\n") == 1 and "Traceback" not in err


def test_variants_are_parsed() -> None:
    assert cli.parse_variant("") is None
    variant = cli.parse_variant("causal, window=128,soft_cap=30")
    assert variant is not None
    defaults = {param.name: param.default for param in variant.params}
    assert defaults == {"window_left": 128, "logits_soft_cap": 30.0}
    for name in ("alibi", "custom_mask", "sigmoid", "sigmoid=0.5", "sink", "soft_cap", "window"):
        assert cli.parse_variant(name) is not None


@pytest.mark.parametrize("text", ["causal=1", "window=x", "window=", "=3", "window=-2"])
def test_wrong_variants_are_refused(text: str) -> None:
    with pytest.raises(VariantError):
        cli.parse_variant(text)
