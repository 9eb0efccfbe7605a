"""Faster tracing: what TVMScript's parser does slowly, many thousand times for each kernel."""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

NOWHERE = contextlib.nullcontext()
PLACES = ("lineno", "col_offset", "end_lineno", "end_col_offset")
"""Fields of a node that say where it is."""
INLINE = ("tir.inline", "FunctionDef")
"""What the parser has a visitor for: inline functions within others."""


def speed_up_tracing() -> None:
    """Replace functions of TVMScript's parser by faster ones that do the same.

    They leave out where in the source each node of a function comes from, which only messages of
    TVM's passes would name.
    """
    from tvm.script.parser.core import diagnostics, dispatch, doc, evaluator
    from tvm.script.parser.core.parser import Parser, ScriptMacro

    # Looks at all modules' files: here, and not in each fork.
    inspect.getmodule(speed_up_tracing.__code__)
    Parser.eval_expr = _Interpreter(doc, evaluator, ScriptMacro.parser_object_name).method()
    Parser.with_source_span = lambda _, node: NOWHERE
    Parser.annotate_current_source_span = lambda _, value: value
    evaluator._eval_assign = _assigner(evaluator._eval_assign, doc)
    ScriptMacro._find_parser_def = lambda _: _find_parser(ScriptMacro.parser_object_name)
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


def _assigner(slow: Callable[..., Any], doc: Any) -> Callable[..., Any]:
    """Return a function that finds what each name of a target is bound to."""

    def assign(target: Any, source: Any) -> Any:
        return {target.id: source} if type(target) is doc.Name else slow(target, source)

    return assign


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
        made, convert = own.doc_cls, self._convert
        if not own.fields:
            alike = made()
            return lambda _: alike
        places = [field for field in own.fields if field in PLACES]
        fields = [field for field in own.fields if field not in PLACES]

        def convert_fields(node: Any) -> Any:
            given, converted = vars(node), made.__new__(made)
            held = vars(converted)
            for field in places:
                held[field] = given.get(field)
            for field in fields:
                held[field] = convert(given.get(field))
            return converted

        return convert_fields


def _find_parser(name: str) -> object:
    """Find the parser at a call of an inline function, without the source of every frame."""
    frame = inspect.currentframe()
    while frame is not None:
        parser = frame.f_globals.get(name)
        if parser is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError("an inline function was called outside of a TVMScript function")


