"""What the pipeline's parts are made of: a planner, and kernels for every query tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tvm_attn._host import CPUINFO_FLAGS
from tvm_attn.codegen.phases import Phases
from tvm_attn.runtime.artifact import Artifact
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import Arch, BuildTarget, portable_host
from tvm_attn.variant import AttentionVariant

PLANNER, DEVICE_PLANNER = "planner", "device_planner"
"""Parts of a kernel that plan: on the host, and on a GPU."""
PATIENCE = 60.0
"""Seconds to wait for a part that another process compiles, once it is needed."""
CACHED_BYTES = 2**23
"""Bytes of K and V that work at a time should read: less than the second-level cache has."""


def query_tiles(
    spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget, schedule: str | None
) -> dict[str, list[Any]]:
    """Return the query tiles of a kernel by symbol, the best first."""
    ranked: list[list[Any]]
    if target.arch:
        from tvm_attn.schedules import families

        ranked = families.query_tiles(spec, variant, target, schedule)
    else:
        from tvm_attn.schedules.tiles import cpu_tiles

        ranked = [[tile] for tile in cpu_tiles(spec, target)]
    return {f"attention_{tiles[0].family}": tiles for tiles in ranked}


def explain_tiles(spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget) -> list[Any]:
    """Return tables of the query tiles that there are to choose from; see `tile_tables`."""
    from tvm_attn.schedules.families import makes_of
    from tvm_attn.schedules.tile_tables import hopper_tables, tile_tables

    tables = list(tile_tables(spec, target, makes_of(variant)))
    if target.arch and "wgmma" in target.arch.features:
        tables[-1:-1] = hopper_tables(spec, variant, target)
    return tables


def explain_choice(
    spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget, schedule: str | None
) -> str:
    """Return why a card's own kernel was not chosen; empty if it was, or has none, or was asked."""
    if target.arch is None or "wgmma" not in target.arch.features or schedule is not None:
        return ""
    from tvm_attn.schedules.tiles_sm90 import refuses

    return refuses(spec, variant, target)


def compile_functions(
    name: str, functions: Mapping[str, Any], target: BuildTarget, dialect: str = "s_tir"
) -> Artifact:
    """Compile functions for a CPU or a GPU."""
    from tvm_attn.codegen.cuda import compile_cuda
    from tvm_attn.codegen.host import compile_host
    from tvm_attn.codegen.kernels import warn_of_spills

    if target.arch is None:
        host = compile_host(functions, target)
        return Artifact({"name": name}, {name: host.library}, {"source.ll": host.source})
    code = compile_cuda(functions, target, dialect=dialect)
    warn_of_spills(code.resources)
    return Artifact(
        {"name": name, "resources": code.resources},
        {name: code.library},
        {"source.cu": code.source, "kernel.ptx": code.ptx},
        {name: {name: code.device}},
    )


def generate_planner(spec: AttentionSpec, hooks: Any) -> Artifact:
    """Compile the planner, for hosts unknown."""
    from tvm_attn.codegen.host import BRANCHING, compile_host
    from tvm_attn.tir.planner import batch_planner, work_planner
    from tvm_attn.tir.planner_bitmaps import Bitmaps
    from tvm_attn.tir.planner_lists import ListMaker
    from tvm_attn.tir.planner_short import short_planner

    maker = ListMaker(hooks.key_positions, hooks.parameters(at="plan"), Bitmaps.of(hooks))
    functions = {
        "plan_short": short_planner(spec.is_paged, maker),
        "plan_batch": batch_planner(spec.is_paged),
        "plan_work": work_planner(maker),
    }
    host = compile_host(maker.beside(functions), portable_host(), BRANCHING)
    return Artifact({"name": PLANNER}, {PLANNER: host.library}, {"source.ll": host.source})


def generate_device_planner(
    spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget
) -> Artifact:
    """Compile the planner for a GPU."""
    from tvm_attn.schedules.device_planner import device_planner
    from tvm_attn.tir.hooks import Hooks

    assert target.arch is not None
    hooks, rows = Hooks(variant), _device_rows(target.arch)
    bounds = (hooks.key_positions, hooks.parameters(at="plan"))
    functions = {"plan_on_device": device_planner(spec.is_paged, rows, *bounds)}
    return compile_functions(DEVICE_PLANNER, functions, target, dialect="tirx")


