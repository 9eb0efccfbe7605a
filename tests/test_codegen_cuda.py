"""CUDA code, compiled by nvcc and by NVRTC for every architecture, where there is no GPU."""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cuda_kernels import (
    BYTES,
    THREADS,
    foreign_code,
    indexed_stack,
    scheduled_sum,
    staged_sum,
)
from tests.fake_driver import make_driver
from tvm_attn import _compat, env
from tvm_attn.codegen import compilers, cuda
from tvm_attn.codegen.children import Child
from tvm_attn.codegen.compilers import CudaCompiler, find_nvcc, find_nvrtc
from tvm_attn.codegen.cuda import DeviceCode, compile_cuda
from tvm_attn.codegen.device_module import unpack
from tvm_attn.codegen.kernels import residents, warn_of_spills
from tvm_attn.codegen.resources import (
    Resources,
    check_limits,
    read_report,
    without_remarks,
)
from tvm_attn.errors import ArtifactError, CompileError
from tvm_attn.runtime import disassembly
from tvm_attn.runtime.disassembly import cubin_of, disassemble
from tvm_attn.target import ARCHS, parse_target

COMPILERS = {"nvcc": find_nvcc, "nvrtc": find_nvrtc}
SUM = Resources(20, 0, 0, 0, 0, BYTES, THREADS)


@pytest.fixture(params=list(COMPILERS))
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaCompiler:
    """One of the two compilers, which is the one that is found."""
    found = COMPILERS[request.param]()
    if found is None:
        pytest.skip(f"{request.param} is not installed")
    use(found, monkeypatch)
    return found


def use(compiler: CudaCompiler | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in COMPILERS:
        found = compiler if compiler and compiler.kind == kind else None
        monkeypatch.setattr(compilers, f"find_{kind}", lambda found=found: found)


@functools.cache
def staged(kind: str, arch: str) -> DeviceCode:
    """`staged_sum`, compiled by the compiler in force: one of this kind."""
    return compile_cuda({"staged": staged_sum()}, parse_target(arch))


# Every architecture


@pytest.mark.parametrize("arch", ARCHS)
def test_both_compilers_know_every_architecture(compiler: CudaCompiler, arch: str) -> None:
    code = staged(compiler.kind, arch)
    assert code.library.startswith(b"\x7fELF")
    assert code.cubin.startswith(b"\x7fELF")
    assert f".target {ARCHS[arch].code}" in code.ptx and ".entry staged_kernel" in code.ptx
    assert "staged_kernel" in code.source and "cp.async.ca.shared.global" in code.source
    assert "\n.global" not in code.ptx, "headers leave no constants"
    assert "staged_kernel" in code.report and ARCHS[arch].code in code.report
    [(name, figures)] = code.resources.items()
    used = Resources(**figures)
    assert name == "staged"
    assert 0 < used.registers < 40 and not used.spills
    assert (used.shared, used.dynamic_shared, used.threads) == (0, BYTES, THREADS)


def test_functions_of_the_schedulable_dialect(compiler: CudaCompiler) -> None:
    code = compile_cuda({"sum": scheduled_sum()}, parse_target("sm_80"), dialect="s_tir")
    used = Resources(**code.resources["sum"])
    assert (used.shared, used.dynamic_shared, used.threads) == (BYTES, 0, THREADS)


def test_several_functions_are_one_module() -> None:
    both = {"first": staged_sum(), "second": staged_sum(2 * BYTES)}
    code = compile_cuda(both, parse_target("sm_80"))
    assert set(code.resources) == set(both)
    assert code.resources["second"]["dynamic_shared"] == 2 * BYTES
    assert b"first_kernel" in code.cubin and b"second_kernel" in code.cubin


def test_both_compilers_make_the_same_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    registers = set()
    for find in COMPILERS.values():
        found = find()
        if found is None:
            pytest.skip("one of the compilers is not installed")
        use(found, monkeypatch)
        registers.add(staged(found.kind, "sm_90").resources["staged"]["registers"])
    assert max(registers) - min(registers) <= 8


def test_nothing_is_compiled_by_tvm_where_there_is_a_gpu(
    run_python: Callable[..., str], root: Path
) -> None:
    printed = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(root)!r})
        import os, tvm_ffi
        from tests.cuda_kernels import staged_sum
        from tvm_attn.codegen.cuda import compile_cuda
        from tvm_attn.target import parse_target

        @tvm_ffi.register_global_func("ffi.Module.create.cuda")
        def create(*_):
            raise RuntimeError("TVM compiles by itself")

        before = dict(os.environ)
        print(compile_cuda({{"staged": staged_sum()}}, parse_target("sm_80")).resources)
        print(before == dict(os.environ))
        """
    )
    resources, same_environment = printed.splitlines()
    assert "'threads': 128" in resources
    assert same_environment == "True"


# Resources

NVCC_REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'long_kernel' for 'sm_90a'
ptxas info    : Function properties for long_kernel
    32 bytes stack frame, 28 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 32 bytes cumulative stack size
ptxas info    : Compile time = 120.564 ms
ptxas info    : Compiling entry function 'short_kernel' for 'sm_90a'
ptxas info    : Function properties for short_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 408 bytes cmem[0]
"""


