"""Hooks as text: what changes a hook changes its text, and what cannot be followed has none."""

from __future__ import annotations

import functools
import operator
import os
import typing
from collections.abc import Callable
from typing import Any

import pytest

from tvm_attn import variants
from tvm_attn._hook_code import hook_code
from tvm_attn.shipped import VARIANTS
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.tir.fingerprint import fingerprint
from tvm_attn.tir.hooks import Hooks
from tvm_attn.variant import AttentionVariant, Expr

SPEC = AttentionSpec(4, 2, 64, q_dtype="float32")
SHIFT = 3


def text(hook: Callable[..., Any] | None) -> str | None:
    return hook_code(AttentionVariant(logits_transform=hook))


def shifted(ctx: Any, s: Expr) -> Expr:
    return helper(s) + SHIFT


def helper(s: Expr) -> Expr:
    return s * 2.0


def other_helper(s: Expr) -> Expr:
    return s * 4.0


def scaled_by(factor: Any) -> Callable[..., Expr]:
    return lambda ctx, s: s * factor


def recursive(ctx: Any, s: Expr, n: int = 3) -> Expr:
    return recursive(ctx, s, n - 1) + 1.0 if n else s


@pytest.mark.parametrize("name", VARIANTS)
def test_shipped_variants_have_a_text_that_is_theirs_alone(name: str) -> None:
    told = hook_code(VARIANTS[name](SPEC))
    assert told is not None and told == hook_code(VARIANTS[name](SPEC))
    assert [other for other in VARIANTS if hook_code(VARIANTS[other](SPEC)) == told] == [name]


def test_hooks_of_one_text_trace_to_the_same() -> None:
    made = [AttentionVariant(logits_transform=scaled_by(factor)) for factor in (2.0, 2.0, 2.5, 2)]
    texts = [hook_code(variant) for variant in made]
    traced = [fingerprint(Hooks(variant), SPEC) for variant in made]
    assert None not in texts
    assert [texts.index(one) for one in texts] == [0, 0, 2, 3]
    assert traced[0] == traced[1] != traced[2]


def test_where_a_hook_stands_and_defaults_of_parameters_are_not_told() -> None:
    def hook(ctx: Any, s: Expr) -> Expr:
        return s * ctx.gain

    first = hook

    def hook(ctx: Any, s: Expr) -> Expr:
        return s * ctx.gain

    texts = {
        hook_code(AttentionVariant(logits_transform=one, params=(Param("gain", default=default),)))
        for one, default in ((first, 1.0), (hook, 2.0))
    }
    assert len(texts) == 1 and None not in texts
    assert hook_code(variants.soft_cap(30.0)) == hook_code(variants.soft_cap(50.0))
    wide = AttentionVariant(logits_transform=hook, params=(Param("gain", dtype="int32"),))
    assert hook_code(wide) not in texts


@pytest.mark.parametrize(
    ("name", "value"), [("SHIFT", 4), ("SHIFT", 3.0), ("helper", other_helper), ("helper", abs)]
)
def test_global_names_are_told(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    before = text(shifted)
    monkeypatch.setitem(globals(), name, value)
    assert None not in (before, text(shifted))
    assert text(shifted) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda f: setattr(f, "__defaults__", (4,)),
        lambda f: setattr(f, "__code__", shifted.__code__),
        lambda f: setattr(f, "note", 1),
    ],
)
def test_a_function_that_is_changed_in_place(change: Callable[[Any], None]) -> None:
    def hook(ctx: Any, s: Expr, by: int = 3) -> Expr:
        return s + by

    before = text(hook)
    change(hook)
    assert before is not None and text(hook) != before


def test_more_than_plain_functions() -> None:
    def by(factor: float, ctx: Any, s: Expr) -> Expr:
        return operator.mul(s, factor)

    texts = [text(functools.partial(by, factor)) for factor in (2.0, 3.0)]
    texts += [text(scaled_by(value)) for value in ((1, [2.0]), (1, [3.0]), {"a": 1}, SPEC)]
    texts += [text(recursive), text(None)]
    assert None not in texts and len(set(texts)) == len(texts)
    masks = [variants.causal() & variants.sliding_window(), variants.causal()]
    assert len({hook_code(mask) for mask in masks}) == 2


class Scale:
    """What a hook may hold, and nobody can look through."""

    factor = 2.0

    def hook(self, ctx: Any, s: Expr) -> Expr:
        return s * self.factor


def reads_the_environment(ctx: Any, s: Expr) -> Expr:
    return s * float(os.environ.get("SCALE", "1"))


def imports_what_may_change(ctx: Any, s: Expr) -> Expr:
    from tests import cases

    return s * cases.SCALE


def looks_around(ctx: Any, s: Expr) -> Expr:
    return s * globals()["SHIFT"]


def looks_inside(ctx: Any, s: Expr) -> Expr:
    return s * helper.__globals__["SHIFT"]


def reads_an_attribute_by_its_name(ctx: Any, s: Expr) -> Expr:
    return s * operator.attrgetter("SHIFT")(helper)


def reads_an_annotation(ctx: Any, s: typing.Literal[2]) -> Expr:
    return s * typing.get_type_hints(helper).get("s", 1)


def counts(ctx: Any, s: Expr) -> Expr:
    global SHIFT
    SHIFT += 0
    return s


def has_a_class(ctx: Any, s: Expr) -> Expr:
    class Local:
        pass

    return s


@pytest.mark.parametrize(
    "hook",
    [
        *(Scale().hook, Scale(), scaled_by(Scale()), scaled_by(Scale), scaled_by(os)),
        *(scaled_by({1, 2}), scaled_by(open), scaled_by(iter([1]))),
        *(reads_the_environment, imports_what_may_change, looks_around, looks_inside),
        *(reads_an_attribute_by_its_name, reads_an_annotation),
        scaled_by(operator.attrgetter("SHIFT")),
        scaled_by(operator.methodcaller),
        *(counts, has_a_class, lambda ctx, s: missing(s)),  # noqa: F821
    ],
)
def test_what_cannot_be_followed_has_no_text(hook: Any) -> None:
    if not callable(hook):
        hook = functools.partial(shifted, hook)
    assert text(hook) is None


def test_a_list_that_holds_itself_has_no_text() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert text(scaled_by(endless)) is None


def test_a_variant_of_another_class_has_no_text() -> None:
    class Own(AttentionVariant):
        pass

    assert hook_code(Own()) is None


def test_names_that_shadow_builtin_ones_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(ctx: Any, s: Expr) -> Expr:
        return max(s, 0.0)

    before = text(hook)
    monkeypatch.setitem(globals(), "max", helper)
    assert before is not None and text(hook) not in (before, None)
