"""The part of a kernel that most programs never need, and that is compiled when one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from tvm_attn.runtime.artifact import Artifact
from tvm_attn.runtime.library import Library


class Later:
    """A library that is taken from the cache, or compiled, when it is first used.

    Parameters
    ----------
    obtain : callable
        Returns it, and the artifact that it is from.
    """

    def __init__(self, obtain: Callable[[], tuple[Artifact, Library]]):
        self._obtain = obtain

    def launch(self, name: str, *arguments: Any) -> None:
        """Call a function, as `Library.launch` does."""
        self._made[1].launch(name, *arguments)

    def complete(self, artifact: Artifact) -> Artifact:
        """Return an artifact with the library in it."""
        made, _ = self._made
        return replace(
            artifact,
            libraries={**artifact.libraries, **made.libraries},
            devices={**artifact.devices, **made.devices},
        )

    @cached_property
    def _made(self) -> tuple[Artifact, Library]:
        return self._obtain()
