"""The house rules: who imports whom, what is packaged, how long files and functions are."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("schedules", "codegen", "runtime")

COMMON = {"errors", "env", "worklist", "_files"}
FACADES = {
    *("decode", "prefill", "cascade", "sparse", "page", "attention", "rope", "pod", "quantization"),
    *("relax", "cli", "bench", "demo", "viz", "__main__"),
}
FACADE_HELPERS = {"_flashinfer"}
PIPELINE = ("pipeline", "_generation", "_parts")
SEEN_BY_COMPILERS = {"spec", "variant", "target", "tir"}
SEEN_BY_RUNTIME = {"spec", "bsr"}
ENTRY_POINT = {"cli": {"bench", "demo", "viz"}, "__main__": {"cli"}}  # the outermost callers

FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 400, 60, 120
SCRIPTED = {"tir", "schedules"}
SCRIPT_DECORATORS = {"prim_func", "inline", "macro"}
OVERSIZE: dict[str, str] = {}
"""What is longer, as ``path`` or ``path::function``, and why it has to be."""

DISTRIBUTIONS = {
    "cuda": "cuda-bindings",
    "ml_dtypes": "ml-dtypes",
    "tvm": "apache-tvm",
    "tvm_ffi": "apache-tvm-ffi",
}
OPTIONAL = {"cli": {"cli"}, "viz": {"viz"}, "bench": {"cli", "viz"}}  # facade -> extras it needs


@dataclass(frozen=True)
class Source:
    """A Python file of the package."""

    path: Path
    module: str

    @property
    def unit(self) -> str:
        """The part of the house it belongs to: ``"tir"`` for ``tvm_attn.tir.attention``."""
        return self.module.split(".")[1] if "." in self.module else "__init__"

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())


@dataclass(frozen=True)
class Import:
    """An imported module, and whether it is imported when the file is."""

    module: str
    line: int
    eager: bool


def sources() -> Iterator[Source]:
    for folder in ("tvm_attn", *STAGES):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if folder == "tvm_attn" else ("tvm_attn", *parts)
            yield Source(path, ".".join(parts).removesuffix(".__init__"))


SOURCES = list(sources())
MODULES = {source.module for source in SOURCES}


def imports(source: Source) -> Iterator[Import]:
    """All imports, also inside functions and for type checkers; names become modules."""

    def walk(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.name}:{node.lineno} imports relatively"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                name = submodule if submodule in MODULES else str(node.module)
                yield Import(name, node.lineno, eager)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            eager = False
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            eager = False
        for child in ast.iter_child_nodes(node):
            yield from walk(child, eager)

    yield from walk(source.tree(), True)


def allowed_units(unit: str) -> set[str]:
    """The parts of the house that `unit` may import."""
    units = {source.unit for source in SOURCES}
    not_said = {*STAGES, *FACADES, *FACADE_HELPERS, *PIPELINE, "__init__"}
    if unit in COMMON:
        return COMMON
    if unit == "runtime":
        return COMMON | SEEN_BY_RUNTIME | {unit}
    if unit in ("schedules", "codegen"):
        return COMMON | SEEN_BY_COMPILERS | {unit, "_compat"}
    if unit in PIPELINE:
        return units - FACADES - FACADE_HELPERS - {"__init__"}
    if unit in FACADES | FACADE_HELPERS:
        beside = FACADE_HELPERS | ENTRY_POINT.get(unit, set()) | {unit, "__init__"}
        return (units - not_said) | {"pipeline", "runtime"} | beside
    return units if unit == "__init__" else units - not_said


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def project_files() -> list[Path]:
    """The files of the repository: those git knows or would add, else all but generated ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        paths = [ROOT / name for name in result.stdout.split("\0") if name]
    else:
        hidden, built = r"\.(?!ci/|gitig|pre-)", r"(?:build|dist|__pycache__|[^/]*\.egg-info)/"
        generated = re.compile(f"(?:^|/)(?:{hidden}|{built})")
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]
        paths = [ROOT / name for name in names if not generated.search(name)]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_imports_go_down_the_house(source: Source) -> None:
    allowed = allowed_units(source.unit)
    wrong = [
        f"{source.name}:{found.line} imports {found.module}"
        for found in imports(source)
        if found.module.split(".")[0] == "tvm_attn"
        and Source(source.path, found.module).unit not in allowed
    ]
    assert not wrong


def test_only_the_demo_and_benchmarks_check_themselves_against_the_reference() -> None:
    users = {
        source.unit
        for source in SOURCES
        for found in imports(source)
        if found.module == "tvm_attn.reference"
    }
    assert users <= {"bench", "demo"}, "the float64 oracle is no part of what is served"


def test_runtime_never_imports_tvm() -> None:
    users = [
        f"{source.name}:{found.line}"
        for source in SOURCES
        for found in imports(source)
        if source.unit == "runtime" and found.module.split(".")[0] == "tvm"
    ]
    assert not users


def test_library_and_runtime_import_without_tvm(run_python: Callable[..., str]) -> None:
    modules = ["tvm_attn", *(s.module for s in SOURCES if s.unit in COMMON | {"runtime"})]
    printed = run_python(
        f"""
        import importlib
        for name in {modules!r}:
            importlib.import_module(name)
        print("tvm" in sys.modules)
        """,
        without_tvm=True,
    )
    assert printed.split() == ["False"]


def test_packages_are_the_folders_on_disk() -> None:
    on_disk = {source.module for source in SOURCES if source.path.name == "__init__.py"}
    setuptools = pyproject()["tool"]["setuptools"]
    assert sorted(on_disk) == sorted(setuptools["packages"])
    mapped = {"tvm_attn": "tvm_attn", **{f"tvm_attn.{stage}": stage for stage in STAGES}}
    assert setuptools["package-dir"] == mapped
    without_init = {s.name for s in SOURCES if not (s.path.parent / "__init__.py").exists()}
    assert not without_init


