"""Which arguments generated functions check: those that a caller may give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm.script import tirx as T

from tvm_attn.codegen.host import compile_host
from tvm_attn.runtime.library import Library
from tvm_attn.target import parse_target
from tvm_attn.tir.signature import ints, takes


def copy() -> Any:
    """Return a function that copies a number; it asks for an array that is as long."""

    @T.prim_func(s_tir=True, check_well_formed=False)
    def function(source_h: T.handle, made_h: T.handle) -> None:
        source = ints(source_h, "source")
        made = ints(made_h, "made")
        assert made.shape[0] >= source.shape[0], "too short"
        made[0] = source[0]

    return function.with_attr("global_symbol", "function")


def compiled(function: Any) -> Any:
    return Library(compile_host({"function": function}, parse_target()).library)["function"]


def array(dtype: torch.dtype = torch.int32, size: int = 2) -> torch.Tensor:
    return torch.arange(1, 1 + size, dtype=dtype)


def test_a_function_checks_all_arguments_unless_it_says_whose_they_are() -> None:
    function = compiled(copy())
    for given in ((array(torch.int64), array()), (array(), array(torch.int64))):
        with pytest.raises(TypeError, match=r"Mismatched .*dtype"):
            function(*given)


def test_what_the_library_makes_is_not_checked() -> None:
    function, made = compiled(takes(copy(), "source")), array(torch.int64)
    with pytest.raises(TypeError, match=r"Mismatched source\.dtype"):
        function(array(torch.int64), made)
    with pytest.raises(TypeError, match="Mismatched type on argument #1"):
        function(array(), 1)
    function(array() + 6, made)
    assert int(made[0]) == 7


def test_what_a_function_asserts_itself_stays() -> None:
    function = compiled(takes(copy()))
    with pytest.raises(RuntimeError, match="too short"):
        function(array(), array(size=1))
