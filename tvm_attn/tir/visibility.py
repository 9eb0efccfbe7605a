"""Keys that a mask hides from none of some query rows: read off the traced mask, for any variant.

If the mask is made of comparisons that are linear in positions, as causal masks and windows are,
the keys that all rows see are a range that follows from the first and the last row. Kernels leave
the mask out of blocks in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tvm import sym, tirx

from tvm_attn.tir.hooks import Hooks
from tvm_attn.variant import MAX_POSITION, Expr, as_bool


class Range(NamedTuple):
    """Integers from `first` to `last`, both included."""

    first: Expr
    last: Expr

    def plus(self, offset: Expr) -> Range:
        """Return the range moved by an offset."""
        return Range(self.first + offset, self.last + offset)


ALL = Range(tirx.const(-MAX_POSITION, "int32"), tirx.const(MAX_POSITION, "int32"))
NONE = Range(tirx.const(0, "int32"), tirx.const(-1, "int32"))


def seen_by_all(
    hooks: Hooks, fixed: Mapping[str, Expr], rows: Mapping[str, Range], kv_shift: Expr
) -> Range:
    """Return keys (indices) that the mask surely hides from none of the rows.

    None where that cannot be told: for a mask that looks keys up in an array, say, or multiplies
    positions.

    Parameters
    ----------
    hooks : Hooks
        The variant.
    fixed : mapping of str to Expr
        Fields of the context that have one value, such as ``batch``.
    rows : mapping of str to Range
        Fields in which the rows differ, and the values each takes, independently of the others.
    kv_shift : Expr
        Position of key 0.
    """
    box = {tirx.Var(name, "int32"): extent for name, extent in rows.items()}
    fields = {**fixed, **{row.name: row for row in box}}
    return _solve_mask(hooks, fields, box, kv_shift) or NONE


def seen_by_row(hooks: Hooks, row: Mapping[str, Expr], kv_shift: Expr) -> Range | None:
    """Return exactly the keys (indices) that the mask hides not from a row.

    None where they are no range that can be told: see `seen_by_all`.

    Parameters
    ----------
    hooks, kv_shift
        As in `seen_by_all`.
    row : mapping of str to Expr
        Fields of the context that say which row it is, and of which request.
    """
    return _solve_mask(hooks, row, {}, kv_shift)


def clear_bits_hide(hooks: Hooks, name: str) -> bool:
    """Whether a mask hides all keys whose bit in a bitmap is clear, whatever else it says."""
    if hooks.variant.mask is None:
        return False
    names = ("batch", "qo_len", "kv_len", "qo_idx", "q_pos", "kv_idx", "kv_pos")
    fields = {field: tirx.Var(field, "int32") for field in (*names, "kv_head", "qo_head")}
    clear = hooks.reading({name: tirx.const(False, "bool")})
    hidden = sym.Analyzer().simplify(as_bool(hooks.variant.mask(clear.context(**fields))))
    return isinstance(hidden, tirx.IntImm) and int(hidden.value) == 0


def with_set_bits(hooks: Hooks) -> Hooks:
    """Return hooks to which all bits of all bitmaps are set."""
    return hooks.reading({name: tirx.const(True, "bool") for name in hooks.bitmaps()})


def _solve_mask(
    hooks: Hooks, fields: Mapping[str, Expr], box: Mapping[Any, Range], kv_shift: Expr
) -> Range | None:
    if hooks.variant.mask is None:
        return ALL
    key = tirx.Var("kv_idx", "int32")
    context = hooks.context(**fields, kv_idx=key, kv_pos=kv_shift + key)
    return _solve(as_bool(hooks.variant.mask(context)), box, key)


def _solve(condition: Expr, box: Mapping[Any, Range], key: Any) -> Range | None:
    """Return the keys for which a condition holds in all of the box, if they can be told."""
    if isinstance(condition, tirx.And):
        a, b = _solve(condition.a, box, key), _solve(condition.b, box, key)
        if a is None or b is None:
            return None
        return Range(tirx.max(a.first, b.first), tirx.min(a.last, b.last))
    if isinstance(condition, tirx.IntImm):
        return ALL if condition.value else NONE
    if isinstance(condition, tirx.LE | tirx.LT):
        return _at_least(condition.b, condition.a, isinstance(condition, tirx.LT), box, key)
    if isinstance(condition, tirx.GE | tirx.GT):
        return _at_least(condition.a, condition.b, isinstance(condition, tirx.GT), box, key)
    return None


def _at_least(
    large: Expr, small: Expr, strict: bool, box: Mapping[Any, Range], key: Any
) -> Range | None:
    """Return keys for which ``large - small`` is at least 0 (`strict`: 1) in all of the box."""
    if str(large.ty) != "int32":
        return None
    terms = sym.detect_linear_equation(large - small, [*box, key])
    if not all(isinstance(coefficient, tirx.IntImm) for coefficient in terms[:-1]) or not terms:
        return None
    *slopes, least = terms
    for slope, extent in zip(slopes, box.values(), strict=False):
        least = least + slope * (extent.first if slope.value > 0 else extent.last)
    least = least - int(strict)
    slope = slopes[-1].value
    if slope > 0:
        return Range(-tirx.floordiv(least, slope), ALL.last)
    if slope < 0:
        return Range(ALL.first, tirx.floordiv(least, -slope))
    first, last = (tirx.Select(least >= 0, a, n) for a, n in zip(ALL, NONE, strict=True))
    return Range(first, last)
