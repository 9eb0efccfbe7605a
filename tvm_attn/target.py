"""Targets: from ``"cuda -arch=sm_90"``, in any form people write, to what the pipeline needs.

`parse_target` accepts every form and returns a `BuildTarget`; what a GPU architecture offers stands
in our own table `ARCHS`, because TVM's tags know only the shared memory of old launches.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm_attn import _compat
from tvm_attn._host import native_cpu, portable_cpu
from tvm_attn.errors import TargetError

KINDS = ("cuda", "llvm")
FEATURES = frozenset({"cp_async", "ldmatrix", "wgmma", "tma", "tcgen05", "fp8"})


@dataclass(frozen=True)
class Arch:
    """What a GPU architecture offers. The number of SMs belongs to a card: ask at run time.

    Parameters
    ----------
    name : str
        ``"sm_90"``.
    code : str
        The architecture code is generated for: ``"sm_90a"`` where instructions need it.
    shared_memory_per_block, shared_memory_per_sm : int
        Bytes; the first is the opt-in maximum.
    max_threads_per_sm : int
        Resident threads of one SM.
    features : frozenset of str
        A subset of `FEATURES`.
    max_threads_per_block, registers_per_block : int
        Launch limits, the same everywhere so far.
    """

    name: str
    code: str
    shared_memory_per_block: int
    shared_memory_per_sm: int
    max_threads_per_sm: int
    features: frozenset[str]
    max_threads_per_block: int = 1024
    registers_per_block: int = 65536

    def __post_init__(self) -> None:
        """Validate the row."""
        if not re.fullmatch(r"sm_\d+", self.name) or self.code.rstrip("a") != self.name:
            raise TargetError(f"code={self.code!r} does not belong to the architecture {self.name}")
        if not self.features <= FEATURES:
            raise TargetError(f"{self.name}: {sorted(self.features - FEATURES)} are not features")
        if not 0 < self.shared_memory_per_block < self.shared_memory_per_sm:
            raise TargetError(f"{self.name}: a block cannot have more shared memory than its SM")


_AMPERE = frozenset({"cp_async", "ldmatrix"})
_ADA = _AMPERE | {"fp8"}
_KB = 1024
ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm_80", "sm_80", 163 * _KB, 164 * _KB, 2048, _AMPERE),
        Arch("sm_86", "sm_86", 99 * _KB, 100 * _KB, 1536, _AMPERE),
        Arch("sm_89", "sm_89", 99 * _KB, 100 * _KB, 1536, _ADA),
        Arch("sm_90", "sm_90a", 227 * _KB, 228 * _KB, 2048, _ADA | {"tma", "wgmma"}),
        Arch("sm_100", "sm_100a", 227 * _KB, 228 * _KB, 2048, _ADA | {"tma", "tcgen05"}),
        Arch("sm_120", "sm_120a", 99 * _KB, 100 * _KB, 1536, _ADA | {"tma"}),
    )
}
"""The architectures kernels are generated for."""

TAGS = {
    "nvidia/geforce-rtx-3090": "sm_86",
    "nvidia/geforce-rtx-4090": "sm_89",
    "nvidia/geforce-rtx-5090": "sm_120",
    "nvidia/nvidia-a10": "sm_86",
    "nvidia/nvidia-a100": "sm_80",
    "nvidia/nvidia-b200": "sm_100",
    "nvidia/nvidia-h100": "sm_90",
    "nvidia/nvidia-h200": "sm_90",
    "nvidia/nvidia-l4": "sm_89",
    "nvidia/nvidia-l40s": "sm_89",
}
"""Cards by tag; any other tag is looked up in TVM."""

_OPTIONS = {"cuda": ("arch",), "llvm": ("mcpu", "mattr", "mtriple")}
_DERIVED = frozenset(  # what TVM writes into a target by itself; `ARCHS` has our numbers
    "tag keys host max_num_threads thread_warp_size registers_per_block l2_cache_size_bytes "
    "max_shared_memory_per_block max_threads_per_block num-cores".split()
)
_ALLOWED = (
    'use "cuda -arch=sm_90", "sm_90", "cuda", "llvm -mcpu=native", "llvm" or "cpu", a tag such as '
    '"nvidia/nvidia-h100", a dict or its JSON, a tvm Target, a torch device, or None for this CPU; '
    f"architectures: {', '.join(ARCHS)}"
)


@dataclass(frozen=True)
class BuildTarget:
    """What code is generated for: a GPU architecture, or a CPU. Made by `parse_target`.

    Parameters
    ----------
    kind : {"cuda", "llvm"}
        The code generator.
    arch : Arch, optional
        The GPU architecture; only, and always, of ``cuda``.
    mcpu : str
        LLVM's name of the CPU; only, and always, of ``llvm``.
    mattr : tuple of str
        Features switched on or off besides those of `mcpu`: ``"+avx2"``, ``"-avx512f"``.
    mtriple : str
        LLVM's target triple, empty for this machine's.

    Raises
    ------
    TargetError
        If the fields do not go together.
    """

    kind: str
    arch: Arch | None = None
    mcpu: str = ""
    mattr: tuple[str, ...] = ()
    mtriple: str = ""

    def __post_init__(self) -> None:
        """Validate."""
        if self.kind not in KINDS:
            raise TargetError(f"kind={self.kind!r} is not a kind of target; {_ALLOWED}")
        if (self.arch is None) == (self.kind == "cuda"):
            raise TargetError(f"a {self.kind} target with arch={self.arch}; {_ALLOWED}")
        if bool(self.mcpu) == (self.kind == "cuda") or self.mcpu == "native":
            raise TargetError(f"a {self.kind} target with mcpu={self.mcpu!r}; {_ALLOWED}")
        for attr in self.mattr:
            if not re.fullmatch(r"[+-][\w.-]+", attr):
                raise TargetError(f'mattr={attr!r} must be a feature such as "+avx2" or "-avx512f"')

    @functools.cached_property
    def features(self) -> frozenset[str]:
        """What the target offers: of an `Arch`, or LLVM's names such as ``"avx2"`` (asks TVM)."""
        if self.arch is not None:
            return self.arch.features
        self._check_cpu()
        return _compat.cpu_features(self._config())

    @property
    def vector_bits(self) -> int:
        """Width of a CPU's vector registers, in bits."""
        if "avx512f" in self.features:
            return 512
        return 256 if "avx" in self.features else 128

    def to_tvm(self) -> Any:
        """Return the `tvm.target.Target`.

        Raises
        ------
        TargetError
            If LLVM does not know the CPU, or a feature that is switched on.
        """
        if self.arch is None:
            wanted = {attr[1:] for attr in self.mattr if attr.startswith("+")}
            if wanted - self.features:
                raise TargetError(
                    f"mattr: LLVM does not know or cannot combine {sorted(wanted - self.features)} "
                    f"on {self.mcpu}; it has {', '.join(sorted(self.features))}"
                )
        return _compat.tvm_target(self._config())

    def key(self) -> str:
        """Return the canonical command-line form; `parse_target` reads it back."""
        if self.arch is not None:
            return f"cuda -arch={self.arch.code}"
        options = {"mcpu": self.mcpu, "mattr": ",".join(self.mattr), "mtriple": self.mtriple}
        return " ".join(["llvm", *(f"-{name}={given}" for name, given in options.items() if given)])

    def __str__(self) -> str:
        """Return `key`."""
        return self.key()

    def _config(self) -> dict[str, Any]:
        if self.arch is not None:
            return {
                "kind": "cuda",
                "arch": self.arch.code,
                "max_shared_memory_per_block": self.arch.shared_memory_per_block,
                "max_threads_per_block": self.arch.max_threads_per_block,
                "registers_per_block": self.arch.registers_per_block,
                "thread_warp_size": 32,
            }
        options = {"mattr": list(self.mattr), "mtriple": self.mtriple}
        return {"kind": "llvm", "mcpu": self.mcpu, **{k: v for k, v in options.items() if v}}

    def _check_cpu(self) -> None:
        if not _compat.is_known_cpu(self.mcpu, self.mtriple):
            where = f" for {self.mtriple}" if self.mtriple else ""
            raise TargetError(
                f'mcpu={self.mcpu!r} is not a CPU that LLVM knows{where}; use "native", a level '
                'such as "x86-64-v3", or a name such as "znver4"'
            )


