"""FlashInfer's names on GPU tensors: the tests of the CPU."""

from __future__ import annotations

from dataclasses import replace

from tests.facades import HND, RAGGED, RAGGED_HND, SPEC
from tests.test_facades import *  # noqa: F403
from tvm_attn._flashinfer.options import Features
from tvm_attn.spec import AttentionSpec

_FULL = Features(False, False, False, False, False)
_CAUSAL = _FULL._replace(causal=True)
_USED: tuple[tuple[AttentionSpec, Features], ...] = (
    *((spec, _FULL) for spec in (SPEC, RAGGED)),
    *((replace(spec, kv_layout="HND"), _FULL) for spec in (SPEC, RAGGED)),
    *((spec, _CAUSAL) for spec in (SPEC, HND, RAGGED, RAGGED_HND)),
    (replace(SPEC, kv_dtype="float8_e4m3fn"), _FULL),
    (HND, _CAUSAL._replace(soft_cap=True)),
    (SPEC, _FULL._replace(window=True, soft_cap=True, alibi=True)),
    (SPEC, _FULL._replace(window=True, custom_mask=True)),
    (RAGGED, _FULL._replace(custom_mask=True)),
)
KERNELS = [(spec, features.variant()) for spec, features in _USED]
