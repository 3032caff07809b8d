"""The copy of Outlast that a job runs in: when it is made, when it goes, and who runs in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import outlast
from outlast.base import file_locks
from outlast.worker.launch import package_copy

LONG_AGO = 1e9
SHOW = (
    "import outlast; from outlast.worker.launch import package_copy as p; p.hold(); print(outlast.__file__, flush=True); input()"
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the installed package, which has only this one and its bytecode."""
    module = tmp_path / "installed" / "outlast" / "__init__.py"
    (module.parent / "__pycache__").mkdir(parents=True)
    (module.parent / "__pycache__" / "__init__.cpython-311.pyc").write_text("compiled")
    module.write_text("first")
    monkeypatch.setattr(outlast, "__file__", str(module))
    return module


def test_one_copy_serves_each_version_until_nobody_runs_in_it(module: Path, tmp_path: Path) -> None:
    first = package_copy.make(tmp_path)
    assert package_copy.make(tmp_path) == first
    copied = [str(path.relative_to(first)) for path in sorted(first.rglob("*")) if path.is_file()]
    assert copied == ["outlast/__init__.py", "outlast/__pycache__/__init__.cpython-311.pyc", package_copy.LOCK]
    assert (first / "outlast" / "__init__.py").stat().st_mtime_ns == module.stat().st_mtime_ns, "or its bytecode would be stale"

    holder = file_locks.shared(first / package_copy.LOCK)
    assert holder is not None
    for text in ("second", "third"):
        os.utime(first / package_copy.LOCK, (LONG_AGO, LONG_AGO))
        module.write_text(text)
        assert (package_copy.make(tmp_path) / "outlast" / "__init__.py").read_text() == text
        assert (first / "outlast" / "__init__.py").read_text() == "first"
    os.close(holder)
    module.write_text("the fourth")
    package_copy.make(tmp_path)
    kept = {path.read_text() for path in tmp_path.glob("packages/*/outlast/__init__.py")}
    assert kept == {"second", "third", "the fourth"}, "those used within the hour"


def test_a_copy_that_was_cut_is_made_again(module: Path, tmp_path: Path) -> None:
    copied = package_copy.make(tmp_path) / "outlast" / "__init__.py"
    copied.write_text("")
    assert package_copy.make(tmp_path) == copied.parents[1]
    assert copied.read_text() == "first"


@pytest.mark.parametrize("others", ["", "/a:/b", "/a:{copy}"])
def test_a_process_runs_in_the_copy_and_holds_it(others: str, tmp_path: Path) -> None:
    copy = package_copy.make(tmp_path)
    environ = package_copy.ahead({**os.environ, "PYTHONPATH": others.format(copy=copy)}, copy)
    assert environ["PYTHONPATH"].split(":") == [str(copy), *(path for path in ("/a", "/b") if path in others)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SHOW], env=environ, cwd=tmp_path, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == f"{copy}/outlast/__init__.py\n"
        assert not file_locks.free(copy / package_copy.LOCK)
        process.communicate("\n")
    assert file_locks.free(copy / package_copy.LOCK)


def test_the_installed_package_changes_no_environment() -> None:
    assert package_copy.current() is None
    assert package_copy.ahead({"PYTHONPATH": "/a"}) == {"PYTHONPATH": "/a"}
