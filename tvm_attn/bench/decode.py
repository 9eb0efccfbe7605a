"""``tvm-attn bench decode``: decoding on a GPU beside a plain read of the same K and V.

CUDA graphs are replayed that hold a call for each of several caches, so that none is found in the
L2 cache. Every result is held against the float64 reference on sampled requests before it is timed.
A row is OK where our share of the read's speed is at least that of the best published kernel (see
`tvm_attn.bench.decode_rows`).
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from tvm_attn import pipeline, reference
from tvm_attn.bench.batches import page_table
from tvm_attn.bench.decode_rows import Row, rows
from tvm_attn.bench.prefill import machine
from tvm_attn.bench.reading import read_all
from tvm_attn.bench.timing import Work, bursts
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target
from tvm_attn.variants import causal

DEVICE = torch.device("cuda")
HEAD_DIM = 128
ROTATED_BYTES = 2**28
"""Of all caches together, at least: several times an L2 cache."""
MOST_CACHES = 48
LEAST_READ = 2**21
"""Bytes of a plain read, at least: those of smaller rows were published with its figure."""
LEVEL = 0.99
"""What is within 1 % of a figure is level with it."""

Build = Callable[[Row], AttentionModule]
Cache = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A row's batch, and caches of the same shape that are used in turns."""

    table: tuple[torch.Tensor, ...]
    q: torch.Tensor
    caches: list[Cache]


def spec_of(row: Row) -> AttentionSpec:
    """Return the spec of a row."""
    return AttentionSpec(
        row.num_qo_heads,
        row.num_kv_heads,
        HEAD_DIM,
        q_dtype="bfloat16",
        kv_dtype=row.kv_dtype,
        page_size=row.page_size,
    )


