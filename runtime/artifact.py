"""Reading artifacts: a tar file with what was generated and what is known about it.

Members: ``meta.json`` (what the kernel is), shared libraries (``attention.so``, ``planner.so``),
device code of what they launch (``attention/attention_long.device``), and texts a person may want
to read (``tir.py``, ``scheduled.py``, ``source.ll``), compressed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvm_attn.errors import ArtifactError

FORMAT = 5
META, LIBRARY_SUFFIX, DEVICE_SUFFIX = "meta.json", ".so", ".device"
UNREADABLE = (
    *(tarfile.TarError, EOFError, OSError),
    *(KeyError, TypeError, ValueError, RecursionError),
)
"""Errors of reading what is no artifact: as a tar file, and its members."""


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel as data.

    Attributes
    ----------
    meta : dict
        What the kernel is: JSON values.
    libraries : dict of str to bytes
        Shared libraries by name.
    texts : dict of str to str
        Generated texts by member name: those of one kernel of several in a folder of its name.
    devices : dict of str to dict of str to bytes
        Of a GPU: by library, the CUDA modules whose kernels it launches, by name, as TVM's runtime
        loads them.
    """

    meta: dict[str, Any]
    libraries: Mapping[str, bytes]
    texts: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Return a text, that of all kernels one after another.

        Raises
        ------
        KeyError
            If there is none.
        """
        found = [text for path, text in self.texts.items() if path.split("/")[-1] == name]
        if not found:
            raise KeyError(name)
        return "\n".join(found)

    def to_bytes(self) -> bytes:
        """Return the artifact as a tar file."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            code = {name + LIBRARY_SUFFIX: content for name, content in self.libraries.items()}
            for library, modules in self.devices.items():
                code.update({f"{library}/{n}{DEVICE_SUFFIX}": c for n, c in modules.items()})
            texts = {name: zlib.compress(text.encode()) for name, text in self.texts.items()}
            digest = _digest(self.meta, {**code, **texts})
            head = {"format": FORMAT, "digest": digest, **self.meta}
            members = {META: json.dumps(head, indent=1).encode(), **code, **texts}
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return buffer.getvalue()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file.

        Raises
        ------
        ArtifactError
            If there can be no such file.
        """
        try:
            Path(path).write_bytes(self.to_bytes())
        except (OSError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"path={path!r} cannot be written ({error}); name a file in a folder that exists"
            ) from error


def read_artifact(path: Path) -> Artifact:
    """Read an artifact file.

    Raises
    ------
    ArtifactError
        If there is no such file, or it is no artifact, is cut short, or has another format.
    """
    try:
        with tarfile.open(path, mode="r:") as tar:
            members = {m.name: _content(tar, m) for m in tar.getmembers()}
        meta = json.loads(members.pop(META))
        if not isinstance(meta, dict):
            raise TypeError(f"{META} holds {type(meta).__name__}")
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no artifact at {path}") from error
    except UNREADABLE as error:
        raise ArtifactError(f"{path} is no whole artifact ({error!r}); export it again") from error
    if meta.pop("format", None) != FORMAT:
        raise ArtifactError(f"{path} has another format than {FORMAT}; export it again")
    if meta.pop("digest", None) != _digest(meta, members):
        raise ArtifactError(f"{path} is damaged: its content has changed; export it again")
    libraries = _taken(members, LIBRARY_SUFFIX)
    devices: dict[str, dict[str, bytes]] = {}
    for name, content in _taken(members, DEVICE_SUFFIX).items():
        library, _, module = name.partition("/")
        devices.setdefault(library, {})[module] = content
    return Artifact(meta, libraries, LazyTexts(members), devices)


class LazyTexts(Mapping[str, str]):
    """Texts that are decompressed when they are read."""

    def __init__(self, compressed: dict[str, bytes]):
        self._compressed = compressed

    def __getitem__(self, name: str) -> str:
        """Return a text."""
        return zlib.decompress(self._compressed[name]).decode()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._compressed)

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._compressed)


def _taken(members: dict[str, bytes], suffix: str) -> dict[str, bytes]:
    """Take the members of a kind out of all, and return them by what precedes the suffix."""
    names = [name for name in members if name.endswith(suffix)]
    return {name.removesuffix(suffix): members.pop(name) for name in names}


def _digest(meta: Mapping[str, Any], members: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(members):
        digest.update(name.encode() + members[name])
    return digest.hexdigest()


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    content = file.read() if file else b""
    if len(content) != member.size:
        raise EOFError(f"{member.name} is cut short")
    return content
