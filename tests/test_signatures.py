"""Names, parameters, defaults and aliases of the facades are flashinfer-python 0.7.4's."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tvm_attn

FLASHINFER = json.loads(
    (Path(__file__).parent / "data" / "flashinfer_0.7.4_signatures.json").read_text()
)["modules"]
SHIPPED = {
    "decode": (
        "single_decode_with_kv_cache",
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
    ),
    "prefill": (
        "single_prefill_with_kv_cache",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ),
    "attention": ("BatchAttention",),
    "pod": ("PODWithPagedKVCacheWrapper",),
    "cascade": ("merge_state", "merge_state_in_place", "merge_states"),
    "page": ("append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    "quantization": ("packbits", "segment_packbits"),
}
NAMES = [(module, name) for module, names in SHIPPED.items() for name in names]
CLASSES = [(m, n) for m, n in NAMES if isinstance(FLASHINFER[m][n], dict)]
FUNCTIONS = [(m, n) for m, n in NAMES if isinstance(FLASHINFER[m][n], list)]
Parameter = tuple[str, str, str | None]


def ours(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"tvm_attn.{module}"), name)


def expected(parameters: list[dict[str, str]]) -> list[Parameter]:
    return [(p["name"], p["kind"], p.get("default")) for p in parameters]


def given(function: Any) -> list[Parameter]:
    return [
        (
            p.name,
            p.kind.name.lower(),
            None if p.default is inspect.Parameter.empty else repr(p.default),
        )
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


def methods() -> Iterator[tuple[str, str, str]]:
    for module, name in CLASSES:
        for member, parameters in FLASHINFER[module][name].items():
            if isinstance(parameters, list) and member != "bases":
                yield module, name, member


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_function(module: str, name: str) -> None:
    assert given(ours(module, name)) == expected(FLASHINFER[module][name])


@pytest.mark.parametrize(("module", "name", "member"), list(methods()))
def test_method(module: str, name: str, member: str) -> None:
    found = inspect.getattr_static(ours(module, name), member)
    parameters = FLASHINFER[module][name][member]
    if isinstance(found, property):
        assert parameters == []
    else:
        assert given(found) == expected(parameters)


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_aliases_and_bases(module: str, name: str) -> None:
    cls, wanted = ours(module, name), FLASHINFER[module][name]
    for alias, member in wanted.get("aliases", {}).items():
        assert getattr(cls, alias) is getattr(cls, member)
    assert set(wanted["bases"]) <= {base.__name__ for base in cls.__mro__}


def test_return_lse_aliases() -> None:
    for module, name in CLASSES:
        if name.startswith("Batch") and "Wrapper" in name:
            run_return_lse = inspect.getattr_static(ours(module, name), "run_return_lse")
            assert run_return_lse.keywords == {"return_lse": True}
    alias = ours("prefill", "single_prefill_with_kv_cache_return_lse")
    assert isinstance(alias, functools.partial)
    assert alias.func is ours("prefill", "single_prefill_with_kv_cache")


@pytest.mark.parametrize(
    ("module", "name"), [*NAMES, ("prefill", "single_prefill_with_kv_cache_return_lse")]
)
def test_names_are_at_the_top_level_too(module: str, name: str) -> None:
    assert getattr(tvm_attn, name) is ours(module, name)


def test_nothing_else_of_these_modules_is_shipped() -> None:
    for module, listed in FLASHINFER.items():
        if module in SHIPPED:
            present = {name for name in listed if hasattr(ours_module(module), name)}
            assert present == set(SHIPPED[module]), "add it to SHIPPED"


def ours_module(module: str) -> Any:
    return importlib.import_module(f"tvm_attn.{module}")


def refusing() -> dict[str, Any]:
    """Functions that refuse arguments, by the name they have for callers."""
    found = {}
    for module, name in NAMES:
        facade = ours(module, name)
        found[name] = facade
        if isinstance(facade, type):
            found[name] = facade.__init__
            for member, function in inspect.getmembers(facade, inspect.isfunction):
                if member == "_plan" or not member.startswith("_"):
                    found.setdefault(f"{name}.{member.lstrip('_')}", function)
    return {
        name: function
        for name, function in found.items()
        if hasattr(function, "not_implemented") and "begin_forward" not in name
    }


REFUSALS = [(name, argument) for name, f in refusing().items() for argument in f.not_implemented]


@pytest.mark.parametrize(("name", "argument"), REFUSALS)
def test_what_is_not_implemented_is_refused_by_name(name: str, argument: str) -> None:
    function = refusing()[name]
    parameters = inspect.signature(function).parameters
    before = list(parameters.values())[: list(parameters).index(argument)]
    values = [None if p.default is p.empty else p.default for p in before]
    required = [None for p in before if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    with pytest.raises(NotImplementedError, match=f": {argument} is not implemented"):
        if parameters[argument].kind is inspect.Parameter.VAR_POSITIONAL:
            function(*values, 1)
        else:
            function(*required, **{argument: object()})
    if parameters[argument].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        with pytest.raises(NotImplementedError, match=f": {argument} is not implemented"):
            function(*values, object())


def documented(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of the page, as cells."""
    page = (Path(__file__).parents[1] / "docs" / "flashinfer.md").read_text()
    section = page.split(f"## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_lists_what_is_not_implemented() -> None:
    listed = {
        where.strip("`"): tuple(cell.strip("`*") for cell in arguments.split(", "))
        for where, arguments in documented("What is not implemented")
    }
    actual = {name: f.not_implemented for name, f in refusing().items() if "CUDAGraph" not in name}
    assert listed == actual


def test_every_difference_on_the_page_has_a_test() -> None:
    tests = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for *_, cell in documented("What differs"):
        assert set(cell.replace("`", "").split(", ")) <= tests, f"{cell} is not a test"


def test_the_page_lists_every_name() -> None:
    page = (Path(__file__).parents[1] / "docs" / "flashinfer.md").read_text()
    missing = [name for _, name in NAMES if f"`{name}`" not in page]
    assert not missing
