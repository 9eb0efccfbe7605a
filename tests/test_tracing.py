"""Tracing: what is done in place of TVMScript's parser gives the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tvm.error import DiagnosticError
from tvm.script import tirx as T
from tvm.script.parser.core import doc, evaluator
from tvm.script.parser.core.parser import Parser, ScriptMacro

from tests.cuda_kernels import staged_sum
from tvm_attn._tracing import _Parser
from tvm_attn.schedules import sm90
from tvm_attn.tir import planner_greedy
from tvm_attn.tir.planner import batch_planner, work_planner
from tvm_attn.tir.planner_lists import ListMaker


@T.inline
def everything(buffer: Any, table: Any, at: Any) -> None:
    """An expression of each kind that is evaluated node by node."""
    first, *_ = T.meta_var([*table, 7])
    buffer[0] = T.max(*[first, at]) + len((first, *table))
    buffer[1] = -at % 3 if len(table) == 2 else 0
    buffer[2] = T.if_then_else(at > 1 and not at == 4, table[at - at + 0 if False else 0], 2)
    buffer[3] = (lambda a, b=1: a * b)(at, **dict(b=first)) if at == 1 or at == 3 else 0
    if 0 <= at <= 5:
        buffer[4] = T.Select(at != 2, buffer[at], {"one": 1}["one"])


def of_each_kind() -> Any:
    @T.prim_func(s_tir=True, check_well_formed=False)
    def function(buffer_h: T.handle, at: T.int32) -> None:
        buffer = T.match_buffer(buffer_h, (8,), "int32")
        with T.sblock("root"):
            T.reads(buffer[0:8])
            T.writes(buffer[0:8])
            everything(buffer, (3, 5), at)

    return function


def test_expressions_are_evaluated_as_the_parser_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> list[str]:
        return [str(function) for function in (of_each_kind(), batch_planner(True), staged_sum())]

    slow: list[str] = []
    evaluate = evaluator.ExprEvaluator.eval

    def noting(parser: Any, values: dict[str, Any], node: Any) -> Any:
        slow.append(type(node).__name__)
        return evaluate(parser, values, node)

    monkeypatch.setattr(evaluator.ExprEvaluator, "eval", noting)
    fast = made()
    assert not {"Attribute", "BinOp", "BoolOp", "Compare"} & set(slow)
    few = len(slow)
    monkeypatch.setattr(Parser, "eval_expr", _as_the_parser_does)
    assert made() == fast
    assert len(slow) > 10 * few, "what is compared with leaves all of them to the parser"


def _as_the_parser_does(parser: Any, node: Any, extra: dict[str, Any] | None = None) -> Any:
    values = {**parser.var_table.get(), **(extra or {}), ScriptMacro.parser_object_name: parser}
    return evaluator.ExprEvaluator.eval(parser, values, node)


def test_an_inline_function_needs_a_function_around_it() -> None:
    with pytest.raises(RuntimeError, match="outside of a TVMScript function"):
        ScriptMacro._find_parser_def(None)


def _dumped(node: Any) -> Any:
    if isinstance(node, list):
        return [_dumped(one) for one in node]
    if not isinstance(node, doc.doc.AST):
        return node
    return type(node).__name__, {name: _dumped(getattr(node, name)) for name in node._FIELDS}


@pytest.mark.parametrize("module", [planner_greedy, sm90])
def test_sources_are_parsed_alike(module: Any) -> None:
    source = inspect.getsource(module)
    assert _dumped(_Parser(doc).parse(source)) == _dumped(doc.parse(source))


def test_functions_can_be_traced_again() -> None:
    """Their inline functions, and those within them, are parsed once."""
    work = [
        [str(function) for function in maker.beside({"plan_work": work_planner(maker)}).values()]
        for maker in (ListMaker(lambda *_: (T.int32(0), T.int32(9))) for _ in range(2))
    ]
    assert work[0] == work[1]


def test_a_condition_that_is_none_is_refused_as_the_parser_does() -> None:
    window = None
    with pytest.raises(DiagnosticError, match="Expected Python bool or TIR bool"):

        @T.prim_func(s_tir=True, check_well_formed=False)
        def function(buffer_h: T.handle) -> None:
            buffer = T.match_buffer(buffer_h, (8,), "int32")
            buffer[0] = 1 if window else 2
