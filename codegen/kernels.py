"""The kernels of a family of query tiles: each defined, scheduled and compiled, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tvm_attn import env
from tvm_attn.codegen import host
from tvm_attn.codegen.children import Progress, in_children
from tvm_attn.codegen.cuda import DeviceCode, compile_here
from tvm_attn.codegen.phases import Phases
from tvm_attn.codegen.resources import Resources
from tvm_attn.errors import CompileError
from tvm_attn.target import Arch, BuildTarget

Define = Callable[[str], Any]
"""Makes the definition of the kernel of a name."""
Schedule = Callable[[str, Any], Any]
"""Makes what is compiled of the kernel of a name and of its definition."""
Way = tuple[Callable[[], Any], Callable[[], Any]]
"""Makes the definition of a kernel, and what is compiled."""


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels.

    Attributes
    ----------
    library : bytes
        A shared library with a ``__tvm_ffi_<name>`` symbol for every kernel.
    texts : dict of str to str
        What each phase made, as in an artifact.
    devices : dict of str to bytes
        Of a GPU: the CUDA module of each kernel.
    resources : dict
        Of a GPU: figures of `Resources` of each kernel.
    """

    library: bytes
    texts: Mapping[str, str]
    devices: Mapping[str, bytes] = field(default_factory=dict)
    resources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def cpu_kernels(
    names: list[str], define: Define, schedule: Schedule, target: BuildTarget, phases: Phases
) -> Kernels:
    """Make kernels for a CPU."""
    defined = phases.record("tir", {name: define(name) for name in names})
    scheduled = phases.record("scheduled", {n: schedule(n, f) for n, f in defined.items()})
    code = host.compile_host(scheduled, target)
    phases.note("source.ll", code.source)
    return Kernels(code.library, phases.texts)


def cuda_kernels(
    ways: Mapping[str, Sequence[Way]],
    target: BuildTarget,
    phases: Phases,
    beside: Mapping[str, Callable[[Progress], Any]],
) -> tuple[Kernels, dict[str, int]]:
    """Make kernels for a GPU in tirx, each in a process of its own.

    Parameters
    ----------
    ways : mapping of str to sequence of Way
        How each kernel can be made, the best way first; the others are tried in turn until no
        register spills. The last kernel should be the one that takes longest.
    target : BuildTarget
        The GPU.
    phases : Phases
        Records what is made.
    beside : mapping of str to callable
        Other work to do in processes while the last kernels are compiled, as in `Child`, by name.

    Returns
    -------
    kernels : Kernels
        The kernels.
    chosen : dict of str to int
        Which way each was made.
    """

    def make(name: str, report: Progress) -> tuple[DeviceCode, dict[str, str], int]:
        made = []
        for number, way in enumerate(ways[name]):
            own = phases.of(name, report)
            code = _make_kernel(name, way, target, own)
            made.append((code, own.texts, number))
            if not Resources(**code.resources[name]).spills:
                break
        return min(made, key=lambda one: Resources(**one[0].resources[name]).spilled_bytes)

    longest_first: dict[str, Callable[[Progress], Any]] = {
        name: partial(make, name) for name in reversed(list(ways))
    }
    results = in_children({**longest_first, **beside}, phases.report)
    made = {name: results[name] for name in ways}
    codes = {name: code for name, (code, _, _) in made.items()}
    resources = {name: code.resources[name] for name, code in codes.items()}
    warn_of_spills(resources)
    texts = {name: own for name, (_, own, _) in made.items()}
    kernels = Kernels(
        host.link([code.launcher for code in codes.values()]),
        {f"{name}/{file}": text for name, own in texts.items() for file, text in own.items()},
        {name: code.device for name, code in codes.items()},
        resources,
    )
    return kernels, {name: number for name, (_, _, number) in made.items()}


def _make_kernel(name: str, way: Way, target: BuildTarget, phases: Phases) -> DeviceCode:
    try:
        define, schedule = way
        phases.record("tir", {name: define()})
        functions = phases.record("scheduled", {name: schedule()})
    except Exception as error:
        kind = type(error).__name__
        raise CompileError(f"{name} cannot be generated: {kind}: {error}") from error
    return compile_here(functions, target, "tirx", phases.note)


def residents(name: str, used: Mapping[str, int], wanted: int, arch: Arch) -> int:
    """Return how many CTAs of a kernel share a multiprocessor: as many as wanted, if they fit."""
    fit = Resources(**used).residents(arch)
    if fit < wanted:
        env.logger("codegen").warning(
            "%s: %d CTAs should share a multiprocessor of %s, but only %d fit: %s",
            *(name, wanted, arch.name, fit, used),
        )
    return min(fit, wanted)


def warn_of_spills(resources: Mapping[str, Mapping[str, int]]) -> None:
    """Log which kernels keep anything of their threads outside of registers, which costs time."""
    for name, used in resources.items():
        if spills := Resources(**used).spills:
            env.logger("codegen").warning("%s has %s", name, spills)
