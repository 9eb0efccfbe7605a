"""CPU schedules: every mapping computes what is defined; and what schedules are made of."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tests import rotated
from tests.batches import Batch, random_batch
from tvm_attn import variants
from tvm_attn.codegen.vector_math import vectorize_math
from tvm_attn.errors import SpecError
from tvm_attn.schedules.cpu import schedule
from tvm_attn.schedules.lanes import _loops, _tree
from tvm_attn.schedules.tiles import TileConfig, cpu_tiles
from tvm_attn.shipped import rotary
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target
from tvm_attn.tir.attention import PHASES, attention
from tvm_attn.tir.hooks import Hooks
from tvm_attn.variant import AttentionVariant

TARGET = parse_target("llvm")
CAUSAL = variants.causal()


def spec(group: int = 2, dim: int = 32, dim_vo: int | None = None, **fields: Any) -> AttentionSpec:
    fields = {"q_dtype": "float32", "page_size": 4, **fields}
    return AttentionSpec(2 * group, 2, dim, dim_vo, **fields)


def work_list(batch: Batch, rows: int, piece: int) -> dict[str, torch.Tensor]:
    """Deal units to two CTAs in turn, each cut into pieces of `piece` keys; slots hold NaN."""
    group, fmt = batch.spec.group_size, batch.fmt
    items: list[list[int]] = []
    merges, slots = [], [0]
    lens = zip(fmt.qo_len.tolist(), fmt.kv_len.tolist(), strict=True)
    for b, (qo_len, kv_len) in enumerate(lens):
        for row, head in itertools.product(range(0, qo_len * group, rows), range(2)):
            unit = [b, head, row, min(row + rows, qo_len * group)]
            begins = list(range(0, kv_len, piece)) or [0]
            cut = len(begins) > 1
            for n, begin in enumerate(begins):
                slot = slots[-1] + n if cut else -1
                items.append([*unit, begin, min(begin + piece, kv_len), slot, 0])
            if cut:
                merges.append(unit)
                slots.append(slots[-1] + len(begins))
    dealt = items[::2] + items[1::2]
    return {
        "items": torch.tensor(dealt, dtype=torch.int32).view(-1, 8),
        "cta_indptr": torch.tensor([0, len(items[::2]), len(items)], dtype=torch.int32),
        "merge_items": torch.tensor(merges, dtype=torch.int32).view(-1, 4),
        "merge_indptr": torch.tensor(slots, dtype=torch.int32),
        "partial_o": torch.full((slots[-1], rows, batch.spec.dim_vo), math.nan),
        "partial_lse": torch.full((slots[-1], rows), math.nan),
    }


def run(
    kernel: Callable[..., None], batch: Batch, rows: int, params: tuple[Any, ...], piece: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel on a batch; what it does not write stays NaN."""
    work, fmt, fields = work_list(batch, rows, piece), batch.fmt, batch.spec
    out = torch.full((len(batch.q), fields.num_qo_heads, fields.dim_vo), math.nan)
    lse = torch.full(out.shape[:2], math.nan)
    ints = [fmt.qo_indptr, fmt.kv_indptr, fmt.kv_len, fmt.kv_len - fmt.qo_len, 0 * fmt.kv_len]
    qo_indptr, kv_indptr, kv_len, q_pos_offset, kv_pos_offset = (x.int() for x in ints)
    indices = torch.zeros(1).int() if fmt.kv_indices is None else fmt.kv_indices.int()
    page_dim = 1 if fields.kv_layout == "NHD" else 2
    k, v = (x if x.ndim == 4 else x.unsqueeze(page_dim) for x in batch.kv)
    kernel(
        *(batch.q, k, v),
        *(work[x] for x in ("items", "cta_indptr", "merge_items", "merge_indptr")),
        *(qo_indptr, kv_indptr, indices, kv_len, q_pos_offset, kv_pos_offset),
        *(batch.k_scale if batch.k_scale is not None else torch.ones(2),) * 2,
        *(1 / math.sqrt(fields.head_dim_qk), 1.0, 1.0),
        *params,
        *(work["partial_o"], work["partial_lse"], out, lse),
    )
    return out, lse


