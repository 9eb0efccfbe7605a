"""TVM's serialised CUDA modules: how device code gets into one that loads without a compiler.

Without a GPU, and wherever it is told so, TVM generates a module that holds CUDA source, and that
would be compiled when it is loaded. A module is a format's name, a table of kernels (what TVM's
launcher asks for: types of arguments, launch parameters) and the code itself. `embed` replaces
format and code. All is little-endian; strings and lists begin with their length, 64 bits wide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tvm_attn.errors import CompileError

KIND = "cuda"
SOURCE, CUBIN = "cuda", "cubin"
"""Formats of code."""

DTYPE_BYTES = TAG_BYTES = 4

Item = TypeVar("Item")


@dataclass(frozen=True)
class DeviceModule:
    """A serialised module, taken apart.

    Attributes
    ----------
    table : bytes
        The table of kernels.
    kernels : tuple of str
        Their symbols.
    source : str
        CUDA source.
    """

    table: bytes
    kernels: tuple[str, ...]
    source: str

    def embed(self, cubin: bytes) -> bytes:
        """Return the module with compiled code: what ``ffi.Module.load_from_bytes.cuda`` takes."""
        return _string(CUBIN.encode()) + self.table + _string(cubin)


def unpack(packed: bytes) -> DeviceModule:
    """Take apart what TVM's ``ModulePackImportsToTensor`` makes of a lone CUDA module.

    Raises
    ------
    CompileError
        If it is anything but a module of that form with CUDA source.
    """
    reader = _Reader(packed)
    reader.expect("size", reader.number(), len(packed) - 8)
    reader.expect("rows of the import tree", reader.several(reader.number), [0, 0])
    reader.expect("imports", reader.several(reader.number), [])
    reader.expect("kind", reader.text(), KIND)
    reader.expect("size of the module", reader.number(), len(packed) - reader.at)
    reader.expect("format", reader.text(), SOURCE)
    start = reader.at
    kernels = tuple(reader.several(reader.kernel))
    table = packed[start : reader.at]
    source = reader.text()
    reader.expect("end", reader.at, len(packed))
    return DeviceModule(table, kernels, source)


class _Reader:
    """Reads the parts of a serialised module, one after another."""

    def __init__(self, content: bytes):
        self.at = 0
        self._content = content

    def number(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def text(self) -> str:
        return self._take(self.number()).decode(errors="replace")

    def several(self, read: Callable[[], Item]) -> list[Item]:
        return [read() for _ in range(self.number())]

    def kernel(self) -> str:
        """Read an entry of the table and return its symbol."""
        key, name = self.text(), self.text()
        self.expect("name of a kernel", name, key)
        self._take(self.number() * DTYPE_BYTES)
        self.several(self.text)
        self._take(self.number() * TAG_BYTES)
        return name

    def expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise CompileError(
                f"TVM serialises CUDA modules in a form that this library does not know: {what} is "
                f"{str(found)[:80]!r} instead of {expected!r} at byte {self.at}; install a version "
                "of apache-tvm that tvm-attn asks for"
            )

    def _take(self, size: int) -> bytes:
        taken = self._content[self.at : self.at + size]
        self.expect("a part", f"{len(taken)} bytes long", f"{size} bytes long")
        self.at += size
        return taken


def _string(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content
