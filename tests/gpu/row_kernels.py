"""The kernels of the tests that merge and copy rows, to be built before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tvm_attn import cascade, page
from tvm_attn.page import BITS

MERGED_DIMS = (7, 16, 48, 64, 112, 128, 256)
COPIED_DIMS = ((48, 32), (48, 48), (64, 64), (128, 128), (192, 128), (48, 256))
ROW_BYTES = 16


@dataclass(frozen=True)
class RowKernels:
    """Functions over rows of a dtype, which read `unit` elements at once."""

    dtype: torch.dtype
    dims: tuple[int, ...]
    unit: int

    def __call__(self, target: Any) -> None:
        """Build them; a target does for a device."""
        if len(self.dims) == 1:
            cascade._build(self.dtype, *self.dims, target, self.unit)
        else:
            page._library(*self.dims, self.dtype, target, self.unit)


def _every() -> Iterator[RowKernels]:
    merged = (torch.float32, torch.float16, torch.bfloat16)
    shapes = [(dtype, (dim,)) for dtype in merged for dim in MERGED_DIMS]
    shapes += [(dtype, dims) for dtype in BITS.values() for dims in COPIED_DIMS]
    for dtype, dims in shapes:
        whole = ROW_BYTES // dtype.itemsize
        units = {1, whole} if all(dim % whole == 0 for dim in dims) else {1}
        yield from (RowKernels(dtype, dims, unit) for unit in units)


ROW_BUILDS = tuple(_every())
