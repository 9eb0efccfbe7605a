"""Artifacts: exported and loaded without a compiler, never loaded when damaged."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tvm_attn as ta
from tests.batches import random_batch
from tests.cases import kernel
from tests.test_cache import SMALL
from tvm_attn.errors import ArtifactError
from tvm_attn.runtime.artifact import Artifact, read_artifact
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target

SPEC = AttentionSpec(8, 2, 64, q_dtype="float32", page_size=4)
LENS = ([1, 7, 0, 40, 3], [200, 30, 5, 90, 0])


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "attention.tar"
    kernel("window", SPEC).export(path)
    return path


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
