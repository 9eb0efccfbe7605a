"""From a spec and a variant to a kernel: the whole pipeline."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial, reduce
from itertools import repeat
from operator import or_
from typing import Any

from tvm_attn import _compat, _progress, env
from tvm_attn._generation import (
    DEVICE_PLANNER,
    PLANNER,
    compile_functions,
    explain_choice,
    explain_tiles,
    generate_device_planner,
    generate_kernel,
    generate_planner,
    query_tiles,
)
from tvm_attn._parts import (
    Loaded,
    Part,
    Recipe,
    beside,
    recall_recipe,
    remember_recipe,
    request_key,
)
from tvm_attn._parts import forget_loaded as forget_loaded
from tvm_attn._progress import Progress
from tvm_attn.codegen.cache import cache_key
from tvm_attn.codegen.phases import Phases, dump
from tvm_attn.errors import CompileError, DTypeError, TargetError
from tvm_attn.runtime.artifact import Artifact
from tvm_attn.runtime.disassembly import cubin_of, disassemble
from tvm_attn.runtime.later import Later
from tvm_attn.runtime.library import Library
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget, parse_target
from tvm_attn.variant import AttentionVariant

TENSOR_CORE_DTYPES = ("float16", "bfloat16")
"""Of queries; K and V are widened to them."""
BACKENDS = {"llvm": ("cpu",), "cuda": ("sm80", "sm90")}
"""Schedules by kind of target; the first is the library's choice."""

ATTENTION = "attention"
"""The part of a kernel that computes; the others plan."""

REQUEST_SIZE = 3  # positional arguments of `build`
_jobs: dict[int, Sequence[Callable[..., AttentionModule]]] = {}
"""What `build_many` is building, by call: its processes inherit it, hooks cannot be pickled."""


def build(
    spec: AttentionSpec,
    variant: AttentionVariant | None = None,
    target: object = None,
    *,
    schedule: str | None = None,
    progress: Progress | None = None,
) -> AttentionModule:
    """Build an attention kernel, or take it from the cache.

    Parameters
    ----------
    spec : AttentionSpec
        The problem's shape.
    variant : AttentionVariant, optional
        What is special about this attention; full attention by default.
    target : object, optional
        What to generate code for, in any form `parse_target` takes; this CPU by default.
    schedule : str, optional
        Forces a backend: ``"cpu"`` on a CPU, ``"sm80"`` on a GPU or, for the long requests of a
        Hopper, ``"sm90"``. By default the library chooses, and the kernel's text says why.
    progress : callable, optional
        Called with the name of each stage. Without it, a terminal shows them while they last.

    Returns
    -------
    AttentionModule
        Ready to plan and run.

    Raises
    ------
    TargetError
        If the target or the schedule is unknown.
    CompileError
        If a hook cannot be traced, or a compiler is missing or refuses.
    EnvError
        If an environment variable has a value that cannot be used.
    """
    env.log_level()  # raises, also if nothing is built and logged
    _check_types(spec, variant)
    built_for = parse_target(target)
    _backend(built_for, schedule)
    _check_dtypes(spec, built_for)
    variant = variant or AttentionVariant()
    request = request_key(spec, variant, built_for, schedule)
    recipe = recall_recipe(request)
    made = recipe.recall() if recipe else None
    if recipe is None or made is None:
        recipe, made = _make(spec, variant, built_for, schedule, progress)
        remember_recipe(request, recipe)
    kernel, attention = made.pop(ATTENTION)
    _dump(recipe.parts[0].key, kernel)
    artifact = Artifact(
        {
            **kernel.meta,
            "backend": kernel.meta["families"][-1]["schedule"],
            "why": recipe.why,
            "spec": asdict(spec),
            "variant": str(variant),
            "params": [asdict(param) for param in variant.params],
        },
        reduce(or_, (part.libraries for part, _ in made.values()), dict(kernel.libraries)),
        kernel.texts,
        reduce(or_, (part.devices for part, _ in made.values()), dict(kernel.devices)),
    )
    libraries = {name: library for name, (_, library) in made.items()}
    obtain = recipe.later and partial(_obtain, recipe.later, spec, variant, built_for)
    later = Later(obtain) if obtain else None
    return AttentionModule(artifact, {ATTENTION: attention, **libraries}, later=later)


