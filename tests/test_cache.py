"""The cache: what was built is found there, is made once, and never used when damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import tvm_attn as ta
from tests.caches import Cache, built_at_once, built_in, copied, made_once
from tvm_attn import env, pipeline, variants
from tvm_attn._host import native_cpu
from tvm_attn.codegen import host
from tvm_attn.codegen.cache import sources
from tvm_attn.errors import ArtifactError, CompileError, DTypeError, TargetError
from tvm_attn.spec import AttentionSpec
from tvm_attn.tir import fingerprint as hooks_as_text
from tvm_attn.tir.hooks import Hooks
from tvm_attn.variant import AttentionVariant

SMALL = AttentionSpec(2, 2, 16, q_dtype="float32", page_size=None)
"""What the tests of the cache compile: nothing else has this spec."""


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
    spec = 'ta.AttentionSpec(2, 2, 16, q_dtype="float32", page_size=None)'
    printed = cache.build_without_tvm(run_python, f"{spec}, ta.variants.causal()")
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
        ([SMALL], r"requests are tuples \(spec,\), .* got AttentionSpec"),
        ([(SMALL, None, None, "cpu")], "requests are tuples"),
        ([()], r"requests are tuples .* got \(\)"),
        (SMALL, "requests are tuples .* got AttentionSpec"),
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
spec = ta.AttentionSpec(2, 2, 16, q_dtype="float32", page_size=None)
module = ta.build(spec, ta.variants.causal())
plan = module.plan([0, 3], [0, 5])
print(plan.num_items)
"""


def test_two_processes_compile_a_kernel_once(tmp_path: Path, root: Path) -> None:
    _, parts = built_at_once(BUILD, tmp_path, root, seconds=120)
    assert sorted(parts) == ["attention", "planner"]
