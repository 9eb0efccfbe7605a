"""Compiling shipped kernels for an architecture that this machine need not have."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, repeat
from typing import Any

from tests.generating import read_inline_functions
from tvm_attn.codegen import cuda
from tvm_attn.codegen.children import Child
from tvm_attn.codegen.compilers import CudaCompiler, find_nvcc, find_nvrtc
from tvm_attn.codegen.resources import Resources
from tvm_attn.errors import CompileError
from tvm_attn.schedules.families import attention, query_tiles
from tvm_attn.schedules.tiles_cuda import CudaTile
from tvm_attn.schedules.tiles_sm90 import HopperTile
from tvm_attn.shipped import TUNED_DIMS, Configuration
from tvm_attn.target import parse_target
from tvm_attn.tir.hooks import Hooks

Tile = CudaTile | HopperTile
PRODUCT = re.compile(r"mma_sync_\w+\((.*)\);")
"""A multiplication of a warp: 4 sums, then 6 registers of operands, then the sums again."""
ARRAY = re.compile(r"^\s+(?:alignas\(\d+\) )?[\w ]+? (\w+)\[(\d+)\];", re.MULTILINE)
"""The declaration of an array in registers."""
SUMS, OPERANDS = 4, 6
SERIALISED = "C75"
"""In the assembler's report: multiplications of a warpgroup wait for each other."""
COSTS = {"decode": 3, "draft": 3, "wide": 4, "short": 4, "long": 5}
"""Families of query tiles, by the length of their source and the time to compile it."""
SOFT_CAP, SOFT_CAP_OF_HOPPER = 1.7, 4.5
"""How much longer the source is that caps scores: Hopper's own kernels write them in six places."""
FIND: Mapping[str, Callable[[], CudaCompiler | None]] = {"nvcc": find_nvcc, "nvrtc": find_nvrtc}


@dataclass(frozen=True)
class Kernel:
    """A query tile of a configuration: the best one, and those for when its registers spill."""

    configuration: Configuration
    tiles: Sequence[Tile]

    def compile(self, compilers: Iterable[CudaCompiler]) -> list[Outcome]:
        """Compile it with each compiler, as `build` does: the first tile that does not spill.

        Tiles that spilled by one compiler are left out for the next: if a later one does not spill
        there, `build` comes to one that does not.
        """
        generated: dict[Tile, cuda.Generated] = {}
        outcomes: list[Outcome] = []
        for compiler in compilers:
            first = self.tiles.index(outcomes[-1].tile) if outcomes else 0
            outcomes.append(self._compile(compiler, self.tiles[first:], generated))
        return outcomes

    def _compile(
        self, compiler: CudaCompiler, tiles: Sequence[Tile], generated: dict[Tile, cuda.Generated]
    ) -> Outcome:
        arch = parse_target(self.configuration.target).arch
        assert arch is not None
        outcome = Outcome(self, tiles[0], compiler.kind)
        for tile in tiles:
            try:
                if tile not in generated:
                    generated[tile] = self._generate(tile)
                source = generated[tile].device.source
                if unwritten := unwritten_operands(source):
                    return Outcome(self, tile, compiler.kind, error=f"{unwritten} is not written")
                if beyond := beyond_arrays(source):
                    return Outcome(self, tile, compiler.kind, error=f"{beyond} is out of bounds")
                done = cuda.compile_source(compiler, "attention", source, arch)
                if SERIALISED in done.report:
                    return Outcome(self, tile, compiler.kind, error="wgmma is serialised")
                [used] = cuda.measure(generated[tile], done.report, arch).values()
                outcome = Outcome(self, tile, compiler.kind, used)
            except CompileError as error:
                return Outcome(self, tile, compiler.kind, error=str(error))
            if not used.spills:
                break
        return outcome

    def _generate(self, tile: Tile) -> cuda.Generated:
        try:
            hooks = Hooks(self.configuration.make_variant())
            function = attention(self.configuration.spec, hooks, tile, "attention")
        except Exception as error:
            raise CompileError(f"{self} cannot be generated: {error}") from error
        target = parse_target(self.configuration.target)
        return cuda.generate({"attention": function}, target, "tirx")

    @property
    def family(self) -> str:
        """The family of its query tiles."""
        return self.tiles[0].family

    @cached_property
    def cost(self) -> float:
        """What it takes to compile, roughly; more threads have fewer registers, which may spill."""
        tile, dims = self.tiles[0], self.configuration.dims
        hopper = isinstance(tile, HopperTile)
        capped = SOFT_CAP_OF_HOPPER if hopper else SOFT_CAP
        factor = capped if "soft_cap" in self.configuration.variant else 1.0
        return COSTS[self.family] * factor * (tile.threads if hopper else 128 + max(dims))

    @cached_property
    def choices(self) -> set[tuple[str, Any, str]]:
        """Which choice of its configuration meets which schedule's family of query tiles.

        Head dims that are not tuned count as one choice.
        """
        tile = f"{self.tiles[0].schedule} {self.family}"
        chosen = {f.name: getattr(self.configuration, f.name) for f in fields(self.configuration)}
        if chosen["dims"] not in TUNED_DIMS:
            chosen["dims"] = "others"
        return {(name, choice, tile) for name, choice in chosen.items()}

    def __str__(self) -> str:
        """Return a line that names it."""
        return f"{self.configuration} {self.tiles[0].schedule} {self.family}"


