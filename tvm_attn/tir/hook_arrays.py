"""Tensors as hooks read them: element by element, and a wrong index is an error on its line."""

from __future__ import annotations

from typing import Any

from tvm_attn.errors import VariantError
from tvm_attn.variant import Expr, as_expr


class HookArray:
    """A tensor parameter, as ``ctx.<name>``: ``[i, j]`` is an element; all else is the buffer's.

    Parameters
    ----------
    name : str
        Of the parameter.
    buffer : tvm.tirx.Buffer
        What is read.
    """

    __slots__ = ("_buffer", "_name")

    def __init__(self, name: str, buffer: Any):
        self._name, self._buffer = name, buffer

    def __getitem__(self, indices: Any) -> Expr:
        """Return an element.

        Raises
        ------
        VariantError
            If there is not one index for each dimension, or one is no integer or out of range.
        """
        given = indices if isinstance(indices, tuple) else (indices,)
        shape = tuple(self._buffer.shape)
        if len(given) != len(shape):
            raise VariantError(
                f"ctx.{self._name} has the shape {_text(shape)}, got {len(given)} indices "
                f"{_text(given)}; give {len(shape)}, a hook reads single elements"
            )
        checked = [integer(as_expr(i), f"an index of ctx.{self._name}") for i in given]
        for index, extent in zip(checked, map(constant, shape), strict=True):
            number = constant(index)
            if number is not None and not 0 <= number < (number + 1 if extent is None else extent):
                raise VariantError(
                    f"ctx.{self._name} has the shape {_text(shape)}, index {number} of "
                    f"{_text(given)} is out of range"
                )
        return self._buffer[tuple(checked)]

    def __getattr__(self, name: str) -> Any:
        """Return what the buffer has, such as its shape."""
        return getattr(self._buffer, name)


def integer(value: Any, what: str) -> Any:
    """Return an index as it is, if it is an integer.

    Raises
    ------
    VariantError
        If it is none; the message begins with `what`.
    """
    kind = str(value.ty) if hasattr(value, "ty") else type(value).__name__
    if not kind.startswith(("int", "uint")):
        raise VariantError(f"{what} must be an integer, got {value} of type {kind}")
    return value


def constant(value: Any) -> int | None:
    """Return the value of a constant, None for anything else."""
    number = value if isinstance(value, int) else getattr(value, "value", None)
    return int(number) if isinstance(number, int) else None


def _text(values: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, values))}]"
