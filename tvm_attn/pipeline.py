"""From a spec and a variant to a kernel: the whole pipeline."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvm_attn import _compat, env
from tvm_attn._host import CPUINFO_FLAGS
from tvm_attn.codegen.cache import cache_key, cached, is_cached
from tvm_attn.codegen.phases import Phases, dump
from tvm_attn.errors import DTypeError, TargetError
from tvm_attn.runtime.artifact import Artifact, read_artifact
from tvm_attn.runtime.library import Library
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget, parse_target, portable_host
from tvm_attn.variant import AttentionVariant

_loaded: dict[str, tuple[Artifact, Library]] = {}
"""Artifacts this process has loaded, by cache key."""

PATIENCE = 60.0
"""Seconds to wait for a part that another process compiles, once it is needed."""

_jobs: list[tuple[Any, ...]] = []
"""What `build_many` is building: its processes inherit it, since hooks cannot be pickled."""


def build(
    spec: AttentionSpec,
    variant: AttentionVariant | None = None,
    target: object = None,
    *,
    schedule: str | None = None,
    progress: Callable[[str], None] | None = None,
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
        Forces a backend; by default the library chooses (on a CPU there is one: ``"cpu"``).
    progress : callable, optional
        Called with the name of each stage.

    Returns
    -------
    AttentionModule
        Ready to plan and run.

    Raises
    ------
    TargetError
        If the target or the schedule is unknown, or there is no backend for it yet.
    CompileError
        If a hook cannot be traced, or a compiler refuses.
    """
    _check_types(spec, variant)
    built_for = parse_target(target)
    _check_backend(built_for, schedule)
    from tvm_attn.tir.fingerprint import fingerprint, range_fingerprint
    from tvm_attn.tir.hooks import Hooks

    hooks = Hooks(variant or AttentionVariant())
    content = {
        "spec": spec.compiled(),
        "variant": fingerprint(hooks, spec),
        "target": built_for.key(),
    }
    kernel_part = _Part(
        "attention",
        content,
        lambda key: _generate_kernel(spec, hooks, built_for, Phases(key, progress or _silent)),
    )
    planner_part = _Part(
        "planner",
        {"paged": spec.is_paged, "kv_range": range_fingerprint(hooks)},
        lambda key: _generate_planner(spec, hooks),
    )
    with _built_meanwhile(planner_part, unless=kernel_part.is_there()):
        kernel, attention = kernel_part.obtain()
    host, planner = planner_part.obtain()
    dump(cache_key(content), kernel.texts)
    artifact = Artifact(
        {
            **kernel.meta,
            "spec": asdict(spec),
            "variant": str(hooks.variant),
            "params": [asdict(param) for param in hooks.variant.params],
        },
        {**kernel.libraries, **host.libraries},
        kernel.texts,
    )
    return AttentionModule(artifact, {"attention": attention, "planner": planner})


def build_many(
    requests: Iterable[tuple[Any, ...]], *, progress: Callable[[str], None] | None = None
) -> list[AttentionModule]:
    """Build several kernels in parallel.

    What is not cached is compiled in processes of its own (TVM compiles one thing at a time in a
    process), from which it arrives through the cache.

    Parameters
    ----------
    requests : iterable of tuple
        Positional arguments of `build`: ``(spec,)``, ``(spec, variant)`` or ``(spec, variant,
        target)``.
    progress : callable, optional
        Called with a line for each kernel that is ready.

    Returns
    -------
    list of AttentionModule
        In the order of `requests`.
    """
    jobs = list(requests)
    _compat.import_tvm()
    _jobs[:] = jobs
    try:
        with ProcessPoolExecutor(
            max_workers=min(env.num_threads(), len(jobs) or 1),
            mp_context=multiprocessing.get_context("fork"),
        ) as pool:
            for done, index in enumerate(pool.map(_build_job, range(len(jobs))), start=1):
                (progress or _silent)(f"{done}/{len(jobs)} {jobs[index][0]}")
    finally:
        _jobs.clear()
    return [build(*job) for job in jobs]


def build_functions(
    name: str,
    key: Mapping[str, Any],
    define: Callable[[], Mapping[str, Any]],
    target: object = None,
) -> Library:
    """Compile stand-alone TIR functions for a CPU, or take them from the cache.

    Parameters
    ----------
    name : str
        What they are, for people.
    key : mapping
        What `define` depends on, as JSON-able values.
    define : callable
        Returns the functions by symbol; called only when they are not cached.
    target : object, optional
        As in `build`.
    """
    built_for = parse_target(target)
    _check_backend(built_for, None)

    def generate(_: str) -> Artifact:
        return _compile(name, define(), built_for)

    content = {**key, "functions": name, "target": built_for.key()}
    return _Part(name, content, generate).obtain()[1]


