"""CUDA source of attention kernels, run on the host and watched for races.

As `hopper_threads`, whose schedules these are. Besides, the compiler calls a function before every
load and store (as for a race detector), so that words of shared memory which one thread writes and
another one touches are found with no barrier between the two, whatever the schedule is.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.cuda_threads import SHARED, Arguments, HostLibrary
from tests.hopper_threads import (
    STANDS_IN,
    HopperKernel,
    Schedule,
    StuckError,
    TensorMap,
    bytes_of,
    stand_ins,
)

HEADER = Path(__file__).with_suffix(".hpp")
GAP, ALIGNED = 8192, 1024
"""Bytes between arrays, none of which may be touched; what arrays are aligned to."""
WATCHED = {
    r"cp_async_c[ag]_async_c[ag]_shared_global_(?:L2__\d+B_)?(\d+)": r"copy_later({all}, \1, \1);",
    r"cp_async_c[ag]_src_size_\w+_(\d+)": r"copy_later({0}, {1}, \1, {2});",
    r"cp_async_wait_group_\w+_(\d+)": r"wait_until_copied(\1);",
    r"atom_acq_rel_gpu_global_add_s32": "{0} = count_at((int*){1}, {2});",
    r"ld_global_\w+": "load_global(&{0}, {last}, 1);",
    r"ld_vec_global_v(\d)_\w+": r"auto* to = &{0}; load_global(to, {last}, \1);",
    r"bar_sync_count_sync": "bar_sync_watched({all});",
    r"bar_arrive_arrive": "bar_arrive_watched({all});",
    r"ld_shared_b32|ld_vec_shared_v\d_b32": "load_near({{ {references} }}, {last});",
    r"load_word_if": "if ({2}) load_global(&{0}, {1}, 1);",
    r"st_relaxed_gpu_global_f32": "store_same({all});",
    r"st_global_\w+|st_vec_global_v\d_\w+": "store_global({0}, {{ {rest} }});",
    r"st_vec_shared_v\d_\w+": "store_near({0}, {{ {rest} }});",
    r"mbarrier_init_init_shared_b64": "begin_watched_mbarrier({all});",
    r"mbarrier_arrive_arrive_shared_b64": "arrive_watched({all});",
    r"mbarrier_arrive_expect_tx_\w+_b64": "expect_watched({all});",
    r"mbarrier_wait": "wait_watched({all});",
    r"cp_async_mbarrier_arrive_\w+_noinc_\w+": "arrive_watched_after_copies({all});",
    r"cp_async_bulk_tensor_g2s_\w+": "load_watched({0}, {1}, {{ {middle} }}, {last});",
    r"cp_async_bulk_tensor_s2g_\w+": "store_watched({0}, {{ {middle0} }}, {last});",
    r"cp_async_bulk_commit_group_\w+": "close_watched_stores();",
    r"cp_async_bulk_wait_group_\w+_read_0": "wait_for_watched_stores();",
    r"stmatrix_sync_aligned_m8n8_x4_shared_b16": "store_watched_matrices({0}, {{ {rest} }});",
    r"wgmma_fence_\w+": "order_watched_products();",
    r"wgmma_commit_group_\w+": "close_watched_products();",
    r"wgmma_wait_group_\w+_(\d)": r"wait_for_watched_products(\1);",
    r"barrier_cluster_arrive_\w+_release_aligned": "arrive_at_cluster(true);",
    r"barrier_cluster_arrive_\w+_relaxed_aligned": "arrive_at_cluster(false);",
    r"barrier_cluster_wait_\w+": "wait_for_cluster();",
    r"mapa_u32_shared__cluster_u32": "{0} = address_in_peer({1}, {2});",
    r"tvm_builtin_cluster_ctaid_x": "return own_cta();",
    r"store_peer_\w+": "store_peer({0}, {1}, {{ {values} }});",
    r"note_row": "if ({3}) note_address({0}, {2} ? {1} : 1);",
    r"chunk_of_row": "return (char*){0} + (uint64_t){1} * 16 + {2};",
    r"ldmatrix_\w+_x4_shared_b16": "load_watched_matrices({{ {references} }}, {last}, false);",
    r"ldmatrix_\w+_x4_trans_shared_b16": "load_watched_matrices({{ {references} }}, {last}, true);",
    r"mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32": "multiply_fragments({product}, false);",
    r"mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32": "multiply_fragments({product}, true);",
    r"widen_e4m3": "widen_bytes({all}, false);",
    r"widen_e5m2": "widen_bytes({all}, true);",
}
"""What functions with instructions do, by name, where accesses are watched."""
OPERANDS = (
    "{{ &{0}, &{1}, &{2}, &{3} }}, {{ {4}, {5}, {6}, {7} }}, {{ {8}, {9} }}, "
    "{{ {10}, {11}, {12}, {13} }}"
)
TABLE = {
    pattern: made and made.replace("{product}", OPERANDS)
    for pattern, made in {**WATCHED, **STANDS_IN, **WATCHED}.items()
}
OPTIONS = ("-g1", "-fsanitize=thread", "-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc")
"""Calls before accesses, but not the library that has these functions."""

ENTRY = """
extern "C" int run(int blocks, int seed, const int *priorities, int change, int seconds,
                   char *text, size_t bytes, int spans, uchar **begins, int64_t *sizes,
                   void **given) {
  arena_begin = arena_end = nullptr;
  report = text, report_bytes = bytes, text[0] = 0;
  arrays.clear();
  for (int i = 0; i < spans; i++) arrays.push_back({begins[i], begins[i] + sizes[i]});
  take(given);
  begin_races();
  watched_kernel = call;
  kernel = live_watched;
  return run_ctas(blocks, seed, priorities, change, seconds);
}
"""


@dataclass(frozen=True)
class WatchedKernel(HopperKernel):
    """A kernel that is compiled for the host and watched, in clusters of so many CTAs."""

    cluster: int = 1

    def __post_init__(self) -> None:
        """Compile it."""
        functions = (
            text.replace("static inline", "static inline __attribute__((always_inline))", 1)
            for text in stand_ins(self.made.source, TABLE)
        )
        shared_bytes = self.cluster * (-(-self.made.shared_bytes // ALIGNED) * ALIGNED)
        before = (
            f"#define CLUSTER {self.cluster}",
            f"#define THREADS {self.cluster * self.made.threads}",
            f"#define SHARED_BYTES {shared_bytes}",
            f"#define MOST_SHARED_BYTES {shared_bytes}",
            f'#include "{HEADER}"',
            'extern "C" { int fault; }',
            *functions,
        )
        body = f'extern "C" __global__{self.made.body}'
        body = SHARED.sub(r"uchar* \1 = own_shared_memory();", body)
        body = body.replace("threadIdx.x", "own_thread()").replace("blockIdx.x", "own_block()")
        library = HostLibrary(body, "attention_kernel", before, (ENTRY,), self.folder, OPTIONS)
        object.__setattr__(self, "library", library)

    @property
    def warps(self) -> int:
        """Warps of all CTAs of a cluster; that is also the number of what copies."""
        return self.cluster * super().warps

    def launch(self, blocks: int, schedule: Schedule, arguments: Arguments) -> None:
        """Run all CTAs of a launch on arrays with gaps between them; see `HopperKernel.launch`."""
        tensors = {name: a for name, a in arguments.items() if isinstance(a, torch.Tensor)}
        placed = apart(tensors)
        bases = {tensor.data_ptr(): placed[name].data_ptr() for name, tensor in tensors.items()}
        maps = {n: a.at(bases[a.base]) for n, a in arguments.items() if isinstance(a, TensorMap)}
        try:
            super().launch(blocks, schedule, {**arguments, **placed, **maps})
        except StuckError as error:
            raise StuckError(self._with_lines(str(error))) from None
        for name, tensor in tensors.items():
            tensor.copy_(placed[name])

    def _with_lines(self, text: str) -> str:
        """Add the lines of the kernel's source that a report tells of."""
        path = self.library.functions._name
        addresses = re.findall(r"at (0x[0-9a-f]+)(?=[, \n]|$)", text)
        command = ["addr2line", "-a", "-i", "-e", path, *addresses]
        asked = subprocess.run(command, check=True, input="", capture_output=True, text=True)
        told = re.split(r"^0x.*\n", asked.stdout, flags=re.M)[1:]
        for address, lines in zip(addresses, told, strict=True):
            file, _, line = lines.splitlines()[-1].split()[0].rpartition(":")
            if line.isdigit() and int(line):
                code = Path(file).read_text().splitlines()[int(line) - 1].strip()
                text += f"\n  {address} is line {line}: {code[:300]}"
        return text


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to where nothing is near them."""
    sizes = [GAP + -(-bytes_of(tensor) // ALIGNED) * ALIGNED for tensor in tensors.values()]
    room = torch.full((sum(sizes) + GAP + ALIGNED,), 255, dtype=torch.uint8)
    at, placed = GAP + -room.data_ptr() % ALIGNED, {}
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        own = room[at : at + bytes_of(tensor)].view(tensor.dtype)
        placed[name] = own.as_strided(tensor.shape, tensor.stride())
        placed[name].copy_(tensor)
        at += size
    return placed
