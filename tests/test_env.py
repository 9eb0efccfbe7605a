"""Environment variables: typed, read when asked for, documented on one page."""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tvm_attn as ta
from tvm_attn import env
from tvm_attn.errors import TvmAttnError

THREAD_VARIABLES = ("TVM_ATTN_NUM_THREADS", "TVM_NUM_THREADS", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def unset_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "")


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


@pytest.fixture
def clean_logger() -> Iterator[None]:
    yield
    os.environ.pop("TVM_ATTN_LOG", None)
    env.logger()


def test_the_page_lists_the_variables_of_the_module(root: Path) -> None:
    page = (root / "docs/env_vars.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    assert rows == [[f"`{v.name}`", v.values, v.default, v.meaning] for v in env.VARIABLES]


def test_only_this_module_reads_the_environment(root: Path) -> None:
    readers = set()
    for folder in ("tvm_attn", "schedules", "codegen", "runtime"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                    readers.add(path.relative_to(root).as_posix())
    assert readers == {"tvm_attn/env.py"}


def test_cache_dir_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_ATTN_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == Path.home() / "kernels"
    monkeypatch.setenv("TVM_ATTN_CACHE_DIR", " ")
    assert env.cache_dir().name == "tvm-attn"


@pytest.mark.parametrize(
    ("variable", "read"), [(env.CACHE_DIR, env.cache_dir), (env.DUMP, env.dump_dir)]
)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("~nouser/x", "home directory"),
        ("{folder}/" + "a" * 300, "File name too long"),
        ("{folder}/dangling", "/dangling is a link to nothing"),
        ("{folder}/dangling/x", "/dangling is a link to nothing"),
        ("{folder}/loop", "symbolic links"),
        ("{folder}/loop/x", "symbolic links"),
        ("{folder}/file", "Not a directory"),
        ("{folder}/file/x", "Not a directory"),
    ],
)
def test_a_name_that_no_directory_can_have(
    variable: env.EnvVar,
    read: Callable[[], Path | None],
    given: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable.name, given.format(folder=tmp_path))
    with pytest.raises(env.EnvError, match=rf"{variable.name}='.*{words}.*; name a directory"):
        read()


def test_a_directory_may_be_a_link_or_still_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("link", "link/a/b"):
        monkeypatch.setenv("TVM_ATTN_CACHE_DIR", str(tmp_path / name))
        assert env.cache_dir() == tmp_path / name


def test_override_lasts_for_a_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TVM_ATTN_CACHE_DIR", "before")
    monkeypatch.delenv("TVM_ATTN_DUMP", raising=False)
    with (
        pytest.raises(RuntimeError, match="stop"),
        env.override(env.CACHE_DIR, tmp_path),
        env.override(env.DUMP, tmp_path / "dump"),
    ):
        assert (env.cache_dir(), env.dump_dir()) == (tmp_path, tmp_path / "dump")
        raise RuntimeError("stop")
    assert env.cache_dir() == Path("before")
    assert "TVM_ATTN_DUMP" not in os.environ


def test_dump_dir_is_off_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert env.dump_dir() is None
    monkeypatch.setenv("TVM_ATTN_DUMP", str(tmp_path))
    assert env.dump_dir() == tmp_path


@pytest.mark.parametrize(
    ("given", "level"), [("", None), ("off", None), ("info", logging.INFO), ("DEBUG", 10)]
)
def test_log_level(given: str, level: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_ATTN_LOG", given)
    assert env.log_level() == level


def test_a_bad_log_level_says_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_ATTN_LOG", "loud")
    with pytest.raises(ValueError, match=r"TVM_ATTN_LOG='loud' .* off, info, debug") as error:
        env.log_level()
    assert isinstance(error.value, TvmAttnError)


def test_a_bad_log_level_is_met_where_kernels_come_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec, path = ta.AttentionSpec(2, 1, 16, q_dtype="float32", page_size=4), tmp_path / "kernel.tar"
    ta.build(spec).export(path)
    monkeypatch.setenv("TVM_ATTN_LOG", "loud")
    for take in (lambda: ta.build(spec), lambda: ta.load(path)):
        with pytest.raises(env.EnvError, match="TVM_ATTN_LOG='loud'"):
            take()


@pytest.mark.parametrize(
    ("setting", "stderr"),
    [("off", ""), ("info", "tvm_attn.codegen: built"), ("debug", "tvm_attn.codegen: details")],
)
def test_logger_is_silent_unless_asked(
    setting: str, stderr: str, run_python: Callable[..., str]
) -> None:
    printed = run_python(
        """
        import sys
        sys.stderr = sys.stdout
        from tvm_attn import env
        log = env.logger("codegen")
        log.debug("details")
        log.info("built")
        log.warning("slow")
        """,
        env={"TVM_ATTN_LOG": setting},
    )
    assert stderr in printed
    assert ("slow" in printed) == (setting != "off")
    assert ("details" in printed) == (setting == "debug")


@pytest.mark.usefixtures("clean_logger")
def test_logger_follows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_ATTN_LOG", "debug")
    assert env.logger("plan").isEnabledFor(logging.DEBUG)
    monkeypatch.setenv("TVM_ATTN_LOG", "info")
    assert not env.logger("plan").isEnabledFor(logging.DEBUG)
    assert len(env.logger().handlers) == len(set(env.logger().handlers))


def test_an_application_receives_the_records_it_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        env.logger("plan").info("cut 3 units")
    assert "cut 3 units" in caplog.text


def test_threads_default_to_the_cpus_of_this_process() -> None:
    assert env.num_threads() == len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("eight_cores")
def test_order_of_the_thread_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert env.num_threads() == 5
    monkeypatch.setenv("TVM_NUM_THREADS", "4")
    assert env.num_threads() == 4
    monkeypatch.setenv("TVM_ATTN_NUM_THREADS", "3")
    assert env.num_threads() == 3


@pytest.mark.parametrize("name", ["TVM_ATTN_NUM_THREADS", "TVM_NUM_THREADS"])
@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5"])
def test_a_bad_thread_count_names_its_variable(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, given)
    with pytest.raises(env.EnvError, match=f"{name}='{given}'"):
        env.num_threads()


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("name", THREAD_VARIABLES)
@pytest.mark.parametrize("given", ["8", "9", "1000", "0" * 30 + "9", "1" + "0" * 20, "9" * 5000])
def test_threads_are_at_most_the_cores(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, given)
    assert env.setup_threads() == env.num_threads() == 8
    assert os.environ["TVM_NUM_THREADS"] == "8"


@pytest.mark.usefixtures("eight_cores")
def test_setup_threads_tells_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_ATTN_NUM_THREADS", "2")
    assert env.setup_threads() == 2
    assert os.environ["TVM_NUM_THREADS"] == "2"


@pytest.mark.usefixtures("eight_cores")
def test_setup_threads_respects_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", "7")
    assert env.setup_threads() == 7
    assert os.environ["TVM_NUM_THREADS"] == "7"


def test_tvm_pool_has_the_size_that_was_set(run_python: Callable[..., str]) -> None:
    printed = run_python(
        """
        from tvm_attn import _compat
        tvm = _compat.import_tvm()
        print(tvm.get_global_func("runtime.NumThreads")())
        """,
        env={"TVM_ATTN_NUM_THREADS": "2", "TVM_NUM_THREADS": ""},
    )
    assert printed.split() == ["2"]
