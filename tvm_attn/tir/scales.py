"""Where q_scale, k_scale and v_scale are applied: folded where linear, else on the elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm_attn.tir.hooks import Context, Hooks
from tvm_attn.tir.states import f32
from tvm_attn.variant import Expr

Row = Callable[[Expr], Expr]


@dataclass(frozen=True)
class Scales:
    """Dequantisation scales and the softmax scale of a kernel.

    A key's scale multiplies the query row once instead of every key, and a value's scale the output
    row, unless the variant transforms keys or values: then elements are scaled first.
    """

    hooks: Hooks
    sm_scale: Expr
    q_scale: Expr
    k_scale: Any
    v_scale: Any

    def query(self, ctx: Context, x: Row, d: Expr) -> Expr:
        """Element of a query row, transformed and times everything a score is multiplied with."""
        return self.query_row(ctx, x, d) * self._factor(ctx.kv_head)

    def query_row(self, ctx: Context, x: Row, d: Expr) -> Expr:
        """Element of a query row, transformed."""
        return self.hooks.row_element("query_transform", ctx, lambda e: x(e) * self.q_scale, d)

    def product(self, kv_head: Expr) -> Expr:
        """Factor from the product of a query and a key to a score, for `query_row` as it is used.

        That is: of rows as they are stored if there is no transform, else of transformed ones.
        """
        if self.hooks.variant.query_transform is None:
            return self._factor(kv_head) * self.q_scale
        return self._factor(kv_head)

    def _factor(self, kv_head: Expr) -> Expr:
        variant = self.hooks.variant
        factor = self.sm_scale
        if variant.key_transform is None:
            factor = factor * self.k_scale[kv_head]
        if variant.logits_transform is None:
            factor = factor * f32(self.hooks.accumulation.unit)
        return factor

    def key(self, ctx: Context, x: Row, d: Expr) -> Expr:
        """Element of a key row."""
        if self.hooks.variant.key_transform is None:
            return x(d)
        scale = self.k_scale[ctx.kv_head]
        return self.hooks.row_element("key_transform", ctx, lambda e: x(e) * scale, d)

    def value(self, ctx: Context, x: Row, d: Expr) -> Expr:
        """Element of a value row."""
        if self.hooks.variant.value_transform is None:
            return x(d)
        scale = self.v_scale[ctx.kv_head]
        return self.hooks.row_element("value_transform", ctx, lambda e: x(e) * scale, d)

    def score(self, ctx: Context, s: Expr) -> Expr:
        """Score from the product of scaled query and key: the logit in the accumulation's unit."""
        if self.hooks.variant.logits_transform is None:
            return s
        return self.hooks.logit(ctx, s) * f32(self.hooks.accumulation.unit)

    def value_factor(self, kv_head: Expr) -> Expr:
        """Factor of an output row: the value scale, where it was not applied to the elements."""
        if self.hooks.variant.value_transform is None:
            return self.v_scale[kv_head]
        return f32(1.0)
