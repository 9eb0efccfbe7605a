"""Bit packing under FlashInfer's names, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tvm_attn.errors import DTypeError, ShapeError, SpecError
from tvm_attn.quantization import packbits, segment_packbits

BITORDERS = ("big", "little")


@pytest.mark.parametrize("bitorder", BITORDERS)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_packbits_is_numpys(size: int, bitorder: str) -> None:
    bits = np.random.default_rng(size).integers(0, 2, size).astype(bool)
    packed = packbits(torch.from_numpy(bits), bitorder)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == np.packbits(bits, bitorder=bitorder).tolist()


def test_the_default_is_big_endian() -> None:
    assert packbits(torch.tensor([True, False])).tolist() == [128]
    assert segment_packbits(torch.tensor([1]), torch.tensor([0, 1]))[0].tolist() == [128]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_anything_but_zero_is_a_set_bit(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 0, 3]).to(dtype)
    assert packbits(x, "little").tolist() == [0b1010]
    assert packbits(x.numpy(), "little").tolist() == [0b1010]


@pytest.mark.parametrize("bitorder", BITORDERS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_segments_start_at_bytes(index_dtype: torch.dtype, bitorder: str) -> None:
    lengths = [5, 0, 8, 17, 0, 1]
    rng = np.random.default_rng(0)
    segments = [rng.integers(0, 2, length).astype(bool) for length in lengths]
    indptr = torch.tensor([0, *np.cumsum(lengths)], dtype=index_dtype)
    packed, new_indptr = segment_packbits(
        torch.from_numpy(np.concatenate(segments)), indptr, bitorder
    )
    assert (packed.dtype, new_indptr.dtype) == (torch.uint8, torch.int32)
    assert new_indptr.diff().tolist() == [-(-length // 8) for length in lengths]
    for segment, begin, end in zip(segments, new_indptr[:-1], new_indptr[1:], strict=True):
        assert packed[begin:end].tolist() == np.packbits(segment, bitorder=bitorder).tolist()


def test_segments_may_be_part_of_the_array_or_none() -> None:
    x = torch.ones(10, dtype=torch.bool)
    packed, new_indptr = segment_packbits(x, torch.tensor([2, 4, 9]), "little")
    assert (packed.tolist(), new_indptr.tolist()) == ([0b11, 0b11111], [0, 1, 2])
    packed, new_indptr = segment_packbits(x, np.array([0]))
    assert (packed.tolist(), new_indptr.tolist()) == ([], [0])


def test_of_bits_elsewhere_only_the_segments_are_looked_at() -> None:
    packed, new_indptr = segment_packbits(torch.ones(9, device="meta"), torch.tensor([0, 3, 9]))
    assert (packed.shape, new_indptr.shape) == ((2,), (3,))
    assert packed.is_meta
    assert new_indptr.is_meta
    assert packbits(torch.ones(9, device="meta")).is_meta


def test_bad_arguments() -> None:
    x = torch.ones(4)
    with pytest.raises(SpecError, match="bitorder='middle'"):
        packbits(x, "middle")
    with pytest.raises(ShapeError, match=r"x must be 1-D, got shape \(2, 2\)"):
        packbits(x.view(2, 2))
    with pytest.raises(DTypeError, match="x is a list"):
        packbits([1, 0])  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match=r"indptr has dtype torch\.float32"):
        segment_packbits(x, torch.tensor([0.0, 4.0]))
    with pytest.raises(ShapeError, match="indptr is empty"):
        segment_packbits(x, torch.tensor([], dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"indptr is on meta, the kernel runs on the CPU"):
        segment_packbits(x, torch.tensor([0, 4], device="meta"))
    for wrong in ([0, 3, 2], [-1, 4], [0, 5]):
        with pytest.raises(ShapeError, match=r"stay in 0\.\.4"):
            segment_packbits(x, torch.tensor(wrong))
