"""CUDA source to a cubin, by nvcc."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tvm_attn.codegen.compilers import Compiled, CudaCompiler, RefusedError

WITHOUT_SPECIAL_FUNCTIONS = "-D_GLIBCXX_BITS_SPECFUN_H"
"""Guard of the largest header that nvcc includes by itself (Bessel functions and such, of libstdc++
in C++17): as if it were included already. The code is the same, a tenth of a second sooner."""
FLAGS = ("-std=c++17", "-O3", "--use_fast_math", "--expt-relaxed-constexpr")
QUIET = "--diag-suppress=177,1046"
"""Of functions in TVM's prelude that a kernel does not use."""


def compile_nvcc(
    compiler: CudaCompiler, name: str, source: str, arch: str, assembler: Sequence[str] = ()
) -> Compiled:
    """Compile CUDA source with nvcc.

    Parameters
    ----------
    compiler : CudaCompiler
        An nvcc.
    name : str
        What to call the source in messages.
    source : str
        CUDA source.
    arch : str
        Such as ``"sm_90a"``.
    assembler : sequence of str
        Options of ptxas.

    Raises
    ------
    RefusedError
        With what nvcc prints.
    """
    with tempfile.TemporaryDirectory(prefix="tvm_attn_") as folder:
        source_file, ptx = Path(folder, f"{name}.cu"), Path(folder, f"{name}.ptx")
        source_file.write_text(source)
        keep = (*FLAGS, QUIET, WITHOUT_SPECIAL_FUNCTIONS, "--keep", f"--keep-dir={folder}")
        cubin, report = _cubin(compiler, source_file, arch, assembler, keep)
        return Compiled(cubin, ptx.read_text(), report)


def assemble_nvcc(
    compiler: CudaCompiler, name: str, ptx: str, arch: str, assembler: Sequence[str]
) -> Compiled:
    """Assemble PTX that `compile_nvcc` made, with other options of ptxas."""
    with tempfile.TemporaryDirectory(prefix="tvm_attn_") as folder:
        file = Path(folder, f"{name}.ptx")
        file.write_text(ptx)
        cubin, report = _cubin(compiler, file, arch, assembler)
        return Compiled(cubin, ptx, report)


def _cubin(
    compiler: CudaCompiler,
    file: Path,
    arch: str,
    assembler: Sequence[str],
    options: Sequence[str] = (),
) -> tuple[bytes, str]:
    """Return the cubin of a source or of PTX, and what nvcc prints."""
    cubin = file.with_suffix(".cubin")
    command = [
        *(str(compiler.path), f"-arch={arch}", "-cubin", *options),
        *(f"-Xptxas={','.join(['-v', *assembler])}", "-o", str(cubin), str(file)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise RefusedError(f"{done.stdout}{done.stderr}".replace(f"{file.parent}/", ""))
    return cubin.read_bytes(), done.stderr