def parse_target(target: object = None) -> BuildTarget:
    """Return the `BuildTarget` of any form that names one.

    Parameters
    ----------
    target : BuildTarget, str, dict, tvm.target.Target, torch.device or None
        ``"cuda -arch=sm_90"``, ``"llvm -mcpu=native"``, ``"sm_90"`` or ``"sm_90a"`` (the same),
        ``"llvm"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` (that GPU's architecture), a tag, a dict
        or its JSON; None is the CPU of this process. ``native`` is the default of ``llvm`` and
        becomes the CPU's name, less the vector extensions that the system does not offer. A
        ``host`` in a dict or tvm Target is not used: host code has a target of its own.

    Raises
    ------
    TargetError
        If the form, an option or the architecture is not known, or a cuda target has no
        architecture and there is no GPU to ask.

    Examples
    --------
    >>> print(parse_target("sm_90"))
    cuda -arch=sm_90a
    """
    if isinstance(target, BuildTarget):
        return target
    if target is None:
        return _cpu_target({})
    if isinstance(target, str):
        return _parse_string(target.strip())
    if isinstance(target, Mapping):
        return _parse_config(dict(target))
    if "torch" in sys.modules and isinstance(target, sys.modules["torch"].device):
        return _parse_device(target.type, target.index)
    if "tvm" in sys.modules and isinstance(target, sys.modules["tvm"].target.Target):
        return _parse_config(_compat.target_config(target))
    raise TargetError(f"target={target!r} has the type {type(target).__name__}; {_ALLOWED}")


def portable_host() -> BuildTarget:
    """Return the CPU target for code that runs on hosts unknown: x86-64-v2 on x86."""
    return BuildTarget("llvm", mcpu=portable_cpu())


