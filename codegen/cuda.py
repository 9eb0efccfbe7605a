"""CUDA code: TensorIR to CUDA source and a launcher, source to a cubin, both to what is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tvm_attn import _compat, env
from tvm_attn._files import write_atomically
from tvm_attn.codegen.children import Child
from tvm_attn.codegen.compilers import Compiled, CudaCompiler, RefusedError, require_compiler
from tvm_attn.codegen.device_module import DeviceModule, unpack
from tvm_attn.codegen.host import link, object_code
from tvm_attn.codegen.nvcc import assemble_nvcc, compile_nvcc
from tvm_attn.codegen.nvrtc import compile_nvrtc
from tvm_attn.codegen.resources import (
    Resources,
    check_limits,
    read_report,
    spilled_bytes,
    without_remarks,
)
from tvm_attn.errors import CompileError
from tvm_attn.target import Arch, BuildTarget, portable_host

KERNEL_SUFFIX = "_kernel"
"""What TVM appends to a function's symbol to name its kernel."""

HEURISTICS = ((), ("--register-usage-level=10",), ("--register-usage-level=0",))
"""Options of ptxas: if the last few registers spill with one, they often do not with another."""
MESSAGE_CHARACTERS = 6000
"""Of a compiler's complaint; thousands of errors say no more than the first ones."""

Note = Callable[[str, str], None]


@dataclass(frozen=True)
class DeviceCode:
    """What `compile_cuda` makes.

    Attributes
    ----------
    launcher : bytes
        An object file for the host with a ``__tvm_ffi_<name>`` symbol for every function.
    device : bytes
        The kernels they launch, as ``ffi.Module.load_from_bytes.cuda`` takes them.
    source : str
        CUDA source.
    cubin : bytes
        The machine code in `device`.
    ptx, report : str
        What it was assembled from, and the assembler's report.
    resources : dict
        Figures of `Resources` by kernel: ``"name"`` is that of the function of this name.
    """

    launcher: bytes
    device: bytes
    source: str
    cubin: bytes
    ptx: str
    report: str
    resources: dict[str, dict[str, int]]

    @cached_property
    def library(self) -> bytes:
        """The launcher as a shared library."""
        return link([self.launcher])


@dataclass(frozen=True)
class Generated:
    """What TVM generates: host code, and device code that is yet to be compiled.

    Attributes
    ----------
    host : tvm.IRModule
        Lowered functions that launch the kernels.
    device : DeviceModule
        The kernels.
    launches : mapping
        Launch parameters by kernel.
    """

    host: Any
    device: DeviceModule
    launches: Mapping[str, Mapping[str, Any]]

    @cached_property
    def launcher(self) -> bytes:
        """The host code as an object file."""
        return object_code(_compat.generate_code(self.host, portable_host().to_tvm()))


def compile_cuda(
    functions: Mapping[str, Any], target: BuildTarget, *, dialect: str = "tirx"
) -> DeviceCode:
    """Compile TIR functions for a GPU, which this machine need not have.

    Parameters
    ----------
    functions : mapping of str to tvm.tirx.PrimFunc
        Functions by symbol. What should be compiled side by side goes into calls of its own.
    target : BuildTarget
        A ``cuda`` target.
    dialect : {"tirx", "s_tir"}
        What the functions are written in.

    Raises
    ------
    CompileError
        If TVM or the CUDA compiler refuses, or a kernel is too large for the device. The message
        has theirs, and says where the source was saved.
    """
    _compat.import_tvm()
    with Child(", ".join(functions), lambda _: compile_here(functions, target, dialect)) as child:
        return child.result()


def compile_here(
    functions: Mapping[str, Any],
    target: BuildTarget,
    dialect: str,
    note: Note = lambda name, text: None,
) -> DeviceCode:
    """Compile as `compile_cuda` does, in this process: a `Child`, if there is a GPU.

    Parameters
    ----------
    functions, target, dialect
        As in `compile_cuda`.
    note : callable
        Called with the name and the text of each phase, as it is done.
    """
    if target.arch is None:
        raise CompileError(f"{', '.join(functions)} cannot be compiled as CUDA for {target}")
    compiler = require_compiler()
    generated = generate(functions, target, dialect)
    note("source.cu", generated.device.source)
    compiled = compile_source(
        compiler, "_".join(functions)[:100], generated.device.source, target.arch
    )
    report = without_remarks(compiled.report)
    note("kernel.ptx", compiled.ptx)
    note("ptxas.txt", report)
    used = measure(generated, report, target.arch)
    return DeviceCode(
        generated.launcher,
        generated.device.embed(compiled.cubin),
        generated.device.source,
        compiled.cubin,
        compiled.ptx,
        report,
        {kernel: asdict(figures) for kernel, figures in used.items()},
    )


