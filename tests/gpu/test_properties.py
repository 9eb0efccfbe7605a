"""The algebra of attention states, on the GPU: the tests of the CPU."""

from __future__ import annotations

from tests.cases import variant
from tests.gpu.device import ANY_GPU
from tests.test_properties import *  # noqa: F403

_SPEC = ANY_GPU.paged
KERNELS = [(_SPEC, variant(name, _SPEC)) for name in ("full", "window", "custom_mask")]