def _make(
    spec: AttentionSpec,
    variant: AttentionVariant,
    target: BuildTarget,
    schedule: str | None,
    progress: Progress | None,
) -> tuple[Recipe, dict[str, Loaded]]:
    """Trace a variant, and return the kernel's parts: compiled now, where they are not cached."""
    from tvm_attn.tir.fingerprint import fingerprint
    from tvm_attn.tir.hooks import Hooks

    hooks = Hooks(variant)
    content = {
        "spec": spec.compiled(),
        "variant": fingerprint(hooks, spec),
        "target": target.key(),
        "backend": _backend(target, schedule),
        "tiles": _tiles_to_try(spec, variant, target, schedule),
    }
    kernel = Part(ATTENTION, cache_key(content), target.arch is not None)
    planner, device_planner = _planners(spec, hooks, target)

    def alike(made: Artifact) -> Artifact:
        """Return what was made of the hooks, if they are still as the key says."""
        if fingerprint(hooks, spec) != content["variant"]:
            raise CompileError(
                "its hooks gave something else when they were traced again; a hook is called many "
                "times, and must give the same expression each time"
            )
        return made

    def generate(key: str) -> Artifact:
        phases, others = Phases(key, report), beside(planner, plans)
        return alike(generate_kernel(spec, hooks, target, schedule, phases, others))

    def plans(_: str) -> Artifact:
        return alike(generate_planner(spec, hooks))

    with _progress.stages(progress) as report:
        try:
            made = {ATTENTION: kernel.obtain(generate), PLANNER: planner.obtain(plans)}
        except CompileError as error:
            raise CompileError(f"variant {str(variant)!r}: {error}") from error
    why = explain_choice(spec, variant, target, schedule)
    return Recipe((kernel, planner), why, device_planner), made


def _planners(spec: AttentionSpec, hooks: Any, target: BuildTarget) -> tuple[Part, Part | None]:
    """Return the planner of the host, and that of a GPU if that is the target."""
    from tvm_attn.tir.fingerprint import range_fingerprint

    content = {"paged": spec.is_paged, "kv_range": range_fingerprint(hooks)}
    host = Part(PLANNER, cache_key(content), on_gpu=False)
    if target.arch is None:
        return host, None
    on_device = {**content, "planner": "device", "target": target.key()}
    return host, Part(DEVICE_PLANNER, cache_key(on_device), on_gpu=True)


def _obtain(
    device_planner: Part, spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget
) -> Loaded:
    """Return the planner for a GPU, compiled now if it is not cached."""

    def generate(_: str) -> Artifact:
        from tvm_attn.tir.hooks import Hooks

        if _planners(spec, Hooks(variant), target)[1] != device_planner:
            raise CompileError(
                f"the hooks of {str(variant)!r} have changed since its kernel was built; build anew"
            )
        return generate_device_planner(spec, variant, target)

    return device_planner.obtain(generate)


def tile_tables(
    spec: AttentionSpec, variant: AttentionVariant | None = None, target: object = None
) -> list[Any]:
    """Return tables that say which query tiles `build` chooses, and why: nothing is compiled.

    Parameters
    ----------
    spec, variant, target
        As in `build`.

    Returns
    -------
    list of tvm_attn.schedules.tile_tables.TileTable
        Each with a title, columns and rows of text.
    """
    _check_types(spec, variant)
    built_for = parse_target(target)
    _check_dtypes(spec, built_for)
    return explain_tiles(spec, variant or AttentionVariant(), built_for)


def build_many(
    requests: Iterable[tuple[Any, ...]],
    *,
    schedule: str | None = None,
    progress: Progress | None = None,
) -> list[AttentionModule]:
    """Build several kernels in parallel.

    What is not cached is compiled in processes of its own (TVM compiles one thing at a time in a
    process), from which it arrives through the cache.

    Parameters
    ----------
    requests : iterable of tuple
        Positional arguments of `build`: ``(spec,)``, ``(spec, variant)`` or ``(spec, variant,
        target)``.
    schedule : str, optional
        As in `build`, for all of them.
    progress : callable, optional
        Called with a line for each kernel that is ready. Without it, a terminal shows a bar.

    Returns
    -------
    list of AttentionModule
        In the order of `requests`.

    Raises
    ------
    DTypeError
        If a request is no such tuple. Other errors are those of `build`.
    """
    jobs = [partial(build, *given, schedule=schedule) for given in _checked_requests(requests)]
    _compat.import_tvm()
    _jobs[call := id(jobs)] = jobs
    try:
        with (
            _progress.bar(progress, len(jobs)) as report,
            ProcessPoolExecutor(
                max_workers=min(env.num_threads(), len(jobs) or 1),
                mp_context=multiprocessing.get_context("fork"),
            ) as pool,
        ):
            for done, index in enumerate(pool.map(_build_job, repeat(call), range(len(jobs))), 1):
                report(f"{done}/{len(jobs)} {jobs[index].args[0]}")
    finally:
        del _jobs[call]
    return [job() for job in jobs]


