"""Kernels for a GPU from spec to artifact: built once, cached by compiler, read and dumped."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import tvm_attn as ta
from tests.caches import Cache, built_at_once, built_in, copied, made_once
from tests.test_artifacts import rewritten
from tvm_attn import cli, env, pipeline, variants
from tvm_attn.codegen import compilers, kernels
from tvm_attn.codegen.compilers import CudaCompiler, find_compiler
from tvm_attn.codegen.kernels import Kernels
from tvm_attn.errors import CompileError, TargetError
from tvm_attn.runtime import disassembly
from tvm_attn.runtime.artifact import read_artifact
from tvm_attn.runtime.library import Library
from tvm_attn.schedules import sm80
from tvm_attn.spec import AttentionSpec
from tvm_attn.variant import AttentionVariant

SPEC = AttentionSpec(2, 2, 64, page_size=None)
TARGET = "cuda -arch=sm_80"
NAMES = ("attention_decode", "attention_draft", "attention_short", "attention_long")
TEXTS = ("tir.py", "scheduled.py", "source.cu", "kernel.ptx", "ptxas.txt")

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no CUDA compiler")


def build(spec: AttentionSpec = SPEC, target: str = TARGET, **options: Any) -> ta.AttentionModule:
    return ta.build(spec, variants.causal(), target, **options)


@dataclass(frozen=True)
class Built:
    """A folder with a cache and a dump, the kernels in it, and the stages of the build."""

    folder: Path
    made: list[Kernels]
    stages: list[str]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """`SPEC`, built once in a run, in a cache of its own."""
    return made_once(tmp_path_factory, "built_for_a_gpu", build_in)


def build_in(folder: Path) -> Built:
    built = Built(folder, [], [])
    cuda_kernels = kernels.cuda_kernels

    def make(*arguments: Any) -> Kernels:
        built.made.append(cuda_kernels(*arguments))
        return built.made[0]

    with built_in(built.folder, kernels, "cuda_kernels", make):
        build(progress=built.stages.append)
        assert not list(built.folder.glob("cache/device_planner-*.tar"))
        build().export(built.folder / "attention.tar")
    return built


@pytest.fixture
def cache(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    """A copy of that cache, nothing of it loaded, and a compiler that makes the same code again."""
    again = built.made[0]
    [path] = built.folder.glob("cache/device_planner-*.tar")
    planner = read_artifact(path)
    monkeypatch.setattr(pipeline, "generate_device_planner", lambda *_: planner)
    yield from copied(
        built.folder, tmp_path, monkeypatch, kernels, "cuda_kernels", lambda *_: again
    )


# What a kernel is


def test_a_kernel_says_what_it_is(cache: Cache) -> None:
    module = build()
    meta = read_artifact(cache.kernel).meta
    assert (meta["device"], meta["target"], meta["cpu_flags"]) == ("cuda", TARGET, [])
    assert (module.device, module.backend, module.target) == ("cuda", "sm80", TARGET)
    assert [family["name"] for family in meta["families"]] == ["decode", "draft", "short", "long"]
    assert all(family["residents"] >= 1 for family in meta["families"])
    assert tuple(module.resources["kernels"]) == tuple(meta["resources"]) == NAMES
    for name, used in meta["resources"].items():
        assert not used["stack"] and not used["spill_stores"] and not used["spill_loads"]
        assert f"{name}: {used['registers']} registers" in str(module)


def test_a_kernel_can_be_read(cache: Cache) -> None:
    module = build()
    for name in NAMES:
        assert f"def {name}(" in module.tir and f"def {name}(" in module.scheduled
        assert f"{name}_kernel(" in module.source
        assert f".entry {name}_kernel(" in module.ptx
        assert f"{name}_kernel" in module.sass
    assert "HMMA" in module.sass and "mma.sync" in module.ptx


def test_a_kernel_for_a_gpu_is_read_without_tvm_and_compilers(
    cache: Cache, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    path = tmp_path / "attention.tar"
    build().export(path)
    printed = run_python(
        f"""
        import subprocess, torch, tvm_attn
        subprocess.Popen = None
        module = tvm_attn.load({str(path)!r})
        print(len(module.source), len(module.ptx), len(module.tir))
        print(module.plan([0, 3], [0, 500]).num_items > 0)
        print([name for name in sys.modules if name.split(".")[0] == "tvm"])
        """,
        without_tvm=True,
        env={"PATH": "", "CUDA_HOME": "", "CUDA_PATH": ""},
    )
    module = build()
    lengths = f"{len(module.source)} {len(module.ptx)} {len(module.tir)}"
    assert printed.splitlines() == [lengths, "True", "[]"]


def test_damage_to_device_code_is_seen(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "attention.tar"
    build().export(path)
    rewritten(path, {"attention/attention_long.device": lambda code: code[:-1] + b"?"})
    with pytest.raises(ta.errors.ArtifactError, match="damaged"):
        ta.load(path)


def test_the_stages_of_a_build_are_reported(built: Built) -> None:
    for name in NAMES:
        own = [stage for stage in built.stages if stage.startswith(f"{name}: ")]
        assert own == [f"{name}: {text}" for text in TEXTS]
    assert len(built.stages) == len(NAMES) * len(TEXTS)


def test_a_dump_has_every_phase_of_every_kernel(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build()
    dumped = {path.relative_to(cache.dump).parts for path in cache.dump.rglob("*.*")}
    [key] = {parts[0] for parts in dumped}
    assert dumped == {(key, name, text) for name in NAMES for text in (*TEXTS, "kernel.sass")}
    texts = [(cache.dump / key / name / "source.cu").read_text() for name in NAMES]
    assert module.source == "\n".join(texts)
    monkeypatch.setattr(disassembly, "_disassembler", lambda: None)
    with env.override(env.DUMP, cache.dump / "again"):
        build()
    assert len(list(cache.dump.glob("again/*/*/kernel.ptx"))) == len(NAMES)
    assert not list(cache.dump.glob("again/*/*/kernel.sass"))


# The planner for a GPU is compiled when it is needed


def test_what_is_exported_has_the_planner_for_a_gpu(cache: Cache, tmp_path: Path) -> None:
    [path] = cache.folder.glob("device_planner-*.tar")
    planner = read_artifact(path)
    path.unlink()
    module = build()
    assert not path.exists() and not cache.compiled
    module.export(tmp_path / "attention.tar")
    assert path.exists()
    for whole in (read_artifact(tmp_path / "attention.tar"), pickle.loads(pickle.dumps(module))):
        artifact = getattr(whole, "_artifact", whole)
        assert artifact.devices["device_planner"] == planner.devices["device_planner"]
        assert set(artifact.libraries) == {"attention", "planner", "device_planner"}
        assert artifact.meta["device_rows"] > 0


def test_a_planner_for_a_gpu_that_is_launched(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[str, int]] = []
    monkeypatch.setattr(Library, "launch", lambda self, *call: launched.append(call))
    build()._later.launch("plan_on_device", 1)
    assert launched == [("plan_on_device", 1)]
    assert not cache.compiled


def test_hooks_that_change_before_their_planner_is_compiled(cache: Cache) -> None:
    hidden = [0]
    causal = variants.causal()
    changing = replace(causal, kv_range=lambda *at: (hidden[0], causal.kv_range(*at)[1]))
    module = ta.build(SPEC, changing, TARGET)
    hidden[0] = 1
    with pytest.raises(CompileError, match=r"hooks of .* have changed since its kernel was built"):
        module.export(os.devnull)


# Schedules, and what is refused


def test_schedules_belong_to_targets(cache: Cache) -> None:
    assert build(schedule="sm80").backend == "sm80"
    assert not cache.compiled, "the library's choice and the same by name are one kernel"
    with pytest.raises(TargetError, match=r"schedule='cpu' is no backend .*'sm90', or None"):
        build(schedule="cpu")
    with pytest.raises(TargetError, match=r"schedule='sm80' is no backend .*'cpu', or None"):
        build(target="llvm", schedule="sm80")


def test_a_hook_that_cannot_be_traced_shows_its_line() -> None:
    wrong = AttentionVariant(mask=lambda ctx: ctx.no_such_field, name="wrong")
    with pytest.raises(CompileError, match=r"variant 'wrong': its mask.*no_such_field") as raised:
        ta.build(SPEC, wrong, TARGET)
    assert "wrong = AttentionVariant(mask=lambda ctx: ctx.no_such_field" in str(raised.value)


def test_a_kernel_that_cannot_be_generated(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a tile without rows")

    shutil.copytree(built.folder / "cache", tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    monkeypatch.setattr(sm80, "attention", fail)
    words = r"variant 'causal & alibi': attention_\w+ cannot be generated: ZeroDivisionError: a t"
    with pytest.raises(CompileError, match=words) as raised:
        ta.build(SPEC, variants.causal() & variants.alibi(), TARGET)
    assert "in fail" in str(raised.value.__cause__.__cause__), "the child's traceback is there"


def test_a_compiler_that_refuses(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Kernels:
        raise CompileError("nvcc-13.0 cannot compile attention_long for sm_80: no reason")

    monkeypatch.setattr(kernels, "cuda_kernels", refuse)
    with pytest.raises(CompileError, match=r"variant 'causal & alibi': nvcc-13\.0 cannot"):
        ta.build(SPEC, variants.causal() & variants.alibi(), TARGET)
    assert len(list(cache.folder.glob("attention-*.tar"))) == 1


# The cache


def test_what_is_cached_is_not_built_again(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    build(), find_compiler()
    pipeline.forget_loaded()
    monkeypatch.setattr(subprocess, "Popen", None)  # nor is a compiler asked for its version
    build()
    build(replace(SPEC, num_qo_heads=6, num_kv_heads=6))
    assert not cache.compiled
    build(target="sm_86")
    assert cache.compiled == list(NAMES)


@pytest.mark.parametrize("damage", ["empty", "cut", "changed"])
def test_a_damaged_file_is_built_again(cache: Cache, damage: str) -> None:
    path = cache.kernel
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "empty": b"",
        "cut": whole[:middle],
        "changed": whole[:middle] + bytes(100) + whole[middle + 100 :],
    }[damage]
    assert damaged != whole
    path.write_bytes(damaged)
    build()
    assert cache.compiled == list(NAMES)
    assert path.read_bytes() == whole


def found(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have compilers of these versions and no others."""
    for kind in ("nvcc", "nvrtc"):
        version = versions.get(kind)
        compiler = CudaCompiler(kind, version, Path()) if version else None
        monkeypatch.setattr(compilers, f"find_{kind}", lambda compiler=compiler: compiler)


