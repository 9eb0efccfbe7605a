"""CUDA source to a cubin, by nvcc."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tvm_attn.codegen.compilers import Compiled, CudaCompiler, RefusedError

FLAGS = ("-std=c++17", "-O3", "--use_fast_math", "--expt-relaxed-constexpr")
QUIET = "--diag-suppress=177"
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
        files = {suffix: Path(folder, f"{name}.{suffix}") for suffix in ("cu", "ptx", "cubin")}
        files["cu"].write_text(source)
        command = [
            *(str(compiler.path), *FLAGS, QUIET, f"-arch={arch}", "-cubin"),
            f"-Xptxas={','.join(['-v', *assembler])}",
            *("--keep", f"--keep-dir={folder}", "-o", str(files["cubin"]), str(files["cu"])),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            raise RefusedError(f"{done.stdout}{done.stderr}".replace(f"{folder}/", ""))
        return Compiled(files["cubin"].read_bytes(), files["ptx"].read_text(), done.stderr)
