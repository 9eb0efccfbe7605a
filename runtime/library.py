"""Loading compiled functions: TVM's runtime library, and shared libraries from artifacts.

Needs tvm_ffi and the file ``libtvm_runtime.so``, not `import tvm`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_attn import env
from tvm_attn.errors import ArtifactError
from tvm_attn.runtime.host import check_process

RUNTIME = "libtvm_runtime.so"


class Library:
    """The functions of a shared library, by name.

    Parameters
    ----------
    content : bytes
        A shared library made by the code generator.
    """

    def __init__(self, content: bytes):
        load_runtime()
        import tvm_ffi

        with tempfile.TemporaryDirectory(prefix="tvm_attn_") as folder:
            path = Path(folder, "host.so")
            path.write_bytes(content)
            try:
                self._module = tvm_ffi.load_module(str(path))
            except Exception as error:
                raise ArtifactError(f"the shared library cannot be loaded: {error}") from error
        self._functions: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return a function; it takes torch tensors and Python scalars."""
        if name not in self._functions:
            try:
                self._functions[name] = self._module[name]
            except AttributeError as error:
                raise ArtifactError(f"the library has no function {name!r}") from error
        return self._functions[name]

    def launch(self, name: str, *arguments: Any) -> None:
        """Call a function that runs on the thread pool.

        Raises
        ------
        ProcessError
            In a process whose pool was lost in a fork.
        """
        check_process()
        self[name](*arguments)


@functools.cache
def load_runtime() -> None:
    """Load TVM's runtime library, once, with the thread pool's size set before.

    Raises
    ------
    ArtifactError
        If the library is not installed.
    """
    env.setup_threads()
    import tvm_ffi  # noqa: F401  # brings the library that the runtime links against

    ctypes.CDLL(str(_find_runtime()), ctypes.RTLD_GLOBAL)


@functools.cache
def num_threads() -> int:
    """Return the number of threads of TVM's CPU pool."""
    load_runtime()
    import tvm_ffi

    return int(tvm_ffi.get_global_func("runtime.NumThreads")())


def _find_runtime() -> Path:
    for entry in sys.path:
        path = Path(entry or ".", "tvm", "lib", RUNTIME)
        if path.exists():
            return path
    raise ArtifactError(f"{RUNTIME} is not installed; install it with: pip install apache-tvm")
