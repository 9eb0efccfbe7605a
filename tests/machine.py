"""What tests run on: the fixture ``machine`` is this CPU, and in ``tests/gpu`` the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests import cases
from tests.accuracy import State
from tests.batches import Batch, random_batch
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.spec import AttentionSpec


@dataclass(frozen=True)
class Machine:
    """A device, and how tests that run anywhere use it.

    Attributes
    ----------
    device, target : str
        For tensors, and for `build`.
    dtype : str
        Of queries and the KV cache, where a test leaves the choice.
    """

    device: str
    target: str | None
    dtype: str

    def spec(self, **fields: Any) -> AttentionSpec:
        """Return `paged` with other fields."""
        heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 64}
        return AttentionSpec(**{**heads, "q_dtype": self.dtype, "page_size": 4, **fields})

    @property
    def paged(self) -> AttentionSpec:
        """Return a small spec: 8 query heads on 2, head dim 64, pages of 4."""
        return self.spec()

    @property
    def tokens(self) -> AttentionSpec:
        """Return `paged` with pages of one token, which can be dealt and cut in any way."""
        return self.spec(page_size=1)

    def batch(self, spec: AttentionSpec, *lens: list[int], **options: Any) -> Batch:
        """Return `random_batch` on the device."""
        return random_batch(spec, *lens, **options).to(self.device)

    def kernel(self, name: str, spec: AttentionSpec) -> AttentionModule:
        """Return the kernel of a variant, built when it is first asked for."""
        return cases.kernel(name, spec, self.target)

    def run(
        self, name: str, batch: Batch, plan: dict[str, Any] | None = None, **keywords: Any
    ) -> State:
        """Return out and lse of a variant's kernel; `plan` are keywords of its plan."""
        args = cases.arguments(name, batch)
        module = self.kernel(name, batch.spec)
        planned = module.plan(batch.fmt, **{**args.plan, **(plan or {})})
        given = {**batch.scales, **args.run, **keywords}
        return module.run(planned, batch.q, batch.kv, return_lse=True, **given)

    def check(self, name: str, batch: Batch, **given: Any) -> State:
        """Hold the result of a batch against the promise; see `cases.check`."""
        return cases.check(name, batch, module=self.kernel(name, batch.spec), **given)

    def put(self, *values: Any) -> torch.Tensor:
        """Return a tensor of values on the device."""
        return torch.tensor(*values, device=self.device)


CPU = Machine("cpu", None, "float32")
