"""Host code: scheduled TIR to a shared library, through LLVM and the system's linker."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_attn import _compat
from tvm_attn.codegen.vector_math import vectorize_math
from tvm_attn.errors import CompileError
from tvm_attn.target import BuildTarget

BRANCHING = {
    "config": {"tirx.disable_storage_rewrite": True},
    "disabled_pass": ["s_tir.CompactBufferAllocation", "s_tir.StmtSimplify", "tirx.RemoveNoOp"],
}
"""Options of TVM's passes for planners, which are branches and loops over arrays that are given.

The first pass loses track of variables in branches; the others take most of the time, and leave
nothing out that LLVM does not.
"""
LINKERS = ("cc", "gcc", "clang", "ld")


@dataclass(frozen=True)
class HostCode:
    """What `compile_host` generates.

    Attributes
    ----------
    library : bytes
        An ELF shared library with a ``__tvm_ffi_<name>`` symbol for every function.
    source : str
        Its LLVM IR.
    """

    library: bytes
    source: str


def compile_host(
    functions: Mapping[Any, Any], target: BuildTarget, options: Mapping[str, Any] | None = None
) -> HostCode:
    """Compile TIR functions for a CPU.

    Parameters
    ----------
    functions : mapping of (str or tvm.ir.GlobalVar) to tvm.tirx.PrimFunc
        Functions by symbol, and private ones by the variable that those call them by.
    target : BuildTarget
        An ``llvm`` target.
    options : mapping, optional
        Of TVM's passes, as ``PassContext`` takes them.

    Raises
    ------
    CompileError
        If TVM or the linker refuses; the message has theirs.
    """
    tvm = _compat.import_tvm()
    from tvm_attn.codegen.checks import check_what_is_given

    named = {
        name: f.with_attr("global_symbol", name) if isinstance(name, str) else f
        for name, f in functions.items()
    }
    try:
        with tvm.transform.PassContext(**(options or {})):
            lowered = _compat.lower_host(vectorize_math(tvm.IRModule(named)), target.to_tvm())
            code = _compat.generate_code(check_what_is_given(lowered), target.to_tvm())
    except Exception as error:
        names = ", ".join(map(str, functions))
        raise CompileError(f"TVM cannot compile {names} for {target}: {error}") from error
    return HostCode(link([object_code(code)]), code.inspect_source("ll"))


def object_code(module: Any) -> bytes:
    """Return a `tvm.runtime.Module` with host code as an object file, without what it imports."""
    with tempfile.TemporaryDirectory(prefix="tvm_attn_") as folder:
        path = Path(folder, "host.o")
        module.write_to_file(str(path), "obj")
        return path.read_bytes()


def link(objects: Sequence[bytes]) -> bytes:
    """Return the shared library of object files.

    Raises
    ------
    CompileError
        If there is no linker, or it refuses.
    """
    linker = next((found for name in LINKERS if (found := shutil.which(name))), None)
    if linker is None:
        raise CompileError(
            f"no linker found (tried {', '.join(LINKERS)}); install a C compiler, or load a kernel "
            "that was exported elsewhere"
        )
    with tempfile.TemporaryDirectory(prefix="tvm_attn_") as folder:
        files = [Path(folder, f"{number}.o") for number in range(len(objects))]
        for file, content in zip(files, objects, strict=True):
            file.write_bytes(content)
        library = Path(folder, "host.so")
        command = [linker, "-shared", "-o", str(library), *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{' '.join(command)} failed:\n{done.stderr}")
        return library.read_bytes()
