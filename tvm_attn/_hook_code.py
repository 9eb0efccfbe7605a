"""A variant's hooks as text, from their code alone: nothing is traced, TVM is not imported.

What a hook gives depends on its bytecode and on all that this reads: constants, defaults, what a
closure holds, global names. Two variants of one text therefore trace to the same expressions. What
cannot be followed has no text, and neither has a variant that uses it: an object of a user's class,
a module that may hold anything, a builtin function that looks around.
"""

from __future__ import annotations

import builtins
import dis
import functools
import operator
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import takewhile
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.variant import HOOKS, AttentionVariant

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
"""Types whose values their text tells."""
MODULES = frozenset("math operator functools tvm.tirx tvm_attn.spec tvm_attn.variant".split())
"""Modules that give the same at any time, by the versions of Python, TVM and this library."""
OWN_NAMES = {"_operator": "operator", "_functools": "functools"}
"""What modules call the parts of them that are not written in Python."""
TVM = "tvm.tirx"
"""Where TVM has what makes expressions."""
PURE = frozenset(
    "abs all any bool dict divmod enumerate filter float hasattr int isinstance len list map max "
    "min pow range reversed round set slice sorted str sum tuple zip "
    "ArithmeticError AssertionError Exception IndexError KeyError NotImplementedError TypeError "
    "ValueError ZeroDivisionError".split()
)
"""Builtin functions and classes whose result depends on their arguments alone."""
LOOKING = (operator.attrgetter, operator.methodcaller)
"""What reads attributes whose names are values."""
LOOKING_NAMES = frozenset(kind.__name__ for kind in LOOKING)
REFUSED = frozenset(
    "STORE_GLOBAL DELETE_GLOBAL STORE_ATTR DELETE_ATTR DELETE_DEREF LOAD_LOCALS "
    "LOAD_FROM_DICT_OR_GLOBALS LOAD_FROM_DICT_OR_DEREF LOAD_SUPER_ATTR".split()
)
"""Instructions that change what code finds, or find it elsewhere."""


class UntoldError(Exception):
    """Something has no text."""


def hook_code(variant: AttentionVariant) -> str | None:
    """Return the text of a variant's hooks and parameters; None if their code does not tell."""
    if type(variant) is not AttentionVariant:
        return None
    hooks = [(name, getattr(variant, name)) for name in HOOKS]
    try:
        told = _Told().text([pair for pair in hooks if pair[1] is not None])
    except (UntoldError, RecursionError):
        return None
    params = [declaration(param) for param in variant.params]
    return "\n".join([*params, f"use_softmax={variant.use_softmax}", told])


def declaration(param: Param) -> str:
    """Return the text of a parameter without what is its host's: its default and largest value."""
    return repr(replace(param, default=None, largest=None))


class _Told:
    """Texts of values; a function that was met before, as in a recursion, is a number."""

    def __init__(self) -> None:
        self._functions: list[FunctionType] = []

    def text(self, value: Any) -> str:
        """Return a value's text.

        Raises
        ------
        UntoldError
            If it has none.
        """
        kind = type(value)
        if kind in PLAIN:
            return f"{kind.__name__} {value!r}"
        return f"{kind.__name__}({', '.join(self._parts(value))})"

    def _parts(self, value: Any) -> Iterator[str]:
        kind = type(value)
        if kind in (tuple, list):
            yield from map(self.text, value)
        elif kind is frozenset:
            yield from sorted(map(self.text, value))
        elif kind is dict:
            yield from (f"{self.text(key)}: {self.text(held)}" for key, held in value.items())
        elif kind in (AttentionSpec, Param):
            yield from (self.text(getattr(value, field.name)) for field in fields(value))
        elif kind is FunctionType and not _is_of_library(value):
            yield from self._function(value)
        elif kind is functools.partial:
            yield from map(self.text, (value.func, value.args, value.keywords, vars(value)))
        elif kind is MethodType:
            yield from map(self.text, (value.__func__, value.__self__))
        else:
            yield _library_name(value)

    def _function(self, function: FunctionType) -> Iterator[str]:
        met = [number for number, f in enumerate(self._functions) if f is function]
        if met:
            yield f"#{met[0]}"
            return
        self._functions.append(function)
        yield from map(self.text, (function.__defaults__, function.__kwdefaults__, vars(function)))
        yield self.text(tuple(_content(cell) for cell in function.__closure__ or ()))
        yield from self._code(function.__code__, function.__globals__)

    def _code(self, code: CodeType, names: dict[str, Any]) -> Iterator[str]:
        """Return texts of code, of the code within it, and of the global names that they read."""
        if any(name.startswith("__") or name in LOOKING_NAMES for name in code.co_names):
            raise UntoldError(code.co_names)
        yield f"{code.co_code.hex()} {getattr(code, 'co_exceptiontable', b'').hex()}"
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        yield f"{counts} {code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from self._code(constant, names)
            else:
                yield self.text(constant)
        _check_instructions(list(dis.get_instructions(code)))
        for name in _global_names(code):
            yield f"{name} = {self._global(name, names)}"

    def _global(self, name: str, names: dict[str, Any]) -> str:
        if name in names:
            return self.text(names[name])
        if name in PURE and names.get("__builtins__") in (builtins, vars(builtins)):
            return self.text(getattr(builtins, name))
        raise UntoldError(name)


def _global_names(code: CodeType) -> list[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    return [i.argval for i in dis.get_instructions(code) if i.opname in loads]


def _check_instructions(code: list[dis.Instruction]) -> None:
    """Refuse code that changes what it finds, or imports what may hold anything."""
    for at, instruction in enumerate(code):
        if instruction.opname in REFUSED:
            raise UntoldError(instruction.opname)
        if instruction.opname == "IMPORT_NAME":
            rest = takewhile(lambda i: i.opname != "POP_TOP", code[at + 1 :])
            taken = [i.argval for i in rest if i.opname == "IMPORT_FROM"]
            module, is_relative = instruction.argval, code[at - 2].argval != 0
            names = {f"{module}.{name}" for name in taken} or {module}
            if is_relative or not (names <= MODULES or (taken and module in MODULES)):
                raise UntoldError(module)


def _is_of_library(function: FunctionType) -> bool:
    """Whether a function is one of a library that is always the same, by its name there."""
    module = sys.modules.get(function.__module__)
    is_there = getattr(module, function.__name__, None) is function
    return is_there and _is_fixed(function.__module__)


def _is_fixed(module: str) -> bool:
    """Whether what a module holds is always the same."""
    return module in MODULES or f"{module}.".startswith(f"{TVM}.")


def _library_name(value: Any) -> str:
    """Return the name of a library's module, function or class that is always the same."""
    if isinstance(value, ModuleType):
        module, name = value.__name__, ""
    elif isinstance(value, FunctionType | BuiltinFunctionType | type):
        module, name = str(value.__module__), value.__qualname__
    else:
        raise UntoldError(value)
    if value in LOOKING:
        raise UntoldError(value)
    if module == "builtins" and name in PURE and getattr(builtins, name) is value:
        return name
    module = OWN_NAMES.get(module, module)
    if not _is_fixed(module):
        raise UntoldError(value)
    return f"{module}.{name}"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is filled later, or never
        raise UntoldError(cell) from None