def assert_same_as_definition(
    tile: TileConfig,
    batch: Batch,
    variant: AttentionVariant = CAUSAL,
    params: tuple[Any, ...] = (),
    piece: int = 48,
) -> None:
    """Hold the scheduled kernel against the unscheduled definition: bits of the last ulps apart."""
    function = attention(batch.spec, Hooks(variant), rows=tile.rows, block=tile.block)
    definition = tvm.compile(function, target="llvm")["attention"]
    module = vectorize_math(schedule(function, tile).mod)
    scheduled = tvm.compile(module, target=TARGET.to_tvm())["main"]
    expected = run(definition, batch, tile.rows, params, piece)
    got = run(scheduled, batch, tile.rows, params, piece)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def mapped(tile: TileConfig, family: str, vector: str) -> TileConfig:
    assert (tile.family, tile.vector) == (family, vector)
    return tile


DECODE = ([1, 1, 2, 1], [70, 0, 37, 1])
PREFILL = ([40, 3, 1, 9], [70, 3, 0, 5])


@pytest.mark.parametrize(
    ("fields", "index", "vector", "lens"),
    [
        ({"group": 2}, 0, "dims", DECODE),
        ({"group": 2, "dim": 48, "dim_vo": 112, "kv_layout": "HND"}, 0, "dims", DECODE),
        ({"group": 1, "kv_dtype": "float8_e4m3fn", "page_size": None}, 0, "dims", DECODE),
        ({"group": 20, "dim_vo": 16}, 0, "rows", DECODE),
        ({"group": 1, "dim": 16, "dim_vo": 48, "page_size": None}, 1, "rows", PREFILL),
        ({"group": 3, "kv_dtype": "float8_e5m2", "kv_layout": "HND"}, 1, "rows", PREFILL),
        ({"group": 5, "dim": 48, "dim_vo": 112, "kv_layout": "HND"}, 1, "rows", PREFILL),
    ],
)
def test_a_mapping_computes_what_is_defined(
    fields: dict[str, Any], index: int, vector: str, lens: tuple[list[int], list[int]]
) -> None:
    problem = spec(**fields)
    tile = mapped(cpu_tiles(problem, TARGET)[index], ("short", "long")[index], vector)
    assert_same_as_definition(tile, random_batch(problem, *lens))


@pytest.mark.parametrize(
    ("name", "index"), [("soft_cap", 1), ("sigmoid", 0), ("sigmoid", 1), ("rotary", 0)]
)
def test_a_variant_is_scheduled_as_it_is_defined(name: str, index: int) -> None:
    problem = spec()
    variant, params = {
        "soft_cap": (CAUSAL & variants.soft_cap(), (3.0,)),
        "sigmoid": (CAUSAL & variants.sigmoid(), (-1.0,)),
        "rotary": (CAUSAL & rotary(problem), tuple(rotated.tensors(problem).values())),
    }[name]
    batch = random_batch(problem, *(DECODE, PREFILL)[index])
    assert_same_as_definition(cpu_tiles(problem, TARGET)[index], batch, variant, params)


@pytest.mark.parametrize("mcpu", ["x86-64-v2", "x86-64-v3"])
def test_narrow_vectors_have_tiles_of_their_own(mcpu: str) -> None:
    if not re.match("x86-64|znver|sky|sap|ice|cas", TARGET.mcpu):
        pytest.skip("needs an x86 CPU")
    problem = spec(group=1, dim=16)
    tiles = cpu_tiles(problem, parse_target(f"llvm -mcpu={mcpu}"))
    for tile, lens in zip(tiles, (DECODE, PREFILL), strict=True):
        assert tile.lanes == {"x86-64-v2": 4, "x86-64-v3": 8}[mcpu]
        assert_same_as_definition(tile, random_batch(problem, *lens))


@functools.cache
def traced() -> str:
    return str(attention(spec(), Hooks(CAUSAL), rows=4, block=32).script())


def test_every_phase_is_an_sblock_of_the_definition() -> None:
    names = re.findall(r'T\.sblock\("(\w+)"\)', traced())
    positions = [names.index(phase) for phase in PHASES]
    assert positions == sorted(positions)


def test_every_trace_names_its_sblocks_alike() -> None:
    assert attention(spec(), Hooks(CAUSAL), rows=4, block=32).script() == traced()


def test_decoding_streams_keys_and_asks_for_them_ahead() -> None:
    problem = spec()
    short, long = cpu_tiles(problem, TARGET)
    text = {
        tile.family: schedule(
            attention(problem, Hooks(CAUSAL), rows=tile.rows, block=tile.block), tile
        ).mod.script()
        for tile in (short, long)
    }
    assert " k_tile" not in text["short"] and "prefetch" in text["short"]
    assert " k_tile" in text["long"] and "prefetch" not in text["long"]


@pytest.mark.parametrize("group", [*range(1, 65), 128])
def test_tiles_exist_for_every_group_and_head_dim(group: int) -> None:
    for dim in range(16, 257, 16):
        short, long = cpu_tiles(spec(group, 64, dim), TARGET)
        assert short.rows >= group
        assert (short.family, long.family) == ("short", "long")