def forget_loaded() -> None:
    """Drop what this process has loaded; the cache on disk stays."""
    _loaded.clear()


def _check_types(spec: object, variant: object) -> None:
    if not isinstance(spec, AttentionSpec):
        raise DTypeError(f"spec must be an AttentionSpec, got {type(spec).__name__}")
    if not isinstance(variant, AttentionVariant | None):
        raise DTypeError(
            f"variant must be an AttentionVariant, got {variant!r}; compose them from "
            "tvm_attn.variants, such as causal() & sliding_window(128)"
        )


def _check_backend(target: BuildTarget, schedule: str | None) -> None:
    if target.kind != "llvm":
        raise TargetError(f"there is no backend for {target} yet; build for a CPU: target='llvm'")
    if schedule not in (None, "cpu"):
        raise TargetError(f"schedule={schedule!r} is not a backend for {target}; use 'cpu' or None")


def _build_job(index: int) -> int:
    build(*_jobs[index])
    return index


class _Part:
    """A part of a kernel that is cached by itself: what it is made from, and how."""

    def __init__(self, name: str, content: Mapping[str, Any], generate: Callable[[str], Artifact]):
        self.name, self.key, self._generate = name, cache_key(content), generate

    def is_there(self) -> bool:
        """Whether nothing has to be compiled."""
        return self.key in _loaded or is_cached(self.name, self.key)

    def obtain(self) -> tuple[Artifact, Library]:
        """Return the part from memory, from the cache, or newly compiled."""
        if self.key not in _loaded:
            _loaded[self.key] = cached(
                self.name, self.key, _read, lambda: self._generate(self.key).to_bytes()
            )
        return _loaded[self.key]


@contextmanager
def _built_meanwhile(part: _Part, *, unless: bool) -> Iterator[None]:
    """Compile a part in a process of its own, into the cache, while something else is compiled.

    TVM compiles one thing at a time in a process. Should the other process fail, nothing is lost:
    the part is then compiled when it is needed, and the error is met there.
    """
    if unless or part.is_there():
        yield
        return
    _compat.import_tvm()
    process = multiprocessing.get_context("fork").Process(target=part.obtain, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.join(timeout=PATIENCE)
        process.kill()


def _read(path: Path) -> tuple[Artifact, Library]:
    artifact = read_artifact(path)
    [library] = artifact.libraries.values()
    return artifact, Library(library)


def _compile(name: str, functions: Mapping[str, Any], target: BuildTarget) -> Artifact:
    from tvm_attn.codegen.host import compile_host

    code = compile_host(functions, target)
    return Artifact({"name": name}, {name: code.library}, {"source.ll": code.source})


def _generate_planner(spec: AttentionSpec, hooks: Any) -> Artifact:
    """Compile the planner, for hosts unknown."""
    from tvm_attn.tir.planner import batch_planner, work_planner

    functions = {
        "plan_batch": batch_planner(spec.is_paged),
        "plan_work": work_planner(hooks.key_positions, hooks.parameters(at="plan")),
    }
    return _compile("planner", functions, portable_host())


def _generate_kernel(
    spec: AttentionSpec, hooks: Any, target: BuildTarget, phases: Phases
) -> Artifact:
    """Definition -> schedule -> code, for every query tile."""
    from tvm_attn.schedules.cpu import schedule
    from tvm_attn.schedules.tiles import cpu_tiles
    from tvm_attn.tir.attention import attention

    tiles = {f"attention_{tile.family}": tile for tile in cpu_tiles(spec, target)}
    defined = phases.record(
        "tir",
        {
            name: attention(spec, hooks, rows=tile.rows, block=tile.block, name=name)
            for name, tile in tiles.items()
        },
    )
    scheduled = phases.record(
        "scheduled",
        {name: _function(schedule(defined[name], tile).mod) for name, tile in tiles.items()},
    )
    code = _compile("attention", scheduled, target)
    phases.note("source.ll", code.texts["source.ll"])
    meta = {
        "use_softmax": hooks.variant.use_softmax,
        "families": [
            {"name": t.family, "rows": t.rows, "block": t.block, "overhead": t.overhead}
            for t in tiles.values()
        ],
        "target": target.key(),
        "cpu_flags": sorted(CPUINFO_FLAGS[f] for f in target.features if f in CPUINFO_FLAGS),
    }
    return Artifact(meta, code.libraries, phases.texts)


def _function(module: Any) -> Any:
    """Return the one function of a module."""
    [function] = module.functions.values()
    return function


def _silent(stage: str) -> None:
    """Report nothing."""
