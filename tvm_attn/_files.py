"""Files of the cache: whole or not there, and notes, which are small and can be done without."""

from __future__ import annotations

import hashlib
import json
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from tvm_attn import env


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_note(name: str) -> Any | None:
    """Return a note of the cache, None if there is none or it is not as it was written."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        saved = json.loads(_path(name).read_text())
        if saved["digest"] == _digest(name, saved["note"]):
            return saved["note"]
    return None


def write_note(name: str, note: Any) -> None:
    """Have `read_note` find a note, in terms of JSON, wherever the cache can be written to."""
    saved = {"note": note, "digest": _digest(name, note)}
    with suppress(OSError, env.EnvError):
        write_atomically(_path(name), json.dumps(saved).encode())


def _path(name: str) -> Path:
    return env.cache_dir() / f"{name}.json"


def _digest(name: str, note: Any) -> str:
    return hashlib.sha256(json.dumps([name, note], sort_keys=True).encode()).hexdigest()
