"""The command ``tvm-attn``: builds, reads and plans kernels, runs the demo, measures.

Needs the extra ``cli``. An error of the library ends a command with one line and exit status 2.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import platform
import re
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np

try:
    import typer
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.table import Table
except ImportError as missing:
    raise SystemExit(
        f"the command tvm-attn needs {missing.name}; install it with: pip install 'tvm-attn[cli]'"
    ) from missing

import tvm_attn as ta
from tvm_attn import bench as benchmarks
from tvm_attn import env, variants
from tvm_attn.demo.console import run_demo
from tvm_attn.demo.options import DemoOptions
from tvm_attn.errors import PlanError, TvmAttnError, VariantError
from tvm_attn.pipeline import tile_tables
from tvm_attn.runtime.gantt import gantt_svg
from tvm_attn.spec import AttentionSpec

app = typer.Typer(
    help="Attention kernels for LLM serving, generated with Apache TVM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="List or clear the compiled kernels on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

VARIANTS: dict[str, tuple[Callable[..., Any], Callable[[str], Any] | None]] = {
    "alibi": (variants.alibi, None),
    "causal": (variants.causal, None),
    "custom_mask": (variants.custom_mask, None),
    "sigmoid": (variants.sigmoid, float),
    "sink": (variants.sink, None),
    "soft_cap": (variants.soft_cap, float),
    "window": (variants.sliding_window, int),
}
"""Names in ``--variant``: the constructor, and how its argument is read."""

ARTIFACT = re.compile(r".+-[0-9a-f]{32}\.(tar|tar\.lock|json)")
"""Names of the cache's own files."""

MAX_TOKENS = 2**29
"""Of a batch to look at; no request may have more."""

WIDTH = 1000
"""Columns that a table may take: a terminal breaks long lines, nothing is cut for a pipe."""

PACKAGES = (
    *("tvm-attn", "apache-tvm", "apache-tvm-ffi", "torch", "numpy"),
    *("cuda-bindings", "nvidia-cuda-nvrtc"),
)

VariantOption = Annotated[
    str, typer.Option("--variant", help=f"Comma-separated: {', '.join(VARIANTS)}; name=value.")
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", help='Such as "cuda -arch=sm_90" or "llvm -mcpu=native". [default: this CPU]'
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Text(str, Enum):
    """What ``show`` can show."""

    TIR = "tir"
    SCHEDULED = "scheduled"
    SOURCE = "source"
    PTX = "ptx"
    SASS = "sass"
    RESOURCES = "resources"
    TILES = "tiles"


LEXERS = {
    "cpu": {Text.TIR: "python", Text.SCHEDULED: "python", Text.SOURCE: "llvm"},
    "cuda": {
        **{Text.TIR: "python", Text.SCHEDULED: "python"},
        **{Text.SOURCE: "cuda", Text.PTX: "ptx"},
    },
}
"""How to colour what ``show`` shows, by device."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Parameters
    ----------
    arguments : sequence of str, optional
        Instead of those of the process.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="tvm-attn")
    except (TvmAttnError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"tvm-attn: {type(error).__name__}: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def make_spec(
    *,
    num_qo_heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    num_kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Head dim of queries and keys.")] = 128,
    head_dim_vo: Annotated[
        int | None, typer.Option(help="Head dim of values. [default: as --head-dim]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of queries and outputs.")] = "bfloat16",
    kv_dtype: Annotated[
        str | None, typer.Option(help="Dtype of the KV cache. [default: as --dtype]")
    ] = None,
    kv_layout: Annotated[str, typer.Option(help="NHD or HND.")] = "NHD",
    page_size: Annotated[int, typer.Option(help="Tokens per page; 0 is ragged K/V.")] = 16,
) -> AttentionSpec:
    """Return the spec that a command's options describe."""
    return AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=head_dim_vo,
        q_dtype=dtype,
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
        page_size=page_size or None,
    )


