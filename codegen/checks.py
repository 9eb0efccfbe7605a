"""Checks of arguments in generated functions: those of what a caller may give stay.

TVM has a function check every argument at each call: a dozen comparisons for a tensor, each with a
message of its own, which are most of a small function's code and of the time to compile it. What
the library makes itself, such as work lists, is not checked again. Functions say what is a
caller's: `tvm_attn.tir.signature.GIVEN`.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_attn.tir.signature import GIVEN

KINDS = ("TypeError", "ValueError")
"""Errors of TVM's own checks."""
OPENINGS = ("Mismatched ", "Invalid ")
"""How their messages begin, before the name of an argument."""


def check_what_is_given(module: tvm.IRModule) -> tvm.IRModule:
    """Leave out checks of arguments that are not a caller's, from lowered functions."""
    return tvm.IRModule({name: _checked(f) for name, f in module.functions.items()})


def _checked(function: tirx.PrimFunc) -> tirx.PrimFunc:
    given = function.attrs.get(GIVEN)
    if given is None:
        return function
    names = {str(name) for name in given}

    def keep(check: Any) -> Any:
        name = _argument(check)
        return check if name is None or name in names else tirx.Evaluate(0)

    return tvm_ffi.structural_map(function, (tirx.AssertStmt, keep))


def _argument(check: Any) -> str | None:
    """Return the name of the argument that a check is about; None if it is about no single one."""
    if str(check.error_kind.value) not in KINDS:
        return None
    parts = [str(part.value) for part in check.message_parts]
    name = next((part for part in parts if part not in OPENINGS), "").partition(".")[0]
    return name if name.isidentifier() else None
