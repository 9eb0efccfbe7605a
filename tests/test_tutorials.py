"""The tutorials run from top to bottom, and each notebook is its script with outputs.

``python -m tests.test_tutorials`` executes the scripts and writes the notebooks anew.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import jupytext
import nbformat
import pytest
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "tutorials").glob("*.py"))
CELL_SECONDS = 120

ABSOLUTE_PATH = re.compile(r"(?:^|[\s\"'(=:])(?:/[A-Za-z_][\w.-]*/[\w.-]|[A-Z]:\\)", re.MULTILINE)
ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")

every_tutorial = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


class ThisPython(KernelSpecManager):
    """The interpreter that runs the tests, whatever kernels are installed for the user."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


def executed(script: Path) -> NotebookNode:
    """Return a script as a notebook, executed in a process of its own."""
    notebook = jupytext.read(script)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            km=AsyncKernelManager(
                kernel_spec_manager=ThisPython(), transport="ipc", ip=f"{folder}/kernel"
            ),
            timeout=CELL_SECONDS,
            record_timing=False,
            resources={"metadata": {"path": str(script.parent)}},
        )
        python = {"PYTHONPATH": os.pathsep.join(paths), "IPYTHONDIR": folder}
        client.execute(env={**os.environ, **python}, cleanup_kc=True)
    return notebook


def write_notebook(script: Path) -> None:
    """Execute a script and write it next to itself as a notebook, without a trace of when."""
    notebook = executed(script)
    notebook.metadata["language_info"] = {"name": "python"}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    jupytext.write(notebook, script.with_suffix(".ipynb"))


def committed(script: Path) -> NotebookNode:
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def sources(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in notebook.cells:
        yield from cell.get("outputs", ())


def kinds(notebook: NotebookNode) -> list[list[str]]:
    """What each code cell puts out: the kinds of its outputs, standard error left out.

    A stream may arrive in any number of parts.
    """
    return [
        [kind for kind, _ in groupby(kind_of(o) for o in cell.outputs if o.get("name") != "stderr")]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def kind_of(output: NotebookNode) -> str:
    return output.name if output.output_type == "stream" else " ".join(sorted(output.data))


def texts(output: NotebookNode) -> Iterator[str]:
    """Everything in an output that a person reads, or a browser draws from text."""
    yield output.get("text", "")
    for kind, value in output.get("data", {}).items():
        if not kind.startswith("image/") or kind == "image/svg+xml":
            yield str(value)


def test_there_are_tutorials() -> None:
    assert SCRIPTS
    notebooks = sorted((ROOT / "tutorials").glob("*.ipynb"))
    assert notebooks == [script.with_suffix(".ipynb") for script in SCRIPTS]


@every_tutorial
def test_notebook_and_script_are_the_same(script: Path) -> None:
    assert sources(committed(script)) == sources(jupytext.read(script)), (
        "write the notebooks anew: python -m tests.test_tutorials"
    )


@every_tutorial
def test_notebook_has_the_outputs_of_one_run(script: Path) -> None:
    notebook = committed(script)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert {output.output_type for output in outputs(notebook)} <= {
        *("stream", "display_data", "execute_result")
    }
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]


@every_tutorial
def test_outputs_name_no_machine(script: Path) -> None:
    for output in outputs(committed(script)):
        for text in texts(output):
            found = ABSOLUTE_PATH.search(text) or ADDRESS.search(text)
            assert not found, f"{found[0]!r} in: {text[:400]}"


@every_tutorial
def test_tutorial_runs(script: Path) -> None:
    assert kinds(executed(script)) == kinds(committed(script))


if __name__ == "__main__":
    for tutorial in SCRIPTS:
        write_notebook(tutorial)
