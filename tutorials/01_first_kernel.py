# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From a spec to a running kernel
#
# You know attention and PyTorch; no TVM is needed. We take a batch as a serving engine has it, say
# what attention it needs, generate a kernel for this CPU, read what was generated, plan the batch,
# run it and compare with float64.
#
# 1. The problem: a paged KV cache is a block-sparse matrix
# 2. Spec and variant
# 3. Build, and read what was generated
# 4. Plan
# 5. Run and compare
# 6. A variant of your own
# 7. Export, and load without TVM
#
# The pictures need the extra `viz`: `pip install 'tvm-attn[viz]'`.

# %%
# %matplotlib inline
import inspect
import re
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from textwrap import dedent

import torch

import tvm_attn as ta
from tvm_attn import reference, viz

_ = torch.manual_seed(0)

# %% [markdown]
# ## 1. The problem: a paged KV cache is a block-sparse matrix
#
# An engine steps many requests at once. Some decode one token, some prefill hundreds; each has a KV
# history of another length, which lives in pages anywhere in a common pool. Four small arrays say
# where:
#
# | array | shape | meaning |
# | --- | --- | --- |
# | `qo_indptr` | `[batch + 1]` | query tokens of request `b` are `qo_indptr[b]:qo_indptr[b + 1]` |
# | `kv_indptr` | `[batch + 1]` | its pages are `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]` |
# | `kv_indices` | `[num_pages]` | page ids, in KV order |
# | `kv_last_page_len` | `[batch]` | tokens in its last page |
#
# That is a sparse matrix in block sparse row (BSR) form. A block row is a request, a block column
# is a page, and a block is there if the request reads the page. Ragged K/V, block masks and token
# trees take the same form.
#
# Our batch: three requests decode, one is prefilled from scratch, and one is prefilled in chunks,
# now tokens 70 to 90.


