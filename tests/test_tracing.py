"""Tracing: TVMScript's parser compiles no expression whose parts are names and constants."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tvm.script import tirx as T
from tvm.script.parser.core import doc, evaluator
from tvm.script.parser.core.parser import ScriptMacro

from tests.cuda_kernels import staged_sum
from tvm_attn._tracing import _Parser
from tvm_attn.schedules import sm90
from tvm_attn.tir import planner_greedy
from tvm_attn.tir.planner import batch_planner, work_planner


def test_simple_expressions_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def noting(tree: Any, filename: str, mode: str) -> Any:
        if mode == "eval":
            compiled.append(type(tree.body).__name__)
        return compile(tree, filename=filename, mode=mode)

    monkeypatch.setattr(evaluator, "compile", noting, raising=False)
    made = [str(batch_planner(True)), str(staged_sum())]
    assert not {"Name", "Constant", "Attribute", "Subscript"} & set(compiled)
    few = len(compiled)
    monkeypatch.setattr(evaluator, "_eval_expr", _compiling_all)
    assert [str(batch_planner(True)), str(staged_sum())] == made
    assert len(compiled) > 10 * few, "what is compared with compiles all of them"


def _compiling_all(node: Any, values: dict[str, Any]) -> Any:
    tree = evaluator.ast.Expression(body=evaluator.doc.from_doc(node))
    code = evaluator.compile(evaluator.ast.fix_missing_locations(tree), filename="<>", mode="eval")
    return eval(code, values)


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
    work = [str(work_planner(lambda *_: (T.int32(0), T.int32(9)), [])) for _ in range(2)]
    assert work[0] == work[1]