def generate_kernel(
    spec: AttentionSpec,
    hooks: Any,
    target: BuildTarget,
    schedule: str | None,
    phases: Phases,
    beside: Mapping[str, Callable[..., Any]],
) -> Artifact:
    """Definition -> schedule -> code, for every query tile; `beside` is done in other processes."""
    from tvm_attn.codegen.children import meanwhile
    from tvm_attn.codegen.kernels import cpu_kernels, cuda_kernels, residents
    from tvm_attn.schedules import cpu
    from tvm_attn.tir.attention import attention

    ranked = query_tiles(spec, hooks.variant, target, schedule)

    def define(name: str, tile: Any) -> Any:
        return attention(spec, hooks, rows=tile.rows, block=tile.block, name=name)

    if target.arch is None:
        tiles = {name: best for name, [best] in ranked.items()}
        with meanwhile(beside, PATIENCE):
            made = cpu_kernels(
                list(tiles),
                lambda name: define(name, tiles[name]),
                lambda name, defined: _function(cpu.schedule(defined, tiles[name]).mod),
                target,
                phases,
            )
        shares = dict.fromkeys(tiles, 1)
    else:
        from tvm_attn.schedules import families

        def way(name: str, tile: Any) -> Any:
            return partial(define, name, tile), partial(families.attention, spec, hooks, tile, name)

        ways = {name: [way(name, tile) for tile in best] for name, best in ranked.items()}
        made, chosen = cuda_kernels(ways, target, phases, beside)
        tiles = {name: best[chosen[name]] for name, best in ranked.items()}
        shares = {
            name: residents(name, used, tiles[name].residents, target.arch)
            for name, used in made.resources.items()
        }
    described = [_family(tile, shares[name], spec, target) for name, tile in tiles.items()]
    return Artifact(
        {**_facts(hooks, target), "families": described, "resources": made.resources},
        {"attention": made.library},
        made.texts,
        {"attention": made.devices} if made.devices else {},
    )


def _family(tile: Any, residents: int, spec: AttentionSpec, target: BuildTarget) -> dict[str, Any]:
    """Return what the runtime has to know of a query tile."""
    on_gpu = target.arch is not None
    return {
        **{"name": tile.family, "rows": tile.rows},
        "schedule": tile.schedule if on_gpu else "cpu",
        **{"block": tile.granule if on_gpu else tile.block},
        **{"overhead": tile.overhead, "residents": residents},
        "cached_tokens": _cached_tokens(spec) if on_gpu and tile.family == "long" else 0,
        **({"clusters": tile.clusters} if on_gpu and tile.clusters is not None else {}),
        **({"replaces": "decode"} if tile.family == "wide" else {}),
    }


def _cached_tokens(spec: AttentionSpec) -> int:
    """Return the KV tokens of a head that a GPU's second-level cache holds beside all else."""
    from tvm_attn.tir.signature import itemsize

    return CACHED_BYTES // ((spec.head_dim_qk + spec.dim_vo) * itemsize(str(spec.kv_dtype)))


def _facts(hooks: Any, target: BuildTarget) -> dict[str, Any]:
    """Return what the runtime has to know of a variant and a target."""
    features = () if target.arch else target.features
    return {
        "use_softmax": hooks.variant.use_softmax,
        "target": target.key(),
        "device": "cuda" if target.arch else "cpu",
        "device_rows": _device_rows(target.arch) if target.arch else 0,
        "cpu_flags": sorted(CPUINFO_FLAGS[f] for f in features if f in CPUINFO_FLAGS),
    }


def _device_rows(arch: Arch) -> int:
    """Return how many units and pieces a GPU's planner has room for."""
    from tvm_attn.schedules.device_planner import rows_of

    return rows_of(arch)


def _function(module: Any) -> Any:
    """Return the one function of a module."""
    [function] = module.functions.values()
    return function
