"""Elementary functions of CUDA kernels: how far they are from exact, and that they are used."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

import tvm_attn as ta
from tests.generating import generate_kernel
from tvm_attn.codegen import device_math
from tvm_attn.codegen.device_math import precise_math
from tvm_attn.schedules.tiles_cuda import cuda_tiles
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.target import parse_target
from tvm_attn.variants import causal, soft_cap

EXPRESSIONS = ("tanh", "sin", "cos")


def module(function: Callable[[Any], Any], dtype: str = "float32") -> tvm.IRModule:
    """Return a module that applies a function of an expression to a vector."""

    @T.prim_func(s_tir=True, check_well_formed=False)
    def definition(x_h: T.handle, y_h: T.handle) -> None:
        n = T.int32()
        x = T.match_buffer(x_h, (n,), dtype, align=4)
        y = T.match_buffer(y_h, (n,), dtype, align=4)
        for i in T.serial(n):
            y[i] = function(x[i])

    return tvm.IRModule({"f": definition.with_attr("global_symbol", "f")})


def elementwise(name: str) -> Callable[[Any], np.ndarray]:
    """Compile what stands for a function, with this CPU's ``exp2``, ``sin`` and ``cos``."""
    compiled = tvm.compile(module(getattr(device_math, name)), target="llvm")["f"]

    def call(values: Any) -> np.ndarray:
        x = np.asarray(values, np.float32)
        y = np.empty_like(x)
        compiled(x, y)
        return y

    return call


def between(low: float, high: float) -> np.ndarray:
    return np.linspace(low, high, 1 << 20).astype(np.float32)


def test_tanh_is_accurate() -> None:
    near = between(device_math.NEAR_ZERO - 0.02, device_math.NEAR_ZERO + 0.05)
    tiny = np.geomspace(1e-37, 1, 1 << 18).astype(np.float32)
    tanh = elementwise("tanh")
    for x in (between(-12, 12), between(-1, 1), near, -near, tiny, -tiny):
        x = x[x != 0]
        exact = np.tanh(x.astype(np.float64))
        assert np.max(np.abs(tanh(x) / exact - 1)) < 5e-7


@pytest.mark.parametrize("name", ["sin", "cos"])
@pytest.mark.parametrize("reach", [math.pi, 10, 1e3, 1e5])
def test_sin_and_cos_are_accurate(name: str, reach: float) -> None:
    x = between(-reach, reach)
    exact = getattr(np, name)(x.astype(np.float64))
    assert np.max(np.abs(elementwise(name)(x) - exact)) < 2e-7


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_angles_are_less_than_half_a_turn_where_it_matters(name: str) -> None:
    """A GPU's own ``sin`` and ``cos`` are good between ``-pi`` and ``pi`` only."""
    x = between(-1e5, 1e5)
    compiled = tvm.compile(module(device_math._within_a_turn), target="llvm")["f"]
    angle = np.empty_like(x)
    compiled(x, angle)
    assert np.max(np.abs(angle)) < math.pi + 0.01


def test_special_values() -> None:
    tanh = elementwise("tanh")
    x = [math.inf, -math.inf, math.nan, 1e30, -1e30, 90, -90, 0, 1e-45, -1e-45]
    expected = [1, -1, math.nan, 1, -1, 1, -1, 0, 1e-45, -1e-45]
    np.testing.assert_array_equal(tanh(x), np.array(expected, np.float32))
    for name in ("sin", "cos"):
        angles = [math.nan, math.inf, -math.inf, 0]
        expected = [math.nan, math.nan, math.nan, getattr(math, name)(0)]
        np.testing.assert_array_equal(elementwise(name)(angles), np.array(expected, np.float32))


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_calls_of_float32_are_replaced_and_no_others(name: str) -> None:
    function, build = getattr(tirx, name), getattr(device_math, name)
    replaced = precise_math(module(function))
    tvm.ir.assert_structural_equal(replaced["f"], module(build)["f"], map_free_vars=True)
    twice = precise_math(module(lambda x: function(function(x))))
    tvm.ir.assert_structural_equal(
        twice["f"], module(lambda x: build(build(x)))["f"], map_free_vars=True
    )
    for dtype in ("float16", "float64"):
        kept = module(function, dtype)
        tvm.ir.assert_structural_equal(precise_math(kept)["f"], kept["f"])
    other = module(tirx.exp2)
    tvm.ir.assert_structural_equal(precise_math(other)["f"], other["f"])


def test_a_soft_cap_is_made_without_the_rough_tanh() -> None:
    spec, target = AttentionSpec(8, 2, 64), parse_target("sm_90")
    tile, _ = cuda_tiles(spec, target)
    body = generate_kernel(spec, causal() & soft_cap(30.0), tile, target).body
    assert "logits_soft_cap" in body and "exp2f(" in body
    assert "tanh" not in body


def test_tan_is_accurate_far_from_0() -> None:
    x = between(-1e4, 1e4)
    exact = np.tan(x.astype(np.float64))
    usual = np.abs(exact) < 10
    assert np.max(np.abs(elementwise("tan")(x) - exact)[usual]) < 1e-4


@pytest.mark.parametrize("y", [0.0, 0.5, 2.0, 3.0, -1.0, -2.0])
def test_pow_of_any_sign(y: float) -> None:
    def power(x: Any) -> Any:
        return device_math.pow(x, tirx.const(y, "float32"))

    compiled = tvm.compile(module(power), target="llvm")["f"]
    x = np.array([-8.0, -1.5, -1.0, -0.25, 0.25, 1.0, 1.5, 8.0], np.float32)
    out = np.empty_like(x)
    compiled(x, out)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(out, np.power(x.astype(np.float64), y), rtol=1e-5)


@pytest.mark.parametrize("name", ["half", "max", "uint", "INFINITY"])
def test_parameters_may_be_called_what_means_something_in_cuda(name: str) -> None:
    variant = ta.AttentionVariant(
        logits_transform=lambda ctx, s: s * getattr(ctx, name), params=(Param(name),)
    )
    spec = AttentionSpec(8, 2, 64, q_dtype="bfloat16", page_size=16)
    target = parse_target("sm_90")
    kernel = generate_kernel(spec, variant, cuda_tiles(spec, target)[0], target)
    assert re.search(rf"float {name}_\b", kernel.body)
    assert not re.search(rf"float {name}\b", kernel.body)