def with_spec(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `make_spec`, in place of its parameter ``spec``."""

    @functools.wraps(command)
    def combined(**given: Any) -> None:
        options = {name: given.pop(name) for name in described}
        command(spec=make_spec(**options), **given)

    described = inspect.signature(make_spec, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters
    parameters = [*(p for p in own.values() if p.name != "spec"), *described.values()]
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    combined.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    combined.__annotations__ = {p.name: p.annotation for p in keywords}
    return combined


@app.command()
def demo(
    requests: Annotated[int, typer.Option(help="Requests of the trace.")] = DemoOptions.requests,
    seed: Annotated[int, typer.Option(help="Of tokens, tables and samples.")] = DemoOptions.seed,
    dtype: Annotated[str, typer.Option(help="Of queries, KV cache, outputs.")] = DemoOptions.dtype,
    as_json: JsonOption = False,
) -> None:
    """Serve recorded traffic on this CPU and check what is computed; exits 1 on a failure."""
    options = DemoOptions(requests=requests, seed=seed, dtype=dtype)
    raise typer.Exit(0 if run_demo(options, as_json=as_json).ok else 1)


@app.command()
@with_spec
def build(
    *,
    spec: AttentionSpec,
    variant: VariantOption = "",
    target: TargetOption = None,
    export: Annotated[Path | None, typer.Option(help="Write the kernel to this file.")] = None,
) -> None:
    """Build a kernel, or take it from the cache, and print what it is."""
    kernel = _build(spec, variant, target)
    print(kernel)
    if export is not None:
        kernel.export(export)
        print(f"  written to {export}, {export.stat().st_size:,} bytes")


@app.command()
@with_spec
def show(
    *,
    what: Annotated[Text, typer.Argument(help="What to print.")],
    spec: AttentionSpec,
    variant: VariantOption = "",
    target: TargetOption = None,
) -> None:
    """Print what a kernel consists of, from its definition to its resources."""
    if what is Text.TILES:
        for table in tile_tables(spec, parse_variant(variant), target):
            print(f"{table.title}:" if table.rows else table.title)
            _print_table(table.columns, table.rows)
        return
    kernel = _build(spec, variant, target)
    content = getattr(kernel, what.value)
    text = content if isinstance(content, str) else json.dumps(content, indent=2)
    lexer = LEXERS[kernel.device].get(what)
    if sys.stdout.isatty() and lexer:
        Console().print(Syntax(text, lexer, background_color="default"))
    else:
        print(text)


@app.command()
@with_spec
def plan(
    *,
    spec: AttentionSpec,
    qo_lens: Annotated[str, typer.Option(help="Query tokens of each request.")] = "1,1,512",
    kv_lens: Annotated[str, typer.Option(help="KV tokens of each request.")] = "400,80,512",
    variant: VariantOption = "causal",
    target: TargetOption = None,
    ctas: Annotated[
        int | None, typer.Option(help="CTAs to deal to. [default: the CPU's threads]")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw it to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan a batch of the given lengths, and draw how its work is dealt to the machine."""
    qo, kv = _lengths("--qo-lens", qo_lens), _lengths("--kv-lens", kv_lens)
    if len(qo) != len(kv):
        raise PlanError(
            f"--qo-lens has {len(qo)} lengths, --kv-lens {len(kv)}; give one of each per request"
        )
    kernel = _build(spec, variant, target)
    kernel = kernel if ctas is None else kernel.with_ctas(ctas)
    planned = kernel.plan(*_batch(qo, kv, spec.page_size))
    print(planned.to_json() if as_json else planned)
    if svg is not None:
        svg.write_text(gantt_svg(planned.work), encoding="utf-8")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The benchmark.")] = "cpu",
) -> None:
    """Measure this machine. What follows the name is for the benchmark: see bench cpu -- --help."""
    modules = (importlib.import_module(m.name) for m in _modules_of(benchmarks))
    runnable = {m.__name__.rsplit(".", 1)[1]: m for m in modules if hasattr(m, "main")}
    if name not in runnable:
        raise typer.BadParameter(f"{name!r} is none of: {', '.join(runnable)}")
    raise typer.Exit(runnable[name].main(context.args))


