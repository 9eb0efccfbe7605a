"""``tvm-attn bench cpu``: kernels against torch, planning, and what a call and a build cost."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tvm_attn import env, pipeline, variants
from tvm_attn.bench.batches import DISTRIBUTIONS, PagedBatch, kv_lengths, page_table, paged_batch
from tvm_attn.bench.timing import interleaved
from tvm_attn.runtime.library import num_threads
from tvm_attn.spec import AttentionSpec

Row = dict[str, Any]
CTAS = 132
"""CTAs that planning is measured for: the SMs of an H200."""


def prefill(dtypes: tuple[str, ...]) -> Iterator[Row]:
    """Causal prefill of 1024 tokens against torch's `scaled_dot_product_attention`."""
    for dtype in dtypes:
        for dim in (64, 128):
            for kv_heads in (32, 8):
                spec = _spec(kv_heads, dim, dtype)
                yield _against_torch("prefill", spec, [1024], [1024], causal=True)


def decode(dtypes: tuple[str, ...]) -> Iterator[Row]:
    """Decode of 16 requests with 1024 tokens each."""
    for dtype in dtypes:
        yield _against_torch("decode", _spec(8, 128, dtype), [1] * 16, [1024] * 16, causal=False)


def planning() -> Iterator[Row]:
    """Planning time and balance for `CTAS` CTAs, of decode batches with 8 KV heads."""
    kernel = pipeline.build(_spec(8, 128, "bfloat16"), variants.causal()).with_ctas(CTAS)
    for batch in (1, 64, 512, 4096):
        for distribution in DISTRIBUTIONS:
            lengths = kv_lengths(distribution, batch, 1024)
            table = page_table([1] * batch, lengths, 16)
            plan = kernel.plan(*table)
            seconds = interleaved({"plan": partial(kernel.plan, *table)})["plan"]
            yield {
                "what": "plan",
                "case": f"batch {batch} {distribution}",
                "us": round(seconds * 1e6, 1),
                "imbalance": round(plan.work[0].imbalance, 3),
                "slots": plan.num_slots,
            }


def overheads() -> Iterator[Row]:
    """Measure what a run costs over the kernel itself, and what building costs."""
    spec = _spec(8, 128, "float32")
    kernel = pipeline.build(spec, variants.causal())
    batch = paged_batch(spec, [1], [1])
    plan = kernel.plan(*batch.table)
    out, lse = kernel.run(plan, batch.q, batch.kv, return_lse=True)
    launch = kernel.launcher(plan, batch.q, batch.kv, out, lse)
    times = interleaved({"run": lambda: kernel.run(plan, batch.q, batch.kv), "kernel": launch})
    overhead = (times["run"] - times["kernel"]) * 1e6
    yield {"what": "run", "case": "over the kernel", "us": round(overhead, 1)}
    for case, seconds in _build_seconds().items():
        yield {"what": "build", "case": case, "us": round(seconds * 1e6)}


def _spec(kv_heads: int, dim: int, dtype: str) -> AttentionSpec:
    return AttentionSpec(32, kv_heads, dim, q_dtype=dtype, page_size=16)


def _against_torch(
    what: str, spec: AttentionSpec, qo_lens: list[int], kv_lens: list[int], causal: bool
) -> Row:
    batch = paged_batch(spec, qo_lens, kv_lens)
    kernel = pipeline.build(spec, variants.causal())
    plan = kernel.plan(*batch.table)
    q, k, v = _dense(batch, spec, len(qo_lens))
    gqa = spec.group_size > 1
    sdpa = torch.nn.functional.scaled_dot_product_attention
    times = interleaved(
        {
            "ours": lambda: kernel.run(plan, batch.q, batch.kv),
            "torch": lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=gqa),
        }
    )
    kv_bytes = sum(cache.nbytes for cache in batch.kv)
    return {
        "what": what,
        "case": f"{spec.num_qo_heads}/{spec.num_kv_heads} D{spec.head_dim_qk} {spec.q_dtype}",
        "ms": round(times["ours"] * 1e3, 3),
        "torch ms": round(times["torch"] * 1e3, 3),
        "ratio": round(times["torch"] / times["ours"], 2),
        "GB/s": round(kv_bytes / times["ours"] / 1e9, 1),
    }


def _dense(batch: PagedBatch, spec: AttentionSpec, requests: int) -> list[torch.Tensor]:
    """Return the batch as torch wants it: ``[batch, heads, tokens, dim]``, contiguous."""
    pages = batch.table[2].long()
    caches = [c[pages].reshape(requests, -1, spec.num_kv_heads, c.shape[-1]) for c in batch.kv]
    q = batch.q.reshape(requests, -1, spec.num_qo_heads, spec.head_dim_qk)
    return [t.transpose(1, 2).contiguous() for t in (q, *caches)]


def _build_seconds() -> dict[str, float]:
    """Seconds to build a kernel with an empty cache, and to take it from the cache."""
    spec = _spec(8, 128, "float32")
    variant = variants.causal() & variants.sliding_window(512)
    seconds = {}
    with tempfile.TemporaryDirectory() as folder, env.override(env.CACHE_DIR, folder):
        for case in ("cold", "from cache"):
            pipeline.forget_loaded()
            start = time.perf_counter()
            pipeline.build(spec, variant)
            seconds[case] = time.perf_counter() - start
    return seconds


def machine() -> str:
    """Describe the CPU, the threads and the versions."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    model = names[0].split(":")[1].strip() if names else platform.processor()
    from tvm_attn.target import parse_target

    return f"{model} ({parse_target()}), {num_threads()} threads, torch {torch.__version__}"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print its rows."""
    parser = argparse.ArgumentParser(prog="tvm-attn bench cpu", description=__doc__)
    groups: dict[str, Callable[[tuple[str, ...]], Iterator[Row]]] = {
        "prefill": prefill,
        "decode": decode,
        "plan": lambda dtypes: planning(),
        "overhead": lambda dtypes: overheads(),
    }
    parser.add_argument("--only", choices=groups, help="run one group")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated")
    parser.add_argument("--json", action="store_true", help="print a JSON row a line")
    options = parser.parse_args(argv)
    torch.set_num_threads(num_threads())
    if not options.json:
        print(machine())
    for name, group in groups.items():
        if options.only in (None, name):
            for row in group(tuple(options.dtypes.split(","))):
                print(json.dumps(row) if options.json else _line(row), flush=True)
    return 0


def _line(row: Row) -> str:
    rest = "  ".join(f"{k} {v}" for k, v in row.items() if k not in ("what", "case"))
    return f"{row['what']:8} {row['case']:28} {rest}"
