"""Artifacts: exported and loaded without a compiler, cached once, never loaded when damaged."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tvm_attn as ta
from tests.batches import random_batch
from tests.caches import Cache, built_in, copied, made_once
from tests.cases import kernel
from tvm_attn import env, pipeline, variants
from tvm_attn._host import native_cpu
from tvm_attn.codegen import host
from tvm_attn.codegen.cache import sources
from tvm_attn.errors import ArtifactError, CompileError, DTypeError, TargetError
from tvm_attn.runtime.artifact import Artifact, read_artifact
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target
from tvm_attn.tir import fingerprint as hooks_as_text
from tvm_attn.tir.hooks import Hooks
from tvm_attn.variant import AttentionVariant

SPEC = AttentionSpec(8, 2, 64, q_dtype="float32", page_size=4)
LENS = ([1, 7, 0, 40, 3], [200, 30, 5, 90, 0])
SMALL = AttentionSpec(2, 2, 16, q_dtype="float32", page_size=None)
"""What the tests of the cache compile: nothing else has this spec."""


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "attention.tar"
    kernel("window", SPEC).export(path)
    return path


# Export and load


def test_a_process_without_tvm_computes_the_same_bits(
    exported: Path, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    module, batch = kernel("window", SPEC), random_batch(SPEC, *LENS)
    plan = module.plan(batch.fmt, window_left=20, fixed_split_size=64)
    out, lse = module.run(plan, batch.q, batch.kv, return_lse=True)
    fmt = batch.fmt
    table = (fmt.qo_indptr, fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len)
    torch.save((table, batch.q, batch.kv, out, lse), tmp_path / "batch.pt")
    printed = run_python(
        f"""
        import torch, tvm_attn
        module = tvm_attn.load({str(exported)!r})
        table, q, kv, out, lse = torch.load({str(tmp_path / "batch.pt")!r})
        plan = module.plan(*table, window_left=20, fixed_split_size=64)
        got = module.run(plan, q, kv, return_lse=True)
        print(torch.equal(got[0], out), torch.equal(got[1], lse))
        print(sorted(name for name in sys.modules if name.split(".")[0] == "tvm"))
        print(module)
        """,
        without_tvm=True,
    )
    bits, imported, *description = printed.splitlines()
    assert bits == "True True"
    assert imported == "[]"
    assert "\n".join(description) == str(module)


def test_a_loaded_kernel_says_what_it_is(exported: Path) -> None:
    built, loaded = kernel("window", SPEC), ta.load(str(exported))
    for name in ("spec", "variant", "params", "target", "families"):
        assert getattr(loaded, name) == getattr(built, name)
    for name in ("tir", "scheduled", "source", "resources"):
        assert getattr(loaded, name) == getattr(built, name)
        assert getattr(built, name)


def test_a_kernel_is_exported_for_its_own_spec(tmp_path: Path) -> None:
    wide = replace(SPEC, num_qo_heads=16, num_kv_heads=4, page_size=7)
    kernel("window", wide).export(tmp_path / "wide.tar")
    assert ta.load(tmp_path / "wide.tar").spec == wide


# Files that are no artifact, or not ours


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "there is no artifact"), (b"", "no whole artifact"), (b"\x7fELF" * 999, "no whole")],
)
def test_files_that_are_no_artifact(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "some.tar"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=words) as raised:
        ta.load(path)
    assert str(path) in str(raised.value)


def test_a_kernel_is_exported_to_a_file(exported: Path, tmp_path: Path) -> None:
    module = ta.load(exported)
    for path in (tmp_path, tmp_path / "no" / "folder.tar", None, "a\0b", "a" * 300):
        with pytest.raises(ArtifactError, match=r"cannot be written .* name a file in a folder"):
            module.export(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["[]", "null", "1", '"x"', "true", "[" * 10**5, "\\xff"])
def test_a_head_that_says_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "some.tar"
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("meta.json")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content.encode()))
    with pytest.raises(ArtifactError, match="no whole artifact"):
        ta.load(path)


@pytest.mark.parametrize("path", [None, 1, b"a.tar", "a\0b", "a" * 300])
def test_a_path_that_names_no_file(path: Any) -> None:
    with pytest.raises(ArtifactError, match=r"names no file|no whole artifact"):
        ta.load(path)


def test_a_directory_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no whole artifact"):
        ta.load(tmp_path)


def rewritten(path: Path, changes: dict[str, Callable[[bytes], bytes]]) -> Path:
    """Change members of an artifact file."""
    with tarfile.open(path) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            changed = changes.get(name, bytes)(content)
            member = tarfile.TarInfo(name)
            member.size = len(changed)
            tar.addfile(member, io.BytesIO(changed))
    return path


def test_another_format(exported: Path) -> None:
    path = rewritten(exported, {"meta.json": lambda x: x.replace(b'"format": ', b'"format": 9')})
    with pytest.raises(ArtifactError, match="another format"):
        ta.load(path)


def for_other_processors(library: bytes) -> bytes:
    """Say AArch64 in an ELF header."""
    return library[:18] + (183).to_bytes(2, "little") + library[20:]


def test_code_for_another_architecture(exported: Path) -> None:
    artifact = read_artifact(exported)
    code = {name: for_other_processors(library) for name, library in artifact.libraries.items()}
    foreign = replace(artifact, libraries=code)
    exported.write_bytes(foreign.to_bytes())
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        ta.load(exported)


def test_code_that_this_cpu_does_not_have_the_instructions_for(tmp_path: Path) -> None:
    ours = parse_target(None).features
    foreign = next(
        cpu
        for cpu in ("sapphirerapids", "znver5", "graniterapids")
        if not parse_target(f"llvm -mcpu={cpu}").features <= ours
    )
    path = tmp_path / "foreign.tar"
    with pytest.raises(ArtifactError, match=foreign):
        ta.build(SMALL, target=f"llvm -mcpu={foreign}").export(path)
        ta.load(path)


def test_helper_functions_are_no_kernel(exported: Path, tmp_path: Path) -> None:
    planner = {"planner": read_artifact(exported).libraries["planner"]}
    path = tmp_path / "planner.tar"
    path.write_bytes(Artifact({"name": "planner"}, planner).to_bytes())
    with pytest.raises(ArtifactError, match=str(path)):
        ta.load(path)


def test_damage_anywhere_is_seen(exported: Path) -> None:
    whole = exported.read_bytes()

    def content() -> tuple[object, ...]:
        artifact = read_artifact(exported)
        return artifact.meta, dict(artifact.libraries), dict(artifact.texts)

    original = content()
    for position in [*range(0, 8192, 7), *range(8192, len(whole), len(whole) // 150)]:
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        exported.write_bytes(damaged)
        try:
            same = content() == original
        except ArtifactError:
            continue
        assert same, f"byte {position} was changed and nobody noticed"


# The cache


@dataclass(frozen=True)
class Built:
    """A folder with a cache and a dump, and the code that the compiler made for them."""

    folder: Path
    code: dict[str, host.HostCode]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """`SMALL`, built once in a run, in a cache of its own."""
    return made_once(tmp_path_factory, "built", build_in)


def build_in(folder: Path) -> Built:
    built = Built(folder, {})
    compile_host = host.compile_host

    def compile_and_keep(functions: Mapping[str, object], *given: Any) -> host.HostCode:
        code = compile_host(functions, *given)
        built.code.update(dict.fromkeys(functions, code))
        return code

    with built_in(built.folder, host, "compile_host", compile_and_keep):
        ta.build(SMALL, variants.causal())
    return built


@pytest.fixture
def cache(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    """A copy of that cache, nothing of it loaded, and a compiler that makes the same code again."""

    def again(functions: Mapping[str, object], *_: object) -> host.HostCode:
        return built.code[next(iter(functions))]

    yield from copied(built.folder, tmp_path, monkeypatch, host, "compile_host", again)


def test_what_is_cached_is_not_built_again(cache: Cache) -> None:
    ta.build(SMALL, variants.causal())
    ta.build(replace(SMALL, num_qo_heads=6, num_kv_heads=6), variants.causal())
    assert not cache.compiled


def test_kernels_that_see_the_same_keys_share_a_planner(cache: Cache) -> None:
    ta.build(SMALL, variants.causal() & variants.alibi())
    assert set(cache.compiled) == {"attention_short", "attention_long"}


@pytest.mark.parametrize("damage", ["empty", "cut", "cut at the end", "changed", "text"])
def test_a_damaged_file_is_built_again(cache: Cache, damage: str) -> None:
    path = cache.kernel
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "cut at the end": whole[: whole.index(b"source.ll") + 700],
        "changed": whole[:20_000] + bytes(100) + whole[20_100:],
        "text": b"no tar file" * 1000,
    }[damage]
    path.write_bytes(damaged)
    ta.build(SMALL, variants.causal())
    assert set(cache.compiled) == {"attention_short", "attention_long"}
    assert path.read_bytes() == whole
    pipeline.forget_loaded()
    cache.compiled.clear()
    ta.build(SMALL, variants.causal())
    assert not cache.compiled


def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the variants that are traced from now on."""
    names: list[str] = []
    fingerprint = hooks_as_text.fingerprint

    def trace(hooks: Hooks, spec: AttentionSpec) -> str:
        names.append(str(hooks.variant))
        return fingerprint(hooks, spec)

    monkeypatch.setattr(hooks_as_text, "fingerprint", trace)
    return names


