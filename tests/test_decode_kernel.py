"""The decode kernel as it is written: the phases of the definition, by name, and no waiting."""

from __future__ import annotations

import ast
import inspect
from itertools import product

import pytest
from tvm import tirx
from tvm.sym import Analyzer

from tests.compiling import FIND, beyond_arrays, unwritten_operands
from tests.generating import generate_kernel
from tvm_attn.codegen.cuda import compile_source
from tvm_attn.runtime.disassembly import disassemble
from tvm_attn.schedules import decode
from tvm_attn.schedules.families import tiles_to_try
from tvm_attn.schedules.primitives import ahead, join
from tvm_attn.schedules.primitives.shapes import CHUNK_BYTES
from tvm_attn.schedules.primitives.staging import SwizzledTile
from tvm_attn.schedules.tiles_cuda import Kind
from tvm_attn.shipped import VARIANTS
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target
from tvm_attn.tir.attention import PHASES

NAMES = {"merge": "merge_unit"}
"""Phases that have another name here."""
GATHERS = ["gather_k", "gather_v"]
"""Phases of blocks to come, which are run ahead of the others."""
HOPPER = parse_target("sm_90")


def calls(function: ast.AST) -> list[str]:
    """Return the names that are called in a piece of code, in the order they are written in."""
    found = [
        child
        for child in ast.walk(function)
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name)
    ]
    found.sort(key=lambda call: (call.lineno, call.col_offset))
    return [call.func.id for call in found if isinstance(call.func, ast.Name)]


def function(module: object, name: str) -> ast.FunctionDef:
    tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    [found] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    return found


def phases_of(code: ast.AST) -> list[str]:
    wanted = [NAMES.get(phase, phase) for phase in PHASES]
    return [name for name in calls(code) if name in wanted]


def test_blocks_go_through_the_phases_in_the_order_of_the_definition() -> None:
    [loop] = [node for node in function(decode, "attend").body if isinstance(node, ast.While)]
    assert phases_of(loop) == ["qk", "logits", "mask", "softmax", "pv"]
    assert phases_of(function(ahead, "run_ahead")) == GATHERS


def test_every_phase_is_there() -> None:
    written = {
        *phases_of(function(decode, "attention")),
        *phases_of(function(decode, "attend")),
        *phases_of(function(decode, "prepare")),
        *phases_of(function(decode, "begin")),
        *phases_of(function(ahead, "run_ahead")),
    }
    assert written == {NAMES.get(phase, phase) for phase in PHASES}


def test_warps_wait_for_one_another_only_between_items() -> None:
    for module, name in ((decode, "attend"), (decode, "prepare"), (ahead, "run_ahead")):
        assert "cta_sync" not in ast.unparse(function(module, name))
    assert "cta_sync" in ast.unparse(function(join, "store_state"))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_widened_in_registers(kv_dtype: str) -> None:
    problem = AttentionSpec(8, 2, 128, q_dtype="bfloat16", kv_dtype=kv_dtype)
    tile, *_ = tiles_to_try(problem, HOPPER, "decode", (False, False))
    kernel = generate_kernel(problem, VARIANTS["causal"](problem), tile, HOPPER)
    assert f"widen_{kv_dtype.split('_')[1].removesuffix('fn')}(" in kernel.body
    assert ".f32.f16.f16.f32" in kernel.source and "f32.bf16.bf16" not in kernel.source


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("columns", [16, 48, 64, 80, 96, 112, 128, 192, 256])
def test_a_tile_without_padding_has_no_bank_conflicts(columns: int, dtype: str) -> None:
    """Eight rows of a matrix are in eight groups of banks, and every element has its own place."""
    rows, stages, line = 16, 2, 128
    tile = SwizzledTile(None, 0, rows, columns, stages, dtype)
    places = [
        [int(tile.index(stage, row, column)) for column in range(0, columns, tile.chunk)]
        for stage, row in product(range(stages), range(rows))
    ]
    chunks = sorted(place for row in places for place in row)
    assert chunks == list(range(0, stages * rows * columns, tile.chunk))
    for row, chunk in product(range(0, stages * rows, 8), range(columns // tile.chunk)):
        matrix = [places[row + i][chunk] * CHUNK_BYTES // tile.chunk % line for i in range(8)]
        assert sorted(matrix) == list(range(0, line, CHUNK_BYTES))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("columns", [16, 48, 64, 80, 128, 192, 256])
def test_pairs_of_chunks_are_where_their_elements_are(columns: int, dtype: str) -> None:
    tile = SwizzledTile(None, tirx.const(0, "uint32"), 16, columns, 2, dtype)
    size = CHUNK_BYTES // tile.chunk
    for row, chunk in product(range(16), range(columns // tile.chunk)):
        pointer = Analyzer().simplify(tile.chunk_pointer(1, row, chunk % 2, chunk // 2))
        assert int(pointer) == int(tile.index(1, row, chunk * tile.chunk)) * size


def test_operands_that_nothing_writes_are_found() -> None:
    problem = AttentionSpec(8, 2, 128, q_dtype="bfloat16")
    tile, *_ = tiles_to_try(problem, HOPPER, "decode", (False, False))
    kernel = generate_kernel(problem, VARIANTS["causal"](problem), tile, HOPPER)
    assert not unwritten_operands(kernel.body)
    product = next(line for line in kernel.body.splitlines() if "mma_sync" in line)
    operand = product.split(",")[4].split("[")[0].strip()
    spoilt = kernel.body.replace(product, product.replace(f"{operand}[", "nowhere["))
    assert unwritten_operands(spoilt) == {"nowhere"}


def test_elements_beyond_arrays_are_found() -> None:
    source = "\n  float o[4];\n  unsigned long long others_ptr[2];\n  o[3] = others_ptr[1] + x[9];"
    assert not beyond_arrays(source)
    assert beyond_arrays(source.replace("others_ptr[1]", "others_ptr[2]")) == {"others_ptr[2]"}


def test_rows_of_pages_and_ragged_tokens_differ_in_the_table_alone() -> None:
    for page_size in (16, None):
        problem = AttentionSpec(8, 2, 128, q_dtype="bfloat16", page_size=page_size)
        tile, *_ = tiles_to_try(problem, HOPPER, "decode", (False, False))
        kernel = generate_kernel(problem, VARIANTS["full"](problem), tile, HOPPER)
        assert ("kv_indices_ptr[" in kernel.body) == (page_size is not None)


@pytest.mark.parametrize("family", ["decode", "wide"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_warps_never_count_as_diverged(family: Kind, kv_dtype: str) -> None:
    """Else every shuffle of the loop would first see to it that they are not."""
    compiler = FIND["nvcc"]()
    if compiler is None:
        pytest.skip("no nvcc")
    problem = AttentionSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype=kv_dtype, page_size=16)
    tile, *_ = tiles_to_try(problem, HOPPER, family, (False, False))
    kernel = generate_kernel(problem, VARIANTS["causal"](problem), tile, HOPPER)
    assert HOPPER.arch is not None
    made = compile_source(compiler, "attention", kernel.source, HOPPER.arch)
    assert "0 bytes stack frame, 0 bytes spill stores" in made.report
    assert "BRA.DIV" not in disassemble(made.cubin)