@cache_app.command("list")
def list_cache(as_json: JsonOption = False) -> None:
    """List the compiled kernels in the cache."""
    files = [path for path in _cached_files() if path.suffix == ".tar"]
    sizes = {path.name: path.stat().st_size for path in files}
    if as_json:
        print(json.dumps({"directory": str(env.cache_dir()), "files": sizes}))
        return
    print(f"{env.cache_dir()}: {_kernels(len(files))}, {sum(sizes.values()):,} bytes")
    if files:
        _print_table(("file", "bytes"), [(name, f"{size:,}") for name, size in sizes.items()])


@cache_app.command("clear")
def clear_cache() -> None:
    """Delete the compiled kernels in the cache, and nothing else that is in its directory."""
    files = _cached_files()
    for path in files:
        path.unlink(missing_ok=True)
    deleted = sum(path.suffix == ".tar" for path in files)
    print(f"{env.cache_dir()}: {_kernels(deleted)} deleted")


@app.command()
def info(as_json: JsonOption = False) -> None:
    """Print versions, machine and settings: what a bug report needs."""
    facts = {
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "system": platform.platform(),
        "target": str(ta.parse_target()),
        "threads": str(env.num_threads()),
        "cache": str(env.cache_dir()),
        "nvcc": str(env.cuda_program("nvcc") or "not found"),
        **{variable.name: variable.read() or "(unset)" for variable in env.VARIABLES},
    }
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_table(("", ""), list(facts.items()))


def parse_variant(text: str) -> ta.AttentionVariant | None:
    """Return the variant that ``"causal,window=128,soft_cap=30"`` names, None if it is empty.

    Raises
    ------
    VariantError
        If a name is unknown, or its value cannot be read.
    """
    parts = [_parse_part(part.strip()) for part in text.split(",") if part.strip()]
    return functools.reduce(lambda a, b: a & b, parts) if parts else None


def _parse_part(part: str) -> Any:
    name, equals, value = part.partition("=")
    if name not in VARIANTS:
        raise VariantError(f"--variant: {name!r} is none of {', '.join(VARIANTS)}")
    make, read = VARIANTS[name]
    if not equals:
        return make()
    if read is None:
        raise VariantError(f"--variant: {name} takes no value, got {part!r}")
    try:
        return make(read(value))
    except ValueError as error:
        raise VariantError(f"--variant: {part!r}: {error}") from error


def _build(spec: AttentionSpec, variant: str, target: str | None) -> ta.AttentionModule:
    return ta.build(spec, parse_variant(variant), target)


def _lengths(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise PlanError(f"{option}={text!r} must be lengths of at least 0, such as 1,1,512")
    lengths = [int(word) for word in words]
    if sum(lengths) > MAX_TOKENS:
        raise PlanError(f"{option} has {sum(lengths)} tokens, more than {MAX_TOKENS}")
    return lengths


def _batch(qo_lens: list[int], kv_lens: list[int], page_size: int | None) -> tuple[Any, ...]:
    """Return the arguments of `plan` for a batch whose pages follow one another."""
    qo_indptr = [0, *accumulate(qo_lens)]
    if page_size is None:
        return qo_indptr, [0, *accumulate(kv_lens)]
    kv_indptr = [0, *accumulate(-(-kv_len // page_size) for kv_len in kv_lens)]
    last_page_len = [(kv_len - 1) % page_size + 1 for kv_len in kv_lens]
    return qo_indptr, kv_indptr, np.arange(kv_indptr[-1], dtype=np.int32), last_page_len


def _modules_of(package: Any) -> list[pkgutil.ModuleInfo]:
    return list(pkgutil.iter_modules(package.__path__, f"{package.__name__}."))


def _cached_files() -> list[Path]:
    directory = env.cache_dir()
    if not directory.is_dir():
        return []
    kernels = sorted(path for path in directory.iterdir() if ARTIFACT.fullmatch(path.name))
    return [*kernels, *sorted((directory / env.FAILED).glob("*.cu"))]


def _kernels(count: int) -> str:
    return f"{count} kernel{'s'[: count != 1]}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ta.__version__ if package == "tvm-attn" else "not installed"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, box=None, show_header=any(columns), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(width=WIDTH).print(table, highlight=False, markup=False)