def test_what_was_asked_for_before_is_not_traced(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = traced(monkeypatch)
    ta.build(SMALL, variants.causal())
    assert not names
    known, opaque = variants.causal() & variants.alibi(), object()
    untold = replace(known, mask=lambda ctx: (opaque, known.mask(ctx))[1], name="untold")
    for variant in (known, untold):
        for _ in range(2):
            assert ta.build(SMALL, variant).variant == str(variant)
    before_and_after_it_was_made = ["causal & alibi"] * 2
    assert names == [*before_and_after_it_was_made, "untold", "untold"]


@pytest.mark.parametrize("damage", ["no file", "empty", "cut", "changed", "another form"])
def test_a_recipe_that_is_damaged_is_made_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    [recipe] = cache.folder.glob("request-*.json")
    whole = recipe.read_text()
    damaged = {
        **{"no file": "", "empty": "", "cut": whole[:-9], "another form": "[]"},
        "changed": whole.replace('"why": ""', '"why": "who knows"'),
    }[damage]
    assert damaged != whole
    recipe.write_text(damaged)
    if damage == "no file":
        recipe.unlink()
    names = traced(monkeypatch)
    ta.build(SMALL, variants.causal())
    assert names == ["causal"] and not cache.compiled
    assert recipe.read_text() == whole


def test_what_is_cached_for_this_cpu_needs_no_tvm(
    cache: Cache, run_python: Callable[..., str]
) -> None:
    native_cpu.cache_clear()
    ta.build(SMALL, variants.causal())
    printed = run_python(
        """
        import tvm_attn as ta
        spec = ta.AttentionSpec(2, 2, 16, q_dtype="float32", page_size=None)
        module = ta.build(spec, ta.variants.causal())
        print(module.variant, [name for name in sys.modules if name.split(".")[0] == "tvm"])
        """,
        without_tvm=True,
        env={env.CACHE_DIR.name: str(cache.folder)},
    )
    assert printed == "causal []\n"


@pytest.mark.parametrize(
    ("kind", "compiled"), [("attention-*.tar", True), ("request-*.json", False)]
)
def test_files_that_changed_places_are_not_used(cache: Cache, kind: str, compiled: bool) -> None:
    ta.build(SMALL, variants.causal() & variants.alibi())
    one, other = cache.folder.glob(kind)
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    pipeline.forget_loaded()
    cache.compiled.clear()
    assert ta.build(SMALL, variants.causal()).variant == "causal"
    assert bool(cache.compiled) == compiled
    of_causal = {contents[0], contents[1]} & {one.read_bytes(), other.read_bytes()}
    assert len(of_causal) == 1, "the file of what was asked for is right again"


def test_a_file_of_the_cache_is_no_kernel(cache: Cache) -> None:
    with pytest.raises(ArtifactError, match="no attention kernel"):
        ta.load(cache.kernel)


def test_a_recipe_without_a_part_is_not_used(cache: Cache) -> None:
    cache.kernel.unlink()
    ta.build(SMALL, variants.causal())
    assert set(cache.compiled) == {"attention_short", "attention_long"}


def test_every_source_that_makes_kernels_counts(root: Path) -> None:
    counted = {path.resolve() for path in sources()}
    folders = ("tvm_attn/tir", "tvm_attn/variants", "schedules", "codegen")
    assert counted >= {path for folder in folders for path in (root / folder).rglob("*.py")}
    assert counted >= set((root / "tvm_attn").glob("*.py"))


def test_a_failed_build_leaves_no_file(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.kernel.unlink()

    def interrupt(*_: object) -> host.HostCode:
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "compile_host", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ta.build(SMALL, variants.causal())
    assert not list(cache.folder.glob("attention-*.tar"))
    assert not list(cache.folder.glob("*.tmp"))


def test_the_stages_of_a_build_are_reported(cache: Cache) -> None:
    stages: list[str] = []
    ta.build(SMALL, variants.causal(), progress=stages.append)
    assert not stages, "what is cached has no stages"
    ta.build(SMALL, variants.causal() & variants.alibi(), progress=stages.append)
    assert stages == ["tir.py", "scheduled.py", "source.ll"]


def test_many_kernels_come_in_order(cache: Cache) -> None:
    wide = replace(SMALL, num_qo_heads=6, num_kv_heads=6)
    lines: list[str] = []
    modules = ta.build_many(
        [(spec, variants.causal()) for spec in (wide, SMALL)], progress=lines.append
    )
    assert [module.spec for module in modules] == [wide, SMALL]
    assert [line.split()[0] for line in lines] == ["1/2", "2/2"]
    assert ta.build_many([]) == []


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([SPEC], r"requests are tuples \(spec,\), .* got AttentionSpec"),
        ([(SPEC, None, None, "cpu")], "requests are tuples"),
        ([()], r"requests are tuples .* got \(\)"),
        (SPEC, "requests are tuples .* got AttentionSpec"),
    ],
)
def test_requests_for_many_kernels(requests: Any, words: str) -> None:
    with pytest.raises(DTypeError, match=words):
        ta.build_many(requests)


