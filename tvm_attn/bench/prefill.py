"""``tvm-attn bench prefill``: prefill and appends on a GPU beside torch's cuDNN and fa2 attention.

Every result is held against the float64 reference on sampled rows before it is timed. A row is OK
where our ratio to cuDNN is at least that of the best published kernel (with ``--schedule sm80``, of
the same instruction set; see `tvm_attn.bench.prefill_rows`); variants, and queries that make large
scores, stand beside our own plain causal attention.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tvm_attn import pipeline, reference
from tvm_attn.bench.batches import page_table
from tvm_attn.bench.prefill_rows import Row, rows
from tvm_attn.bench.timing import Work, bursts
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.shipped import VARIANTS
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import parse_target

CAP = 30.0
DEVICE = torch.device("cuda")
TORCH = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "torch fa2": SDPBackend.FLASH_ATTENTION}
SAMPLES = 8
"""Query rows checked at the beginning, the middle and the end of a request."""
LEVEL = 0.99
"""What is within 1 % of a figure is level with it."""

Build = Callable[[Row], AttentionModule]


@dataclass(frozen=True)
class Given:
    """Keywords of plan, run and the reference, for a variant."""

    plan: dict[str, Any]
    run: dict[str, Any]
    twin: dict[str, Any]


def spec_of(row: Row) -> AttentionSpec:
    """Return the spec of a row."""
    return AttentionSpec(
        row.num_qo_heads,
        row.num_kv_heads,
        row.head_dim,
        row.head_dim_vo,
        q_dtype="bfloat16",
        page_size=row.page_size,
    )


def given(row: Row) -> Given:
    """Return the arguments of a row's variant; a custom mask is that of causal attention."""
    causal = {} if row.variant == "full" else {"mask": reference.causal()}
    if row.variant == "soft_cap":
        return Given({}, {"logits_soft_cap": CAP}, {**causal, "logits": reference.soft_cap(CAP)})
    if row.variant == "alibi":
        slopes = reference.alibi_slopes(row.num_qo_heads).to(DEVICE)
        return Given({}, {"alibi_slopes": slopes}, {**causal, "logits": reference.alibi(slopes)})
    if row.variant == "window":
        left = row.window - 1
        mask = reference.causal() & reference.sliding_window(left)
        return Given({"window_left": left}, {}, {"mask": mask})
    if row.variant == "custom_mask":
        visible = np.tri(row.qo_len, row.kv_len, row.kv_len - row.qo_len, dtype=bool)
        bits = torch.from_numpy(np.packbits(visible, axis=None, bitorder="little"))
        return Given({"custom_mask": bits.repeat(row.batch)}, {}, causal)
    return Given({}, {}, causal)


def random(*shape: int) -> torch.Tensor:
    """Return normal bfloat16 values."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def ours(row: Row, kernel: AttentionModule) -> Work:
    """Plan a row, check what it gives, and return the call to time."""
    spec, args = kernel.spec, given(row)
    qo_lens, kv_lens = (list(lens) for lens in zip(*row.requests, strict=True))
    q = random(sum(qo_lens), spec.num_qo_heads, spec.head_dim_qk) * row.scale
    table = page_table(qo_lens, kv_lens, row.page_size or 1)
    pages = (len(table[2]), row.page_size) if row.page_size else (sum(kv_lens),)
    dims = (spec.head_dim_qk, spec.dim_vo)
    k, v = (random(*pages, spec.num_kv_heads, dim) for dim in dims)
    plan = kernel.plan(*table[: 4 if row.page_size else 2], **args.plan)
    out = q.new_full((*q.shape[:2], spec.dim_vo), torch.nan)
    work = partial(kernel.run, plan, q, (k, v), out=out, **args.run)
    work()
    for request in {0, row.batch - 1}:
        mine = slice(*table[0][request : request + 2].tolist())
        kv = (dense(x, row, table, request) for x in (k, v))
        check(row, args, (q[mine], *kv), out[mine])
    return work


def dense(
    cache: torch.Tensor, row: Row, table: tuple[torch.Tensor, ...], request: int
) -> torch.Tensor:
    """Return K or V of a request, ``[kv_len, num_kv_heads, head_dim]``."""
    begin, end = table[1][request : request + 2].tolist()
    if row.page_size is None:
        return cache[begin:end]
    return cache[table[2][begin:end].long()].flatten(0, 1)[: row.requests[request][1]]


def check(row: Row, args: Given, qkv: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    """Hold sampled rows of a request against the reference."""
    q, k, v = qkv
    starts = (0, len(q) // 2, max(len(q) - SAMPLES, 0))
    sampled = torch.cat([torch.arange(start, start + SAMPLES) for start in starts]).to(DEVICE)
    sampled = sampled[sampled < len(q)]
    q_pos = sampled + len(k) - len(q)
    exact, eager = (
        reference.attention(q[sampled], k, v, q_pos=q_pos, compute=compute, **args.twin)[0]
        for compute in ("float64", "eager")
    )
    reference.check_accuracy(out[sampled], exact, eager, name=row.name)


def peers(row: Row) -> dict[str, Work]:
    """Return torch's attention on the row's shape, or on the dense batch that stands for it."""
    batch, tokens = row.dense or (row.batch, row.kv_len)
    heads = (row.num_qo_heads, row.num_kv_heads, row.num_kv_heads)
    dims = (row.head_dim, row.head_dim, row.head_dim_vo or row.head_dim)
    q, k, v = (
        random(batch, tokens, *each).transpose(1, 2) for each in zip(heads, dims, strict=True)
    )
    attend = partial(scaled_dot_product_attention, is_causal=row.variant != "full")

    def call(backend: SDPBackend, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v, enable_gqa=k.shape[1] != q.shape[1])

    works: dict[str, Work] = {}
    for name, backend in TORCH.items():
        for repeats in (1, heads[0] // heads[1]):  # some have no grouped queries, or no such dims
            kv = tuple(x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
            with suppress(RuntimeError):
                call(backend, *kv)
                works[name] = partial(call, backend, *kv)
                break
    return works


def measure(row: Row, build: Build, rounds: int, schedule: str | None = None) -> dict[str, Any]:
    """Return a row's figures."""
    works = {"ours": ours(row, build(row))}
    result: dict[str, Any] = {"group": row.group, "row": row.name}
    if has_plain(row):
        plain = plain_of(row)
        works["plain"] = ours(plain, build(plain))
    if row.beside_torch:
        works.update(peers(row))
    times = bursts(works, rounds=rounds)
    rate = row.flops / times["ours"] / 1e12
    result["us"], result["TFLOP/s"] = round(times["ours"] * 1e6, 1), round(rate, 1)
    verdicts = []
    if has_plain(row):
        over = times["ours"] / times["plain"]
        result["time over plain causal"] = round(over, 3)
        verdicts += ["OK" if over <= row.limit else "behind"] if row.limit else []
    if row.beside_torch:
        batch, tokens = row.dense or (row.batch, row.kv_len)
        dense = replace(row, batch=batch, qo_len=tokens, kv_len=tokens, lens=(), window=0)
        rates = {name: dense.flops / times[name] / 1e12 for name in TORCH if name in works}
        result.update({name: round(each, 1) for name, each in rates.items()})
        result["ratio to cuDNN"] = round(rate / rates["cuDNN"], 3)
        if needed := row.needed(schedule):
            result["needed"] = round(needed, 3)
            verdicts.append("OK" if rate / rates["cuDNN"] >= LEVEL * needed else "behind")
    if verdicts:
        result["verdict"] = max(verdicts)
    return result


