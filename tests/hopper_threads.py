"""CUDA source of Hopper's attention kernels, run on the host: each thread of a CTA is a fiber.

What only the machine has is stood in for by functions of the same meaning: barriers, copies that
land late, products that are done late. Warps go on in an order that is chosen by a `Schedule`: one
that is starved moves only when nothing else can. What is read too early or overwritten too early
gives wrong results then, and threads that wait for each other are named.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from tests.cuda_threads import Arguments, HostLibrary
from tests.generating import GeneratedKernel

HEADER = Path(__file__).with_suffix(".hpp")
WARP = 32
REPORT_BYTES, SECONDS = 1 << 14, 60
"""Room for a report, and how long a launch may take of a processor."""
DEVICE = r"(?:__forceinline__ __device__|__device__ __forceinline__)"
FUNCTION = re.compile(rf"^{DEVICE} ([\w ]+?[ *]+)(\w+)\(([^)]*)\) {{(.*?(?:\n|; ))}}$", re.M | re.S)

STANDS_IN = {
    r"mbarrier_init_init_shared_b64": "begin_mbarrier({all});",
    r"mbarrier_arrive_arrive_shared_b64": "mbarrier_arrive({all});",
    r"mbarrier_arrive_expect_tx_\w+_b64": "mbarrier_expect({all});",
    r"mbarrier_wait": "mbarrier_wait({all});",
    r"cp_async_mbarrier_arrive_\w+_noinc_\w+": "arrive_after_copies({all});",
    r"cp_async_c[ag]_async_c[ag]_shared_global_(?:L2__\d+B_)?(\d+)": r"begin_copy({all}, \1, \1);",
    r"cp_async_c[ag]_src_size_\w+_(\d+)": r"begin_copy({0}, {1}, \1, {2});",
    r"cp_async_commit_group_\w+": "close_copies();",
    r"cp_async_wait_group_\w+_(\d+)": r"wait_for_copies(\1);",
    r"cp_async_bulk_tensor_g2s_\w+": "begin_load({0}, {1}, {{ {middle} }}, {last});",
    r"cp_async_bulk_tensor_s2g_\w+": "begin_store({0}, {{ {middle0} }}, {last});",
    r"cp_async_bulk_commit_group_\w+": "close_stores();",
    r"cp_async_bulk_wait_group_\w+_read_0": "wait_for_stores();",
    r"fence_proxy_proxy_async_shared__cta": "publish();",
    r"fence_mbarrier_init_\w+|griddepcontrol_\w+": "",
    r"bar_sync_count_sync": "bar_sync({all});",
    r"bar_arrive_arrive": "bar_arrive({all});",
    r"setmaxnreg_\w+?_u32_(\d+)": r"set_registers(\1);",
    r"atom_\w+_global_add_s32": "{0} = add_to_global((int*){1}, {2});",
    r"cvt_f16x2_f32_rn_f16x2_f32": "pack_halves({all});",
    r"cvt_bf16x2_f32_rn_bf16x2_f32": "pack_bfloats({all});",
    r"ld_vec_global_v(\d)_\w+": r"auto* to = &{0}; load_words(to, {last}, \1);",
    r"ld_vec_shared_v4_b32": "memcpy(&{0}, shared_pointer({last}, 16), 16);",
    r"st_vec_global_v\d_\w+": "store_words({0}, {{ {rest} }});",
    r"st_vec_shared_v\d_\w+": "store_shared({0}, {{ {rest} }});",
    r"ldmatrix_sync_aligned_m8n8_x4_shared_b16": "load_matrices({{ {references} }}, {last});",
    r"stmatrix_sync_aligned_m8n8_x4_shared_b16": "store_matrices({0}, {{ {rest} }});",
    r"wgmma_fence_\w+": "order_products();",
    r"wgmma_commit_group_\w+": "close_products();",
    r"wgmma_wait_group_\w+_(\d)": r"wait_for_products(\1);",
    r"hold_\w+": "",
    r"clear": "{0} = 0;",
    r"units_after": "return (char*){0} + (uint64_t){1} * {2};",
    r"keep": "return {0};",
    r"ptx_wgmma_encode_matrix_descriptor": "encode_descriptor({all});",
    r"cvta_generic_to_shared": "return shared_address({0});",
    r"is_elected": None,
}
"""What functions with instructions do, by name; None of what the header has."""
PRODUCT = re.compile(r"wgmma_(b?)f16_(rs|ss)_mma_async_\w*_m64n(\d+)k16_f32_\w+?((?:_[01])+)")

ENTRY = """
extern "C" int run(int blocks, int seed, const int *priorities, int change, int seconds,
                   char *text, size_t bytes, int spans, uchar **begins, int64_t *sizes,
                   void **given) {
  report = text, report_bytes = bytes, text[0] = 0;
  arrays.clear();
  for (uchar **begin = begins; begin < begins + spans; begin++)
    arrays.push_back({*begin, *begin + *sizes++});
  take(given);
  kernel = call;
  return run_ctas(blocks, seed, priorities, change, seconds);
}
"""


class TensorMap(ctypes.Structure):
    """A tensor as the copy engine sees it, innermost dimension first; strides are in bytes."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 5),
        ("box", ctypes.c_int64 * 5),
    )

    @staticmethod
    def of(tensor: torch.Tensor, dims: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
        """Return the map of some of a tensor's dimensions, as `hopper.tensor_maps` encodes it."""
        sizes = [tensor.shape[axis] for axis in dims]
        strides = [tensor.stride(axis) * tensor.itemsize for axis in dims]
        of_five = ctypes.c_int64 * 5
        return TensorMap(
            tensor.data_ptr(), len(dims), of_five(*sizes), of_five(*strides), of_five(*box)
        )

    def at(self, base: int) -> TensorMap:
        """Return the map of the same tensor elsewhere."""
        return TensorMap(base, self.rank, self.sizes, self.strides, self.box)


@dataclass(frozen=True)
class Schedule:
    """Who goes on, of those who can.

    Parameters
    ----------
    seed : int
        Of what is left to chance.
    starved, favoured : frozenset of int
        Warps that go on only when no other can, or whenever they can. After the last warp comes
        what copies.
    change : int
        How often, of a thousand steps, somebody comes to be preferred or neglected by chance.
    """

    seed: int = 0
    starved: frozenset[int] = frozenset()
    favoured: frozenset[int] = frozenset()
    change: int = 0

    def priorities(self, agents: int) -> list[int]:
        """Return how much each one is preferred."""
        return [1 + (i in self.favoured) - (i in self.starved) for i in range(agents)]


class StuckError(AssertionError):
    """Threads wait for each other, or do what none may do."""


@dataclass(frozen=True)
class HopperKernel:
    """A kernel of Hopper's that is compiled for the host.

    Parameters
    ----------
    made : GeneratedKernel
        Its source, as TVM generates it.
    folder : Path
        For files.
    """

    made: GeneratedKernel
    folder: Path
    library: HostLibrary = field(init=False)

    def __post_init__(self) -> None:
        """Compile it."""
        before = (
            f"#define THREADS {self.made.threads}",
            f"#define SHARED_BYTES {self.made.shared_bytes}",
            f'#include "{HEADER}"',
            'extern "C" { int fault; }',
            *stand_ins(self.made.source),
        )
        name = "attention_kernel"
        body = f'extern "C" __global__{self.made.body}'
        library = HostLibrary(body, name, before, (ENTRY,), self.folder)
        object.__setattr__(self, "library", library)

    @property
    def warps(self) -> int:
        """Warps of a CTA; that is also the number of what copies."""
        return self.made.threads // WARP

    def have(self, fault: int) -> None:
        """Choose which fault it has, of those that its source has by number; 0 is none."""
        ctypes.c_int.in_dll(self.library.functions, "fault").value = fault

    def launch(self, blocks: int, schedule: Schedule, arguments: Arguments) -> None:
        """Run all CTAs of a launch, one after the other; `arguments` are by parameter."""
        agents = self.warps + 1
        tensors = [a for a in arguments.values() if isinstance(a, torch.Tensor)]
        begins = (ctypes.c_void_p * len(tensors))(*(a.data_ptr() for a in tensors))
        sizes = (ctypes.c_int64 * len(tensors))(*map(bytes_of, tensors))
        report = ctypes.create_string_buffer(REPORT_BYTES)
        priorities = (ctypes.c_int * agents)(*schedule.priorities(agents))
        done = self.library.functions.run(
            *(blocks, schedule.seed, priorities, schedule.change, SECONDS),
            *(report, ctypes.c_size_t(REPORT_BYTES), len(tensors), begins, sizes),
            self.library.given(arguments),
        )
        if not done:
            raise StuckError(f"{schedule}: {report.value.decode()}")


def bytes_of(tensor: torch.Tensor) -> int:
    """Return how many bytes of memory a tensor is spread over."""
    if not tensor.numel():
        return 0
    return (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        * tensor.itemsize
        + tensor.itemsize
    )


def stand_ins(
    source: str, table: Mapping[str, str | None] = MappingProxyType(STANDS_IN)
) -> Iterator[str]:
    """Yield the functions that a kernel calls, in C++: instructions by what stands in for them."""
    before = source[: source.index('extern "C" __global__')]
    for result, name, parameters, body in FUNCTION.findall(before):
        if (made := _stand_in(name, parameters, table)) is not None:
            yield f"static inline {result}{name}({parameters}) {{ {made} }}" if made != "-" else ""
        elif "asm" in body:
            raise AssertionError(f"nothing stands in for {name}")
        else:
            yield f"static inline {result}{name}({parameters}) {{{body}}}"


def _stand_in(name: str, parameters: str, table: Mapping[str, str | None]) -> str | None:
    """Return what a function does; None if that is what it says, "-" if it is left out."""
    names = [parameter.split()[-1].lstrip("*&") for parameter in parameters.split(",") if parameter]
    short = re.sub(r"^tvm_builtin_(ptx|cuda)_", "", name)
    if product := PRODUCT.fullmatch(short):
        return _product(product, names)
    for pattern, made in table.items():
        if found := re.fullmatch(pattern, short):
            return "-" if made is None else found.expand(_filled(made, names))
    return None


def _filled(made: str, names: list[str]) -> str:
    """Return a template with names of parameters."""
    return made.format(
        *names,
        all=", ".join(names),
        last=names[-1] if names else "",
        rest=", ".join(names[1:]),
        values=", ".join(names[2:]),
        middle=", ".join(names[2:-1]),
        middle0=", ".join(names[1:-1]),
        references=", ".join(f"&{name}" for name in names[:-1]),
    )


def _product(found: re.Match[str], names: list[str]) -> str:
    """Return a product of a warpgroup: with operands in registers, or both in shared memory."""
    is_bfloat, operands, columns, signs = found[1] == "b", found[2], int(found[3]), found[4]
    outs, rest = names[: columns // 2], names[columns // 2 :]
    transposes = signs.strip("_").split("_")
    assert transposes[:2] == ["1", "1"] and transposes[2:-1] in ([], ["0"])
    *left, right, adds = rest
    shared = operands == "ss"
    words = "nullptr" if shared else "words"
    fields = (
        *(columns, 0, int(is_bfloat), int(shared), int(transposes[-1] == "0")),
        *(f"(bool){adds}", left[0] if shared else 0, right),
    )
    declared = "" if shared else f"uint words[] = {{ {', '.join(left)} }}; "
    made = ", ".join(map(str, fields))
    return f"{declared}begin_product({{ {made} }}, {outs[0]}, {outs[-1]}, {words});"
