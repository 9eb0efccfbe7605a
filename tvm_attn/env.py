"""Environment variables: the one module that reads them, each at the time of the call.

`VARIABLES` lists them with their meaning; ``docs/env_vars.md`` is that list as a page. A value that
cannot be used raises `EnvError` where it is first needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from tvm_attn.errors import TvmAttnError


class EnvError(TvmAttnError, ValueError):
    """An environment variable has a value that cannot be used."""


@dataclass(frozen=True)
class EnvVar:
    """An environment variable, as documented.

    Parameters
    ----------
    name : str
        Its name.
    values : str
        The values it takes.
    default : str
        What holds when it is unset or empty.
    meaning : str
        What it does, in one sentence.
    """

    name: str
    values: str
    default: str
    meaning: str

    def read(self) -> str | None:
        """Return the value in force, None when unset or blank."""
        return os.environ.get(self.name, "").strip() or None


CACHE_DIR = EnvVar(
    "TVM_ATTN_CACHE_DIR",
    "a directory",
    "the user's cache directory",
    "Where compiled kernels are kept; created when first needed.",
)
LOG = EnvVar(
    "TVM_ATTN_LOG",
    "`off`, `info`, `debug`",
    "`off`",
    "How much the logger `tvm_attn` writes to standard error.",
)
DUMP = EnvVar(
    "TVM_ATTN_DUMP",
    "a directory",
    "no dumps",
    "Where each build writes the IR after every phase and the generated source.",
)
NUM_THREADS = EnvVar(
    "TVM_ATTN_NUM_THREADS",
    "an integer of at least 1",
    "`TVM_NUM_THREADS`, else `OMP_NUM_THREADS`, else the CPUs this process may use",
    "Threads that plans are cut for and kernels run on, on the CPU; never more than its cores, "
    "and fixed once the first kernel has been loaded.",
)
VARIABLES = (CACHE_DIR, LOG, DUMP, NUM_THREADS)

FAILED = "failed"
"""Folder of sources that a compiler refused, below the directory of dumps, else of kernels."""

_LONG = 10
"""Digits of a number that no machine has so many cores as."""
_LOG_LEVELS = {"off": None, "info": logging.INFO, "debug": logging.DEBUG}
_to_nowhere = logging.NullHandler()  # keeps `logging` from its handler of last resort
_to_stderr = logging.StreamHandler()
_to_stderr.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))


@contextlib.contextmanager
def override(variable: EnvVar, value: object) -> Iterator[None]:
    """Give a variable another value for the time of a ``with`` block."""
    previous = os.environ.get(variable.name)
    os.environ[variable.name] = str(value)
    try:
        yield
    finally:
        if previous is None:
            del os.environ[variable.name]
        else:
            os.environ[variable.name] = previous


def cache_dir() -> Path:
    """Return the directory of compiled kernels (not created here).

    Raises
    ------
    EnvError
        If there can be no such directory.
    """
    given = CACHE_DIR.read()
    return _directory(CACHE_DIR, given) if given else Path(platformdirs.user_cache_dir("tvm-attn"))


def dump_dir() -> Path | None:
    """Return the directory that builds dump into, None when they do not (not created here).

    Raises
    ------
    EnvError
        If there can be no such directory.
    """
    given = DUMP.read()
    return _directory(DUMP, given) if given else None


def cuda_program(name: str) -> Path | None:
    """Return a program of the CUDA toolkit, None if it is not installed.

    The toolkit that ``CUDA_HOME`` or ``CUDA_PATH`` names comes before ``PATH``.
    """
    homes = (os.environ.get(variable, "").strip() for variable in ("CUDA_HOME", "CUDA_PATH"))
    folders = [str(Path(home, "bin")) for home in homes if home]
    found = shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))
    return Path(found) if found else None


def keep_cuda_source() -> None:
    """Have TVM hand out the CUDA source that it generates, where there is a GPU too.

    There it would compile the source itself. Only for a process of one's own.
    """
    os.environ["TVM_COMPILE_FORCE_FALLBACK"] = "1"


def log_level() -> int | None:
    """Return the `logging` level asked for, None for ``off``.

    Raises
    ------
    EnvError
        If ``TVM_ATTN_LOG`` is not one of its values.
    """
    given = LOG.read() or "off"
    if given.lower() not in _LOG_LEVELS:
        raise EnvError(f"{LOG.name}={given!r} is not a level; use one of {', '.join(_LOG_LEVELS)}")
    return _LOG_LEVELS[given.lower()]


def num_threads() -> int:
    """Return the number of CPU threads to plan for and to run on: at most this machine's cores.

    With more of them, TVM's pool would take minutes to end.

    Raises
    ------
    EnvError
        If ``TVM_ATTN_NUM_THREADS`` or ``TVM_NUM_THREADS`` is not an integer of at least 1.
    """
    for name in (NUM_THREADS.name, "TVM_NUM_THREADS"):
        given = os.environ.get(name, "").strip()
        if given:
            return _thread_count(name, given)
    openmp = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    asked = _up_to_cores(openmp) if openmp.isdecimal() else 0
    return asked or len(os.sched_getaffinity(0))


def setup_threads() -> int:
    """Fix the size of TVM's CPU thread pool, which reads ``TVM_NUM_THREADS`` when it starts.

    Call this before TVM's runtime library is loaded. A ``TVM_NUM_THREADS`` that is already set
    stays, unless ``TVM_ATTN_NUM_THREADS`` says otherwise, or there are fewer cores.

    Returns
    -------
    int
        The number of threads, as `num_threads` gives it.
    """
    threads = num_threads()
    os.environ["TVM_NUM_THREADS"] = str(threads)
    return threads


def logger(name: str = "") -> logging.Logger:
    """Return the logger ``tvm_attn`` (or its child), set up as ``TVM_ATTN_LOG`` says now.

    With ``off`` it writes nothing itself: an application that configures `logging` gets the records
    it asks for, and any other program gets none.

    Parameters
    ----------
    name : str
        A child's name, such as ``"codegen"``; empty for the library's own logger.
    """
    root = logging.getLogger("tvm_attn")
    level = log_level()
    if level is None:
        root.removeHandler(_to_stderr)
        root.addHandler(_to_nowhere)
        root.setLevel(logging.NOTSET)
    else:
        root.addHandler(_to_stderr)
        root.setLevel(level)
    return root.getChild(name) if name else root


def _directory(variable: EnvVar, given: str) -> Path:
    """Return a directory that is there, or can be made as far as its name goes."""
    reason: object
    try:
        path = Path(given).expanduser()
        if stat.S_ISDIR(path.stat().st_mode):
            return path
        reason = "Not a directory"
    except FileNotFoundError:
        dangling = [str(p) for p in (path, *path.parents) if p.is_symlink() and not p.exists()]
        if not dangling:
            return path
        reason = f"{dangling[-1]} is a link to nothing"
    except (OSError, RuntimeError) as error:
        reason = error
    raise EnvError(
        f"{variable.name}={given!r} cannot be written ({reason}); name a directory that can be"
    )


def _thread_count(name: str, given: str) -> int:
    threads = _up_to_cores(given) if given.isdecimal() else 0
    if threads < 1:
        raise EnvError(f"{name}={given!r} is not a number of threads; use an integer of at least 1")
    return threads


def _up_to_cores(digits: str) -> int:
    """Return a number, or that of cores if it is larger; Python reads no number of any size."""
    cores = os.cpu_count() or 1
    digits = digits.lstrip("0")
    return min(int(digits or 0), cores) if len(digits) < _LONG else cores
