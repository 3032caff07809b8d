"""`outlast data get` as a process: killed at any moment and run again it is complete; and what people see of it."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.data import dataset_directory
from servers import Place
from tars import tar
from web import Fault, Web

FILES = {f"set/{i:03}.bin": random.Random(i).randbytes(5_000) for i in range(300)}


ARCHIVE = tar(FILES)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the command in a directory of its own."""

    def start(*words: str | Path) -> subprocess.Popen[str]:
        environ = {**os.environ, "OUTLAST_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "outlast", "data", "get", *map(str, words)]
        return subprocess.Popen(command, env=environ, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def tree(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != dataset_directory.MARKER)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def looks_whole(directory: Path) -> bool:
    """Whether somebody who looks for the marker or for the files would take it for complete."""
    return (directory / dataset_directory.MARKER).exists()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_download_that_was_killed_or_interrupted_goes_on_where_it_was(
    web: Web, start: Start, tmp_path: Path, by: signal.Signals
) -> None:
    url = f"{web.put('set.tar.gz', ARCHIVE)}#sha256={hashlib.sha256(ARCHIVE).hexdigest()}"
    web.fault = lambda request: Fault(rate=100_000)
    process = start(url, "--to", "to")
    content = tmp_path / "to" / dataset_directory.COMING / "0" / "content"
    while not (content.exists() and content.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(by)
    code, _, err = ended(process)
    if by == signal.SIGINT:
        assert code == 130
        assert err.endswith("stopped; the same command goes on from here\n")
    assert dataset_directory.incomplete(tmp_path / "to")
    web.fault = lambda request: None
    code, out, err = ended(start(url, "--to", "to"))
    assert (code, out) == (0, f"got {url.partition('#')[0]}: 300 files, 1.4 MiB in to\n"), err
    assert "outlast | going on with " in err
    assert tree(tmp_path / "to") == FILES
    assert web.requests[-1].range
    assert web.requests[-1].range[0] > 0


def test_a_dataset_goes_to_a_store_with_its_marker_last(
    web: Web, outlast: Callable[..., tuple[int, str, str]], rclone: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path / "cache"))
    url = web.put("set.tar.gz", tar({"set/a.txt": b"a", "set/b.txt": b"b"}))
    code, out, err = outlast("data", "get", url, "--to", f"{rclone.url}/set")
    assert (code, out) == (0, f"got {url}: 2 files, 2 B in {rclone.url}/set\n"), err
    assert "the download was not compared with any checksum; for a comparison, append #sha256=" in err
    there = tree(rclone.directory / "set")
    assert {name: content for name, content in there.items() if not name.startswith(".")} == {
        "set/a.txt": b"a",
        "set/b.txt": b"b",
    }
    assert dataset_directory.COMING not in there
    assert list((tmp_path / "cache" / "get").iterdir()) == [], "nothing stays on this machine"
    before = len(web.requests)
    assert outlast("data", "get", url, "--to", f"{rclone.url}/set")[1].startswith("already there: ")
    assert len(web.requests) == before


@pytest.mark.slow
@pytest.mark.parametrize("target", ["to", "store"])
def test_killed_at_random_moments_and_run_again_it_is_complete(
    web: Web, start: Start, rclone: Place, tmp_path: Path, target: str
) -> None:
    url = f"{web.put('set.tar.gz', ARCHIVE)}#sha256={hashlib.sha256(ARCHIVE).hexdigest()}"
    web.fault = lambda request: Fault(rate=2_000_000)
    chance = random.Random(int(os.environ.get("SEED", "0")))
    for attempt in range(20):
        to, directory = (f"{rclone.url}/{attempt}", rclone.directory / f"{attempt}") if target == "store" else (f"to-{attempt}", tmp_path / f"to-{attempt}")  # fmt: skip  # noqa: E501
        for _ in range(2):
            process = start(url, "--to", to)
            time.sleep(chance.uniform(0.1, 2.5))
            process.kill()
            process.communicate()
            if looks_whole(directory):
                assert {k: v for k, v in tree(directory).items() if k in FILES} == FILES
        code, _, err = ended(start(url, "--to", to))
        assert code == 0, err
        assert {k: v for k, v in tree(directory).items() if k in FILES} == FILES
        assert looks_whole(directory)
        if target == "to":
            assert sorted(path.name for path in directory.iterdir()) == [dataset_directory.MARKER, "set"]