@pytest.mark.parametrize("stage", STAGES)
def test_stages_are_seen_inside_the_package(stage: str) -> None:
    link = ROOT / "tvm_attn" / stage
    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../{stage}"
    module = importlib.import_module(f"tvm_attn.{stage}")
    assert Path(str(module.__file__)).resolve() == ROOT / stage / "__init__.py"


def test_sdist_and_wheel_hold_the_package_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("tvm_attn", *STAGES):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=skip)
    build = (
        "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])('.'))"
    )

    def run(hook: str, directory: Path) -> Path:
        command = [sys.executable, "-W", "ignore", "-c", build, hook]
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return directory / result.stdout.split()[-1]

    sdist = run("build_sdist", tree)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    wheel = run("build_wheel", tmp_path / sdist.name.removesuffix(".tar.gz"))
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = [
        f"tvm_attn/{name}" if name.startswith(STAGES) else name
        for name in (source.name for source in SOURCES)
    ]
    patterns = pyproject()["tool"]["setuptools"]["package-data"]["tvm_attn"]
    data = [path for pattern in patterns for path in (ROOT / "tvm_attn").glob(pattern)]
    assert sorted(packed) == sorted([*modules, *(p.relative_to(ROOT).as_posix() for p in data)])


def test_stages_do_not_leak_as_top_level_modules() -> None:
    code = """
import importlib.util as util, json
names = ["schedules", "codegen", "runtime", "tests", "tutorials", "tvm_attn"]
print(json.dumps([name for name in names if util.find_spec(name)]))
"""
    command = [sys.executable, "-I", "-c", code]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert found in ([], ["tvm_attn"])


def test_public_names_of_a_package_are_not_names_of_its_modules() -> None:
    clashes = []
    for package in {source.module for source in SOURCES if source.path.name == "__init__.py"}:
        public = getattr(importlib.import_module(package), "__all__", ())
        for name in public:
            value = getattr(importlib.import_module(package), name)
            if f"{package}.{name}" in MODULES and not inspect.ismodule(value):
                clashes.append(f"{package}.{name}")
    assert not clashes, "importing the module would replace the function"


def declared(extras: set[str]) -> set[str]:
    project = pyproject()["project"]
    requirements = [r for extra in extras for r in project["optional-dependencies"][extra]]
    return {re.match(r"[\w-]+", r)[0] for r in [*project["dependencies"], *requirements]}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_imported_packages_are_declared(source: Source) -> None:
    eager = declared(OPTIONAL.get(source.unit, set()))
    lazy = declared({"cuda", "cli", "viz"})
    undeclared = []
    for found in imports(source):
        top = found.module.split(".")[0]
        if top == "tvm_attn" or top in sys.stdlib_module_names:
            continue
        if DISTRIBUTIONS.get(top, top) not in (eager if found.eager else lazy):
            undeclared.append(f"{source.name}:{found.line} imports {found.module}")
    assert not undeclared


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(node, f"{prefix}{node.name}." if inside else prefix)


def code_lines(function: ast.FunctionDef) -> int:
    """Lines from ``def`` to the end, the docstring not counted."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def is_script(function: ast.FunctionDef) -> bool:
    """Whether it is TVMScript: its body is parsed by TVM."""
    names = {ast.unparse(d).split("(")[0].split(".")[-1] for d in function.decorator_list}
    return bool(SCRIPT_DECORATORS & names)


def is_kernel(source: Source, function: ast.FunctionDef) -> bool:
    """Whether it is, or generates, a kernel: TVMScript cannot be cut into pieces freely."""
    inside = (node for node in ast.walk(function) if isinstance(node, ast.FunctionDef))
    return source.unit in SCRIPTED and any(map(is_script, inside))


def test_files_and_functions_are_short() -> None:
    too_long = {}
    for source in SOURCES:
        lines = len(source.path.read_text().splitlines())
        if lines > FILE_LINES:
            too_long[source.name] = lines
        for name, function in functions(source.tree()):
            limit = KERNEL_LINES if is_kernel(source, function) else FUNCTION_LINES
            if code_lines(function) > limit:
                too_long[f"{source.name}::{name}"] = code_lines(function)
    unexpected = {name: lines for name, lines in too_long.items() if name not in OVERSIZE}
    assert not unexpected
    assert set(OVERSIZE) <= set(too_long), "an exception is not needed any more"
    assert all(OVERSIZE.values()), "an exception needs a reason"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_public_things_have_docstrings(source: Source) -> None:
    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef) or child.name.startswith("_"):
                continue
            if ast.get_docstring(child) is None:
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")

    tree = source.tree()
    assert ast.get_docstring(tree), f"{source.name} has no docstring"
    assert not list(walk(tree, ""))


def test_only_tvmscript_goes_without_types() -> None:
    untyped = []
    for source in SOURCES:
        for name, function in functions(source.tree()):
            arguments = function.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            bare = [a for a in named if a.annotation is None and a.arg not in ("self", "cls")]
            has_result = function.returns is not None or function.name == "__init__"
            if not is_script(function) and (bare or not has_result):
                untyped.append(f"{source.name}:{function.lineno} {name}")
    assert not untyped


def test_files_name_no_machine_and_no_unfinished_work() -> None:
    unwanted = re.compile(r"(?<![\w.])/(?:work|root|tmp/w)\b|\b(?:TO" + r"DO|FIX" + r"ME)\b")
    found = []
    for path in project_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(lines, 1)
            if unwanted.search(line)
        ]
    assert not found
