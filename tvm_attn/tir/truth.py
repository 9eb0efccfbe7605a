"""While a hook is traced nothing is known to be equal: asking for that is an error, not a constant.

TVM lets Python ask an equality of expressions whether it is true, and answers whether both sides
are the same object. A hook that says ``not``, ``and``, ``if`` or ``in`` would become a constant.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

PACKAGES = (Path(__file__).parent.parent, *(Path(str(m.__file__)).parent for m in (tvm, tvm_ffi)))
ROOTS = tuple(f"{folder}{os.sep}" for folder in PACKAGES)
_tracing = threading.local()


def is_library(filename: str) -> bool:
    """Whether code is of this package or of TVM, and not a user's."""
    return filename.startswith(ROOTS)


@contextmanager
def undecided() -> Iterator[None]:
    """Have equalities raise `ValueError` where a user's code asks whether they are true."""
    before = getattr(_tracing, "is_on", False)
    _tracing.is_on = True
    try:
        yield
    finally:
        _tracing.is_on = before


def _refuse_to_decide(equality: Any) -> None:
    is_same = equality.__bool__

    def ask(comparison: Any) -> bool:
        asked_by = sys._getframe(1).f_code.co_filename
        if getattr(_tracing, "is_on", False) and not is_library(asked_by):
            raise ValueError(
                "whether expressions are equal is not known while a hook is traced; combine "
                "comparisons with &, | and ~ instead of and, or, not and in, and choose by "
                "tirx.Select(condition, a, b) instead of if"
            )
        return bool(is_same(comparison))

    equality.__bool__ = ask


for _comparison in (tirx.Var("x", "int32") == 0, tirx.Var("x", "int32") != 0):
    _refuse_to_decide(type(_comparison))
