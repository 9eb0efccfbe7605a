"""Whether this machine can run code that was built for another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tvm_attn.errors import ArtifactError

CPUINFO = Path("/proc/cpuinfo")


def check_cpu(flags: Sequence[str], what: str) -> None:
    """Raise `ArtifactError` if this CPU lacks an extension, by the names of ``/proc/cpuinfo``.

    Where the system does not tell, nothing is checked.
    """
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    missing = set(flags) - set(found[1].split()) if found else set()
    if missing:
        raise ArtifactError(
            f"{what} uses {', '.join(sorted(missing))}, which this CPU lacks; build for "
            'target="llvm -mcpu=x86-64-v2", or on this machine'
        )
