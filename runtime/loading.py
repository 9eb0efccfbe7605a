"""Exported kernels are loaded here."""

from __future__ import annotations

import os
from pathlib import Path

from tvm_attn import env
from tvm_attn.errors import ArtifactError
from tvm_attn.runtime.artifact import read_artifact
from tvm_attn.runtime.host import missing_flags
from tvm_attn.runtime.module import AttentionModule


def load(path: str | os.PathLike[str]) -> AttentionModule:
    """Load an exported kernel: needs torch, tvm_ffi and TVM's runtime library, no compiler.

    Raises
    ------
    ArtifactError
        If the file is no artifact, or was built for another machine.
    EnvError
        If an environment variable has a value that cannot be used.
    """
    env.log_level()  # raises, though nothing is logged
    try:
        file = Path(path)
    except TypeError as error:
        raise ArtifactError(f"path={path!r} names no file ({error})") from error
    artifact = read_artifact(file)
    if not {"families", "spec"} <= set(artifact.meta):
        raise ArtifactError(f"{path} is no attention kernel; export one with kernel.export(path)")
    missing = missing_flags(artifact.meta["cpu_flags"])
    if missing:
        raise ArtifactError(f"{path}, built for {artifact.meta['target']}, {missing}")
    return AttentionModule.of(artifact)