def _parse_string(text: str) -> BuildTarget:
    if text.startswith("{"):
        try:
            return _parse_config(json.loads(text))
        except json.JSONDecodeError as error:
            raise TargetError(f"target={text!r} is not valid JSON ({error}); {_ALLOWED}") from error
    if re.fullmatch(r"sm_\w+", text):
        return _cuda_target(text)
    device = re.fullmatch(r"(cuda|cpu):(\d+)", text)
    if device:
        return _parse_device(device[1], int(device[2]))
    if "/" in text.split(" ")[0]:
        return _parse_tag(text)
    return _parse_command_line(text)


def _parse_command_line(text: str) -> BuildTarget:
    try:
        kind, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise TargetError(f"target={text!r} cannot be read ({error}); {_ALLOWED}") from error
    config: dict[str, Any] = {"kind": "llvm" if kind == "cpu" else kind}
    while words:
        name, equals, given = words.pop(0).partition("=")
        if not name.startswith("-"):
            raise TargetError(f"target={text!r}: {name!r} is not an option; {_ALLOWED}")
        if not equals and words:
            given = words.pop(0)
        config[name.lstrip("-")] = given
    return _parse_config(config)


def _parse_tag(tag: str) -> BuildTarget:
    if tag in TAGS:
        return _cuda_target(TAGS[tag])
    config = _compat.tag_config(tag)
    if config is None:
        raise TargetError(f"target={tag!r} is not a tag of TVM or of {', '.join(TAGS)}; {_ALLOWED}")
    return _parse_config(config)


def _parse_config(config: dict[Any, Any]) -> BuildTarget:
    if not all(isinstance(name, str) for name in (*config, config.get("tag", ""))):
        raise TargetError(f"target={config}: names of options, and tags, must be text; {_ALLOWED}")
    if "kind" not in config and "tag" in config:
        return _parse_tag(config["tag"])
    kind = config.pop("kind", None)
    if kind not in KINDS:
        raise TargetError(f"target kind {kind!r} is not supported; {_ALLOWED}")
    given = {k: v for k, v in config.items() if k not in _DERIVED and not k.startswith("feature.")}
    unknown = set(given) - set(_OPTIONS[kind])
    if unknown:
        options = ", ".join(f"-{option}" for option in _OPTIONS[kind])
        raise TargetError(f"{kind} has no option {sorted(unknown)}, only {options}; {_ALLOWED}")
    for option, value in given.items():
        words = value if option == "mattr" and isinstance(value, list | tuple) else [value]
        if not all(isinstance(word, str | None) for word in words):
            raise TargetError(f"{option}={value!r} must be text; {_ALLOWED}")
    made = _cuda_target(given.get("arch")) if kind == "cuda" else _cpu_target(given)
    if "keys" not in config:
        _check_derived(config, made)
    return made


def _check_derived(config: dict[str, Any], made: BuildTarget) -> None:
    """Refuse numbers that a person wrote and that are not ours; those of TVM come with `keys`."""
    own = made._config()
    own["max_num_threads"] = own.get("max_threads_per_block")
    for name in sorted(set(config) & _DERIVED - {"tag", "host"}):
        if str(config[name]) != str(own.get(name)):
            follows = f"it is {own[name]}" if own.get(name) else "nothing depends on it"
            raise TargetError(
                f"-{name}={config[name]} cannot be chosen: of {made}, {follows}; leave it out"
            )


def _parse_device(kind: str, index: int | None) -> BuildTarget:
    if kind == "cpu":
        return _cpu_target({})
    if kind == "cuda":
        return _cuda_target(None, index)
    raise TargetError(f"a target for the device {kind!r} is not supported; {_ALLOWED}")


def _cuda_target(name: str | None, device: int | None = None) -> BuildTarget:
    name = name or _gpu_arch(device)
    arch = ARCHS.get(name) or next((arch for arch in ARCHS.values() if arch.code == name), None)
    if arch is None:
        raise TargetError(f"architecture {name!r} is not supported; {_ALLOWED}")
    return BuildTarget("cuda", arch)


def _gpu_arch(device: int | None) -> str:
    import torch

    if not torch.cuda.is_available():
        raise TargetError(
            "a cuda target needs an architecture where there is no GPU to ask: name one, such as "
            '"cuda -arch=sm_90"; or use the CPU, by target="cpu", or device="cpu" of a facade'
        )
    if device is not None and device >= torch.cuda.device_count():
        raise TargetError(f"there is no GPU {device}; {torch.cuda.device_count()} can be used")
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _cpu_target(options: dict[str, Any]) -> BuildTarget:
    mattr = options.get("mattr") or ()
    given = tuple(mattr.split(",")) if isinstance(mattr, str) else tuple(mattr)
    mtriple = options.get("mtriple") or ""
    mcpu = options.get("mcpu") or ("generic" if mtriple else "native")
    if mcpu != "native":
        return BuildTarget("llvm", None, mcpu, given, mtriple)
    if mtriple:
        raise TargetError(
            f"mcpu=native is the CPU of this process and cannot go with mtriple={mtriple!r}; "
            "name the CPU, or leave mtriple out"
        )
    name, hidden = native_cpu()
    return BuildTarget("llvm", None, name, hidden + given)