@pytest.mark.parametrize("indent", ["    ", "ptxas         .     "])
def test_figures_of_a_report(indent: str) -> None:
    report = re.sub(r"^    ", indent, NVCC_REPORT, flags=re.MULTILINE)
    remark = "x.cu(3): warning: some remark\n    int row = 0;\n        ^\n\n"
    assert without_remarks(f"{remark}{report}{remark}") == report
    assert read_report(report) == {
        "long_kernel": {
            **{"registers": 255, "stack": 32, "spill_stores": 28, "spill_loads": 24},
            "shared": 0,
        },
        "short_kernel": {
            **{"registers": 40, "stack": 0, "spill_stores": 0, "spill_loads": 0},
            "shared": 512,
        },
    }
    assert read_report("") == {}


def test_a_report_without_a_figure_is_refused() -> None:
    report = NVCC_REPORT.replace("32 bytes stack frame, 28 bytes spill stores, ", "")
    with pytest.raises(CompileError, match="no stack of long_kernel"):
        read_report(report)


def test_what_does_not_fit_into_registers_is_told(
    compiler: CudaCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    code = compile_cuda({"indexed": indexed_stack()}, parse_target("sm_90"))
    assert code.resources["indexed"]["stack"] >= 256
    with caplog.at_level(logging.WARNING, "tvm_attn.codegen"):
        warn_of_spills(code.resources)
    assert re.search(r"indexed has \d+ bytes of stack, 0 of spill stores", caplog.text)


def test_kernels_without_spills_pass_quietly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tvm_attn.codegen"):
        warn_of_spills({"sum": vars(SUM)})
    assert not caplog.text


def test_more_shared_memory_than_a_device_has(compiler: CudaCompiler) -> None:
    functions = {"large": staged_sum(200 * 1024)}
    with pytest.raises(CompileError, match=r"large_kernel needs 204800 bytes.*sm_86.*101376"):
        compile_cuda(functions, parse_target("sm_86"))
    assert compile_cuda(functions, parse_target("sm_90")).resources["large"]["threads"] == THREADS


@pytest.mark.parametrize(
    ("used", "words"),
    [
        (Resources(64, 0, 0, 0, 0, 0, 2048), "2048 threads.*1024"),
        (Resources(200, 0, 0, 0, 0, 0, 512), "102400 registers.*65536"),
        (Resources(20, 0, 0, 0, 60_000, 60_000, 128), "120000 bytes of shared.*101376"),
    ],
)
def test_other_limits(used: Resources, words: str) -> None:
    with pytest.raises(CompileError, match=f"some_kernel needs {words}"):
        check_limits("some_kernel", used, ARCHS["sm_86"])


@pytest.mark.parametrize(
    ("arch", "used", "count"),
    [
        ("sm_86", Resources(255, 0, 0, 0, 0, 0, 128), 2),
        ("sm_86", Resources(32, 0, 0, 0, 0, 0, 512), 3),  # 1536 threads
        ("sm_86", Resources(32, 0, 0, 0, 0, 49 * 1024, 128), 2),
        ("sm_86", Resources(32, 0, 0, 0, 1024, 49 * 1024, 128), 1),
        ("sm_90", Resources(32, 0, 0, 0, 0, 227 * 1024, 128), 1),
    ],
)
def test_ctas_that_share_a_multiprocessor(
    arch: str, used: Resources, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert used.residents(ARCHS[arch]) == count
    with caplog.at_level(logging.WARNING, "tvm_attn.codegen"):
        assert residents("some", vars(used), count, ARCHS[arch]) == count
        assert not caplog.text
        assert residents("some", vars(used), 8, ARCHS[arch]) == count
    assert "8 CTAs should share" in caplog.text


# Refusals


@pytest.mark.parametrize("variable", [env.DUMP, env.CACHE_DIR])
def test_a_refused_source_is_saved(
    compiler: CudaCompiler,
    variable: env.EnvVar,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable.name, str(tmp_path))
    code = "__device__ float foreign(float x) { return x + no_such_name; }"
    with pytest.raises(CompileError) as raised:
        compile_cuda({"broken": foreign_code(code)}, parse_target("sm_89"))
    message = str(raised.value)
    assert f"{compiler.label} cannot compile broken for sm_89" in message
    assert re.search(r'^broken\.cu\(\d+\): error: .*"no_such_name" is undefined', message, re.M)
    [saved] = (tmp_path / "failed").iterdir()
    assert str(saved) in message and "no_such_name" in saved.read_text()


def test_thousands_of_errors_are_cut(compiler: CudaCompiler) -> None:
    calls = "".join(f"x += no_such_name_{i} + 1;\n" for i in range(90))
    code = f"__device__ float foreign(float x) {{\n{calls}return x; }}"
    with pytest.raises(CompileError) as raised:
        compile_cuda({"broken": foreign_code(code)}, parse_target("sm_80"))
    assert len(str(raised.value)) < 7000


def test_what_tvm_refuses() -> None:
    with pytest.raises(CompileError, match="TVM cannot compile sum for cuda -arch=sm_80"):
        compile_cuda({"sum": scheduled_sum()}, parse_target("sm_80"), dialect="tirx")
    with pytest.raises(CompileError, match="llvm"):
        compile_cuda({"sum": scheduled_sum()}, parse_target("llvm"))


# What is loaded


def pack() -> bytes:
    """Return a module with CUDA source, as TVM packs it."""
    target = parse_target("sm_80").to_tvm().with_host(parse_target("llvm").to_tvm())
    function = staged_sum().with_attr("global_symbol", "staged")
    module = _compat.import_tvm().IRModule({"staged": function})
    _, device, _ = _compat.lower_cuda(module, target, "tirx")
    return _compat.packed_module(_compat.generate_code(device, target))


@functools.cache
def packed() -> bytes:
    """`pack`, where TVM keeps source as it is."""
    with Child("module", lambda _: pack()) as child:
        return child.result()


def test_device_code_takes_the_place_of_source() -> None:
    module = unpack(packed())
    assert module.kernels == ("staged_kernel",)
    assert 'extern "C" __global__' in module.source
    device = module.embed(b"\x7fELF code")

    def parts() -> Iterator[bytes]:
        rest = device
        for size in (None, len(module.table), None):
            if size is None:
                [size], rest = struct.unpack("<Q", rest[:8]), rest[8:]
            yield rest[:size]
            rest = rest[size:]
        assert not rest

    assert list(parts()) == [b"cubin", module.table, b"\x7fELF code"]
    assert packed().count(module.table) == 1


@pytest.mark.parametrize("change", ["cut", "longer", "kind", "format", "name", "empty"])
def test_another_form_of_modules_is_refused(change: str) -> None:
    whole = packed()
    other = {
        "cut": whole[:-100],
        "longer": whole + b"\0",
        "kind": whole.replace(b"cuda", b"rocm", 1),
        "format": whole.replace(b"cuda", b"cubi", 2).replace(b"cubi", b"cuda", 1),
        "name": whole.replace(b"staged_kernel", b"staged_kernes", 1),
        "empty": b"",
    }[change]
    with pytest.raises(CompileError, match="in a form that this library does not know"):
        unpack(other)


LAUNCH = """
import ctypes, sys
from pathlib import Path
for path in {drivers!r}:
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
from tvm_attn.runtime import library
library.load_cuda_runtime()
import tvm_ffi
device = tvm_ffi.get_global_func(library.DEVICE_LOADER)(Path({device!r}).read_bytes())
print(device.kind, device.inspect_source() == "")
kernel = device["staged_kernel"]
memory = ctypes.c_void_p(4096)
kernel(memory, memory, memory, 5, 5, {threads}, {shared})
"""


def test_device_code_is_what_tvm_launches(
    tmp_path: Path, run_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = find_nvcc() or find_nvrtc()
    if compiler is None:
        pytest.skip("there is no CUDA compiler")
    use(compiler, monkeypatch)
    libraries = Path(str(importlib.util.find_spec("tvm").origin)).parent / "lib"
    drivers = [str(path) for path in make_driver(tmp_path, libraries, arguments=4)]
    shared = 60 * 1024
    code = compile_cuda({"staged": staged_sum(shared)}, parse_target("sm_80"))
    device = tmp_path / "device"
    device.write_bytes(code.device)
    script = LAUNCH.format(drivers=drivers, device=str(device), threads=THREADS, shared=shared)
    printed = run_python(script, without_tvm=True).splitlines()
    assert printed == [
        "cuda True",
        "load a cubin",
        "function staged_kernel",
        f"attribute 8 {shared}",
        f"launch grid 5 block {THREADS} shared {shared} last argument 5",
    ]


# SASS


def test_sass_has_the_instructions(compiler: CudaCompiler) -> None:
    code = staged(compiler.kind, "sm_90")
    assert cubin_of(code.device) == code.cubin
    text = disassemble(code.cubin)
    assert "staged_kernel" in text and "LDGSTS" in text and "EXIT" in text


def test_sass_needs_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "_disassembler", lambda: None)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvdisasm"):
        disassemble(b"\x7fELF")


def test_sass_of_what_is_no_code() -> None:
    with pytest.raises(CompileError, match="refuses the code"):
        disassemble(b"\x7fELF and no more")
    with pytest.raises(ArtifactError, match="no machine code"):
        cubin_of(b"cuda source")


def test_programs_of_a_toolkit_come_from_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("home", "path"):
        program = tmp_path / folder / "bin" / "cuobjdump"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path/bin"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
    assert env.cuda_program("cuobjdump") == tmp_path / "path/bin/cuobjdump"
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "home"))
    assert env.cuda_program("cuobjdump") == tmp_path / "home/bin/cuobjdump"
    monkeypatch.setattr(disassembly, "WHEEL", "no/such/file")
    assert disassembly._disassembler() == [str(tmp_path / "home/bin/cuobjdump"), "--dump-sass"]
    assert env.cuda_program("nvdisasm") is None


def test_a_kernel_without_a_known_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    generated = cuda.Generated(b"", unpack(packed()), {})
    with pytest.raises(CompileError, match="nothing is known about staged_kernel"):
        cuda.measure(generated, "", ARCHS["sm_80"])
