"""What hooks may index, and which variables they may use: found before a kernel is generated."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tvm import tirx

import tvm_attn as ta
from tvm_attn import variants
from tvm_attn.errors import ArtifactError, CompileError
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.tir.fingerprint import fingerprint
from tvm_attn.tir.hooks import Hooks
from tvm_attn.variant import AttentionVariant

SPEC = AttentionSpec(2, 2, 64, 32, q_dtype="float32", page_size=None)
TABLE = Param("table", kind="tensor", shape=("rows", 4))
FOREIGN = tirx.Var("mine", "int32")


def line_of(function: Callable[..., Any]) -> str:
    return f'File "{__file__}", line {inspect.getsourcelines(function)[1]}'


def assert_refused(variant: AttentionVariant, function: Callable[..., Any], words: str) -> None:
    with pytest.raises(CompileError) as raised:
        ta.build(SPEC, variant)
    message = str(raised.value)
    assert words in message
    assert line_of(function) in message


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (lambda ctx: ctx.table[ctx.qo_head], "got 1 indices [_qo_head]; give 2"),
        (lambda ctx: ctx.table[ctx.qo_head, 1, 2], "got 3 indices [_qo_head, 1, 2]; give 2"),
        (lambda ctx: ctx.table[ctx.qo_head, 4], "index 4 of [_qo_head, 4] is out of range"),
        (lambda ctx: ctx.table[-1, 0], "index -1 of [-1, 0] is out of range"),
        (lambda ctx: ctx.table[1.5, 0], "must be an integer, got 1.5 of type float"),
        (lambda ctx: ctx.table[ctx.qo_head, 0:2], "must be an integer, got slice"),
    ],
)
def test_indices_of_a_tensor(index: Callable[[Any], Any], words: str) -> None:
    variant = AttentionVariant(logits_transform=lambda ctx, s: s + index(ctx), params=(TABLE,))
    assert_refused(variant, index, words)


@pytest.mark.parametrize("compose", [False, True])
@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("mask", lambda ctx: ctx.kv_pos < FOREIGN),
        ("logits_transform", lambda ctx, s: s * ctx.table[FOREIGN, 0]),
        ("kv_range", lambda ctx, q_lo, q_hi: (None, q_hi + FOREIGN)),
    ],
)
def test_variables_of_its_own(name: str, hook: Callable[..., Any], compose: bool) -> None:
    variant = AttentionVariant(**{name: hook}, params=(TABLE,))
    if compose:
        variant = variants.causal() & variants.soft_cap(3.0) & variant
    assert_refused(variant, hook, "mine is a variable of its own")


@pytest.mark.parametrize("name", ["query_transform", "key_transform", "value_transform"])
@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda ctx, x, d: x(d + 1), "reads element {dim} of a row of {dim} for element {last}"),
        (lambda ctx, x, d: x(d + 1000), "reads element 1000 of a row of {dim} for element 0"),
        (lambda ctx, x, d: x(-1), "reads element -1 of a row of {dim}"),
        (
            lambda ctx, x, d: tirx.Select(d < 9, x(d), x(d - 10)),
            "reads element -1 of a row of {dim} for element 9",
        ),
        (lambda ctx, x, d: x(0.5), "e must be an integer, got 0.5 of type float"),
    ],
)
def test_elements_of_a_row(name: str, hook: Callable[..., Any], words: str) -> None:
    dim = SPEC.dim_vo if name == "value_transform" else SPEC.head_dim_qk
    assert_refused(AttentionVariant(**{name: hook}), hook, words.format(dim=dim, last=dim - 1))


@pytest.mark.parametrize(
    "hook",
    [
        lambda ctx, x, d: x((d + 32) % 64),
        lambda ctx, x, d: tirx.Select(d < 32, -x(d + 32), x(d - 32)),
        lambda ctx, x, d: tirx.if_then_else(d < 63, x(d + 1), x(0)),
        lambda ctx, x, d: x(tirx.Cast("int32", ctx.table[d, 0])),
        lambda ctx, x, d: x(d) * ctx.table[ctx.table.shape[0] - 1, 3],
    ],
)
def test_what_may_be_read(hook: Callable[..., Any]) -> None:
    variant = AttentionVariant(query_transform=hook, params=(TABLE,))
    assert "query_transform: " in fingerprint(Hooks(variant), SPEC)


@pytest.mark.parametrize(
    "hook",
    [
        lambda ctx: not (ctx.kv_pos == 2),
        lambda ctx: ctx.kv_pos in (2, 3),
        lambda ctx: any(ctx.kv_pos == i for i in (2, 3)),
        lambda ctx: ctx.kv_pos == 2 or ctx.kv_pos == 3,
        lambda ctx: ctx.kv_pos != 2 and ctx.kv_pos != 3,
        lambda ctx: ctx.kv_pos < 3 if ctx.qo_head == 0 else ctx.kv_pos < 4,
    ],
)
def test_equality_is_not_decided_while_tracing(hook: Callable[..., Any]) -> None:
    assert_refused(AttentionVariant(mask=hook), hook, "whether expressions are equal is not known")
    x = tirx.Var("x", "int32")
    assert x == x
    assert x in (x,), "outside of hooks TVM's answer stands"


@pytest.mark.parametrize("divide", [tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod])
def test_a_constant_divisor_is_not_0(divide: Callable[..., Any]) -> None:
    def mask(ctx: Any) -> Any:
        return divide(ctx.kv_pos, tirx.const(0, "int32")) == 0

    assert_refused(AttentionVariant(mask=mask), mask, "divides an integer by 0")


def test_truth_values_are_not_compared() -> None:
    def same(ctx: Any) -> Any:
        return (ctx.kv_pos < 5) == (ctx.q_pos < 6)

    assert_refused(AttentionVariant(mask=same), same, "compares truth values")


def test_lines_of_code_that_has_no_file_are_named() -> None:
    names: dict[str, Any] = {}
    exec("def mask(ctx):\n    x = 1\n    return ctx.nothing + x\n", names)
    with pytest.raises(CompileError, match=r'File "<string>", line 3, in mask'):
        ta.build(SPEC, AttentionVariant(mask=names["mask"]))


def test_lines_are_a_users_in_whatever_folder(tmp_path: Path) -> None:
    """Also in one that is called like this package."""
    path = tmp_path / "tvm_attn" / "mine.py"
    path.parent.mkdir()
    path.write_text(
        "def helper(ctx):\n    return ctx.nothing\n\n\ndef mask(ctx):\n    return helper(ctx)\n"
    )
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(CompileError) as raised:
        ta.build(SPEC, AttentionVariant(mask=names["mask"]))
    assert f'File "{path}", line 2, in helper' in str(raised.value)


@pytest.mark.parametrize("first", [0, 1])
def test_a_hook_that_gives_something_else_each_time_is_an_error(first: int) -> None:
    """And leaves nothing under the key of what it gave first."""
    calls = itertools.count(first)

    def whimsical(ctx: Any, s: Any) -> Any:
        return s * (4.625 if next(calls) == 0 else 9.5 + next(calls))

    with pytest.raises(CompileError, match="gave something else"):
        ta.build(SPEC, AttentionVariant(logits_transform=whimsical))
    honest = ta.build(SPEC, AttentionVariant(logits_transform=lambda ctx, s: s * 4.625))
    assert "4.625" in honest.tir


def test_a_function_that_is_nowhere_is_an_error_of_the_build() -> None:
    def calls_nothing(ctx: Any, s: Any) -> Any:
        return tirx.call_pure_extern("float32", "of_no_library", s)

    with pytest.raises(ArtifactError, match="undefined symbol: of_no_library"):
        ta.build(SPEC, AttentionVariant(logits_transform=calls_nothing))
