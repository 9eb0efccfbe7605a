"""The phases a kernel goes through, recorded as text and dumped where the user wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm_attn import env


class Phases:
    """Keeps the text of every phase, and writes it under ``TVM_ATTN_DUMP`` if that is set.

    Parameters
    ----------
    name : str
        Folder to dump into, below the one the user gave.
    progress : callable
        Called with the name of each phase as it is done.

    Attributes
    ----------
    texts : dict of str to str
        ``tir.py``, ``scheduled.py``, ``source.ll``: what each phase made.
    report : callable
        `progress`.
    """

    def __init__(self, name: str, progress: Callable[[str], None]):
        self.texts: dict[str, str] = {}
        self._name = name
        self.report = progress

    def of(self, kernel: str, progress: Callable[[str], None]) -> Phases:
        """Return phases of one kernel: it has a folder of its own, and its stages bear its name."""
        return Phases(f"{self._name}/{kernel}", lambda stage: progress(f"{kernel}: {stage}"))

    def record(self, phase: str, functions: Mapping[str, Any]) -> dict[str, Any]:
        """Record the TVMScript of a phase's functions, and return them."""
        self.note(f"{phase}.py", "\n\n".join(f.script() for f in functions.values()))
        return dict(functions)

    def note(self, name: str, text: str) -> None:
        """Record a phase's text."""
        self.texts[name] = text
        self.report(name)
        env.logger("codegen").debug("%s: %d characters", name, len(text))
        dump(self._name, {name: text})


def dump(folder: str, texts: Mapping[str, str]) -> None:
    """Write texts to a folder under ``TVM_ATTN_DUMP``, if that is set."""
    root = env.dump_dir()
    if root is None:
        return
    for name, text in texts.items():
        path = root / folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise env.EnvError(
                f"{env.DUMP.name}: {path} cannot be written ({error}); name a directory that can be"
            ) from error
