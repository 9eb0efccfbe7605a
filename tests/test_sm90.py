"""Machine code of the Hopper backend: nothing spills, multiplications and exponentials overlap."""

from __future__ import annotations

import re

import pytest

from tests.compiling import FIND
from tests.generating import read_inline_functions
from tvm_attn import variants
from tvm_attn.codegen import cuda
from tvm_attn.codegen.children import Child
from tvm_attn.codegen.compilers import Compiled, CudaCompiler
from tvm_attn.runtime.disassembly import disassemble
from tvm_attn.schedules.tiles_sm90 import tiles_to_try
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target
from tvm_attn.variant import AttentionVariant

TARGET = parse_target("cuda -arch=sm_90")
WAIT_FOR_QK, WAIT_FOR_PV = (rf"WARPGROUP\.DEPBAR\.LE gsb0, 0x{n}" for n in (1, 0))
EXPONENTIALS = 64
"""Of a lane, for a block of 128 keys."""


def compiled(spec: AttentionSpec, variant: AttentionVariant, compiler: CudaCompiler) -> Compiled:
    """Compile a Hopper kernel, in a process of its own."""
    read_inline_functions()

    def work(_: object) -> Compiled:
        from tvm_attn.schedules import sm90
        from tvm_attn.tir.hooks import Hooks

        function = sm90.attention(spec, Hooks(variant), tiles_to_try(spec)[0])
        generated = cuda.generate({"attention": function}, TARGET, "tirx")
        assert TARGET.arch is not None
        source = generated.device.source
        return cuda.compile_source(compiler, "attention", source, TARGET.arch)

    with Child("a kernel", work) as child:
        result: Compiled = child.result()
        return result


def check_pipeline(made: Compiled, exponentials: int, *, has_boxes: bool) -> str:
    """Check what holds of all kernels, and return SASS.

    ``exponentials`` are those of a lane for a block; ``has_boxes``: of pages.
    """
    assert "0 bytes stack frame, 0 bytes spill stores" in made.report
    assert "C75" not in made.report, "multiplications are serialised"
    code = disassemble(made.cubin)
    loops = [part.split(".L_x_")[-1] for part in code.split("BRA.U.ANY")[:-1]]
    assert bool(loops) == has_boxes, "each lane copies a box, of pages that have them"
    assert all(loop.count("UTMALDG") == 1 and loop.count(";") <= 8 for loop in loops)
    between = re.findall(f"{WAIT_FOR_QK}(.*?){WAIT_FOR_PV}", code, re.DOTALL)
    most = max(part.count("MUFU.EX2") for part in between)
    assert most >= exponentials // 2, "exponentials do not overlap weights times values"
    return code


@pytest.mark.parametrize(
    ("kind", "page_size", "heads", "head_dim"),
    [
        *(("nvcc", None, 32, 128), ("nvrtc", 16, 32, 128)),
        *(("nvcc", 1, 32, 128), ("nvrtc", 12, 32, 128), ("nvcc", 5, 40, 128)),
        *(("nvcc", None, 64, 64), ("nvrtc", 16, 64, 64)),
    ],
)
def test_the_pipeline_is_what_it_is_written_to_be(
    kind: str, page_size: int | None, heads: int, head_dim: int
) -> None:
    if (compiler := FIND[kind]()) is None:
        pytest.skip(f"there is no {kind}")
    spec = AttentionSpec(heads, 8, head_dim, q_dtype="bfloat16", page_size=page_size)
    made = compiled(spec, variants.causal(), compiler)
    check_pipeline(made, EXPONENTIALS, has_boxes=page_size == 16)


@pytest.mark.parametrize(
    ("kind", "dims", "page_size", "heads"),
    [
        *(("nvcc", (256, 256), None, 16), ("nvcc", (256, 256), 1, 16)),
        ("nvrtc", (192, 128), 64, 40),
    ],
)
def test_wide_heads_need_no_memory_of_threads_and_leave_in_runs(
    kind: str, dims: tuple[int, int], page_size: int | None, heads: int
) -> None:
    if (compiler := FIND[kind]()) is None:
        pytest.skip(f"there is no {kind}")
    spec = AttentionSpec(
        heads, 8, dims[0], head_dim_vo=dims[1], q_dtype="bfloat16", page_size=page_size
    )
    made = compiled(spec, variants.causal(), compiler)
    exponentials = EXPONENTIALS * tiles_to_try(spec)[0].block // 128
    code = check_pipeline(made, exponentials, has_boxes=page_size == 64)
    rows, runs = 2, dims[1] // 32
    assert code.count("STG.E.128") >= rows * runs, "rows do not leave in runs of 16 bytes"