class _Interpreter:
    """Evaluates expressions node by node, where the parser compiles each node by itself.

    Some kinds of nodes, such as lambdas, and slices are left to the parser.
    """

    def __init__(self, doc: Any, evaluator: Any, marker: str):
        self._evaluator = evaluator
        self._marker = marker
        self._and = doc.And()
        self._starred = doc.Starred
        self._stops = {doc.And: False, doc.Or: True}
        self._subscript_kind, self._sliced = doc.Subscript, (doc.Slice, doc.Tuple)
        self._ways: dict[type, Callable[[Any, Any], Any]] = {
            doc.Name: self._name,
            doc.Constant: lambda _, node: node.value,
            doc.Attribute: lambda parser, node: getattr(self.value(parser, node.value), node.attr),
            doc.Subscript: self._subscript,
            doc.Call: self._call,
            doc.Tuple: lambda parser, node: tuple(self._several(parser, node.elts)),
            doc.List: lambda parser, node: self._several(parser, node.elts),
            doc.BinOp: self._binary,
            doc.UnaryOp: self._unary,
            doc.Compare: self._compare,
            doc.BoolOp: self._both_or_either,
            doc.IfExp: self._choice,
        }

    def method(self) -> Callable[..., Any]:
        """Return what stands for the parser's method."""

        def eval_expr(parser: Any, node: Any, extra_vars: dict[str, Any] | None = None) -> Any:
            return self._slow(parser, node, extra_vars) if extra_vars else self.value(parser, node)

        return eval_expr

    def value(self, parser: Any, node: Any) -> Any:
        """Return the value of a node."""
        return self._ways.get(type(node), self._slow)(parser, node)

    def _slow(self, parser: Any, node: Any, extra: dict[str, Any] | None = None) -> Any:
        values = {**parser.var_table.get(), **(extra or {}), self._marker: parser}
        return self._evaluator.ExprEvaluator.eval(parser, values, node)

    def _name(self, parser: Any, node: Any) -> Any:
        found = parser.var_table.name2value.get(node.id)
        if found:
            return found[-1]
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        raise self._evaluator.ParserError(node, f"Undefined variable: {node.id}")

    def _several(self, parser: Any, nodes: Any) -> list[Any]:
        values = []
        for node in nodes:
            if type(node) is self._starred:
                values.extend(self.value(parser, node.value))
            else:
                values.append(self.value(parser, node))
        return values

    def _subscript(self, parser: Any, node: Any) -> Any:
        if self._has_slice(node):
            return self._slow(parser, node)
        owner = self.value(parser, node.value)
        return owner[self.value(parser, node.slice)]

    def _has_slice(self, node: Any) -> bool:
        """Whether a node is a subscript with slices, which the parser completes in expressions."""
        if type(node) is not self._subscript_kind:
            return False
        kind, several = self._sliced
        at = node.slice
        return type(at) is kind or (type(at) is several and any(type(e) is kind for e in at.elts))

    def _call(self, parser: Any, node: Any) -> Any:
        if any(map(self._has_slice, node.args)):
            return self._slow(parser, node)
        function = self.value(parser, node.func)
        args = self._several(parser, node.args)
        named: dict[str, Any] = {}
        for word in node.keywords:
            value = self.value(parser, word.value)
            named.update(value if word.arg is None else {word.arg: value})
        # `_find_parser` looks for the parser in the globals of who calls
        return FunctionType(_called.__code__, {self._marker: parser})(function, *args, **named)

    def _binary(self, parser: Any, node: Any) -> Any:
        if self._has_slice(node.left) or self._has_slice(node.right):
            return self._slow(parser, node)
        values = [self.value(parser, node.left), self.value(parser, node.right)]
        return self._evaluator._eval_op(node.op, values)

    def _unary(self, parser: Any, node: Any) -> Any:
        if self._has_slice(node.operand):
            return self._slow(parser, node)
        return self._evaluator._eval_op(node.op, [self.value(parser, node.operand)])

    def _compare(self, parser: Any, node: Any) -> Any:
        nodes = [node.left, *node.comparators]
        if any(map(self._has_slice, nodes)):
            return self._slow(parser, node)
        apply, values = self._evaluator._eval_op, [self.value(parser, one) for one in nodes]
        pairs = itertools.pairwise(values)
        found = [apply(op, list(pair)) for op, pair in zip(node.ops, pairs, strict=True)]
        return functools.reduce(lambda left, right: apply(self._and, [left, right]), found)

    def _both_or_either(self, parser: Any, node: Any) -> Any:
        first, *others = node.values
        value, stop = self.value(parser, first), self._stops[type(node.op)]
        for other in others:
            if value is stop:
                return value
            value = self._evaluator._eval_op(node.op, [value, self.value(parser, other)])
        return value

    def _choice(self, parser: Any, node: Any) -> Any:
        test = self.value(parser, node.test)
        if isinstance(test, bool):
            return self.value(parser, node.body if test else node.orelse)
        tvm = self._evaluator.tvm
        if not (tvm.ir.is_prim_expr(test) and test.ty.matches_code(tvm.DataTypeCode.BOOL)):
            return self._slow(parser, node)  # which says what is wrong
        values = [self.value(parser, one) for one in (node.body, node.orelse)]
        return tvm.tirx.op.if_then_else(test, *values)


def _called(function: Any, /, *args: Any, **named: Any) -> Any:
    return function(*args, **named)
