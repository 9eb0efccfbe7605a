"""One unit seen from inside: its query rows, and the keys each of them may look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_attn.tir.hooks import Context, Hooks
from tvm_attn.variant import Expr


@dataclass(frozen=True)
class Batch:
    """The batch's arrays, int32, as the planner wrote them.

    ``qo_indptr, kv_indptr [batch + 1]``, ``kv_indices [num_pages]``, ``kv_len, q_pos_offset,
    kv_pos_offset [batch]``.
    """

    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    kv_len: Any
    q_pos_offset: Any
    kv_pos_offset: Any


def opaque(difference: Expr) -> Expr:
    """Return an int32 difference such that no comparison of a hook's is solved for a part of it.

    TVM moves terms across comparisons as if nothing overflowed, which a parameter near the largest
    integer then does where the hook itself does not.
    """
    if not isinstance(difference, tirx.Sub):
        return difference
    wide = (tirx.Cast("int64", term) for term in (difference.a, difference.b))
    return tirx.Cast("int32", tirx.Sub(*wide))


@dataclass(frozen=True)
class Rows:
    """Fused query rows of one (request, KV head): row ``r`` is token ``r // G``, head ``r % G``."""

    hooks: Hooks
    group_size: int
    batch: Batch
    request: Expr
    kv_head: Expr

    @property
    def qo_begin(self) -> Expr:
        """First query token of the request in q."""
        return self.batch.qo_indptr[self.request]

    @property
    def qo_len(self) -> Expr:
        """Query tokens of the request."""
        return self.batch.qo_indptr[self.request + 1] - self.batch.qo_indptr[self.request]

    @property
    def kv_len(self) -> Expr:
        """KV tokens of the request."""
        return self.batch.kv_len[self.request]

    @property
    def q_shift(self) -> Expr:
        """Position of the request's first query."""
        return self.batch.q_pos_offset[self.request]

    @property
    def kv_shift(self) -> Expr:
        """Position of the request's first key."""
        return self.batch.kv_pos_offset[self.request]

    def token(self, row: Expr) -> Expr:
        """Query token of a fused row, counted from the request's first."""
        return tirx.floordiv(row, self.group_size)

    def head(self, row: Expr) -> Expr:
        """Query head of a fused row."""
        return self.kv_head * self.group_size + tirx.floormod(row, self.group_size)

    def index(self, row: Expr) -> tuple[Expr, Expr]:
        """Token and head of a fused row in q, out and lse."""
        return self.qo_begin + self.token(row), self.head(row)

    def query(self, row: Expr) -> Context:
        """Context of a hook that has a query row and no key."""
        return self.hooks.context(**self.request_fields(), **self.query_fields(row))

    def key(self, kv_idx: Expr) -> Context:
        """Context of a hook that has a key and no query."""
        return self.hooks.context(**self.request_fields(), **self._key_fields(kv_idx))

    def pair(self, row: Expr, kv_idx: Expr) -> Context:
        """Context of a hook that has both."""
        return self.hooks.context(
            **self.request_fields(), **self.query_fields(row), **self._key_fields(kv_idx)
        )

    def key_range(self, row_begin: Expr, row_end: Expr) -> tuple[Expr, Expr]:
        """Key indices that fused rows ``row_begin..row_end`` (exclusive) may see, not clipped."""
        lo, hi = self.hooks.key_positions(
            self.request,
            self.qo_len,
            self.kv_len,
            self.q_shift + self.token(row_begin),
            self.q_shift + self.token(row_end - 1),
        )
        return lo - self.kv_shift, hi - self.kv_shift

    def request_fields(self) -> dict[str, Expr]:
        """Fields of a context that say which request and KV head it is."""
        return {
            "batch": self.request,
            "kv_head": self.kv_head,
            "qo_len": opaque(self.qo_len),
            "kv_len": self.kv_len,
        }

    def query_fields(self, row: Expr) -> dict[str, Expr]:
        """Fields of a context that say which query row it is."""
        qo_idx = self.token(row)
        return {"qo_idx": qo_idx, "q_pos": self.q_shift + qo_idx, "qo_head": self.head(row)}

    def _key_fields(self, kv_idx: Expr) -> dict[str, Expr]:
        return {"kv_idx": kv_idx, "kv_pos": self.kv_shift + kv_idx}
