"""Device code as SASS, by the disassembler of the CUDA toolkit or of a pip wheel."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tvm_attn import env
from tvm_attn.errors import ArtifactError, CompileError

ELF = b"\x7fELF"
WHEEL = "nvidia/cu13/bin/nvdisasm"
"""Where the wheel nvidia-cuda-nvdisasm has it, below a folder of installed packages."""


def cubin_of(device: bytes) -> bytes:
    """Return the machine code in a CUDA module, which ends it.

    Raises
    ------
    ArtifactError
        If there is none.
    """
    start = device.find(ELF)
    if start < 0:
        raise ArtifactError("the CUDA module holds no machine code; build the kernel again")
    return device[start:]


def disassemble(cubin: bytes) -> str:
    """Return the SASS of machine code.

    Raises
    ------
    CompileError
        If there is no disassembler, or it does not know the code.
    """
    command = _disassembler()
    if command is None:
        raise CompileError(
            "SASS needs nvdisasm or cuobjdump, and neither was found (tried the wheel, CUDA_HOME, "
            "PATH); install it with: pip install nvidia-cuda-nvdisasm"
        )
    with tempfile.NamedTemporaryFile(prefix="tvm_attn_", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [*command, file.name], capture_output=True, text=True, errors="replace", check=False
        )
    if done.returncode:
        raise CompileError(f"{' '.join(command)} refuses the code:\n{done.stderr}")
    return done.stdout


def _disassembler() -> list[str] | None:
    wheels = (Path(folder, WHEEL) for folder in sys.path)
    nvdisasm = next((path for path in wheels if path.exists()), None) or env.cuda_program(
        "nvdisasm"
    )
    if nvdisasm is not None:
        return [str(nvdisasm), "--print-code"]
    cuobjdump = env.cuda_program("cuobjdump")
    return [str(cuobjdump), "--dump-sass"] if cuobjdump else None
