"""`outlast data get`: a dataset is complete and right, or there is a sentence, and never half a dataset that looks whole."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outlast.data import get, place, registry
from outlast.errors import OutlastError


def got(name: str, directory: Path) -> bool:
    """Get a dataset; whether anything was written."""
    return get.get(registry.named(name), directory, say=print, stop=threading.Event())[1]


def digest(directory: Path) -> str:
    """Of all names and contents below a directory."""
    found = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.name != place.MARKER):
        found.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def test_the_standard_library_is_the_same_text_each_time_without_tests_and_packages(tmp_path: Path) -> None:
    assert got("python-stdlib", tmp_path / "a")
    assert got("python-stdlib", tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    names = {path.relative_to(tmp_path / "a").as_posix() for path in (tmp_path / "a").rglob("*.*")}
    assert {"argparse.py", "json/decoder.py"} < names
    assert not {name for name in names if name.startswith(("test/", "site-packages/", "_sysconfigdata_"))}
    assert {path.suffix for path in (tmp_path / "a").rglob("*") if path.is_file()} == {".py", ".json"}
    found = place.marker(tmp_path / "a")
    assert found is not None
    assert (found.name, found.files, found.source) == ("python-stdlib", len(names) - 1, f"Python {sys.version.split()[0]}")


def test_a_complete_dataset_stays_as_it_is_and_one_without_its_marker_or_a_file_is_completed(tmp_path: Path) -> None:
    assert got("python-stdlib", tmp_path)
    whole = digest(tmp_path)
    assert not got("python-stdlib", tmp_path)
    (tmp_path / "argparse.py").unlink()
    assert got("python-stdlib", tmp_path)
    assert digest(tmp_path) == whole
    (tmp_path / place.MARKER).unlink()
    (tmp_path / place.COMING).mkdir()
    assert place.incomplete(tmp_path)
    assert got("python-stdlib", tmp_path)
    assert digest(tmp_path) == whole
    assert not place.incomplete(tmp_path)


def test_a_directory_with_other_files_or_another_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OutlastError, match=r"holds other files \(thesis.tex\); choose a new or an empty directory"):
        got("python-stdlib", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / place.MARKER).write_text(place.Marker("cifar10", "https://x").text())
    with pytest.raises(OutlastError, match=r"there holds cifar10; choose another directory for python-stdlib"):
        got("python-stdlib", tmp_path / "there")
    (tmp_path / "begun" / place.COMING).mkdir(parents=True)
    (tmp_path / "begun" / place.COMING / "name").write_text("cifar10")
    with pytest.raises(OutlastError, match=r"begun holds a part of cifar10; complete that with the same command as before"):
        got("python-stdlib", tmp_path / "begun")
    with pytest.raises(OutlastError, match=r"thesis.tex is a file; choose a directory"):
        got("python-stdlib", tmp_path / "thesis.tex")
    with pytest.raises(OutlastError, match=r"cannot write python-stdlib to /proc/nothing: .*; correct that, or choose another"):
        got("python-stdlib", Path("/proc/nothing"))


def test_getting_imports_no_torch() -> None:
    code = "import sys; from outlast.data import get, stdlib; print(sorted({'torch', 'numpy', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
