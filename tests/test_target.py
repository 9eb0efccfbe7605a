"""Targets: every form people write, and what each becomes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tvm_attn import _compat, _host, env
from tvm_attn._host import hidden_extensions, native_cpu
from tvm_attn.errors import TargetError, TvmAttnError
from tvm_attn.target import ARCHS, TAGS, Arch, BuildTarget, parse_target, portable_host

SM90_FORMS = [
    "cuda -arch=sm_90",
    "cuda -arch sm_90",
    "cuda --arch=sm_90a",
    " sm_90 ",
    "sm_90a",
    "nvidia/nvidia-h100",
    "nvidia/nvidia-h200",
    {"kind": "cuda", "arch": "sm_90"},
    {"kind": "cuda", "arch": "sm_90a", "max_num_threads": 1024},
    {"tag": "nvidia/nvidia-h200"},
    '{"kind": "cuda", "arch": "sm_90"}',
    BuildTarget("cuda", ARCHS["sm_90"]),
]
HOST_FORMS = [
    None,
    "llvm",
    "cpu",
    "cpu:0",
    "llvm -mcpu=native",
    {"kind": "llvm"},
    '{"kind": "llvm", "mcpu": "native"}',
    torch.device("cpu"),
]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))


@pytest.mark.parametrize("form", SM90_FORMS, ids=str)
def test_forms_of_sm_90(form: object) -> None:
    target = parse_target(form)
    assert target == BuildTarget("cuda", ARCHS["sm_90"])
    assert str(target) == target.key() == "cuda -arch=sm_90a"


@pytest.mark.parametrize("form", HOST_FORMS, ids=str)
def test_forms_of_this_cpu(form: object) -> None:
    target = parse_target(form)
    assert target.kind == "llvm"
    assert target.arch is None
    assert (target.mcpu, target.mattr) == native_cpu()
    assert target.mcpu not in ("", "native", "generic")


def test_options_of_llvm() -> None:
    target = parse_target("llvm -mcpu=x86-64-v3 -mattr=+avx512f,-bmi2 -mtriple=x86_64-linux-gnu")
    assert target == BuildTarget(
        "llvm", None, "x86-64-v3", ("+avx512f", "-bmi2"), "x86_64-linux-gnu"
    )
    assert "avx512f" in target.features
    assert "bmi2" not in target.features
    assert target.vector_bits == 512


@pytest.mark.parametrize(
    ("mcpu", "bits"), [("x86-64-v2", 128), ("x86-64-v3", 256), ("x86-64-v4", 512)]
)
def test_vector_bits(mcpu: str, bits: int) -> None:
    assert parse_target(f"llvm -mcpu={mcpu} -mtriple=x86_64-linux-gnu").vector_bits == bits


@pytest.mark.parametrize("name", ARCHS)
def test_cuda_targets_survive_the_way_through_tvm(name: str) -> None:
    target = parse_target(name)
    tvm_target = target.to_tvm()
    assert tvm_target.attrs["arch"] == ARCHS[name].code
    shared_memory = tvm_target.attrs["max_shared_memory_per_block"]
    assert shared_memory == ARCHS[name].shared_memory_per_block
    assert parse_target(tvm_target) == parse_target(str(target)) == target
    assert target.features == ARCHS[name].features


@pytest.mark.parametrize(
    "form", ["llvm", "llvm -mcpu=x86-64-v3 -mattr=-fma,+avx512f -mtriple=x86_64-linux-gnu"]
)
def test_cpu_targets_survive_the_way_through_tvm(form: str) -> None:
    target = parse_target(form)
    assert parse_target(target.to_tvm()) == parse_target(str(target)) == target


def test_numbers_of_an_architecture_may_be_written_as_they_are() -> None:
    limit = ARCHS["sm_80"].shared_memory_per_block
    written = f"cuda -arch=sm_80 -max_shared_memory_per_block={limit}"
    assert parse_target(written) == parse_target("sm_80")


def test_a_host_of_a_tvm_target_is_not_used() -> None:
    config = {"kind": "cuda", "arch": "sm_80", "host": {"kind": "llvm", "mcpu": "x86-64-v2"}}
    assert parse_target(_compat.tvm_target(config)) == parse_target(config) == parse_target("sm_80")


@pytest.mark.parametrize(
    ("tag", "expected"),
    [("nvidia/nvidia-a30", "cuda -arch=sm_80"), ("aws/cpu/c5.large", "llvm -mcpu=skylake-avx512")],
)
def test_tags_that_only_tvm_knows(tag: str, expected: str) -> None:
    assert tag not in TAGS
    assert str(parse_target(tag)) == expected


@pytest.mark.parametrize("tag", TAGS)
def test_our_tags_agree_with_tvm(tag: str) -> None:
    config = _compat.tag_config(tag)
    if config is not None:
        assert parse_target(config) == parse_target(tag)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("sm_50", "'sm_50' is not supported.*sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
        ("sm_80a", "'sm_80a' is not supported"),
        ("cuda -arch=sm_75", "'sm_75' is not supported"),
        ("cuda sm_90", "'sm_90' is not an option"),
        (
            "cuda -arch=sm_80 -max_shared_memory_per_block=49152",
            "-max_shared_memory_per_block=49152 cannot be chosen: .* it is 166912",
        ),
        ({"kind": "cuda", "arch": "sm_80", "num-cores": 3}, "-num-cores=3 .* nothing depends"),
        ({"kind": "llvm", 1: 2}, "names of options, and tags, must be text"),
        ({"tag": ["nvidia/nvidia-h100"]}, "names of options, and tags, must be text"),
        ("llvm -mcpu=x86-64-v3 -num-cores=4", "-num-cores=4 cannot be chosen"),
        ("cuda -arch=sm_90 -libs=cublas", r"cuda has no option \['libs'\], only -arch"),
        ("llvm -march=x86-64", r"llvm has no option \['march'\], only -mcpu, -mattr, -mtriple"),
        ("llvm -mcpu=native -mtriple=aarch64-linux-gnu", "cannot go with mtriple"),
        ("llvm -mcpu=x86-64-v2 -mattr=avx2", "mattr='avx2' must be a feature"),
        ("metal", "kind 'metal' is not supported"),
        ("", "kind '' is not supported"),
        ("{kind: cuda}", "not valid JSON"),
        ({"arch": "sm_90"}, "kind None is not supported"),
        ("nvidia/nvidia-z9", "'nvidia/nvidia-z9' is not a tag"),
        (torch.device("meta"), "device 'meta' is not supported"),
        (90, "target=90 has the type int"),
    ],
    ids=str,
)
def test_what_is_not_a_target(form: object, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        parse_target(form)


@pytest.mark.parametrize("form", ["cuda", "cuda:0", {"kind": "cuda"}, torch.device("cuda")])
def test_cuda_without_architecture_or_gpu_is_an_error(
    form: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        TargetError, match=r"needs an architecture .* no GPU.* use the CPU, by target"
    ):
        parse_target(form)


@pytest.mark.usefixtures("one_gpu")
def test_cuda_without_architecture_asks_the_gpu() -> None:
    for form in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)):
        assert parse_target(form) == parse_target("sm_89")
    with pytest.raises(TargetError, match="there is no GPU 3; 1 can be used"):
        parse_target("cuda:3")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("llvm -mcpu=pentium9", "'pentium9' is not a CPU that LLVM knows"),
        ("llvm -mcpu=x86-64-v2 -mattr=+warp", r"does not know or cannot combine \['warp'\]"),
    ],
)
def test_what_llvm_does_not_know_is_not_replaced(form: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        parse_target(form).to_tvm()


def test_extensions_that_the_system_hides_are_switched_off() -> None:
    model = frozenset({"avx2", "avx512f", "avx512bf16", "macrofusion"})
    assert hidden_extensions(model, "flags\t\t: fpu avx2 avx512f avx512_bf16\n") == ()
    assert hidden_extensions(model, "flags\t\t: fpu avx2\n") == ("-avx512f", "-avx512bf16")
    assert hidden_extensions(model, "Features : asimd\n") == ()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """LLVM is asked for the CPU's name when there is a mark for it here, from an empty cache on."""
    marks: list[str] = []
    host_cpu = _compat.host_cpu

    def ask() -> str:
        marks.append("host_cpu")
        return host_cpu()

    monkeypatch.setattr(_compat, "host_cpu", ask)
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    native_cpu.cache_clear()
    yield marks
    native_cpu.cache_clear()


