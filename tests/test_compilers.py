"""Finding a CUDA compiler: an nvcc that is new enough, else NVRTC, else a way to get one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tvm_attn.codegen import compilers
from tvm_attn.codegen.compilers import CudaCompiler, find_compiler, find_nvcc, require_compiler
from tvm_attn.errors import CompileError

NVRTC = CudaCompiler("nvrtc", "13.0.88", Path())


def make_nvcc(folder: Path, version: str) -> Path:
    """Write a program that says it is nvcc."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    release = ".".join(version.split(".")[:2])
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{version}'\n")
    path.chmod(0o755)
    return path


def make_host_compiler(path: Path) -> None:
    """Write a program called gcc beside what is on the path."""
    program = path / "path" / "bin" / "gcc"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without CUDA compilers, with a folder for programs."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: None)
    make_host_compiler(tmp_path)
    return tmp_path


def test_nvcc_without_a_host_compiler_is_left_aside(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nvcc(machine / "path", "13.0.88")
    assert find_nvcc() is not None
    (machine / "path" / "bin" / "gcc").unlink()
    assert find_nvcc() is None
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: NVRTC)
    assert find_compiler() == NVRTC


def test_without_a_compiler_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_compiler() is None
    monkeypatch.setattr(compilers, "_is_installed", lambda wheel: "crt" not in wheel)
    with pytest.raises(CompileError) as raised:
        require_compiler()
    for words in (
        "no nvcc was found",
        "nvidia-cuda-crt is not installed",
        "pip install 'tvm-attn[cuda]'",
        "CUDA toolkit >= 12.8",
    ):
        assert words in str(raised.value)


def test_nvcc_on_the_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_nvcc(machine / "path", "13.0.88")
    assert find_compiler() == CudaCompiler("nvcc", "13.0.88", path)
    assert find_compiler().label == "nvcc-13.0.88"
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: NVRTC)
    assert find_compiler().kind == "nvcc"


def test_nvcc_of_a_named_toolkit_comes_first(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nvcc(machine / "path", "13.0.88")
    for variable, version in (("CUDA_PATH", "12.9.1"), ("CUDA_HOME", "13.1.2")):
        make_nvcc(machine / version, version)
        monkeypatch.setenv(variable, str(machine / version))
        assert find_nvcc().version == version


def test_an_old_nvcc_is_passed_over(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_nvcc(machine / "path", "12.4.131")
    with pytest.raises(CompileError, match=rf"nvcc 12\.4\.131 at {path} is too old"):
        require_compiler()
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: NVRTC)
    assert require_compiler() is NVRTC


def test_an_updated_nvcc_is_noticed(machine: Path) -> None:
    path = make_nvcc(machine / "path", "12.8.61")
    assert find_nvcc().version == "12.8.61"
    make_nvcc(machine / "path", "13.0.88")
    os.utime(path, ns=(1, 1))
    assert find_nvcc().version == "13.0.88"


def test_a_program_that_is_no_nvcc(machine: Path) -> None:
    make_nvcc(machine / "path", "13.0.88").write_text("#!/bin/sh\nexit 3\n")
    assert find_nvcc() is None