# %%
def page_table(qo_lens: list[int], kv_lens: list[int], page_size: int = 16) -> ta.BSR:
    """Give each request pages from a shuffled pool that has four pages to spare."""
    pages = [-(-kv_len // page_size) for kv_len in kv_lens]
    return ta.BSR.from_page_table(
        qo_indptr=[0, *accumulate(qo_lens)],
        kv_indptr=[0, *accumulate(pages)],
        kv_indices=torch.randperm(sum(pages) + 4)[: sum(pages)],
        kv_last_page_len=[(kv_len - 1) % page_size + 1 for kv_len in kv_lens],
        page_size=page_size,
    )


batch = page_table(qo_lens=[1, 1, 48, 20, 1], kv_lens=[70, 200, 48, 90, 16])
print(batch)

# %%
viz.draw_bsr(batch)

# %% [markdown]
# ## 2. Spec and variant
#
# The **spec** is the shape of the problem. Batch, lengths and head counts are run-time values: only
# the quotient of the head counts, the group size, is compiled in, together with head dims, dtypes
# and layout.

# %%
spec = ta.AttentionSpec(
    num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype="float32", page_size=16
)
print(spec, "| group size", spec.group_size)

# %% [markdown]
# The **variant** is what makes this attention different from plain softmax attention: a few Python
# functions, called hooks. Here is one in full.

# %%
print(inspect.getsource(ta.variants.causal))

# %% [markdown]
# `ctx` knows where it stands: `ctx.kv_pos` and `ctx.q_pos` are not numbers but expressions, and so
# is what the hook returns. `mask` decides about one pair of query and key. `kv_range` says the same
# in bulk: queries at positions `q_lo` to `q_hi` see no key at or after position `q_hi + 1`, so
# blocks there are skipped rather than masked.
#
# Variants compose with `&`: masks AND, ranges intersect, transforms of the logits chain in order.

# %%
variant = ta.variants.causal() & ta.variants.sliding_window(63) & ta.variants.soft_cap(30.0)
print(variant)
print("run-time parameters:", {param.name: param.default for param in variant.params})

# %% [markdown]
# Tracing calls each hook once, on named variables, and gives one expression each. They are a part
# of the cache key: two variants that trace to the same text share a kernel, whatever they are
# called.

# %%
from tvm_attn.tir.fingerprint import fingerprint
from tvm_attn.tir.hooks import Hooks

traced = fingerprint(Hooks(variant), spec)
print("\n".join(line for line in traced.splitlines() if ": " in line))
assert "mask" in traced and "window_left" in traced

# %% [markdown]
# ## 3. Build, and read what was generated
#
# `build` traces the variant into the definition, schedules it, compiles it with LLVM, and keeps the
# result in a cache on disk. Without a `target` it generates code for this CPU.

# %%
kernel = ta.build(spec, variant)
print(kernel)

# %% [markdown]
# There are two kernels in it, for two sizes of query tile: `attention_short` for requests whose
# rows fit one short tile (decoding), `attention_long` for the others (prefill). A row is one (query
# token, query head) pair; the query heads that share a KV head stand in one tile, so a key is
# loaded once for all of them.
#
# ### The definition
#
# `kernel.tir` is the definition in TVMScript, TVM's Python syntax for TensorIR. This is its
# outline: the loops, and the names of the blocks inside.


# %%
def outline(script: str, function: str) -> str:
    """Return the loops and block names of a function of a script."""
    lines = script[script.index(f"def {function}(") :].split("\n\n")[0].splitlines()
    kept = [line for line in lines if re.match(r" +(for |with T\.sblock)", line)]
    return dedent("\n".join(re.sub(r'with T\.sblock\("(\w+)"\):', r"\1", line) for line in kept))


print(outline(kernel.tir, "attention_long"))

# %% [markdown]
# The phases of attention come in this order in every kernel, on every machine: `load_q`, then for
# each block of keys `gather_k`, `qk`, `logits`, `mask`, `softmax`, `gather_v`, `pv`, then
# `store_state`.

# %%
phases = ["load_q", "gather_k", "qk", "logits", "mask", "softmax", "gather_v", "pv", "store_state"]
places = [kernel.tir.index(f'T.sblock("{name}")') for name in phases]
assert places == sorted(places)


def phase(script: str, name: str, function: str = "attention_long") -> str:
    """Return a block of a function, with the loops right around it."""
    lines = script[script.index(f"def {function}(") :].splitlines()
    depth = [len(line) - len(line.lstrip()) for line in lines]
    first = at = next(i for i, line in enumerate(lines) if f'T.sblock("{name}")' in line)
    while lines[first - 1].lstrip().startswith("for ") and depth[first - 1] < depth[first]:
        first -= 1
    last = next(i for i in range(at + 1, len(lines)) if depth[i] <= depth[at])
    kept = [line for line in lines[first:last] if "T.reads" not in line and "T.writes" not in line]
    return dedent("\n".join(kept))


for name in ("gather_k", "qk", "logits", "mask"):
    print(phase(kernel.tir, name), end="\n\n")

# %% [markdown]
# - `gather_k` is where paging is: token -> page through `kv_indices`, and a place in the page.
# - `qk` is the matrix product, one multiply-add at a time.
# - In `logits` and `mask` you find the variant, with its variables replaced by where the kernel
#   stands. From here on logits are in base 2, hence the factor log2(e).
#
# ### The schedule
#
# The definition says what is computed, and nothing of how. A schedule rewrites its loops, one step
# at a time, and every step keeps the result. Below are the steps that matter most on a CPU, for the
# phases from `gather_k` to `mask`, each with the loops it leaves. We take them by hand, on the same
# definition, with the library's own tile for this CPU.

# %%
from tvm import s_tir

from tvm_attn.schedules.tiles import cpu_tiles
from tvm_attn.tir.attention import attention


def scores(sch: s_tir.Schedule) -> str:
    """Return the outline of the phases from gather_k to mask."""
    text = outline(sch.mod["main"].script(), "attention")
    begin, end = text.index("scores\n"), text.index("softmax\n")
    return dedent(text[begin:end].partition("\n")[2].rpartition("\n")[0])


tile = next(tile for tile in cpu_tiles(spec, ta.parse_target(None)) if tile.family == "long")
print(tile, end="\n\n")
sch = s_tir.Schedule(attention(spec, Hooks(variant), rows=tile.rows, block=tile.block))
print(scores(sch))

# %% [markdown]
# **Step 1: fewer passes.** `logits` writes a whole tile that `mask` reads again. Inlined, it is a
# part of `mask`.

# %%
sch.compute_inline(sch.get_sblock("logits"))
print(scores(sch))

# %% [markdown]
# **Step 2: a register tile.** Split rows and keys, and move the loop over the head dim between the
# tiles and their elements. Every element of Q and K that is loaded is now used several times before
# it is dropped, and the sums of a tile can stay in registers while `d` runs.

# %%
qk, mask = sch.get_sblock("qk"), sch.get_sblock("mask")
i, j, d = sch.get_loops(qk)[-3:]
i_0, i_1 = sch.split(i, [None, tile.qk[0]])
j_0, j_1 = sch.split(j, [None, tile.qk[1]])
sch.reorder(j_0, i_0, d, j_1, i_1)
print(scores(sch))

# %% [markdown]
# **Step 3: rows along a vector register.** Neighbouring rows do the same work on the same key, so
# they can share an instruction. To be loaded together they must be neighbours in memory: the
# buffers that `load_q`, `qk` and `mask` write are transposed, and TVM rewrites everything that
# reads them.

# %%
for name in ("load_q", "qk", "mask"):
    sch.transform_layout(sch.get_sblock(name), ("write", 0), lambda row, x: (x, row))
vectors, lanes = sch.split(i_1, [None, tile.lanes])
sch.vectorize(lanes)
sch.unroll(vectors)
sch.unroll(j_1)
print(scores(sch))

# %% [markdown]
# **Step 4: finish a register tile at once.** `mask` moves inside, to the tile that has just been
# summed. And the sums are set to 0 before the loop over `d`, not by a test inside of it.

# %%
sch.reverse_compute_at(mask, i_0, preserve_unit_loops=True)
sch.decompose_reduction(qk, d)
print(scores(sch))

# %% [markdown]
# `tvm_attn/schedules/cpu.py` does this for every phase, and makes the loops over CTAs parallel. A
# CTA, the unit of work on a GPU, is a thread here. In `kernel.scheduled` the product looks as ours
# does:

# %%
print(phase(kernel.scheduled, "qk_update"))
assert "for c in T.parallel(" in kernel.scheduled
assert phase(kernel.scheduled, "qk_update") == phase(
    sch.mod["main"].script(), "qk_update", function="attention"
)

# %% [markdown]
# ### The code
#
# `kernel.source` is the LLVM IR. This is the loop over `d`: a sum that starts at 0 and stays in a
# register (`phi`), a vector of Q, an element of K copied to all lanes (`shufflevector`), and the
# multiply-add, once for every vector of the register tile. (LLVM may unroll the loop on top of
# that.)

# %%
multiply_add = re.compile(r"@llvm\.fmuladd\.v\d+f32")
per_tile = tile.qk[0] // tile.lanes * tile.qk[1]
loop = next(
    block
    for block in re.split(r"\n(?=\S+:)", kernel.source)
    if block.startswith("for_body_d") and len(multiply_add.findall(block)) >= per_tile
)
lines = [line.split(", !")[0] for line in loop.splitlines() if "#dbg" not in line]
first = next(number for number, line in enumerate(lines) if multiply_add.search(line))
print("\n".join([*lines[:3], "  ...", *lines[first - 5 : first + 1], "  ..."]))
print(f"{len(multiply_add.findall(loop))} multiply-adds, {per_tile} in a register tile")

# %% [markdown]
# ## 4. Plan
#
# A plan says who does what. It is made once per batch, from lengths alone; all layers use it. A
# *unit* is one (request, KV head, query tile); the planner deals units to CTAs, and cuts one into
# several *items* along its keys only where that pays.
#
# A plan is for a number of CTAs, by default this machine's threads. `with_ctas` plans for another
# number, and here we take 8 so that there is something to see. (In Jupyter a plan also draws
# itself: end a cell with `plan`.)

# %%
kernel8 = kernel.with_ctas(8)
plan = kernel8.plan(batch)
print(plan)

# %%
viz.draw_plan(plan)

# %% [markdown]
# Every queue can be read. An item names its request, its KV head, its rows, and its KV tokens. The
# window of 63 tokens is at work here: request 1 has 200 tokens, and its only query needs the last
# 64.

# %%
items = [item for work in plan.work for queue in work.queues() for item in queue]
for item in items:
    if item.request == 1:
        print(item)
assert min(item.kv_begin for item in items if item.request == 1) == 200 - 64

# %% [markdown]
# ### One giant request
#
# Eight CTAs, 16 requests that decode with 512 tokens each: all are equal, and nothing is cut. Now
# one of them has 32768 tokens. Uncut, its units would keep two CTAs busy, one per KV head, while
# six have nothing left to do. They are cut: each piece writes a partial state (output and
# log-sum-exp) to a *slot*, and the slots of a unit are merged in KV order.
#
# The window is a run-time parameter of this variant; here it is turned off, or only 64 tokens of
# the giant would count.

# %%
even = kernel8.plan(page_table([1] * 16, [512] * 16), window_left=-1)
giant = kernel8.plan(page_table([1] * 16, [32768] + [512] * 15), window_left=-1)
print(even, giant, sep="\n\n")
assert even.num_slots == 0
assert giant.num_slots > 0
assert giant.work[0].imbalance < 1.1

# %%
viz.draw_plan(giant)

# %% [markdown]
# ### Another machine
#
# An H100 has 132 streaming multiprocessors. What its plan would be can be made and looked at here:
# a plan needs lengths and a number of CTAs, not the machine. Text shows the first CTAs and the
# last.

# %%
skewed = page_table([1] * 64, [65536] + [1024] * 63)
print(kernel.with_ctas(132).plan(skewed, window_left=-1))

# %% [markdown]
# ## 5. Run and compare
#
# A cache of random pages. What nobody refers to holds NaN: pages that belong to no request, and the
# end of each last page.

# %%
num_pages = batch.num_blocks + 4
k, v = (torch.randn(num_pages, 16, spec.num_kv_heads, 64) for _ in "kv")
last_pages = batch.kv_indices[batch.kv_indptr[1:] - 1]
for cache in (k, v):
    cache[~torch.isin(torch.arange(num_pages), batch.kv_indices)] = torch.nan
    for page, length in zip(last_pages, batch.kv_last_page_len, strict=True):
        cache[page, length:] = torch.nan

q = torch.randn(batch.nnz_qo, spec.num_qo_heads, 64)
out, lse = kernel8.run(plan, q, (k, v), return_lse=True)
print(out.shape, lse.shape)

# %% [markdown]
# `tvm_attn.reference` computes the same in float64, with a torch twin of each variant. How close
# must we be? At most twice as far from float64 as PyTorch eager is in the kernel's own dtype, plus
# two units in the last place. `check_accuracy` raises otherwise.

# %%
twin = {
    "mask": reference.causal() & reference.sliding_window(63),
    "logits": reference.soft_cap(30.0),
}
exact = reference.batch_attention(q, (k, v), batch, **twin)
eager = reference.batch_attention(q, (k, v), batch, compute="eager", **twin)
print(reference.check_accuracy(out, exact[0], eager[0], name="out"))
print(reference.check_accuracy(lse, exact[1], eager[1], name="lse"))

# %% [markdown]
# The cap is a run-time parameter, so another value needs no other kernel. The window is one too,
# but the plan was cut for 63: a run may narrow it.

# %%
softer = kernel8.run(plan, q, (k, v), logits_soft_cap=5.0, window_left=15)
twin = {
    "mask": reference.causal() & reference.sliding_window(15),
    "logits": reference.soft_cap(5.0),
}
exact = reference.batch_attention(q, (k, v), batch, **twin)
eager = reference.batch_attention(q, (k, v), batch, compute="eager", **twin)
print(reference.check_accuracy(softer, exact[0], eager[0]))

try:
    kernel8.run(plan, q, (k, v), window_left=127)
except ta.errors.PlanError as error:
    print(error)
else:
    raise AssertionError("a wider window than planned must be refused")

# %% [markdown]
# ## 6. A variant of your own
#
# A learned bias per head and distance, shared by all distances from 31 on, added to the logits. The
# table is a tensor given at run time. Two things to know:
#
# - Expressions come from `tvm.tirx`: `tirx.max`, `tirx.exp`, `tirx.Select`, ...; arithmetic and
#   comparison are plain Python.
# - A hook is evaluated for pairs that the mask hides as well, so it must be safe for all: the
#   distance is clamped at both ends, or a key after the query would read before the table.

# %%
from tvm import tirx


def add_bias(ctx, s):
    """Add the bias of this head at this distance."""
    distance = tirx.max(0, tirx.min(ctx.q_pos - ctx.kv_pos, 31))
    return s + ctx.bias_table[ctx.qo_head, distance]


relative_bias = ta.AttentionVariant(
    logits_transform=add_bias,
    params=(ta.Param("bias_table", kind="tensor", shape=("num_qo_heads", 32)),),
    name="relative_bias",
)
biased = ta.build(spec, ta.variants.causal() & relative_bias).with_ctas(8)
print(phase(biased.tir, "logits"))

# %% [markdown]
# Check it as we checked the first. The twin is one line of torch.

# %%
table = torch.randn(spec.num_qo_heads, 32)
plan = biased.plan(batch)
out, lse = biased.run(plan, q, (k, v), return_lse=True, bias_table=table)

twin = {
    "mask": reference.causal(),
    "logits": lambda s, q_pos, kv_pos, head: s + table[head, (q_pos - kv_pos).clamp(0, 31)],
}
exact = reference.batch_attention(q, (k, v), batch, **twin)
eager = reference.batch_attention(q, (k, v), batch, compute="eager", **twin)
print(reference.check_accuracy(out, exact[0], eager[0], name="out"))
print(reference.check_accuracy(lse, exact[1], eager[1], name="lse"))

# %% [markdown]
# What is forgotten is named, before anything is launched:

# %%
try:
    biased.run(plan, q, (k, v))
except ta.errors.VariantError as error:
    print(error)
else:
    raise AssertionError("a missing parameter must be refused")

# %% [markdown]
# ## 7. Export, and load without TVM
#
# An exported kernel is one file: native code, its planner, and the texts we have read. To load it
# takes torch, `tvm_ffi` and TVM's small runtime library, no compiler. The process below could not
# `import tvm` if it tried.

# %%
with tempfile.TemporaryDirectory() as folder:
    biased.export(Path(folder, "biased.tar"))
    torch.save([q, k, v, table, batch], Path(folder, "inputs.pt"))
    program = """
        import sys
        sys.modules["tvm"] = None  # makes `import tvm` fail

        import torch
        import tvm_attn as ta

        q, k, v, table, batch = torch.load("inputs.pt", weights_only=False)
        kernel = ta.load("biased.tar").with_ctas(8)
        plan = kernel.plan(batch)
        torch.save(kernel.run(plan, q, (k, v), bias_table=table), "out.pt")
        print("ran", kernel.variant, "without TVM")
    """
    command = [sys.executable, "-c", dedent(program)]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    elsewhere = torch.load(Path(folder, "out.pt"))

assert torch.equal(out, elsewhere)  # the same bits

# %% [markdown]
# ## Where to go from here
#
# - `tvm_attn/tir/attention.py` is the definition; its function `attend` is the algorithm on one
#   page.
# - `tvm_attn/variants/` has the ready-made variants, all as short as the one above.
# - `TVM_ATTN_DUMP=folder` writes the texts of each build to a folder; `docs/env_vars.md` lists the
#   other variables.
