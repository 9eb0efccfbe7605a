"""``tvm-attn bench prefill``: prefill and appends on a GPU beside torch's cuDNN and fa2 attention.

Every result is held against the float64 reference on sampled rows before it is timed. A row is OK
where our ratio to cuDNN is at least that of the best published kernel of the same instruction set
(see `tvm_attn.bench.prefill_rows`); variants stand beside our own plain causal attention.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
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
    qo_lens, kv_lens = [row.qo_len] * row.batch, [row.kv_len] * row.batch
    q = random(sum(qo_lens), spec.num_qo_heads, spec.head_dim_qk)
    table = page_table(qo_lens, kv_lens, row.page_size or 1)
    pages = (len(table[2]), row.page_size) if row.page_size else (sum(kv_lens),)
    k, v = (random(*pages, spec.num_kv_heads, spec.head_dim_qk) for _ in range(2))
    plan = kernel.plan(*table[: 4 if row.page_size else 2], **args.plan)
    out = torch.full_like(q, torch.nan)
    work = partial(kernel.run, plan, q, (k, v), out=out, **args.run)
    work()
    for request in {0, row.batch - 1}:
        check(row, args, request, (q, *(dense(x, row, table, request) for x in (k, v))), out)
    return work


def dense(
    cache: torch.Tensor, row: Row, table: tuple[torch.Tensor, ...], request: int
) -> torch.Tensor:
    """Return K or V of a request, ``[kv_len, num_kv_heads, head_dim]``."""
    if row.page_size is None:
        return cache[request * row.kv_len : (request + 1) * row.kv_len]
    begin, end = table[1][request : request + 2].tolist()
    return cache[table[2][begin:end].long()].flatten(0, 1)[: row.kv_len]


def check(
    row: Row, args: Given, request: int, qkv: tuple[torch.Tensor, ...], out: torch.Tensor
) -> None:
    """Hold sampled rows of a request against the reference."""
    starts = (0, row.qo_len // 2, row.qo_len - SAMPLES)
    sampled = torch.cat([torch.arange(start, start + SAMPLES) for start in starts]).to(DEVICE)
    q, k, v = qkv
    at = request * row.qo_len + sampled
    exact, eager = (
        reference.attention(
            q[at],
            k,
            v,
            q_pos=sampled + row.kv_len - row.qo_len,
            compute=compute,
            **args.twin,
        )[0]
        for compute in ("float64", "eager")
    )
    reference.check_accuracy(out[at], exact, eager, name=row.name)


def peers(row: Row) -> dict[str, Work]:
    """Return torch's attention on the row's shape, or on the dense batch that stands for it."""
    batch, tokens = row.dense or (row.batch, row.kv_len)
    heads = (row.num_qo_heads, row.num_kv_heads, row.num_kv_heads)
    q, k, v = (random(batch, tokens, n, row.head_dim).transpose(1, 2) for n in heads)
    attend = partial(scaled_dot_product_attention, is_causal=row.variant != "full")

    def call(backend: SDPBackend, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v, enable_gqa=k.shape[1] != q.shape[1])

    works: dict[str, Work] = {}
    for name, backend in TORCH.items():
        try:
            call(backend, k, v)
            works[name] = partial(call, backend, k, v)
        except RuntimeError:  # this backend has no grouped queries
            wide = (x.repeat_interleave(heads[0] // heads[1], dim=1) for x in (k, v))
            works[name] = partial(call, backend, *wide)
    return works


def measure(row: Row, build: Build, rounds: int) -> dict[str, Any]:
    """Return a row's figures."""
    works = {"ours": ours(row, build(row))}
    result: dict[str, Any] = {"group": row.group, "row": row.name}
    if row.group == "variants":
        plain = replace(row, variant="causal", window=0)
        works["plain"] = ours(plain, build(plain))
    else:
        works.update(peers(row))
    times = bursts(works, rounds=rounds)
    result["us"] = round(times["ours"] * 1e6, 1)
    result["TFLOP/s"] = round(row.flops / times["ours"] / 1e12, 1)
    if row.group == "variants":
        return {**result, "time over plain causal": round(times["ours"] / times["plain"], 3)}
    batch, tokens = row.dense or (row.batch, row.kv_len)
    flops = replace(row, batch=batch, qo_len=tokens, kv_len=tokens).flops
    rates = {name: flops / times[name] / 1e12 for name in TORCH}
    ratio = row.flops / times["ours"] / 1e12 / rates["cuDNN"]
    result.update({name: round(rate, 1) for name, rate in rates.items()})
    result["ratio to cuDNN"] = round(ratio, 3)
    if row.needed is not None:
        result["needed"] = round(row.needed, 3)
        result["verdict"] = "OK" if ratio >= row.needed else "behind"
    return result


def builder(chosen: list[Row], target: str, schedule: str | None) -> Build:
    """Build all kernels of the rows in parallel, and return what finds them."""
    wanted = {}
    for row in chosen:
        for each in (row, replace(row, variant="causal", window=0)):
            if each is row or row.group == "variants":
                spec = spec_of(each)
                wanted[spec, each.variant] = (spec, VARIANTS[each.variant](spec), target)
    pipeline.build_many(wanted.values())
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
            result = measure(row, build, options.rounds)
        except AssertionError as error:
            result = {"group": row.group, "row": row.name, "error": str(error), "verdict": "WRONG"}
        bad += result.get("verdict", "OK") != "OK"
        print(json.dumps(result) if options.json else line(result), flush=True)
    return int(bad > 0)


def line(result: dict[str, Any]) -> str:
    """Return a row as text."""
    rest = "  ".join(f"{k} {v}" for k, v in result.items() if k not in ("group", "row", "verdict"))
    return f"{result['group']:8} {result['row']:44} {rest}  {result.get('verdict', '')}".rstrip()
