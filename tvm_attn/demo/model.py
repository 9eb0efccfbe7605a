"""A stand-in for a model: the query, key and value of a token are looked up in random tables.

What attention sees is then a function of (request, position, layer) alone: whoever knows a
request's tokens can recompute its dense K and V without the paged cache.
"""

from __future__ import annotations

import numpy as np
import torch

from tvm_attn.demo.options import DemoOptions

VOCABULARY = 8192


class Model:
    """Per layer, the projections of every token of a vocabulary, in the dtype of the demo.

    Parameters
    ----------
    options : DemoOptions
        Layers, heads, head dim, dtype and seed.
    """

    def __init__(self, options: DemoOptions):
        rng = torch.Generator().manual_seed(options.seed)
        dtype = getattr(torch, options.dtype)

        def table(heads: int) -> torch.Tensor:
            return torch.randn(VOCABULARY, heads, options.head_dim, generator=rng).to(dtype)

        heads = (options.num_qo_heads, options.num_kv_heads, options.num_kv_heads)
        self._layers = [tuple(map(table, heads)) for _ in range(options.num_layers)]
        self._seed = options.seed

    def tokens(self, request: int, count: int) -> torch.Tensor:
        """Return the tokens ``[count]`` of a request: its prompt, then its answer."""
        rng = np.random.default_rng((self._seed, request))
        return torch.from_numpy(rng.integers(VOCABULARY, size=count))

    def queries(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        """Return q ``[n, num_qo_heads, head_dim]`` of the tokens ``[n]``."""
        return self._layers[layer][0][tokens]

    def keys_values(self, tokens: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v ``[n, num_kv_heads, head_dim]`` of the tokens ``[n]``."""
        _, k, v = self._layers[layer]
        return k[tokens], v[tokens]
