"""Small file system in memory, which tests can fill or make read-only repeatedly. Requires the right to mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZE = 6 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    tmpfs = ["-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(directory)]
    if os.geteuid() != 0 or not shutil.which("mount") or _mount(*tmpfs).returncode != 0:
        pytest.skip("this user may not mount a file system")
    yield directory
    repair(directory)
    subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def protect(disk: Path) -> None:
    """Make the disk read-only, as a kernel does after an error.

    Files open for writing prevent this, so processes that open the path see another mount.
    """
    _mount("--bind", str(disk), str(disk)).check_returncode()
    _mount("-o", "remount,bind,ro", str(disk)).check_returncode()


def repair(disk: Path) -> None:
    if os.statvfs(disk).f_flag & os.ST_RDONLY:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    (disk / "filler").unlink(missing_ok=True)


def _mount(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["mount", *words], capture_output=True, check=False)
