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
import tempfile
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

HEADER = Path(__file__).with_suffix(".hpp")
SHARED = re.compile(r"extern __shared__ .* (\w+)\[\];")
NUMBERS = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
}
Arguments = Mapping[str, Any]

ENTRY = """
extern "C" int run(int blocks, int order, int seed, void **given) {
  std::mt19937 random(seed);
  std::vector<int> ctas(blocks);
  for (int i = 0; i < blocks; i++) ctas[i] = i;
  if (order == BACKWARD) std::reverse(ctas.begin(), ctas.end());
  if (order == SHUFFLED) std::shuffle(ctas.begin(), ctas.end(), random);
  take(given);
  kernel = call;
  size_t begun = 0;
  run_others = [&] {
    size_t first = begun;
    while (begun < ctas.size())
      if (!run_cta(ctas[begun++], (Order)order, random)) return false;
    return begun > first;
  };
  return !run_others();
}
"""


class Order(IntEnum):
    """Order of CTAs, and of the threads of each."""

    FORWARD = 0
    BACKWARD = 1
    SHUFFLED = 2


def is_possible() -> bool:
    """Whether this host can do that."""
    return platform.machine() == "x86_64" and shutil.which("g++") is not None


class HostLibrary:
    """A kernel that is compiled for the host, with what calls it.

    Parameters
    ----------
    body : str
        The kernel's function, after others that it calls.
    name : str
        Its symbol.
    before, after : sequence of str
        C++ before and after it. What is after it has two functions: ``take`` takes the addresses of
        arguments in the kernel's order, ``call`` calls the kernel with them.
    folder : Path
        For files.
    options : sequence of str
        More of them for the compiler.

    Attributes
    ----------
    parameters : dict of str to str
        Types of parameters by name; names of arrays end in ``_ptr``.
    functions : CDLL
        What is there to be called.
    """

    def __init__(
        self,
        body: str,
        name: str,
        before: Sequence[str],
        after: Sequence[str],
        folder: Path,
        options: Sequence[str] = (),
    ):
        body = SHARED.sub(r"uchar* \1 = shared_memory;", body)
        [signature, *_] = re.findall(rf"{name}\((.*?)\)", body)
        both = [parameter.rsplit(maxsplit=1) for parameter in signature.split(",")]
        self.parameters = {
            name: re.sub(r"\b(const|__\w+__)\b", "", of).strip() for of, name in both
        }
        own = [f"static {of} own_{p};" for p, of in self.parameters.items()]
        takes = (f"own_{p} = *({of}*)*given++;" for p, of in self.parameters.items())
        call = ", ".join(f"own_{p}" for p in self.parameters)
        own.append(f"static void take(void **given) {{ {' '.join(takes)} }}")
        own.append(f"static void call() {{ {name}({call}); }}")
        path = Path(tempfile.mkdtemp(dir=folder)) / "kernel.cpp"
        path.write_text("\n".join([*before, body, *own, *after]))
        usual = "-O1 -w -shared -fPIC -std=c++17 -fno-strict-aliasing -fcf-protection=none"
        library = path.with_suffix(".so")
        files = ("-o", str(library), str(path))
        command = ["g++", *usual.split(), "-fno-stack-protector", *files, *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert not done.returncode, done.stderr[:4000]
        self.functions = ctypes.CDLL(str(library))

    def given(self, arguments: Arguments) -> ctypes.Array[ctypes.c_void_p]:
        """Return the addresses of arguments, which are by parameter."""
        values = [_value(of, arguments[name]) for name, of in self.parameters.items()]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        addresses.values = values  # type: ignore[attr-defined]
        return addresses


def _value(of: str, given: Any) -> Any:
    """Return an argument as an object of its type."""
    if isinstance(given, torch.Tensor):
        return ctypes.c_void_p(given.data_ptr())
    return given if isinstance(given, ctypes.Structure) else NUMBERS[of](given)


class HostKernel:
    """A kernel of integers that is compiled for the host.

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
        before = (f"#define THREADS {threads}", f'#include "{HEADER}"')
        self._library = HostLibrary(body, name, before, (ENTRY,), folder)
        self.parameters = list(self._library.parameters)

    def launch(self, blocks: int, order: Order, seed: int, arguments: Arguments) -> None:
        """Run all CTAs of a launch; `arguments` are by parameter."""
        given = self._library.given(arguments)
        stuck = self._library.functions.run(blocks, int(order), seed, given)
        assert not stuck, "threads wait for others that never come"
