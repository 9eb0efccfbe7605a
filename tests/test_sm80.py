"""The kernel with ``mma.sync``, as it is written: the phases of the definition, by name."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from itertools import product
from typing import Any

import pytest
from tvm import tirx
from tvm.sym import Analyzer

from tests.compiling import beyond_arrays
from tests.generating import generate_kernel
from tvm_attn.schedules import sm80
from tvm_attn.schedules.primitives.fragments import ACCUMULATORS
from tvm_attn.schedules.primitives.shapes import COLUMNS, is_swizzled
from tvm_attn.schedules.primitives.staging import SharedTile, SwizzledTile
from tvm_attn.schedules.tiles_cuda import cuda_tiles
from tvm_attn.shipped import VARIANTS
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target
from tvm_attn.tir.attention import PHASES

PRIMITIVES = "tvm_attn.schedules.primitives."
NAMES = {"merge": "merge_unit"}
"""Phases that have another name here."""
GATHERS = {"gather_k": "qk", "gather_v": "pv"}
"""Copies of a block, and what they have to be begun before."""
EARLY = "load_q"
"""What is done for the next item in the last block of one, where there is room."""
ONCE = ("load_q", "store_state", "merge_unit")
"""What is done for an item, not for each of its blocks."""


def phase_names() -> list[str]:
    return [NAMES.get(phase, phase) for phase in PHASES]


@functools.cache
def tree() -> ast.Module:
    return ast.parse(inspect.getsource(sm80))


def function(name: str) -> ast.FunctionDef:
    [found] = [n for n in ast.walk(tree()) if isinstance(n, ast.FunctionDef) and n.name == name]
    return found


def defined(module: ast.Module) -> set[str]:
    return {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}


def phases_of(node: ast.AST) -> list[str]:
    """Return the phases that are called in a piece of code, in the order they are written in."""
    calls = [
        child
        for child in ast.walk(node)
        if isinstance(child, ast.Call)
        and isinstance(child.func, ast.Name)
        and child.func.id in phase_names()
    ]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [call.func.id for call in calls if isinstance(call.func, ast.Name)]


def block_loop() -> ast.While:
    [loop] = [node for node in function("attend").body if isinstance(node, ast.While)]
    return loop


def test_every_phase_is_called_and_no_phase_is_the_kernels_own() -> None:
    called = {name for f in ("begin", "attend", "attention") for name in phases_of(function(f))}
    assert called == set(phase_names())
    assert not defined(tree()) & set(phase_names())


def test_phases_are_primitives_of_these_names() -> None:
    modules = {
        alias.name: str(node.module)
        for node in ast.walk(tree())
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is None
    }
    for name in phase_names():
        assert modules[name].startswith(PRIMITIVES), name
        home = importlib.import_module(modules[name])
        assert name in defined(ast.parse(inspect.getsource(home)))
        assert getattr(sm80, name) is getattr(home, name)


def test_a_block_goes_through_the_phases_in_the_order_of_the_definition() -> None:
    written = phases_of(block_loop())
    blockwise = [name for name in phase_names() if name not in ONCE]
    assert set(written) == set(blockwise)
    computed = [name for name in written if name not in GATHERS]
    assert list(dict.fromkeys(computed)) == [name for name in blockwise if name not in GATHERS]
    for copied, needed in GATHERS.items():
        assert written.index(copied) < written.index(needed)


def test_an_item_begins_with_its_queries_and_ends_with_its_state() -> None:
    assert phases_of(function("begin")) == list(GATHERS)
    kernel = phases_of(function("attention"))
    assert set(kernel) == set(ONCE)
    assert list(dict.fromkeys(kernel)) == [name for name in phase_names() if name in ONCE]


def test_a_block_is_computed_alike_for_every_number_of_stages() -> None:
    """What is copied when depends on the stages; the arithmetic does not."""
    written = phases_of(block_loop())
    counts = {name: written.count(name) for name in set(written) - set(GATHERS)}
    assert counts == {"qk": 2, "logits": 1, "mask": 1, "softmax": 1, "pv": 1}


def test_queries_come_early_only_where_warps_hold_theirs() -> None:
    [guarded] = [
        node
        for node in ast.walk(block_loop())
        if isinstance(node, ast.If) and ast.unparse(node.test) == "cta.tile.holds_queries"
    ]
    assert ast.unparse(guarded.body[0]).startswith("take_queries(")
    assert ast.unparse(block_loop()).count("take_queries(") == 1
    assert phases_of(function("take_queries")) == [EARLY]
    assert EARLY not in phases_of(block_loop())


def number(expr: Any) -> int:
    """Evaluate sums and exclusive ors of constants."""
    expr = Analyzer().simplify(expr)
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    a, b = number(expr.a), number(expr.b)
    return a + b if isinstance(expr, tirx.Add) else a ^ b


@pytest.mark.parametrize("kind", [SharedTile, SwizzledTile])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256])
def test_operands_are_where_they_were_copied_to(kind: type[SharedTile], dim: int) -> None:
    tile = kind(None, tirx.const(0, "uint32"), 32, dim, 2, "bfloat16")
    for row, chunk in product(range(16), range(2)):
        corner = Analyzer().simplify(tile.pointer(1, row, chunk * tile.chunk))
        for rows, columns in product((0, 16), range(0, dim, 16)):
            wanted = tile.pointer(1, row + rows, columns + chunk * tile.chunk)
            assert number(tile.corner_pointer(corner, rows, columns)) == number(wanted)


def test_rows_of_several_lines_are_not_padded() -> None:
    swizzled = [dim for dim in range(16, 257, 16) if is_swizzled(dim, "bfloat16")]
    assert swizzled == [128, 192, 256]
    assert is_swizzled(256, "float8_e4m3fn") and not is_swizzled(128, "float8_e4m3fn")


@pytest.mark.parametrize(("dim", "is_first"), [(64, True), (128, True), (256, False)])
def test_copies_begin_in_the_first_step_where_registers_are_short(dim: int, is_first: bool) -> None:
    spec, target = AttentionSpec(8, 2, dim, q_dtype="bfloat16"), parse_target("sm_90")
    tile = cuda_tiles(spec, target)[1]
    body = generate_kernel(spec, VARIANTS["full"](spec), tile, target).body
    calls = re.findall(r"(mma_sync|cp_async_cg)\w*\(", body)
    first, last = calls.index("mma_sync"), len(calls) - calls[::-1].index("mma_sync")
    products = calls[first:last]
    before = products[: len(products) - products[::-1].index("cp_async_cg")].count("mma_sync")
    assert before > 0
    assert (before < tile.row_tiles * tile.block // COLUMNS) == is_first


@pytest.mark.parametrize("dims", [(16, 32), (192, 128), (128, 256), (256, 64), (48, 240)])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_keys_and_values_of_other_dims_are_copied_by_registers_there_are(
    dims: tuple[int, int], kv_dtype: str
) -> None:
    spec = AttentionSpec(8, 2, *dims, q_dtype="bfloat16", kv_dtype=kv_dtype)
    target = parse_target("sm_90")
    for tile in cuda_tiles(spec, target):
        assert not beyond_arrays(generate_kernel(spec, VARIANTS["full"](spec), tile, target).body)


def test_places_are_looked_up_and_noted_without_branches() -> None:
    """Between multiplications there is then nothing that parts them."""
    spec = AttentionSpec(8, 2, 128, q_dtype="bfloat16", page_size=16)
    target = parse_target("sm_90")
    body = generate_kernel(spec, VARIANTS["full"](spec), cuda_tiles(spec, target)[1], target).body
    loop = body[body.index("mma_sync") :]
    assert "note_row(" in loop and not re.search(r"if \([^\n]*\{\n\s*note_row\(", loop)


BARE = re.compile(r"exp2f\(\w+\[\d+\]\)")
"""The weight of a score that is relative already: no factor, no reference."""
CAPPED = re.compile(r"exp2f\(\(\((\w+\[\d+\]) \* \(.*\(\1 \* \1\)")
"""The weight of a product that becomes a score where it is weighed, by a series of its square."""


@pytest.mark.parametrize(
    ("name", "bare", "capped"),
    [("causal", False, False), ("alibi", True, False), ("soft_cap", False, True)],
)
def test_folded_hooks_make_scores_relative_to_the_references(
    name: str, bare: bool, capped: bool
) -> None:
    """A bounded one where products are weighed, in the basic blocks of multiplications."""
    spec, target = AttentionSpec(8, 2, 128, q_dtype="bfloat16"), parse_target("sm_90")
    tile = cuda_tiles(spec, target)[1]
    body = generate_kernel(spec, VARIANTS[name](spec), tile, target).body
    scores = tile.row_tiles * tile.block // COLUMNS * ACCUMULATORS
    assert len(BARE.findall(body)) == bare * scores
    assert len(CAPPED.findall(body)) == capped * scores
