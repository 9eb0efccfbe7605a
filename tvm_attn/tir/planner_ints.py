"""Integer arithmetic of the planner. What is divided is never negative.

The planner is TensorIR in pieces: ``@T.inline`` functions are expanded where they are called, and a
variable that is passed to one is passed by reference; functions without it build an expression, or
store something, where they are called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

INT32_MAX = (1 << 31) - 1
LENGTH_LIMIT = 1 << 29
"""Most fused rows or KV tokens of a request, and largest position. Positions are then
within 2**30 of one another, and a range may be moved by 2**30 more without leaving int32."""


_scope = ContextVar("_scope", default="global")
"""Scope of variables: on a GPU, what is not said to be a thread's own is memory of all."""


@contextmanager
def variables_in(scope: str) -> Iterator[None]:
    """Have the variables of functions that are traced meanwhile in a scope."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def scope() -> str:
    """Return the scope of the variables of functions that are traced now."""
    return _scope.get()


def bind(handle: Any, name: str, *row: int) -> Any:
    """Bind a parameter to int32 rows, their number free, at any address an int32 can have."""
    return T.match_buffer(handle, (tirx.Var(f"{name}_size", "int32"), *row), "int32", align=4)


def scalar(dtype: str) -> Any:
    """Allocate a variable: a stack slot, which the compiler keeps in a register."""
    return T.alloc_buffer((1,), dtype, scope=_scope.get())[0]


def var(value: Any) -> Any:
    """Allocate a variable with an initial value, to be assigned to a name.

    Also for values that only need a name: a ``T.let`` is not a snapshot of what it loads, and TVM's
    passes substitute it again and again where they reason about conditions and indices.
    """
    value = tirx.convert(value)
    variable = T.alloc_scalar(str(value.ty), scope=_scope.get())
    T.buffer_store(variable.source, value, [0])
    return variable


def store(buffer: Any, index: Any, value: Any) -> None:
    """Write ``buffer[index] = value`` from a Python function."""
    T.buffer_store(buffer, value, index if isinstance(index, list) else [index])


def assign(variable: Any, value: Any) -> None:
    """Assign to a variable from a Python function."""
    T.buffer_store(variable.source, value, [0])


def wide(a: Any) -> Any:
    """As int64."""
    return T.cast(a, "int64")


def as_bit(condition: Any) -> Any:
    """1 if the condition holds, else 0."""
    return T.cast(condition, "int32")


def smallest(*values: Any) -> Any:
    """Return the smallest of several."""
    return reduce(T.min, values)


def low_word(a: Any) -> Any:
    """Lower half of an int64."""
    return T.cast(a, "int32")


def high_word(a: Any) -> Any:
    """Upper half of an int64."""
    return T.cast(T.shift_right(a, T.int64(32)), "int32")


def saturate(a: Any) -> Any:
    """As int32, the largest one standing for all above."""
    return T.cast(T.min(a, T.int64(INT32_MAX)), "int32")


def div(a: Any, b: Any) -> Any:
    """Quotient, rounded down."""
    return T.truncdiv(a, b)


def ceil_div(a: Any, b: Any) -> Any:
    """Quotient, rounded up."""
    return T.truncdiv(a + b - 1, b)


def carve(scratch: Any, begin: Any, shape: tuple[Any, ...], dtype: str = "int32") -> Any:
    """View a part of scratch; `begin` counts elements of its dtype."""
    return T.decl_buffer(shape, dtype, data=scratch.data, elem_offset=begin)


@dataclass(frozen=True)
class Divisor:
    """An int32 that many are divided by, and its `reciprocal`: multiplying is far faster.

    The reciprocal has ``31 + ceil(log2(value))`` fractional bits and is rounded up, which is exact
    for every dividend below 2**31 (Granlund and Montgomery, PLDI 1994).
    """

    value: Any
    reciprocal: Any

    def div(self, a: Any) -> Any:
        """Quotient, rounded down."""
        return T.cast(
            T.shift_right(wide(a) * self.reciprocal, reciprocal_bits(self.value)), "int32"
        )

    def ceil_div(self, a: Any) -> Any:
        """Quotient, rounded up."""
        return self.div(a + self.value - 1)


def reciprocal_bits(value: Any) -> Any:
    """Fractional bits of a reciprocal, as int64."""
    return wide(62 - T.clz(2 * value - 1))


def reciprocal(value: Any) -> Any:
    """Reciprocal of a `Divisor`, as int64."""
    one = T.shift_left(T.int64(1), reciprocal_bits(value))
    return T.truncdiv(one + wide(value) - T.int64(1), wide(value))
