"""The GPU that tests run on."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from tests.machine import Machine

ANY_GPU = Machine("cuda", None, "float16")
"""For its specs, which are those of every GPU."""


@functools.cache
def gpu() -> Machine:
    """Return the current GPU."""
    major, minor = torch.cuda.get_device_capability()
    return replace(ANY_GPU, target=f"cuda -arch=sm_{major}{minor}")
