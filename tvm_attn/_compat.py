"""TVM spellings that change between minor versions, in one place. TVM is imported by the calls."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from types import ModuleType
from typing import Any

from tvm_attn import env
from tvm_attn._tracing import speed_up_tracing
from tvm_attn.errors import TvmAttnError

TVM_MIN, TVM_END = (0, 27), (0, 28)
FFI_MIN, FFI_END = (0, 1, 14), (0, 1, 15)
"""tvm_ffi 0.1.15 crashes the process inside `Schedule.tensorize` and `ir.save_json`."""


class DependencyError(TvmAttnError, ImportError):
    """TVM is missing, or of a version that this library does not work with."""


@functools.cache
def import_tvm() -> ModuleType:
    """Return the module `tvm`, once its version and that of `tvm_ffi` are known to be supported.

    The size of TVM's thread pool is set first.

    Raises
    ------
    DependencyError
        If either is missing or outside its range.
    """
    env.setup_threads()
    try:
        import tvm_ffi

        check_version("apache-tvm-ffi", tvm_ffi.__version__, FFI_MIN, FFI_END)
        import tvm
    except ImportError as error:
        if isinstance(error, DependencyError):
            raise
        raise DependencyError(
            f"building a kernel needs TVM, which cannot be imported ({error}); install "
            "apache-tvm, or load a kernel that was exported before"
        ) from error
    check_version("apache-tvm", tvm.__version__, TVM_MIN, TVM_END)
    speed_up_tracing()
    return tvm  # type: ignore[no-any-return]


def tvm_version() -> str:
    """Return the version of TVM that is installed, without importing it; empty if none is."""
    try:
        return importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_version(
    package: str, version: str, minimum: tuple[int, ...], end: tuple[int, ...]
) -> None:
    """Raise `DependencyError` unless ``minimum <= version < end``."""
    release = tuple(int(part) for part in version.split("+")[0].split(".") if part.isdecimal())
    if not minimum <= release < end:
        low, high = (".".join(map(str, bound)) for bound in (minimum, end))
        raise DependencyError(
            f"{package} {version} is installed, but >={low},<{high} is needed; "
            f"install it with: pip install '{package}>={low},<{high}'"
        )


def tvm_target(config: dict[str, Any]) -> Any:
    """Return the `tvm.target.Target` of a dict (TVM has no command-line form any more)."""
    return import_tvm().target.Target(config)


def target_config(target: Any) -> dict[str, Any]:
    """Return a `tvm.target.Target` as a plain dict."""
    config: dict[str, Any] = json.loads(str(target))
    return config


def tag_config(tag: str) -> dict[str, Any] | None:
    """Return what TVM knows under a target tag as a plain dict, None if it knows no such tag."""
    try:
        return target_config(tvm_target({"tag": tag}))
    except (TypeError, ValueError):
        return None


def host_cpu() -> str:
    """Return LLVM's name of the CPU this process runs on, such as ``"znver4"``."""
    return str(_llvm().llvm_get_system_cpu())


def is_known_cpu(mcpu: str, mtriple: str = "") -> bool:
    """Whether LLVM knows a CPU by this name (an unknown one would silently become generic)."""
    llvm = _llvm()
    return bool(llvm.llvm_is_valid_cpu(mcpu, mtriple or llvm.llvm_get_system_triple()))


def cpu_features(config: dict[str, Any]) -> frozenset[str]:
    """Return LLVM's names of the features that an ``llvm`` target has, such as ``"avx2"``."""
    return frozenset(map(str, _llvm().llvm_get_cpu_features(tvm_target(config))))


def _llvm() -> Any:
    import_tvm()
    import tvm.target.codegen

    return tvm.target.codegen


def lower_cuda(module: Any, target: Any, dialect: str) -> tuple[Any, Any, dict[str, Any]]:
    """Lower functions for a GPU: the first half of `tvm.compile`, which tells nothing of launches.

    Parameters
    ----------
    module : tvm.IRModule
        The functions.
    target : tvm.target.Target
        A ``cuda`` target with a host.
    dialect : {"tirx", "s_tir"}
        What the functions are written in.

    Returns
    -------
    host, device : tvm.IRModule
        Functions that launch kernels, and the kernels.
    launches : dict
        Launch parameters, such as ``threadIdx.x``, as expressions, by kernel.
    """
    import_tvm()
    from tvm import tirx
    from tvm.tirx.build import split_host_device_mods

    pipeline, finalize_host, finalize_device = tirx.get_tir_pipeline(dialect)
    with target:
        host, devices = split_host_device_mods(pipeline(tirx.transform.BindTarget(target)(module)))
        [device] = devices.values()
        return finalize_host()(host), finalize_device()(device), _launches(host)


def lower_host(module: Any, target: Any) -> Any:
    """Lower scheduled functions for a CPU: the first half of `tvm.compile`."""
    import_tvm()
    from tvm import tirx

    pipeline, finalize, _ = tirx.get_tir_pipeline("s_tir")
    with target:
        return finalize()(pipeline(tirx.transform.BindTarget(target.with_host(target))(module)))


def generate_code(module: Any, target: Any) -> Any:
    """Return the `tvm.runtime.Module` with the code of lowered functions."""
    import_tvm()
    from tvm.tirx.build import codegen_build

    with target:
        return codegen_build(module, target)


def packed_module(module: Any) -> bytes:
    """Return a `tvm.runtime.Module` as TVM serialises it into libraries."""
    import tvm_ffi

    pack = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")
    return bytes(pack(module).numpy().tobytes())


LAUNCH_PARAMS = "tirx.kernel_launch_params"
"""Attribute of a kernel of explicit threads: what its launch depends on, in this order."""
_EARLY = "tirx.use_programtic_dependent_launch"


def early_launch(in_clusters: bool) -> list[str]:
    """Return launch parameters of a kernel that may begin before the kernel before it ends."""
    cluster = ["clusterCtaIdx.x"] * in_clusters
    return ["blockIdx.x", *cluster, "threadIdx.x", _EARLY, "tirx.use_dyn_shared_memory"]


def _launches(host: Any) -> dict[str, Any]:
    """Return launch parameters; `_EARLY` is one that has no value."""
    tvm = import_tvm()
    import tvm_ffi

    launches = {}

    def visit(call: Any) -> None:
        if getattr(call.op, "name", "") == "tirx.call_ffi_kernel":
            names = [str(name) for name in call.attrs.launch_params if str(name) != _EARLY]
            values = list(call.args)[-len(names) :]
            launches[str(call.args[0].value)] = dict(zip(names, values, strict=True))

    tvm_ffi.structural_walk(host, (tvm.ir.Call, visit))
    return launches
