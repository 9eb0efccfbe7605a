"""Tracing: TVMScript's parser compiles no expression whose parts are names and constants."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script.parser.core import evaluator
from tvm.script.parser.core.parser import ScriptMacro

from tests.cuda_kernels import staged_sum
from tvm_attn.tir.planner import batch_planner


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
