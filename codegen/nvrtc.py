"""CUDA source to a cubin, by NVRTC from pip wheels: no CUDA toolkit, no host compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm_attn.codegen.compilers import Compiled, CudaCompiler, RefusedError
from tvm_attn.codegen.nvcc import QUIET

FLAGS = ("--std=c++17", "--use_fast_math", QUIET)
HEADERS = ("nvidia/cu13/include", "nvidia/cu13/include/cccl")
"""Where the wheels have CUDA's headers."""

PRELUDE = """\
#define INFINITY __int_as_float(0x7f800000)
struct alignas(64) CUtensorMap { unsigned long long words[16]; };
#line 1
"""
"""What generated code may use, and nvcc has from headers of the host; headers of CUDA that have it
too would leave their constants in every cubin."""

TRAITS = """\
namespace cuda { namespace std {
template <class, class> struct is_same;
template <class, class> extern const bool is_same_v;
template <class> struct is_integral;
template <class> struct is_signed;
template <class> struct is_unsigned;
template <class> struct is_floating_point;
template <bool, class = void> struct enable_if;
template <bool, class, class> struct conditional;
} }
"""
"""In place of ``<cuda/std/type_traits>``, a third of the time of a compilation: TVM's prelude names
these, and no kernel uses them."""


def compile_nvrtc(
    compiler: CudaCompiler, name: str, source: str, arch: str, assembler: Sequence[str] = ()
) -> Compiled:
    """Compile CUDA source with NVRTC; parameters and errors are those of `compile_nvcc`."""
    from cuda.bindings import nvrtc

    text, file = (PRELUDE + source).encode(), f"{name}.cu".encode()
    headers = [TRAITS.encode()], [b"cuda/std/type_traits"]
    program = _done(nvrtc.nvrtcCreateProgram(text, file, len(headers[0]), *headers))
    options = [
        *(*FLAGS, f"--gpu-architecture={arch}"),
        *(f"--ptxas-options={option}" for option in ("-v", *assembler)),
        *(f"-I{Path(compiler.path, folder)}" for folder in HEADERS),
    ]
    try:
        [status] = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RefusedError(f"{status.name}\n{log}")
        cubin = _content(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return Compiled(cubin, _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(size: Callable[..., Any], get: Callable[..., Any], program: Any) -> str:
    return _content(size, get, program).decode(errors="replace").rstrip("\0")


def _content(size: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
    """Return what one of NVRTC's pairs of functions tells about a program."""
    content = b" " * _done(size(program))
    _done(get(program, content))
    return bytes(content)


def _done(answer: tuple[Any, ...]) -> Any:
    """Return the result in an answer of NVRTC, if it has one."""
    status, *results = answer
    if status.value:
        raise RefusedError(status.name)
    return results[0] if results else None
