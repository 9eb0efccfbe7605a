"""Exported kernels run where there is neither TVM's Python package nor a CUDA compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cases import arguments, variant
from tests.gpu.device import ANY_GPU
from tests.machine import Machine
from tests.test_semantics import assert_same_bits
from tvm_attn.errors import TvmAttnError

SPEC = ANY_GPU.paged
KERNELS = [(SPEC, variant(name, SPEC)) for name in ("window", "alibi", "custom_mask")]
LENS = ([1, 7, 0, 40, 3], [3000, 30, 5, 90, 0])


@pytest.mark.parametrize("name", ["window", "alibi", "custom_mask"])
def test_an_exported_kernel_gives_the_same_bits_without_tvm_and_nvcc(
    machine: Machine, name: str, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    batch = machine.batch(SPEC, *LENS)
    args = arguments(name, batch)
    fmt = batch.fmt
    table = (fmt.qo_indptr, fmt.kv_indptr, fmt.kv_indices, fmt.kv_last_page_len)
    expected = machine.run(name, batch)
    machine.kernel(name, SPEC).export(tmp_path / "kernel.tar")
    torch.save((table, args.plan, args.run, batch.q, batch.kv), tmp_path / "given.pt")
    printed = run_python(
        f"""
        import shutil
        import torch
        import tvm_attn as ta

        assert shutil.which("nvcc") is None and shutil.which("cc") is None
        table, plan, run, q, kv = torch.load("{tmp_path}/given.pt")
        kernel = ta.load("{tmp_path}/kernel.tar")
        state = kernel.run(kernel.plan(*table, **plan), q, kv, return_lse=True, **run)
        torch.save(state, "{tmp_path}/state.pt")
        print("tvm" in sys.modules)
        """,
        without_tvm=True,
        env={"PATH": str(tmp_path), "TVM_ATTN_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert printed.split() == ["False"]
    assert_same_bits(torch.load(tmp_path / "state.pt"), expected)


def test_code_for_another_architecture_is_refused(machine: Machine) -> None:
    major, _ = torch.cuda.get_device_capability()
    other = Machine("cuda", f"cuda -arch=sm_{80 if major != 8 else 90}", machine.dtype)
    with pytest.raises(TvmAttnError, match="sm_"):
        other.run("window", machine.batch(SPEC, *LENS))
