"""CUDA source of kernels of integers, run on the host: each thread of a CTA is a fiber.

CTAs run one after another, but for one that waits for others; threads from barrier to barrier in an
order that can be chosen: what depends on it, as where a barrier is missing, gives other results in
another order.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path

import torch

HEADER = Path(__file__).with_suffix(".hpp")
Arguments = Mapping[str, torch.Tensor | int]

ENTRY = """
extern "C" int run(int blocks, int order, int seed, void **arrays, int *numbers) {{
  std::mt19937 random(seed);
  std::vector<int> ctas(blocks);
  for (int i = 0; i < blocks; i++) ctas[i] = i;
  if (order == BACKWARD) std::reverse(ctas.begin(), ctas.end());
  if (order == SHUFFLED) std::shuffle(ctas.begin(), ctas.end(), random);
  {assignments}
  kernel = call;
  size_t begun = 0;
  run_others = [&] {{
    size_t first = begun;
    while (begun < ctas.size())
      if (!run_cta(ctas[begun++], (Order)order, random)) return false;
    return begun > first;
  }};
  return !run_others();
}}
"""


class Order(IntEnum):
    """Order of CTAs, and of the threads of each."""

    FORWARD = 0
    BACKWARD = 1
    SHUFFLED = 2


def is_possible() -> bool:
    """Whether this host can do that."""
    return platform.machine() == "x86_64" and shutil.which("g++") is not None


class HostKernel:
    """A kernel that is compiled for the host.

    Parameters
    ----------
    source : str
        CUDA source of one kernel, as TVM generates it.
    name : str
        Its symbol.
    threads : int
        Of a CTA.
    folder : Path
        For files.

    Attributes
    ----------
    parameters : list of str
        Names of parameters; those of arrays end in ``_ptr``.
    """

    def __init__(self, source: str, name: str, threads: int, folder: Path):
        functions = source[source.index("#define ushort unsigned short") :]
        body = functions[functions.index("#endif") + len("#endif") :]
        body = re.sub(r"extern __shared__ .* (\w+)\[\];", r"uchar* \1 = shared_memory;", body)
        [signature, *_] = re.findall(rf"{name}\((.*?)\)", body)
        self.parameters = [parameter.split()[-1] for parameter in signature.split(",")]
        is_array = {parameter: "*" in s for parameter, s in self._zip(signature)}
        kinds = {True: ("int*", "(int*)*arrays++"), False: ("int", "*numbers++")}
        lines = [f"static {kinds[is_array[p]][0]} own_{p};" for p in self.parameters]
        call = ", ".join(f"own_{p}" for p in self.parameters)
        sets = " ".join(f"own_{p} = {kinds[is_array[p]][1]};" for p in self.parameters)
        text = [f"#define THREADS {threads}", f'#include "{HEADER}"', body, *lines]
        text += [f"static void call() {{ {name}({call}); }}", ENTRY.format(assignments=sets)]
        path = folder / "kernel.cpp"
        path.write_text("\n".join(text))
        options = "-O1 -w -shared -fPIC -std=c++17 -fno-strict-aliasing -fcf-protection=none"
        library = path.with_suffix(".so")
        command = ["g++", *options.split(), "-fno-stack-protector", "-o", library, path]
        subprocess.run(command, check=True, capture_output=True)
        self._run: Callable[..., int] = ctypes.CDLL(str(library)).run

    def _zip(self, signature: str) -> list[tuple[str, str]]:
        return list(zip(self.parameters, signature.split(","), strict=True))

    def launch(self, blocks: int, order: Order, seed: int, arguments: Arguments) -> None:
        """Run all CTAs of a launch; `arguments` are by parameter."""
        given = [arguments[parameter] for parameter in self.parameters]
        arrays = [a.data_ptr() for a in given if isinstance(a, torch.Tensor)]
        numbers = [a for a in given if isinstance(a, int)]
        stuck = self._run(
            *(blocks, int(order), seed),
            (ctypes.c_void_p * len(arrays))(*arrays),
            (ctypes.c_int * len(numbers))(*numbers),
        )
        assert not stuck, "threads wait for others that never come"
