"""Where results go: the output tensors, and the partial states of cut units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_attn.tir.hooks import Context, Hooks
from tvm_attn.tir.scales import Scales
from tvm_attn.variant import Expr


@dataclass(frozen=True)
class Outputs:
    """The tensors a kernel writes.

    ``out [nnz_qo, num_qo_heads, head_dim_vo]`` and ``lse [nnz_qo, num_qo_heads]`` are the results;
    ``partial_o [num_slots, rows, head_dim_vo]`` and ``partial_lse [num_slots, rows]`` the states
    of cut units, float32 and base 2. `lse_scale` turns a base 2 LSE into the base asked for.
    """

    hooks: Hooks
    scales: Scales
    partial_o: Any
    partial_lse: Any
    out: Any
    lse: Any
    lse_scale: Expr

    def finish(self, ctx: Context, o: Expr, lse: Expr) -> Expr:
        """Return an element of `out` from a merged row's element and its log-sum-exp."""
        scaled = o * self.scales.value_factor(ctx.kv_head)
        return tirx.Cast(str(self.out.dtype), self.hooks.output(ctx, scaled, lse))