def has_plain(row: Row) -> bool:
    """Whether a row stands beside our own plain causal attention."""
    return row.group in ("variants", "scaled")


def plain_of(row: Row) -> Row:
    """Return the row of plain causal attention on the same shape."""
    return replace(row, variant="causal", window=0, scale=1.0)


def builder(chosen: list[Row], target: str, schedule: str | None) -> Build:
    """Build all kernels of the rows in parallel, and return what finds them."""
    wanted = {}
    for row in chosen:
        for each in (row, plain_of(row)):
            if each is row or has_plain(row):
                spec = spec_of(each)
                wanted[spec, each.variant] = (spec, VARIANTS[each.variant](spec), target)
    pipeline.build_many(wanted.values(), schedule=schedule)
    return lambda row: pipeline.build(
        *wanted[spec_of(row), row.variant],
        schedule=schedule,
    )


def selected(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows that were asked for."""
    for row in rows():
        if options.only in (None, row.group) and re.search(options.match, row.name):
            yield row


def machine() -> str:
    """Describe the card and the versions."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {cudnn}"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print its rows; returns 1 if one of them is behind or wrong."""
    parser = argparse.ArgumentParser(prog="tvm-attn bench prefill", description=__doc__)
    groups = list(dict.fromkeys(row.group for row in rows()))
    parser.add_argument("--only", choices=groups, help="run one group")
    parser.add_argument("--match", default="", help="run the rows whose name has this regex")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--schedule", help="backend, such as sm80; by default the library's choice")
    parser.add_argument("--target", help="such as 'cuda -arch=sm_90'; by default this GPU")
    parser.add_argument("--rounds", type=int, default=7, help="bursts of each; the median counts")
    parser.add_argument("--json", action="store_true", help="print a JSON row a line")
    options = parser.parse_args(argv)
    chosen = list(selected(options))
    if options.list:
        print("\n".join(f"{row.group:9} {row.name}" for row in chosen))
        return 0
    target = str(parse_target(options.target or "cuda"))
    build = builder(chosen, target, options.schedule)
    torch.manual_seed(0)
    if not options.json:
        print(machine())
    bad = 0
    for row in chosen:
        try:
            result = measure(row, build, options.rounds, options.schedule)
        except AssertionError as error:
            result = {"group": row.group, "row": row.name, "error": str(error), "verdict": "WRONG"}
        bad += result.get("verdict", "OK") != "OK"
        print(json.dumps(result) if options.json else line(result), flush=True)
    return int(bad > 0)


def line(result: dict[str, Any]) -> str:
    """Return a row as text."""
    rest = "  ".join(f"{k} {v}" for k, v in result.items() if k not in ("group", "row", "verdict"))
    return f"{result['group']:8} {result['row']:44} {rest}  {result.get('verdict', '')}".rstrip()