def test_compilers_have_kernels_of_their_own(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, versions in enumerate(({"nvcc": "13.9.1"}, {"nvrtc": "13.9.1"}, {"nvcc": "14.0"})):
        found(monkeypatch, **versions)
        for _ in range(2):
            pipeline.forget_loaded()
            build()
        assert cache.compiled == [*NAMES] * (number + 1)
    labels = {path.name.rsplit("-", 1)[0] for path in cache.folder.glob("attention-*.tar")}
    assert labels >= {"attention-nvcc-13.9.1", "attention-nvrtc-13.9.1", "attention-nvcc-14.0"}


def test_what_is_cached_needs_no_compiler(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch)
    build()
    assert not cache.compiled
    build(target="sm_86")
    assert cache.compiled, "whether there is a compiler is asked where it is needed"


def test_what_is_cached_needs_no_tvm(cache: Cache, run_python: Callable[..., str]) -> None:
    spec = "ta.AttentionSpec(2, 2, 64, page_size=None)"
    request = f'{spec}, ta.variants.causal(), "cuda -arch=sm_80"'
    assert cache.build_without_tvm(run_python, request) == "causal []\n"


def test_many_kernels(cache: Cache) -> None:
    lines: list[str] = []
    jobs = [(SPEC, variants.causal(), target) for target in ("sm_80", "sm_86", "sm_89")]
    modules = ta.build_many(jobs, progress=lines.append)
    assert [module.target for module in modules] == [
        *("cuda -arch=sm_80", "cuda -arch=sm_86", "cuda -arch=sm_89")
    ]
    assert [line.split()[0] for line in lines] == ["1/3", "2/3", "3/3"]


BUILD = """
spec = ta.AttentionSpec(2, 2, 64, page_size=None)
module = ta.build(spec, ta.variants.causal(), "cuda -arch=sm_80")
print(len(module.source), sorted(module.resources["kernels"]))
"""


def test_two_processes_compile_what_is_missing_once(
    built: Built, tmp_path: Path, root: Path
) -> None:
    """The planner, here; `tests/test_cache.py` has whole kernels, of a CPU."""
    shutil.copytree(built.folder / "cache", tmp_path, dirs_exist_ok=True)
    [missing] = tmp_path.glob("planner-*.tar")
    missing.unlink()
    printed, parts = built_at_once(BUILD, tmp_path, root, seconds=240)
    assert "attention_long" in printed
    assert parts == ["planner"]
    assert missing.exists()


# The command line

OPTIONS = ["--num-qo-heads", "2", "--num-kv-heads", "2", "--head-dim", "64", "--page-size", "0"]


@pytest.mark.parametrize("what", ["tir", "scheduled", "source", "ptx", "sass", "resources"])
def test_show(cache: Cache, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OPTIONS, "--dtype", "float16", "--variant", "causal", "--target", TARGET]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["show", what, *options])
    assert not stopped.value.code
    printed = capsys.readouterr().out
    shown = getattr(build(), what)
    assert printed == (shown if isinstance(shown, str) else json.dumps(shown, indent=2)) + "\n"
    assert not cache.compiled


def test_build_and_clear(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OPTIONS, "--dtype", "float16", "--variant", "causal", "--target", TARGET]
    failed = cache.folder / env.FAILED / "attention_long-0123456789ab.cu"
    failed.parent.mkdir()
    failed.write_text("int broken")
    for command in (["build", *options], ["cache", "list"], ["cache", "clear"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(command)
        assert not stopped.value.code
    printed = capsys.readouterr().out
    assert "attention_short: " in printed and "3 kernels deleted" in printed
    assert cache.compiled == []
    assert not [path for path in cache.folder.rglob("*") if path.is_file()]


def test_the_disassembler_of_the_wheel_is_installed_with_the_extra() -> None:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("the extra is not installed")
    assert disassembly._disassembler()[0].endswith(disassembly.WHEEL)