def generate(functions: Mapping[str, Any], target: BuildTarget, dialect: str) -> Generated:
    """Generate CUDA source, and what launches it.

    Parameters
    ----------
    functions, target, dialect
        As in `compile_cuda`.

    Raises
    ------
    CompileError
        If TVM refuses.
    """
    tvm = _compat.import_tvm()
    from tvm_attn.codegen.checks import check_what_is_given
    from tvm_attn.codegen.device_math import precise_math

    named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    full_target = target.to_tvm().with_host(portable_host().to_tvm())
    try:
        host, device, launches = _compat.lower_cuda(
            precise_math(tvm.IRModule(named)), full_target, dialect
        )
        packed = _compat.packed_module(_compat.generate_code(device, full_target))
    except Exception as error:
        names = ", ".join(functions)
        raise CompileError(f"TVM cannot compile {names} for {target}: {error}") from error
    return Generated(check_what_is_given(host), unpack(packed), launches)


def compile_source(compiler: CudaCompiler, name: str, source: str, arch: Arch) -> Compiled:
    """Compile CUDA source: if registers spill, again with other heuristics of the assembler.

    Raises
    ------
    CompileError
        If the compiler refuses; the message has the compiler's, and says where the source is now.
    """
    compile_by = {"nvcc": compile_nvcc, "nvrtc": compile_nvrtc}[compiler.kind]
    try:
        made = [compile_by(compiler, name, source, arch.code, HEURISTICS[0])]
        for options in HEURISTICS[1:]:
            if not spilled_bytes(made[-1].report):
                break
            if compiler.kind == "nvcc":
                made.append(assemble_nvcc(compiler, name, made[0].ptx, arch.code, options))
            else:
                made.append(compile_nvrtc(compiler, name, source, arch.code, options))
        return min(made, key=lambda one: spilled_bytes(one.report))
    except RefusedError as error:
        message = str(error).strip()
        if len(message) > MESSAGE_CHARACTERS:
            said = [line for line in message.splitlines() if "error" in line.lower()]
            message = "\n".join([*said, message])[:MESSAGE_CHARACTERS] + "\n..."
        raise CompileError(
            f"{compiler.label} cannot compile {name} for {arch.code}:\n{message}\n"
            f"The source was saved as {_save(name, source)}"
        ) from error


def _save(name: str, source: str) -> Path:
    """Save a source that cannot be compiled, under a name that is the same the next time."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    path = (env.dump_dir() or env.cache_dir()) / env.FAILED / f"{name}-{digest}.cu"
    write_atomically(path, source.encode())
    return path


def measure(generated: Generated, report: str, arch: Arch) -> dict[str, Resources]:
    """Return what each kernel uses, by the name of its function.

    Parameters
    ----------
    generated : Generated
        The kernels.
    report : str
        The assembler's on their source.
    arch : Arch
        What they are for.

    Raises
    ------
    CompileError
        If a device does not have as much, or the report does not tell.
    """
    measured = read_report(report)
    found = {}
    for kernel in generated.device.kernels:
        if kernel not in measured or kernel not in generated.launches:
            raise CompileError(f"nothing is known about {kernel}; the assembler says:\n{report}")
        launch = generated.launches[kernel]
        used = Resources(
            **measured[kernel],
            dynamic_shared=_constant(kernel, launch, "tirx.use_dyn_shared_memory", 0),
            threads=_num_threads(kernel, launch),
        )
        check_limits(kernel, used, arch)
        found[kernel.removesuffix(KERNEL_SUFFIX)] = used
    return found


def _num_threads(kernel: str, launch: Mapping[str, Any]) -> int:
    x, y, z = (_constant(kernel, launch, f"threadIdx.{axis}", 1) for axis in "xyz")
    return x * y * z


def _constant(kernel: str, launch: Mapping[str, Any], name: str, default: int) -> int:
    """Return a launch parameter that must not depend on the arguments."""
    given = launch.get(name, default)
    try:
        return int(given)
    except TypeError:
        raise CompileError(f"{kernel}: {name} is {given}; it must be a constant") from None
