"""Parts of kernels, each cached by itself, and which of them a request for a kernel is made of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from tvm_attn._files import read_note, write_note
from tvm_attn._hook_code import hook_code
from tvm_attn.codegen.cache import (
    cache_key,
    cached,
    is_cached,
    name_with_compiler,
    read_cached,
)
from tvm_attn.errors import ArtifactError
from tvm_attn.runtime.artifact import Artifact, read_artifact
from tvm_attn.runtime.library import Library
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget
from tvm_attn.variant import AttentionVariant

Loaded = tuple[Artifact, Library]

_loaded: dict[str, Loaded] = {}
"""Artifacts this process has loaded, by cache key."""
_recipes: dict[str, Recipe] = {}
"""Recipes this process has met, by the key of the request."""

STEM = "part"
"""What the file of a part has besides the artifact's own meta data: its name, less the suffix."""


@dataclass(frozen=True)
class Part:
    """A part of a kernel: what it is called, by what key it is cached, whether a GPU runs it."""

    kind: str
    key: str
    on_gpu: bool

    @property
    def name(self) -> str:
        """Name of its file, less the key: one for each CUDA compiler if that made it."""
        return name_with_compiler(self.kind, self.key) if self.on_gpu else self.kind

    def is_there(self) -> bool:
        """Whether nothing has to be compiled."""
        return self.key in _loaded or is_cached(self.name, self.key)

    def recall(self) -> Loaded | None:
        """Return the part from memory or from the cache, None if it is in neither."""
        if self.key not in _loaded:
            found = read_cached(self.name, self.key, _read)
            if found is None:
                return None
            _loaded[self.key] = found
        return _loaded[self.key]

    def obtain(self, generate: Callable[[str], Artifact]) -> Loaded:
        """Return the part from memory, from the cache, or newly compiled: ``generate(key)``."""
        if self.key not in _loaded:
            made = partial(self._make, generate)
            _loaded[self.key] = cached(self.name, self.key, _read, made)
        return _loaded[self.key]

    def _make(self, generate: Callable[[str], Artifact]) -> bytes:
        """Return the content of its file, which says what that is called."""
        artifact = generate(self.key)
        meta = {**artifact.meta, STEM: f"{self.name}-{self.key}"}
        return replace(artifact, meta=meta).to_bytes()


@dataclass(frozen=True)
class Recipe:
    """The parts of a kernel, why it is of the schedule that it is, and what it may need later."""

    parts: tuple[Part, ...]
    why: str
    later: Part | None = None

    def recall(self) -> dict[str, Loaded] | None:
        """Return all parts from memory or from the cache, None if one is in neither."""
        found = {}
        for part in self.parts:
            loaded = part.recall()
            if loaded is None:
                return None
            found[part.kind] = loaded
        return found


def request_key(
    spec: AttentionSpec, variant: AttentionVariant, target: BuildTarget, schedule: str | None
) -> str | None:
    """Return a key of all that a kernel is made from, without tracing the variant.

    Requests of one key get the same kernel; those of two keys may. None if the code of the
    variant's hooks does not tell what they give.
    """
    told = hook_code(variant)
    if told is None:
        return None
    asked = {"spec": asdict(spec), "hooks": told, "target": target.key(), "schedule": schedule}
    return cache_key({**asked, "python": sys.version})


def recall_recipe(request: str | None) -> Recipe | None:
    """Return the recipe of a request that was remembered, by this process or another."""
    if request is None:
        return None
    if request not in _recipes and (saved := read_note(_note(request))):
        parts, later = tuple(Part(**part) for part in saved["parts"]), saved["later"]
        _recipes[request] = Recipe(parts, saved["why"], Part(**later) if later else None)
    return _recipes.get(request)


def remember_recipe(request: str | None, recipe: Recipe) -> None:
    """Have `recall_recipe` find a recipe, wherever the cache can be written to."""
    if request is None:
        return
    _recipes[request] = recipe
    write_note(_note(request), asdict(recipe))


def forget_loaded() -> None:
    """Drop what this process has loaded; the cache on disk stays."""
    _loaded.clear()
    _recipes.clear()


def beside(part: Part, generate: Callable[[str], Artifact]) -> dict[str, Callable[..., bool]]:
    """Return work for a process of its own that compiles a part into the cache, by the part's name.

    There is none if the part is there. Should the process fail, nothing is lost: the part is then
    compiled when it is needed, and the error is met there.
    """
    if part.is_there():
        return {}

    def make(_: object) -> bool:
        with suppress(Exception):
            return bool(part.obtain(generate))
        return False

    return {part.name: make}


def _note(request: str) -> str:
    return f"request-{request}"


def _read(path: Path) -> Loaded:
    artifact = read_artifact(path)
    if artifact.meta.pop(STEM, None) != path.stem:
        raise ArtifactError(f"{path} is the file of another part")
    [(name, content)] = artifact.libraries.items()
    return artifact, Library(content, list(artifact.devices.get(name, {}).values()))
