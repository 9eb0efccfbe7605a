"""CUDA kernels as they are generated: nothing is compiled, no GPU is needed."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from tvm_attn import _compat
from tvm_attn.codegen import cuda
from tvm_attn.codegen.children import Child
from tvm_attn.schedules.tiles_cuda import CudaTile
from tvm_attn.schedules.tiles_sm90 import HopperTile
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget, parse_target
from tvm_attn.variant import AttentionVariant


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel's source, and what a launch of it asks for."""

    source: str
    threads: int
    shared_bytes: int

    @property
    def body(self) -> str:
        """The kernel alone, without what every source begins with."""
        return re.split(r'extern "C" __global__', self.source)[-1]


@functools.cache
def read_inline_functions() -> None:
    """Trace kernels here, so that processes forked off need not read their inline functions."""
    _compat.import_tvm()
    from tvm_attn.schedules import families
    from tvm_attn.tir.hooks import Hooks

    spec, target = AttentionSpec(8, 2, 64, q_dtype="bfloat16"), parse_target("sm_90")
    ranked = [families.query_tiles(spec, AttentionVariant(), target, s) for s in (None, "sm80")]
    tiles = {first.schedule: first for each in ranked for first, *_ in each}
    for tile in tiles.values():
        families.attention(spec, Hooks(AttentionVariant()), tile)


def generate_kernel(
    spec: AttentionSpec, variant: AttentionVariant, tile: CudaTile | HopperTile, target: BuildTarget
) -> GeneratedKernel:
    """Generate attention with tensor cores, in a process of its own."""
    read_inline_functions()

    def work(_: object) -> GeneratedKernel:
        from tvm_attn.schedules import families
        from tvm_attn.tir.hooks import Hooks

        function = families.attention(spec, Hooks(variant), tile)
        generated = cuda.generate({"attention": function}, target, "tirx")
        [launch] = generated.launches.values()
        return GeneratedKernel(
            generated.device.source,
            int(launch["threadIdx.x"]),
            int(launch["tirx.use_dyn_shared_memory"]),
        )

    with Child("a kernel", work) as child:
        result: GeneratedKernel = child.result()
        return result
