"""Software prefetch: asking for rows of the KV cache before they are read.

Rows of one KV head lie far apart in a cache, each often on a memory page of its own, where hardware
prefetchers stop. Attention knows which rows it reads next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

Expr = Any
CACHE_LINE = 64
READ_TO_L2 = (0, 2, 1)
"""Arguments of LLVM's prefetch: to be read, to the second level (the first has few misses in
flight), data."""


@dataclass(frozen=True)
class CacheRow:
    """The cache row that a gathering sblock reads for a token.

    Parameters
    ----------
    element : tvm.ir.TensorLoad
        A read of the row, for the token `token`.
    token : tvm.tirx.Var
        Position in the block of keys.
    lines : int
        Cache lines of a row.
    """

    element: Any
    token: Any
    lines: int

    @staticmethod
    def of(gather: Any, locate: Any) -> CacheRow:
        """Find the row in a ``gather_k`` or ``gather_v`` sblock, by the location it is read at."""
        store = gather.body
        page = locate.body.seq[0].buffer
        reads: list[Any] = []

        def visit(load: Any) -> None:
            if any(_reads(index, page) for index in load.indices):
                reads.append(load)

        tvm_ffi.structural_walk(store.value, (tvm.ir.TensorLoad, visit))
        size = int(store.buffer.shape[-1]) * _bits(reads[0]) // 8
        return CacheRow(reads[0], store.indices[0], -(-size // CACHE_LINE))

    def located_by(self, locate: Any) -> CacheRow:
        """Return the row for tokens of any block, located the way ``locate`` does it."""
        stores = locate.body.seq

        def inline(load: Any) -> Any:
            for store in stores:
                if load.source.same_as(store.buffer):
                    return store.value
            return load

        element = tvm_ffi.structural_map(self.element, (tvm.ir.TensorLoad, inline))
        return CacheRow(element, stores[0].indices[0], self.lines)

    def prefetch(self, token: Expr, line: Expr) -> Any:
        """Return the statement that asks for a line of the row of `token`."""
        *where, _ = self.element.indices
        row = tvm_ffi.structural_map(
            tvm_ffi.Array(where), (tirx.Var, lambda v: token if v.same_as(self.token) else v)
        )
        element = self.element.source[(*row, line * (CACHE_LINE * 8 // _bits(self.element)))]
        to_cache = (tirx.const(argument, "int32") for argument in READ_TO_L2)
        return tirx.Evaluate(
            tirx.call_intrin("void", "tirx.prefetch", tirx.address_of(element), *to_cache)
        )


@dataclass(frozen=True)
class Ahead:
    """What an iteration of a loop asks for: `tokens` rows from `token` on, or a share of each.

    Parameters
    ----------
    row : CacheRow
        What is read.
    token : Expr
        First token, in terms of the loop and the loops around it.
    tokens : int
        How many tokens.
    share, shares : Expr, int
        Which one of `shares` parts of the row.
    when : Expr, optional
        In which iterations.
    """

    row: CacheRow
    token: Expr
    tokens: int
    share: Expr = 0
    shares: int = 1
    when: Expr | None = None

    def statement(self) -> Any:
        """Return ``if when: for t in tokens, l in lines: prefetch``."""
        lines = -(-self.row.lines // self.shares)
        t, line = tirx.Var("t", "int32"), tirx.Var("line", "int32")
        body = self.row.prefetch(self.token + t, self.share * lines + line)
        for variable, extent in ((line, lines), (t, self.tokens)):
            body = tirx.For(variable, 0, extent, tirx.ForKind.UNROLLED, body)
        return body if self.when is None else tirx.IfThenElse(self.when, body, None)


def prefetch_in(mod: tvm.IRModule, loop: Any, ahead: Ahead) -> tvm.IRModule:
    """Prefetch at the head of every iteration of a loop.

    Before: ``for loop: body``. After: ``for loop: (if when: for t in tokens, l in lines: prefetch
    line l of the row of token + t), body``.

    Parameters
    ----------
    mod : tvm.IRModule
        A scheduled module.
    loop : tvm.tirx.Var
        Variable of the loop.
    ahead : Ahead
        What to ask for.
    """

    def insert(nest: Any) -> Any:
        if not nest.loop_var.same_as(loop):
            return nest
        body = tirx.SeqStmt([ahead.statement(), nest.body])
        return tirx.For(nest.loop_var, nest.min, nest.extent, nest.kind, body)

    return tvm_ffi.structural_map(mod, (tirx.For, insert))


def uses(expression: Expr, variable: Any) -> bool:
    """Whether a variable occurs in an expression."""
    found: list[Any] = []
    tvm_ffi.structural_walk(
        expression, (tirx.Var, lambda v: found.append(v) if v.same_as(variable) else None)
    )
    return bool(found)


def _reads(index: Expr, buffer: Any) -> bool:
    return isinstance(index, tvm.ir.TensorLoad) and index.source.same_as(buffer)


def _bits(load: Any) -> int:
    return int(tvm.DataType(str(load.ty)).bits)
