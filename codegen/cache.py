"""The artifact cache: one file per artifact, written atomically under a lock."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from tvm_attn import _compat, env
from tvm_attn._files import write_atomically
from tvm_attn.codegen.compilers import find_compiler
from tvm_attn.errors import ArtifactError

SUFFIX = ".tar"


def cache_key(content: Mapping[str, Any]) -> str:
    """Return the hash of what an artifact is made from.

    Parameters
    ----------
    content : mapping
        What is compiled in, as JSON-able values; the library's source and the versions of TVM are
        added.
    """
    everything = {
        **content,
        "source": _source_hash(),
        "tvm": _compat.tvm_version(),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
    }
    text = json.dumps(everything, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cached(name: str, key: str, read: Callable[[Path], Any], make: Callable[[], bytes]) -> Any:
    """Return ``read(path)`` of the artifact of a key, which ``make()`` writes if it is not there.

    Two processes that want the same artifact make it once. A file that `read` refuses is made
    again.

    Parameters
    ----------
    name : str
        Leading part of the file name, for people.
    key : str
        From `cache_key`.
    read : callable
        Raises `ArtifactError` if the file is corrupt.
    make : callable
        Returns the artifact's bytes.
    """
    path = _path(name, key)
    log = env.logger("cache")
    found = _try_read(path, read)
    if found is not None:
        log.debug("hit %s", path)
        return found
    _make_folder("TVM_ATTN_CACHE_DIR", path.parent)
    with _locked(path):
        found = _try_read(path, read)
        if found is None:
            log.info("building %s", path.name)
            content = make()
            with _writing(path):
                write_atomically(path, content)
            found = read(path)
    return found


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file of the cache."""
    lock = filelock.FileLock(f"{path}.lock")
    with _writing(path):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise `EnvError` where a file of the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise env.EnvError(
            f"TVM_ATTN_CACHE_DIR: {path} cannot be written ({error}); name a directory that can be"
        ) from error


def _make_folder(variable: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise env.EnvError(f"{variable}: {folder} cannot be made: {error}") from error


def read_cached(name: str, key: str, read: Callable[[Path], Any]) -> Any | None:
    """Return what `cached` does, or None if that would have to be made."""
    return _try_read(_path(name, key), read)


def is_cached(name: str, key: str) -> bool:
    """Whether there is a file for a key; reading it may still find it corrupt."""
    return _path(name, key).exists()


def name_with_compiler(name: str, key: str) -> str:
    """Return the name of what a CUDA compiler makes: it is kept apart for each compiler.

    Without a compiler, any that there is a file from will do.
    """
    compiler = find_compiler()
    if compiler is not None:
        return f"{name}-{compiler.label}"
    files = sorted(env.cache_dir().glob(f"{name}-nv*-{key}{SUFFIX}"))
    return files[0].name.removesuffix(f"-{key}{SUFFIX}") if files else name


def _path(name: str, key: str) -> Path:
    return env.cache_dir() / f"{name}-{key}{SUFFIX}"


def _try_read(path: Path, read: Callable[[Path], Any]) -> Any | None:
    if not path.exists():
        return None
    try:
        return read(path)
    except ArtifactError as error:
        env.logger("cache").info("discarding %s: %s", path, error)
        return None


@functools.cache
def _source_hash() -> str:
    """Hash of every source file that a kernel may depend on."""
    digest = hashlib.sha256()
    for file in sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def sources() -> list[Path]:
    """Return every source file that a kernel may depend on."""
    root = Path(__file__).parent.parent
    package = root if (root / "spec.py").exists() else root / "tvm_attn"
    files = list(package.glob("*.py"))
    for folder in ("tir", "variants", "schedules", "codegen"):
        files += (package / folder).rglob("*.py")
    return sorted(files)