def unwritten_operands(source: str) -> set[str]:
    """Return the arrays that a kernel multiplies with ``mma`` and writes nowhere."""
    operands = {
        register.split("[")[0].strip()
        for arguments in PRODUCT.findall(source)
        for register in arguments.split(",")[SUMS : SUMS + OPERANDS]
    }
    loaded = re.compile(r"(?:ldmatrix|cvt|ld_|widen)\w*\((.*)\);")
    assigned = set(re.findall(r"(\w+)\[\d+\] = ", source))
    filled = {name for call in loaded.findall(source) for name in re.findall(r"(\w+)\[\d+\]", call)}
    return operands - assigned - filled


def beyond_arrays(source: str) -> set[str]:
    """Return the elements of a kernel's arrays that are used and that there are not."""
    sizes: dict[str, int] = {}
    for name, size in ARRAY.findall(source):
        sizes[name] = max(sizes.get(name, 0), int(size))
    used = re.findall(r"\b(\w+)\[(\d+)\](?!;)", source)
    return {f"{name}[{at}]" for name, at in used if int(at) >= sizes.get(name, int(at) + 1)}


@dataclass(frozen=True)
class Outcome:
    """What came of compiling a kernel: what it uses, or an error."""

    kernel: Kernel
    tile: Tile
    compiler: str
    used: Resources | None = None
    error: str = ""

    @property
    def residents(self) -> int:
        """CTAs that a multiprocessor holds."""
        arch = parse_target(self.kernel.configuration.target).arch
        assert arch is not None
        return 0 if self.used is None else self.used.residents(arch)

    @property
    def complaint(self) -> str:
        """What is wrong: an error, spills, a stack, or fewer CTAs than the tile is for."""
        wanted = self.tile.residents
        if self.used is None:
            wrong = self.error
        elif self.used.spills:
            wrong = self.used.spills
        elif self.residents < wanted:
            wrong = f"{self.residents} CTAs fit, not {wanted}: {self.used}"
        else:
            wrong = ""
        return wrong and f"{self.kernel} by {self.compiler}: {wrong}"


def kernels(configuration: Configuration) -> list[Kernel]:
    """Return a kernel for each query tile of a configuration, of every schedule that serves it."""
    variant, target = configuration.make_variant(), parse_target(configuration.target)
    chosen, portable = (
        query_tiles(configuration.spec, variant, target, schedule) for schedule in (None, "sm80")
    )
    others = [tiles for tiles in portable if tiles not in chosen]
    return [Kernel(configuration, tiles) for tiles in (*chosen, *others)]


def cover(
    configurations: Sequence[Configuration], others: Sequence[Configuration] = ()
) -> list[Kernel]:
    """Return a kernel or more of each configuration: every choice meets every family of tiles.

    Those that compile fastest, as far as replacing one at a time comes to them. Kernels of `others`
    may be among them, where a choice has met a family in none but slow ones.
    """
    made = [sorted(kernels(each), key=lambda one: one.cost) for each in configurations]
    every, chosen = list(chain.from_iterable(made)), []
    missing = {choice for one in every for choice in one.choices}
    wanted = frozenset(missing)
    for some in chain(made, repeat(every)):
        if len(chosen) >= len(made) and not missing:
            break
        chosen.append(max(some, key=lambda one: len(one.choices & missing)))
        missing -= chosen[-1].choices
    every += chain.from_iterable(map(kernels, others))
    return _cheapest(chosen, sorted(every, key=lambda one: one.cost), wanted)


def _cheapest(
    chosen: list[Kernel], every: Sequence[Kernel], wanted: frozenset[tuple[str, Any, str]]
) -> list[Kernel]:
    """Leave out what is not needed, and replace the rest, until no single step is a gain."""
    met = Counter(choice for one in chosen for choice in one.choices)
    of = Counter(one.configuration for one in chosen)
    for one in sorted(chosen, key=lambda one: -one.cost):
        only = {choice for choice in one.choices & wanted if met[choice] == 1}
        is_last = of[one.configuration] == 1
        if not only and not is_last:
            return _cheapest([each for each in chosen if each is not one], every, wanted)
        for other in every:
            if other.cost >= one.cost:
                break
            is_same = other.configuration == one.configuration
            if only <= other.choices and (is_same or not is_last) and other not in chosen:
                left = [other if each is one else each for each in chosen]
                return _cheapest(left, every, wanted)
    return chosen


def compile_kernels(wanted: Sequence[Kernel], compilers: Sequence[CudaCompiler]) -> list[Outcome]:
    """Compile kernels one after the other, in a process of their own."""
    read_inline_functions()
    if any(compiler.kind == "nvrtc" for compiler in compilers):
        importlib.import_module("cuda.bindings.nvrtc")

    def work(_: object) -> list[Outcome]:
        return [outcome for kernel in wanted for outcome in kernel.compile(compilers)]

    with Child("shipped kernels", work) as child:
        return child.result()