@pytest.mark.parametrize(
    "change", [{"block": 24}, {"rows": 40}, {"qk": (48, 4)}, {"pv": (64, 0)}, {"vector": "keys"}]
)
def test_a_tile_that_does_not_divide_is_an_error(change: dict[str, Any]) -> None:
    tile = TileConfig("long", 64, 32, "rows", 16, (64, 4), (64, 4))
    with pytest.raises(SpecError, match=next(iter(change))):
        replace(tile, **change)


@pytest.mark.parametrize("register", [(4, 1), (4, 8)])
def test_scores_in_vectors_of_dims_fill_at_most_one_register(register: tuple[int, int]) -> None:
    with pytest.raises(SpecError, match="qk keys"):
        TileConfig("short", 4, 32, "dims", 16, register, (4, 32))


@pytest.mark.parametrize(
    ("rows", "keys", "lanes"), [(4, 2, 16), (5, 2, 16), (4, 4, 16), (3, 2, 8), (2, 2, 4)]
)
def test_a_tree_sums_every_register(rows: int, keys: int, lanes: int) -> None:
    loops, tree = (
        tvm.compile(function.with_attr("global_symbol", "f"), target=TARGET.to_tvm())["f"]
        for function in (_loops(rows, keys, lanes), _tree(rows, keys, lanes))
    )
    v = torch.randn(rows, keys, lanes)
    expected, got = torch.zeros(rows, keys), torch.zeros(rows, keys)
    loops(v, expected)
    tree(v, got)
    torch.testing.assert_close(got, expected)


def elementwise(function: Callable[[Any], Any]) -> Callable[[np.ndarray], np.ndarray]:
    """Compile a float32 function of a TIR expression, vectorised."""

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(x_h: T.handle, y_h: T.handle) -> None:
        n = T.int32()
        x = T.match_buffer(x_h, (n, 16), "float32", align=4)
        y = T.match_buffer(y_h, (n, 16), "float32", align=4)
        for i in T.serial(n):
            for j in T.vectorized(16):
                with T.sblock("f"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    y[vi, vj] = function(x[vi, vj])

    module = vectorize_math(tvm.IRModule({"f": definition.with_attr("global_symbol", "f")}))
    assert not re.search(r"T\.(exp|exp2|tanh|sigmoid)\(", module.script())
    compiled = tvm.compile(module, target=TARGET.to_tvm())["f"]

    def call(x: np.ndarray) -> np.ndarray:
        padded = np.resize(x.astype(np.float32), (-(-len(x) // 16), 16))
        y = np.empty_like(padded)
        compiled(padded, y)
        return y.ravel()[: len(x)]

    return call


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FUNCTIONS = {
    "exp2": (tirx.exp2, np.exp2, (-125, 127.99), 2),
    "exp": (tirx.exp, np.exp, (-86.5, 88.7), 2),
    "tanh": (tirx.tanh, np.tanh, (-12, 12), 4),
    "sigmoid": (tirx.sigmoid, sigmoid, (-80, 80), 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_polynomial_is_accurate(name: str) -> None:
    function, exact, (low, high), ulps = FUNCTIONS[name]
    compiled = elementwise(function)
    tiny = np.geomspace(1e-30, 1, 100_000)
    for x in (np.linspace(low, high, 1 << 18), np.linspace(-1, 1, 1 << 18), tiny, -tiny):
        x = x.astype(np.float32)
        expected = exact(x.astype(np.float64))
        ulp = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
        assert np.max(np.abs(compiled(x) - expected) / ulp) <= ulps


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("exp2", {-math.inf: 0, -127: 0, -1e30: 0, 0: 1, 10: 1024, 128: math.inf, 1e30: math.inf}),
        ("exp", {-math.inf: 0, -104: 0, 0: 1, 88.73: math.inf, math.inf: math.inf}),
        ("tanh", {-math.inf: -1, -30: -1, 0: 0, 1e-30: 1e-30, math.inf: 1}),
        ("sigmoid", {-math.inf: 0, -100: 0, 0: 0.5, 100: 1, math.inf: 1}),
    ],
)
def test_a_polynomial_keeps_special_values(name: str, pairs: dict[float, float]) -> None:
    compiled = elementwise(FUNCTIONS[name][0])
    x = np.array([*pairs, math.nan], np.float32)
    np.testing.assert_array_equal(compiled(x), np.array([*pairs.values(), math.nan], np.float32))
