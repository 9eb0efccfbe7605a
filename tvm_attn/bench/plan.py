"""``tvm-attn bench plan``: planning of decode batches, on the GPU and on the host.

On the GPU a CUDA graph is replayed that plans a batch several times over. The plan is compared with
that of the host before it is timed. `call` is what a call takes of the host's time when the GPU
plans, `host` when the host does, copying included and waiting not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tvm_attn import pipeline
from tvm_attn.bench.batches import page_table
from tvm_attn.bench.decode import DEVICE, in_graph
from tvm_attn.bench.prefill import machine
from tvm_attn.bench.timing import bursts, call_time
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.runtime.workspace import PlanLimits
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target
from tvm_attn.variants import causal

PAGE = 16
REPEATS = 20
"""Plans of a graph."""
BATCHES = (1, 8, 64, 512, 4096)
LENGTHS = ("even", "mixed", "giant")


def lengths(kind: str, batch: int) -> list[int]:
    """Return KV lengths of a batch: all alike, as in serving, or one as long as all others."""
    rng = np.random.default_rng(0)
    if kind == "even":
        return [2048] * batch
    mixed = [int(length) for length in np.exp(rng.normal(6.5, 1.2, batch)).clip(1, 16384)]
    return mixed if kind == "mixed" else [min(sum(mixed), 131072), *mixed[1:]]


def measure(kernel: AttentionModule, kind: str, batch: int, rounds: int) -> dict[str, Any]:
    """Return the microseconds that it takes to plan a batch."""
    kv_lens = lengths(kind, batch)
    table = page_table([1] * batch, kv_lens, PAGE)
    limits = PlanLimits(batch, batch, PAGE * len(table[2]))
    on_gpu = [array.to(DEVICE) for array in table]
    here, there, twin = (
        kernel.plan(*arrays, limits=limits, max_qo_len=1) for arrays in (table, on_gpu, on_gpu)
    )
    # Where a GPU has planned, the host cuts as it does; otherwise by an estimate.
    if there.to_json() != kernel.plan(*table, out=twin).to_json():
        raise AssertionError(f"{kind} {batch}: the GPU's plan is not that of the host")

    def work() -> None:
        for _ in range(REPEATS):
            kernel.plan(*on_gpu, out=there)

    times = bursts({"gpu": in_graph(work)}, rounds=rounds)
    calls = {
        "call": call_time(partial(kernel.plan, *on_gpu, out=there)),
        "host": call_time(partial(kernel.plan, *table, out=here)),
    }
    figures = {"gpu": times["gpu"] / REPEATS, **calls}
    return {
        "batch": batch,
        "lengths": kind,
        "slots": here.num_slots,
        **{name: round(seconds * 1e6, 1) for name, seconds in figures.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its rows."""
    parser = argparse.ArgumentParser(prog="tvm-attn bench plan", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="*", default=BATCHES, help="batch sizes")
    parser.add_argument("--rounds", type=int, default=7, help="bursts of each; the median counts")
    parser.add_argument("--json", action="store_true", help="print a JSON row a line")
    options = parser.parse_args(argv)
    spec = AttentionSpec(32, 8, 128, q_dtype="bfloat16", page_size=PAGE)
    kernel = pipeline.build(spec, causal(), str(parse_target("cuda")))
    if not options.json:
        print(machine())
    for batch in options.batch:
        for kind in LENGTHS:
            result = measure(kernel, kind, batch, options.rounds)
            text = "  ".join(f"{name} {value}" for name, value in result.items())
            print(json.dumps(result) if options.json else text, flush=True)
    return 0
