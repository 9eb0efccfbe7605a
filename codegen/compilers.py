"""The CUDA compiler of this machine: nvcc, or NVRTC from pip wheels."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tvm_attn import env
from tvm_attn.errors import CompileError

OLDEST = (12, 8)
"""The first CUDA version that knows all of our architectures."""

WHEELS = (
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
    "cuda-bindings",
)
"""What NVRTC needs, itself first: the extra ``cuda``."""

INSTALL = "pip install 'tvm-attn[cuda]'"


HOST_COMPILERS = ("gcc", "cc")
"""What nvcc compiles with, besides itself."""


@dataclass(frozen=True)
class CudaCompiler:
    """A compiler for CUDA source.

    Parameters
    ----------
    kind : {"nvcc", "nvrtc"}
        Which.
    version : str
        Such as ``"13.0.88"``.
    path : pathlib.Path
        Of nvcc; of the folder that NVRTC's wheels are installed in.
    """

    kind: Literal["nvcc", "nvrtc"]
    version: str
    path: Path

    @property
    def label(self) -> str:
        """Kind and version, such as ``"nvcc-13.0.88"``."""
        return f"{self.kind}-{self.version}"

    @property
    def is_new_enough(self) -> bool:
        """Whether it knows all of our architectures."""
        return tuple(int(part) for part in self.version.split(".")[:2]) >= OLDEST


@dataclass(frozen=True)
class Compiled:
    """What a CUDA compiler makes.

    Attributes
    ----------
    cubin : bytes
        Machine code.
    ptx : str
        What it was assembled from.
    report : str
        What the assembler says about each kernel.
    """

    cubin: bytes
    ptx: str
    report: str


class RefusedError(Exception):
    """A compiler's complaint about a source; it calls the file ``<name>.cu``."""


def find_compiler() -> CudaCompiler | None:
    """Return the compiler to use: nvcc where there is one that is new enough, else NVRTC."""
    return next((c for c in (find_nvcc(), find_nvrtc()) if c and c.is_new_enough), None)


def require_compiler() -> CudaCompiler:
    """Return `find_compiler`, or say why there is none.

    Raises
    ------
    CompileError
        If there is none; the message says what to install.
    """
    compiler = find_compiler()
    if compiler is None:
        oldest, nvcc = ".".join(map(str, OLDEST)), find_nvcc()
        found = f"nvcc {nvcc.version} at {nvcc.path} is too old" if nvcc else "no nvcc was found"
        raise CompileError(
            f"there is no CUDA compiler: {found}, and {', '.join(_missing_wheels())} is not "
            f"installed; install a CUDA toolkit >= {oldest} (on PATH, or CUDA_HOME), or {INSTALL}"
        )
    return compiler


def find_nvcc() -> CudaCompiler | None:
    """Return the nvcc of ``CUDA_HOME`` or ``CUDA_PATH``, else that on ``PATH``.

    None without a host compiler, which nvcc needs.
    """
    path = env.cuda_program("nvcc")
    if path and not any(map(shutil.which, HOST_COMPILERS)):
        env.logger("codegen").info("%s is left aside: there is no %s", path, HOST_COMPILERS[0])
        return None
    version = _nvcc_version(path, path.stat().st_mtime_ns) if path else None
    return CudaCompiler("nvcc", version, path) if path and version else None


def find_nvrtc() -> CudaCompiler | None:
    """Return NVRTC, if all of its wheels are installed."""
    if _missing_wheels():
        return None
    wheel = importlib.metadata.distribution(WHEELS[0])
    return CudaCompiler("nvrtc", wheel.version, Path(str(wheel.locate_file(""))))


@functools.lru_cache
def _nvcc_version(path: Path, changed: int) -> str | None:
    """Ask an nvcc for its version, once for each file that there is at its path."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    if found is None:
        env.logger("codegen").info("%s tells no version:\n%s%s", path, done.stdout, done.stderr)
    return found and found[1]


def _missing_wheels() -> list[str]:
    return [wheel for wheel in WHEELS if not _is_installed(wheel)]


def _is_installed(wheel: str) -> bool:
    try:
        importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
