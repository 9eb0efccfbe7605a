"""Faster tracing: what TVMScript's parser does slowly, many thousand times for each kernel."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

MISSING = object()
INLINE = ("tir.inline", "FunctionDef")
"""What the parser has a visitor for: inline functions within others."""


def speed_up_tracing() -> None:
    """Replace functions of TVMScript's parser by faster ones that do the same."""
    from tvm.script.parser.core import diagnostics, dispatch, doc, evaluator
    from tvm.script.parser.core.parser import ScriptMacro

    slow = evaluator._eval_expr
    simple = _Evaluator(evaluator.doc)

    def evaluate(node: Any, values: dict[str, Any] | None) -> Any:
        found = MISSING if values is None else simple.evaluate(node, values)
        return slow(node, values) if found is MISSING else found

    ScriptMacro._find_parser_def = lambda _: _find_parser(ScriptMacro.parser_object_name)
    evaluator._eval_expr = evaluate
    evaluator.ExprEvaluator._visit = _visitor(evaluator.ExprEvaluator._visit, evaluator.doc)
    parse = _Parser(doc).parse
    diagnostics.Source.as_ast = lambda source: parse(source.source)
    definition = functools.cache(lambda source, name: _definition(parse(source), doc, name))
    ScriptMacro.get_macro_def = lambda self: definition(self.source.source, self.func.__name__)
    dispatch.register(*INLINE)(_leaving_nodes_alone(dispatch.get(*INLINE)))


def _definition(module: Any, doc: Any, name: str) -> Any:
    """Return the node of an inline function; each call of the function visits the same."""
    return next(n for n in module.body if isinstance(n, doc.FunctionDef) and n.name == name)


def _leaving_nodes_alone(visit: Callable[..., None]) -> Callable[..., None]:
    """Return a visitor of inline functions that changes a copy of their node."""

    def visit_copy(parser: Any, node: Any) -> None:
        own = copy.copy(node)
        own.decorator_list = list(node.decorator_list)
        visit(parser, own)

    return visit_copy


def _visitor(slow: Callable[..., Any], doc: Any) -> Callable[..., Any]:
    """Return a function that finds what stands for a node while an expression is evaluated.

    Names and constants, most of all nodes, stand for themselves: nothing is built that would need
    to know where it comes from.
    """
    alike = (doc.expr_context, doc.operator, doc.boolop, doc.unaryop, doc.cmpop)
    kinds = [kind for kind in vars(doc).values() if isinstance(kind, type)]
    leaves = {doc.Constant, *(kind for kind in kinds if issubclass(kind, alike))}

    def visit(self: Any, node: Any) -> Any:
        kind = type(node)
        if kind in leaves or (kind is doc.Name and node.id in self.value_table):
            return node
        return [visit(self, one) for one in node] if kind is list else slow(self, node)

    return visit


class _Parser:
    """Parses source into the nodes of TVMScript's parser."""

    def __init__(self, doc: Any):
        self._doc = doc
        self._ways: dict[type, Callable[[Any], Any]] = {list: self._several}

    def parse(self, source: str) -> Any:
        """Return the nodes of a source, as ``doc.parse`` does."""
        try:
            return self._convert(ast.parse(source, feature_version=(3, 8)))
        except SyntaxError:
            return self._convert(ast.parse(source))

    def _convert(self, node: Any) -> Any:
        kind = type(node)
        if kind not in self._ways:
            self._ways[kind] = self._way(kind)
        return self._ways[kind](node)

    def _several(self, nodes: list[Any]) -> list[Any]:
        return [self._convert(node) for node in nodes]

    def _way(self, kind: type) -> Callable[[Any], Any]:
        """Return how a kind of node is converted: field by field, or in its own way."""
        if not issubclass(kind, ast.AST):
            return lambda node: node
        own = self._doc._get_registry_entry(kind.__name__, "to_doc")
        if not hasattr(own, "doc_cls"):
            return self._doc.to_doc  # type: ignore[no-any-return]
        made, fields, convert = own.doc_cls, tuple(own.fields), self._convert
        return lambda node: made(**{field: convert(getattr(node, field, None)) for field in fields})


def _find_parser(name: str) -> object:
    """Find the parser at a call of an inline function, without the source of every frame."""
    frame = inspect.currentframe()
    while frame is not None:
        parser = frame.f_globals.get(name)
        if parser is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError("an inline function was called outside of a TVMScript function")


class _Evaluator:
    """Evaluates nodes whose parts are names and constants, as nearly all are, without compiling."""

    def __init__(self, doc: Any):
        self._doc = doc

    def evaluate(self, node: Any, values: dict[str, Any]) -> Any:
        """Return the value of a node, or `MISSING`: it has to be compiled."""
        doc, kind = self._doc, type(node)
        if kind is doc.Call:
            return self._call(node, values)
        if kind is doc.Attribute:
            owner = self._atom(node.value, values)
            return MISSING if owner is MISSING else getattr(owner, node.attr)
        if kind is doc.Subscript:
            owner, index = self._atom(node.value, values), self._atom(node.slice, values)
            return MISSING if owner is MISSING or index is MISSING else owner[index]
        return self._atom(node, values)

    def _atom(self, node: Any, values: dict[str, Any]) -> Any:
        if type(node) is self._doc.Name:
            return values.get(node.id, MISSING)
        return node.value if type(node) is self._doc.Constant else MISSING

    def _call(self, node: Any, values: dict[str, Any]) -> Any:
        args = [self._atom(arg, values) for arg in (node.func, *node.args)]
        named = {word.arg: self._atom(word.value, values) for word in node.keywords}
        if None in named or any(value is MISSING for value in (*args, *named.values())):
            return MISSING
        called_with = FunctionType(_called.__code__, values)  # `_find_parser` looks for its globals
        return called_with(*args, **named)


def _called(function: Any, /, *args: Any, **named: Any) -> Any:
    return function(*args, **named)