def problem_of(row: Row) -> Problem:
    """Draw a row's queries, and as many caches as it takes."""
    table = page_table(row.qo_lens, list(row.kv_lens), row.page_size)
    dtype = getattr(torch, row.kv_dtype)
    shape = (len(table[2]), row.page_size, row.num_kv_heads, HEAD_DIM)
    cache_bytes = 2 * math.prod(shape) * dtype.itemsize
    count = min(max(-(-ROTATED_BYTES // cache_bytes), 1), MOST_CACHES)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    caches = [(random(*shape).to(dtype), random(*shape).to(dtype)) for _ in range(count)]
    return Problem(table, random(sum(row.qo_lens), row.num_qo_heads, HEAD_DIM), caches)


def ours(row: Row, kernel: AttentionModule, problem: Problem) -> Work:
    """Plan a row, check what it gives, and return a function that attends to each cache."""
    plan = kernel.plan(*problem.table)
    out = torch.full_like(problem.q, torch.nan)
    lse = torch.empty(problem.q.shape[:2], device=DEVICE)
    kernel.run(plan, problem.q, problem.caches[0], out=out, lse=lse)
    for request in {0, len(row.kv_lens) - 1}:
        check(row, problem, request, out)
    launches = [kernel.launcher(plan, problem.q, cache, out, lse) for cache in problem.caches]

    def work() -> None:
        for launch in launches:
            launch()

    return work


def check(row: Row, problem: Problem, request: int, out: torch.Tensor) -> None:
    """Hold a request's rows against the reference."""
    begin, end = problem.table[1][request : request + 2].tolist()
    pages = problem.table[2][begin:end].long().to(DEVICE)
    k, v = (x[pages].flatten(0, 1)[: row.kv_lens[request]] for x in problem.caches[0])
    mine = slice(*problem.table[0][request : request + 2].tolist())
    exact, eager = (
        reference.attention(
            problem.q[mine],
            k.to(problem.q.dtype),
            v.to(problem.q.dtype),
            mask=reference.causal(),
            compute=compute,
        )[0]
        for compute in ("float64", "eager")
    )
    reference.check_accuracy(out[mine], exact, eager, name=row.name)


def in_graph(work: Work) -> Work:
    """Return a function that replays what some work launches."""
    cuda: Any = torch.cuda
    stream, graph = cuda.Stream(), cuda.CUDAGraph()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        work()
        stream.synchronize()
        with cuda.graph(graph, stream=stream):
            work()
    return partial(_replay, graph, work)


def _replay(graph: Any, work: Work) -> None:
    """Replay a graph of some work, which owns the tensors that the graph reads and writes."""
    graph.replay()


def measure(row: Row, build: Build, target: str, rounds: int) -> dict[str, Any]:
    """Return a row's figures."""
    problem = problem_of(row)
    works = {
        "ours": in_graph(ours(row, build(row), problem)),
        "read": in_graph(read_all(target, _joined(problem.caches))),
    }
    times = bursts(works, rounds=rounds)
    mine, read = (times[name] * 1e6 / len(problem.caches) for name in ("ours", "read"))
    return {
        **{"group": row.group, "row": row.name, "us": round(mine, 1), "read": round(read, 1)},
        **{"share": round(read / mine, 3), "needed": round(row.needed, 3)},
        "ahead": round(read / mine / row.needed, 2),
        "verdict": "OK" if read / mine >= LEVEL * row.needed else "behind",
    }


def _joined(caches: Sequence[Cache]) -> list[torch.Tensor]:
    """Return K and V of each cache as one tensor: the bytes that one launch reads."""
    joined = [torch.cat([x.view(torch.uint8).flatten() for x in cache]) for cache in caches]
    return [pad(x, (0, max(LEAST_READ - len(x), 0))) for x in joined]


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each group: the geometric mean of how far ahead its rows are."""
    groups: dict[str, list[float]] = {}
    for result in results:
        if "ahead" in result:
            groups.setdefault(result["group"], []).append(result["ahead"])
    return [
        f"{group:8} {math.exp(sum(map(math.log, ahead)) / len(ahead)):.2f} of the best peer's "
        f"share in {len(ahead)} rows, {min(ahead):.2f} at least"
        for group, ahead in groups.items()
    ]


def builder(chosen: Sequence[Row], target: str) -> Build:
    """Build all kernels of the rows in parallel, and return what finds them."""
    wanted = list(dict.fromkeys(spec_of(row) for row in chosen))
    pipeline.build_many([(spec, causal(), target) for spec in wanted])
    return lambda row: pipeline.build(spec_of(row), causal(), target)


def parser(prog: str, groups: Sequence[str]) -> argparse.ArgumentParser:
    """Return what reads the arguments."""
    made = argparse.ArgumentParser(prog=prog, description=__doc__)
    made.add_argument("--only", choices=groups, help="run one group")
    made.add_argument("--match", default="", help="run the rows whose name has this regex")
    made.add_argument("--most", type=float, default=math.inf, help="up to so many us of reading")
    made.add_argument("--list", action="store_true", help="print the names of the rows")
    made.add_argument("--target", help="such as 'cuda -arch=sm_90'; by default this GPU")
    made.add_argument("--rounds", type=int, default=7, help="bursts of each; the median counts")
    made.add_argument("--json", action="store_true", help="print a JSON row a line")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print its rows; returns 1 if one of them is behind or wrong."""
    return run("tvm-attn bench decode", list(rows()), argv)


def run(prog: str, every: Sequence[Row], argv: list[str] | None) -> int:
    """Run a benchmark, of the rows that the arguments choose."""
    options = parser(prog, list(dict.fromkeys(row.group for row in every))).parse_args(argv)
    chosen = [
        row
        for row in every
        if options.only in (None, row.group)
        and re.search(options.match, row.name)
        and row.floor <= options.most
    ]
    if options.list:
        print("\n".join(f"{row.group:8} {row.name}" for row in chosen))
        return 0
    target = str(parse_target(options.target or "cuda"))
    build = builder(chosen, target)
    torch.manual_seed(0)
    if not options.json:
        print(machine())
    results = []
    for row in chosen:
        try:
            result = measure(row, build, target, options.rounds)
        except AssertionError as error:
            result = {"group": row.group, "row": row.name, "error": str(error), "verdict": "WRONG"}
        results.append(result)
        print(json.dumps(result) if options.json else line(result), flush=True)
    if not options.json:
        print("\n".join(summary(results)))
    return int(any(result["verdict"] != "OK" for result in results))


def line(result: dict[str, Any]) -> str:
    """Return a row as text."""
    rest = "  ".join(f"{k} {v}" for k, v in result.items() if k not in ("group", "row", "verdict"))
    return f"{result['group']:8} {result['row']:32} {rest}  {result['verdict']}"
