"""``tvm-attn bench run``: what a run takes of the host's time, on a GPU.

Decoding, whose kernels take little time. `run` allocates its result, `into` is given it, `wrapper`
is `BatchDecodeWithPagedKVCacheWrapper.run` into the same; `launch` is the compiled function alone.
The GPU is idle before each call, and nothing waits for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tvm_attn import pipeline
from tvm_attn._flashinfer.decode_paged import BatchDecodeWithPagedKVCacheWrapper
from tvm_attn.bench.batches import page_table
from tvm_attn.bench.decode import DEVICE
from tvm_attn.bench.prefill import machine
from tvm_attn.bench.timing import Work, call_time
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.spec import AttentionSpec
from tvm_attn.variant import AttentionVariant

BATCHES = (1, 64, 512)
SPEC = AttentionSpec(32, 8, 128, q_dtype="bfloat16", page_size=16)
KV_LEN = 64


def measure(kernel: AttentionModule, batch: int) -> dict[str, Any]:
    """Return the microseconds of the host that a batch takes."""
    spec, dtype = SPEC, torch.bfloat16
    table = page_table([1] * batch, [KV_LEN] * batch, 16)
    shape = (len(table[2]), 16, spec.num_kv_heads, spec.head_dim_qk)
    k, v = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(2))
    q = torch.randn(batch, spec.num_qo_heads, spec.head_dim_qk, device=DEVICE, dtype=dtype)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
    plan = kernel.plan(*table)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device=DEVICE))
    _, indptr, indices, last = table
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, 16)
    wrapper.plan(indptr, indices, last, *heads, q_data_type=dtype)
    calls: dict[str, Work] = {
        "run": partial(kernel.run, plan, q, (k, v)),
        "into": partial(kernel.run, plan, q, (k, v), out=out),
        "wrapper": partial(wrapper.run, q, (k, v), out=out),
        "launch": kernel.launcher(plan, q, (k, v), out, lse),
    }
    times = {name: round(call_time(call) * 1e6, 1) for name, call in calls.items()}
    return {"batch": batch, **times}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its rows."""
    parser = argparse.ArgumentParser(prog="tvm-attn bench run", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="*", default=BATCHES, help="batch sizes")
    parser.add_argument("--json", action="store_true", help="print a JSON row a line")
    options = parser.parse_args(argv)
    kernel = pipeline.build(SPEC, AttentionVariant(), DEVICE)
    if not options.json:
        print(machine())
    for batch in options.batch:
        result = measure(kernel, batch)
        text = "  ".join(f"{name} {value}" for name, value in result.items())
        print(json.dumps(result) if options.json else text, flush=True)
    return 0
