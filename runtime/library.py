"""Loading compiled functions: TVM's runtime library, and shared libraries from artifacts.

Needs tvm_ffi and the file ``libtvm_runtime.so`` (``libtvm_runtime_cuda.so`` too, to run on a GPU),
not `import tvm`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tvm_attn import env
from tvm_attn.errors import ArtifactError, ProcessError
from tvm_attn.runtime.device import on_device
from tvm_attn.runtime.host import check_process, fastest_cores

RUNTIME = "libtvm_runtime.so"
CUDA_RUNTIME = "libtvm_runtime_cuda.so"
DEVICE_LOADER = "ffi.Module.load_from_bytes.cuda"


class Library:
    """The functions of a shared library, by name.

    Parameters
    ----------
    content : bytes
        A shared library made by the code generator.
    devices : sequence of bytes
        The CUDA modules that its functions launch kernels of, as TVM's runtime reads them. They are
        loaded when they are first needed: a library can be had without a GPU.
    """

    def __init__(self, content: bytes, devices: Sequence[bytes] = ()):
        load_runtime()
        import tvm_ffi

        try:
            with tempfile.TemporaryDirectory(prefix="tvm_attn_") as folder:
                path = Path(folder, "host.so")
                path.write_bytes(content)
                ctypes.CDLL(str(path), mode=os.RTLD_NOW)  # what it lacks is said, not died of later
                self._module = tvm_ffi.load_module(str(path))
        except Exception as error:
            why = str(error).rpartition("host.so: ")[2]
            raise ArtifactError(f"the shared library cannot be loaded: {why}") from error
        self._functions: dict[str, Callable[..., Any]] = {}
        self._on_gpu = bool(devices)
        self._not_loaded = list(devices)
        self._loading = threading.Lock()

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return a function; it takes torch tensors and Python scalars."""
        if name not in self._functions:
            try:
                self._functions[name] = self._module[name]
            except AttributeError as error:
                raise ArtifactError(f"the library has no function {name!r}") from error
        return self._functions[name]

    def launch(self, name: str, *arguments: Any) -> None:
        """Call a function that runs on the thread pool, or on the GPU that its tensors are on.

        Raises
        ------
        ProcessError
            In a process whose pool was lost in a fork, or that has no NVIDIA driver for a GPU.
        """
        if not self._on_gpu:
            check_process()
            self[name](*arguments)
            return
        self.load_device_code()
        with on_device(next(a.device for a in arguments if isinstance(a, torch.Tensor))):
            self[name](*arguments)

    def load_device_code(self) -> None:
        """Make kernels ready to be launched; the driver loads them on each GPU that runs them.

        Raises
        ------
        ProcessError
            If there is no NVIDIA driver.
        ArtifactError
            If TVM's runtime does not take the code.
        """
        if not self._not_loaded:
            return
        load_cuda_runtime()
        import tvm_ffi

        load = tvm_ffi.get_global_func(DEVICE_LOADER)
        with self._loading:
            while self._not_loaded:
                try:
                    self._module.import_module(load(self._not_loaded[-1]))
                except Exception as error:
                    raise ArtifactError(f"the CUDA module cannot be loaded: {error}") from error
                self._not_loaded.pop()


@functools.cache
def load_runtime() -> int:
    """Load TVM's runtime library, once, and return the size that was set for its thread pools.

    Raises
    ------
    ArtifactError
        If the library is not installed.
    """
    threads = env.setup_threads()
    import tvm_ffi  # noqa: F401  # brings the library that the runtime links against

    ctypes.CDLL(str(_find_library(RUNTIME)), ctypes.RTLD_GLOBAL)
    return threads


@functools.cache
def load_cuda_runtime() -> None:
    """Load the part of TVM's runtime that launches CUDA kernels, once.

    It links against the CUDA runtime that a PyTorch built for CUDA has loaded by now, and against
    the driver.

    Raises
    ------
    ProcessError
        If one of them is not there.
    ArtifactError
        If the library is not installed.
    """
    load_runtime()
    path = _find_library(CUDA_RUNTIME)
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ProcessError(
            f"kernels for a GPU need an NVIDIA driver, and a PyTorch built for CUDA ({error}); run "
            "this where they are, or build for a CPU: target='llvm'"
        ) from error


@functools.cache
def num_threads() -> int:
    """Return the number of threads that kernels run on, without starting them.

    TVM would start its pool to tell, and a process that is forked off later would wait for it.
    """
    return min(load_runtime(), fastest_cores(os.cpu_count() or 1))


def _find_library(name: str) -> Path:
    for entry in sys.path:
        path = Path(entry or ".", "tvm", "lib", name)
        if path.exists():
            return path
    raise ArtifactError(f"{name} is not installed; install it with: pip install apache-tvm")
