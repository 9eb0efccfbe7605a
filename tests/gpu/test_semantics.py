"""What attention means at its edges, on the GPU: the tests of the CPU."""

from __future__ import annotations

from tests.cases import variant
from tests.gpu.device import ANY_GPU
from tests.test_semantics import *  # noqa: F403
from tests.test_semantics import RAGGED_HND

_PAGED, _RAGGED = ANY_GPU.paged, ANY_GPU.spec(**RAGGED_HND)
KERNELS = [
    (_RAGGED, variant("full", _RAGGED)),
    *(
        (_PAGED, variant(name, _PAGED))
        for name in ("window", "alibi", "sink", "custom_mask", "soft_cap")
    ),
]
