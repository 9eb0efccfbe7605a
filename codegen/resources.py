"""What kernels use of a multiprocessor, as the assembler reports it, and what is allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tvm_attn.errors import CompileError
from tvm_attn.target import Arch

WARP = 32
REGISTERS_AT_ONCE = 8
"""Registers of a thread are allocated in these steps."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the system takes for each resident CTA."""
MAX_REGISTERS = 255
"""Of a thread."""

FIGURES = {
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "registers": r"Used (\d+) registers",
    "shared": r"(\d+) bytes smem",
}
"""Where the assembler's report of a kernel has what, and of functions it calls."""
MAY_BE_LEFT_OUT = ("shared",)
"""Figures that a report has only if they are not 0."""


@dataclass(frozen=True)
class Resources:
    """What a kernel uses.

    Attributes
    ----------
    registers : int
        Of a thread.
    stack, spill_stores, spill_loads : int
        Bytes of a thread's local memory.
    shared, dynamic_shared : int
        Bytes of a CTA's shared memory: fixed in its code, and asked for at launch.
    threads : int
        Of a CTA.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    dynamic_shared: int
    threads: int

    @property
    def spills(self) -> str:
        """What does not fit into registers, in words; empty if all does."""
        if not self.spilled_bytes:
            return ""
        return (
            f"{self.stack} bytes of stack, {self.spill_stores} of spill stores and "
            f"{self.spill_loads} of spill loads with {self.registers} registers"
        )

    @property
    def spilled_bytes(self) -> int:
        """Bytes that do not fit into registers."""
        return self.stack + self.spill_stores + self.spill_loads

    def residents(self, arch: Arch) -> int:
        """Return how many CTAs a multiprocessor holds at the same time."""
        registers = _up(self.registers, REGISTERS_AT_ONCE) * _up(self.threads, WARP)
        shared = self.shared + self.dynamic_shared + RESERVED_SHARED
        return min(
            arch.max_threads_per_sm // self.threads,
            arch.registers_per_block // registers,
            arch.shared_memory_per_sm // shared,
        )


def without_remarks(log: str) -> str:
    """Return the assembler's report in a compiler's log, which may have remarks on the source."""
    return "".join(re.findall(r"^(?:ptxas|[ ]+\d+ bytes).*\n", log, re.MULTILINE))


def read_report(report: str) -> dict[str, dict[str, int]]:
    """Return the figures in an assembler's report (``ptxas -v``), by kernel.

    Parameters
    ----------
    report : str
        Of nvcc or NVRTC.

    Returns
    -------
    dict
        Kernel symbol to figure to value, with the names of `FIGURES`.

    Raises
    ------
    CompileError
        If a figure is missing.
    """
    _, *parts = re.split(r"Compiling entry function '(\w+)'", report)
    return {
        kernel: {name: _figure(kernel, name, text) for name in FIGURES}
        for kernel, text in zip(parts[::2], parts[1::2], strict=True)
    }


def spilled_bytes(report: str) -> int:
    """Return the bytes that the kernels of a report keep outside of registers."""
    outside = ("stack", "spill_stores", "spill_loads")
    return sum(used[name] for used in read_report(report).values() for name in outside)


def check_limits(kernel: str, used: Resources, arch: Arch) -> None:
    """Raise `CompileError` if a device cannot hold one CTA of a kernel."""
    shared = used.shared + used.dynamic_shared
    registers = _up(used.registers, REGISTERS_AT_ONCE) * _up(used.threads, WARP)
    limits = {
        "threads": (used.threads, arch.max_threads_per_block),
        "registers of a thread": (used.registers, MAX_REGISTERS),
        "registers": (registers, arch.registers_per_block),
        "bytes of shared memory": (shared, arch.shared_memory_per_block),
    }
    for what, (given, limit) in limits.items():
        if given > limit:
            raise CompileError(
                f"{kernel} needs {given} {what}, but a CTA on {arch.name} has at most {limit}; "
                "use a smaller tile"
            )


def _figure(kernel: str, name: str, text: str) -> int:
    found = [int(value) for value in re.findall(FIGURES[name], text)]
    if not found and name not in MAY_BE_LEFT_OUT:
        raise CompileError(f"the assembler's report has no {name} of {kernel}:\n{text.strip()}")
    return max(found, default=0)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