def build_functions(
    name: str,
    key: Mapping[str, Any],
    define: Callable[[int], Mapping[str, Any]],
    target: object,
    dim: int,
    unit: int,
) -> Library:
    """Compile stand-alone functions over rows, or take them from the cache.

    Parameters
    ----------
    name : str
        What they are, for people.
    key : mapping
        What `define` depends on, as JSON-able values.
    define : callable
        Returns the functions by symbol, for tiles of so many rows; called only when they are not
        cached.
    target : object
        As in `build`.
    dim, unit : int
        Elements of the longest row; elements of a row whose address allows one access.
    """
    built_for = parse_target(target)
    rows = {"dim": dim, "unit": unit}
    content = {**key, **rows, "functions": name, "target": built_for.key()}

    def generate(_: str) -> Artifact:
        from tvm_attn.schedules.rows import map_rows

        return compile_functions(name, map_rows(define, dim, unit, built_for), built_for)

    part = Part(name, cache_key(content), built_for.arch is not None)
    return part.obtain(generate)[1]


def build_kernel(name: str, define: Callable[[], Any], target: object) -> Library:
    """Compile a stand-alone kernel of explicit threads for a GPU, or take it from the cache.

    Parameters
    ----------
    name : str
        Its symbol.
    define : callable
        Returns the function; called only when it is not cached.
    target : object
        As in `build`.
    """
    built_for = parse_target(target)
    content = {"kernel": name, "target": built_for.key()}

    def generate(_: str) -> Artifact:
        return compile_functions(name, {name: define()}, built_for, dialect="tirx")

    part = Part(name, cache_key(content), built_for.arch is not None)
    return part.obtain(generate)[1]


def _checked_requests(requests: object) -> list[tuple[Any, ...]]:
    listed: list[Any] = list(requests) if isinstance(requests, Iterable) else [requests]
    for given in listed:
        if not isinstance(given, tuple | list) or not 1 <= len(given) <= REQUEST_SIZE:
            raise DTypeError(
                "requests are tuples (spec,), (spec, variant) or (spec, variant, target), "
                f"got {given!r}"
            )
    return listed


def _check_types(spec: object, variant: object) -> None:
    if not isinstance(spec, AttentionSpec):
        raise DTypeError(f"spec must be an AttentionSpec, got {type(spec).__name__}")
    if not isinstance(variant, AttentionVariant | None):
        raise DTypeError(
            f"variant must be an AttentionVariant, got {variant!r}; compose them from "
            "tvm_attn.variants, such as causal() & sliding_window(128)"
        )


def _check_dtypes(spec: AttentionSpec, target: BuildTarget) -> None:
    if target.arch and spec.q_dtype not in TENSOR_CORE_DTYPES:
        raise TargetError(
            f"q_dtype={spec.q_dtype} cannot be built for {target}, whose tensor cores take "
            f"{' or '.join(TENSOR_CORE_DTYPES)}"
        )


def _backend(target: BuildTarget, schedule: str | None) -> str:
    allowed = BACKENDS[target.kind]
    if schedule not in (None, *allowed):
        names = " or ".join(map(repr, allowed))
        raise TargetError(f"schedule={schedule!r} is no backend for {target}; use {names}, or None")
    return schedule or allowed[0]


def _tiles_to_try(
    spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget, schedule: str | None
) -> list[dict[str, Any]]:
    """Return what the kernels may be made of, as JSON-able values."""
    ranked = query_tiles(spec, variant, target, schedule).values()
    return [asdict(tile) for tiles in ranked for tile in tiles]


def _build_job(call: int, index: int) -> int:
    _jobs[call][index](progress=_progress.unheard)
    return index


def _dump(folder: str, artifact: Artifact) -> None:
    """Dump what an artifact consists of, also if it was built before, where the user wants that."""
    if env.dump_dir() is None:
        return
    dump(folder, artifact.texts)
    for modules in artifact.devices.values():
        for name, device in modules.items():
            try:
                dump(f"{folder}/{name}", {"kernel.sass": disassemble(cubin_of(device))})
            except CompileError as error:
                env.logger("codegen").info("%s", error)