def test_many_kernels_of_a_schedule(cache: Cache) -> None:
    [module] = ta.build_many([(SMALL, variants.causal())], schedule="cpu")
    assert module.backend == "cpu"
    with pytest.raises(TargetError, match="schedule='sm80' is no backend"):
        ta.build_many([(SMALL,)], schedule="sm80")


def test_one_of_many_kernels_that_cannot_be_built(cache: Cache) -> None:
    wrong = AttentionVariant(mask=lambda ctx: ctx.no_such_field, name="wrong")
    with pytest.raises(CompileError, match=r"variant 'wrong': its mask.*no_such_field"):
        ta.build_many([(SMALL, variants.causal()), (SMALL, wrong)])


def test_a_dump_has_every_phase(cache: Cache) -> None:
    module = ta.build(SMALL, variants.causal())
    texts = {"tir.py": module.tir, "scheduled.py": module.scheduled, "source.ll": module.source}
    dumped = {path.name: path.read_text() for path in cache.dump.rglob("*") if path.is_file()}
    assert dumped == texts
    assert "attention_short" in module.tir
    assert "attention_long" in module.scheduled
    assert "define" in module.source


def test_dumps_of_several_kernels_stand_side_by_side(cache: Cache) -> None:
    with env.override(env.DUMP, cache.dump):
        ta.build(SMALL, variants.causal() & variants.alibi())
    assert len({path.read_text() for path in cache.dump.rglob("tir.py")}) == 2


BUILD = """
import sys, time
sys.path.insert(0, ".")
import tvm_attn as ta
from tvm_attn import _compat
_compat.import_tvm()
print("ready", flush=True)
sys.stdin.readline()
spec = ta.AttentionSpec(2, 2, 16, q_dtype="float32", page_size=None)
module = ta.build(spec, ta.variants.causal())
plan = module.plan([0, 3], [0, 5])
print(plan.num_items)
"""


def test_two_processes_compile_a_kernel_once(tmp_path: Path, root: Path) -> None:
    variables = {**os.environ, env.CACHE_DIR.name: str(tmp_path), env.LOG.name: "info"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(BUILD)],
            cwd=root,
            env=variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    results = []
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        results.append(process.communicate(timeout=120))
        assert process.returncode == 0, results[-1][1]
    assert results[0][0] == results[1][0]
    log = "".join(err for _, err in results)
    built = re.findall(r"building (\w+)-", log)
    assert sorted(built) == ["attention", "planner"], log
