"""The CPU of this process: its name, and what the system does not let programs use of it."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from pathlib import Path

from tvm_attn import _compat
from tvm_attn._files import read_note, write_note

CPUINFO = Path("/proc/cpuinfo")
MODEL = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
"""Lines of it by which LLVM's answers are kept."""

CPUINFO_FLAGS = {  # LLVM's name of a vector extension -> the kernel's name of it
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avxvnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avx512vnni": "avx512_vnni",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512vp2intersect": "avx512_vp2intersect",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
}


@functools.cache
def native_cpu() -> tuple[str, tuple[str, ...]]:
    """Return LLVM's name of the CPU, and the vector extensions of that CPU to switch off.

    LLVM goes by the model; a virtual machine or the kernel may offer fewer extensions than the
    model has, and code that used them would be an illegal instruction. What LLVM says of a model is
    kept in the cache: to ask it takes importing TVM, which is 2 s.

    Returns
    -------
    name : str
        Such as ``"znver4"``.
    hidden : tuple of str
        Such as ``("-avx512f",)``; empty where the system offers all that the model has.
    """
    if not _is_x86() or not CPUINFO.exists():
        return _compat.host_cpu(), ()
    cpuinfo = CPUINFO.read_text()
    note = f"cpu-{_model_key(cpuinfo)}"
    said = read_note(note)
    if said is None:
        name = _compat.host_cpu()
        features = _compat.cpu_features({"kind": "llvm", "mcpu": name})
        said = {"name": name, "features": sorted(features)}
        write_note(note, said)
    return said["name"], hidden_extensions(frozenset(said["features"]), cpuinfo)


def _model_key(cpuinfo: str) -> str:
    """Return a key of the first CPU's model, and of the version of TVM, and LLVM with it."""
    first = cpuinfo.split("\n\n")[0].splitlines()
    lines = [line for line in first if line.split(":")[0].strip() in MODEL]
    return hashlib.sha256("\n".join([_compat.tvm_version(), *lines]).encode()).hexdigest()[:32]


def hidden_extensions(features: frozenset[str], cpuinfo: str) -> tuple[str, ...]:
    """Return, as ``"-name"``, the vector extensions among `features` that `cpuinfo` lacks."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None:
        return ()
    offered = set(flags[1].split())
    return tuple(
        f"-{feature}"
        for feature, flag in CPUINFO_FLAGS.items()
        if feature in features and flag not in offered
    )


def portable_cpu() -> str:
    """Return the CPU level that code for hosts unknown is generated for."""
    return "x86-64-v2" if _is_x86() else "generic"


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