def anew() -> tuple[str, tuple[str, ...]]:
    """Return the CPU as another process finds it."""
    native_cpu.cache_clear()
    return native_cpu()


on_x86 = pytest.mark.skipif(not _host._is_x86() or not _host.CPUINFO.exists(), reason="not x86")


@on_x86
def test_llvm_is_asked_once_for_a_model(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = native_cpu()
    assert anew() == first and len(asked) == 1
    cpuinfo = _host.CPUINFO.read_text()
    for text, times in (
        (cpuinfo.replace("cpu MHz\t\t: ", "cpu MHz\t\t: 1"), 1),
        (cpuinfo.replace("stepping\t: ", "stepping\t: 1"), 2),
    ):
        monkeypatch.setattr(_host, "CPUINFO", tmp_path / "cpuinfo")
        _host.CPUINFO.write_text(text)
        assert anew() == first and len(asked) == times
    monkeypatch.setattr(_compat, "tvm_version", lambda: "0.99")
    assert anew() == first and len(asked) == 3


@on_x86
def test_what_the_system_hides_is_found_anew(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, _ = native_cpu()
    [note] = (tmp_path / "cache").iterdir()
    text = note.read_text().replace('"features": [', '"features": ["avx512fp16", ')
    note.write_text(text)
    assert anew()[0] == name and len(asked) == 2, "the note was not as it was written"
    monkeypatch.setattr(_host, "CPUINFO_FLAGS", {"x87": "no such flag"})
    assert anew() == (name, ("-x87",)) and len(asked) == 2


@on_x86
@pytest.mark.parametrize("folder", [os.devnull, f"{os.devnull}/cache"])
def test_the_cpu_has_a_name_without_a_cache(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv(env.CACHE_DIR.name, folder)
    assert native_cpu()[0] and anew()[0] and len(asked) == 2


def test_portable_host() -> None:
    host = portable_host()
    assert host.kind == "llvm"
    assert host.mattr == ()
    assert host.mcpu in ("x86-64-v2", "generic")
    host.to_tvm()


def test_build_targets_are_values() -> None:
    assert len({parse_target(form) for form in SM90_FORMS}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_target("sm_90").kind = "llvm"
    for bad in ({"kind": "cuda"}, {"kind": "llvm"}, {"kind": "llvm", "mcpu": "native"}):
        with pytest.raises(TargetError):
            BuildTarget(**bad)


def test_arch_rows_are_checked() -> None:
    row = dataclasses.asdict(ARCHS["sm_80"])
    for change in ({"code": "sm_90a"}, {"features": {"mma"}}, {"shared_memory_per_block": 1 << 20}):
        with pytest.raises(TargetError):
            Arch(**{**row, **change})


def test_gpu_targets_need_no_tvm(run_python: Callable[..., str], tmp_path: Path) -> None:
    forms = [form for form in SM90_FORMS if not isinstance(form, BuildTarget)]
    printed = run_python(
        f"""
        import json
        from tvm_attn.errors import TvmAttnError
        from tvm_attn.target import parse_target
        print({{str(parse_target(form)) for form in json.loads({json.dumps(forms)!r})}})
        print(parse_target("llvm -mcpu=x86-64-v3"))
        try:
            parse_target("llvm")
        except TvmAttnError as error:
            print(type(error).__name__, error)
        """,
        without_tvm=True,
        env={env.CACHE_DIR.name: str(tmp_path)},
    ).splitlines()
    assert printed[:2] == ["{'cuda -arch=sm_90a'}", "llvm -mcpu=x86-64-v3"]
    assert printed[2].startswith("DependencyError building a kernel needs TVM")


@pytest.mark.parametrize("version", ["0.1.14.post0", "0.1.14.post1", "0.1.14"])
def test_supported_versions(version: str) -> None:
    _compat.check_version("apache-tvm-ffi", version, _compat.FFI_MIN, _compat.FFI_END)


@pytest.mark.parametrize("version", ["0.1.13", "0.1.15", "0.1.15.post2", "0.2.0"])
def test_other_versions_say_what_to_install(version: str) -> None:
    with pytest.raises(TvmAttnError, match=r"pip install 'apache-tvm-ffi>=0\.1\.14,<0\.1\.15'"):
        _compat.check_version("apache-tvm-ffi", version, _compat.FFI_MIN, _compat.FFI_END)
