"""What can be chosen about a demo."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_attn.demo.trace import TRACE_REQUESTS
from tvm_attn.errors import SpecError
from tvm_attn.spec import Q_DTYPES, AttentionSpec


@dataclass(frozen=True)
class DemoOptions:
    """Traffic, model and server of a demo.

    Parameters
    ----------
    requests : int
        How many requests of the trace to serve, 1 to 2,000.
    seed : int
        Of tokens, projections and the choice of what is checked.
    dtype : str
        Of queries, KV cache and outputs: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    num_layers, num_qo_heads, num_kv_heads, head_dim : int
        The model.
    page_size, num_pages : int
        Tokens per page of the KV cache, and its pages.
    max_batch, max_tokens : int
        Requests and query tokens of a step.
    check_every : int
        Steps from one check to the next.

    Raises
    ------
    SpecError
        If a value is out of range.
    """

    requests: int = 200
    seed: int = 0
    dtype: str = "bfloat16"
    num_layers: int = 2
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    num_pages: int = 4096
    max_batch: int = 64
    max_tokens: int = 512
    check_every: int = 20

    def __post_init__(self) -> None:
        """Validate; the model is validated by its spec."""
        if not 1 <= self.requests <= TRACE_REQUESTS:
            raise SpecError(f"requests={self.requests} must be in 1..{TRACE_REQUESTS}")
        if self.dtype not in Q_DTYPES:
            raise SpecError(f"dtype={self.dtype!r} must be one of {Q_DTYPES}")
        if not 0 <= self.seed < 2**32:
            raise SpecError(f"seed={self.seed} must be in 0..{2**32 - 1}")
        for name in ("num_layers", "num_pages", "max_batch", "check_every"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_tokens < self.max_batch:
            raise SpecError(
                f"max_tokens={self.max_tokens} must be at least max_batch={self.max_batch}: "
                "every running request decodes a token a step"
            )

    @property
    def spec(self) -> AttentionSpec:
        """The attention problem of a layer."""
        return AttentionSpec(
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim,
            q_dtype=self.dtype,
            page_size=self.page_size,
        )
