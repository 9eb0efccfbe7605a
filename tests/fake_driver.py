"""A CUDA driver and runtime that record launches, for TVM's CUDA runtime where there is no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

CUDA_RUNTIME = "libtvm_runtime_cuda.so"
LIBRARIES = {"libcuda.so.1": r"cu[A-Z]\w+", "libcudart.so.13": r"cuda\w+"}
"""What TVM's CUDA runtime links against, and what the names in it look like."""

RECORDING = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned grid[3], block[3], shared; } Config;
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cuModuleLoadData(void **module, const void *image) {
  printf("load %s\n", memcmp(image, "\177ELF", 4) ? "something else" : "a cubin");
  *module = (void *)1;
  return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  printf("function %s\n", name);
  *function = (void *)2;
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
  printf("attribute %d %d\n", attribute, value);
  return 0;
}
int cuLaunchKernelEx(const Config *c, void *function, void **arguments, void **extra) {
  printf("launch grid %u block %u shared %u last argument %d\n", c->grid[0], c->block[0], c->shared,
         *(int *)arguments[ARGUMENTS - 1]);
  fflush(stdout);
  return 0;
}
"""


def make_driver(folder: Path, tvm_libraries: Path, arguments: int) -> list[Path]:
    """Compile both libraries and return their paths, in the order in which they are to be loaded.

    Parameters
    ----------
    folder : pathlib.Path
        Where to put them.
    tvm_libraries : pathlib.Path
        Where TVM's libraries are.
    arguments : int
        How many arguments the kernels take, the last one an int32.
    """
    needed = subprocess.run(
        ["nm", "-D", "--undefined-only", tvm_libraries / CUDA_RUNTIME],
        capture_output=True,
        text=True,
        check=True,
    )
    symbols = [line.split()[-1].split("@")[0] for line in needed.stdout.splitlines()]
    paths = []
    for name, pattern in LIBRARIES.items():
        own = [s for s in symbols if re.fullmatch(pattern, s) and f"int {s}(" not in RECORDING]
        code = RECORDING.replace("ARGUMENTS", str(arguments))
        code += "".join(f"int {symbol}() {{ return 0; }}\n" for symbol in own)
        source, script, path = folder / f"{name}.c", folder / f"{name}.map", folder / name
        source.write_text(code)
        script.write_text(f"{name} {{ *; }};\n")
        command = [
            *("cc", "-w", "-shared", "-fPIC", f"-Wl,--version-script={script}"),
            *(f"-Wl,-soname,{name}", "-o", path, source),
        ]
        subprocess.run(command, check=True)
        paths.append(path)
    return paths
