"""A few kernels on tiny batches, for compute-sanitizer; exits with 1 if a result is wrong.

Build them first, so that no compiler runs under the tool::

    python -m tests.gpu.prebuild sanitize
    compute-sanitizer --tool memcheck python -m tests.gpu.sanitize

and the same with ``--tool racecheck`` and ``--tool synccheck``. Words choose kernels and batches:
those whose lines have one of them. Of ``pieces`` racecheck reports work items that were replaced:
it does not see that a lane which arrives at a barrier speaks for its warp (``docs/gpu``).
"""

from __future__ import annotations

import os
import sys
import time
from itertools import product

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # an allocation for each tensor

import torch

from tests.accuracy import assert_states_accurate
from tests.batches import random_batch
from tests.cases import arguments, name_of, spec_of, states, variant
from tests.gpu.device import gpu
from tvm_attn._pairwise import Row

_ROWS = (
    ("causal", ("bfloat16", "bfloat16"), "NHD", 16, 4, (128, 128)),
    ("full", ("float16", "float16"), "HND", None, 1, (64, 64)),
    ("window_soft_cap", ("bfloat16", "bfloat16"), "NHD", 5, 8, (128, 128)),
    ("custom_mask", ("float16", "float16"), "NHD", None, 5, (96, 96)),
    ("window_sink", ("bfloat16", "float8_e4m3fn"), "HND", 1, 4, (64, 64)),
    ("sigmoid", ("float16", "float8_e5m2"), "NHD", None, 2, (128, 128)),
    ("rotary", ("bfloat16", "bfloat16"), "HND", 16, 4, (192, 128)),
    ("alibi", ("float16", "float16"), "NHD", 64, 1, (256, 256)),
    ("causal", ("bfloat16", "bfloat16"), "NHD", 16, 16, (80, 112)),
)
ROWS: list[Row] = [
    dict(zip(("variant", "dtypes", "layout", "page_size", "group", "dims"), row, strict=True))
    for row in _ROWS
]
KERNELS = [(spec, variant(row["variant"], spec)) for row in ROWS for spec in [spec_of(row)]]
LENS = {
    "mixed": (None, [1, 70, 0, 3, 1], [150, 70, 5, 0, 3]),
    "split": (32, [1, 1], [200, 90]),
    "pieces": (64, [90, 2], [300, 200]),
    "few": (None, [1], [2100]),
    "short": (None, [7, 2], [1300, 700]),
}
"""Fixed split, query lengths and KV lengths; the last two are cut so that a GPU is full."""
FEW_CTAS = 2
"""CTAs that pieces are dealt to, so that each has a queue of them."""


def main() -> int:
    """Run every kernel, or those that are named, and say which were wrong."""
    wrong = 0
    for row, batch in product(ROWS, LENS):
        name = f"{name_of(row)} {batch}"
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        start = time.perf_counter()
        try:
            check(row, *LENS[batch])
        except AssertionError as error:
            wrong += 1
            print(f"WRONG {name}: {error}")
        else:
            print(f"right {name}, {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{wrong} wrong results")
    return int(wrong > 0)


def check(row: Row, split: int | None, qo_lens: list[int], kv_lens: list[int]) -> None:
    """Compare a batch with the reference, which is computed on the CPU."""
    machine, spec, name = gpu(), spec_of(row), row["variant"]
    here = random_batch(spec, qo_lens, kv_lens)
    there = here.to(machine.device)
    args, on_gpu = arguments(name, here), arguments(name, there)
    module = machine.kernel(name, spec)
    if split is not None:
        module = module.with_ctas(FEW_CTAS)
    plan = module.plan(there.fmt, **on_gpu.plan, fixed_split_size=split)
    has_lse = args.reference.get("use_softmax", True)
    keywords = {**there.scales, **on_gpu.run, "return_lse": has_lse}
    got = module.run(plan, there.q, there.kv, **keywords)
    torch.cuda.synchronize()
    exact, eager = (states(name, here, args, compute) for compute in ("float64", "eager"))
    assert_states_accurate(got, exact, eager, here.fmt)


if __name__ == "__main__":
    sys.exit(main())
