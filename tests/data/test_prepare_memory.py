"""A hundred thousand small images are got and prepared within 512 MiB, by all processes together."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from outlast.base import machine_memory
from outlast.data import shard_format
from outlast.data.prepare import work_units

LIMIT = 512 << 20
CLASSES, EACH, DISTINCT = 200, 500, 1000


@pytest.mark.parametrize(
    ("free_mib", "each_mib", "processes"), [(10_000, 64, 16), (300, 64, 2), (300, 0, 4), (60, 64, 1), (None, 64, 16)]
)
def test_processes_are_as_many_as_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int | None, each_mib: int, processes: int
) -> None:
    if free_mib is not None:
        (tmp_path / "meminfo").write_text(f"MemTotal: 0 kB\nMemAvailable: {free_mib << 10} kB\n")
    monkeypatch.setattr(machine_memory, "Machine", lambda machine=machine_memory.Machine: machine(tmp_path, tmp_path))
    monkeypatch.setattr(work_units, "cores", lambda: 16)
    wanted = work_units.Request(tmp_path, tmp_path, 0)
    assert work_units.fitting(wanted, each_mib << 20).processes == processes
    assert work_units.fitting(work_units.Request(tmp_path, tmp_path, 7), each_mib << 20).processes == 7, "as asked"


def _images() -> Iterator[tuple[str, bytes]]:
    """JPEGs of 64 x 64, no two with the same bytes."""
    random, kinds = np.random.default_rng(0), []
    for _ in range(DISTINCT):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((64, 64)).save(file, "JPEG")
        kinds.append(file.getvalue())
    for number in range(CLASSES * EACH):
        of_kind = kinds[number % DISTINCT]
        comment = b"\xff\xfe\x00\x0a" + number.to_bytes(8, "big")
        yield f"set/train/n{number % CLASSES:08d}/images/{number}.JPEG", of_kind[:2] + comment + of_kind[2:]


def _archive(path: Path) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as zipped:
            for name, content in _images():
                zipped.writestr(zipfile.ZipInfo(name, (2015, 1, 1, 0, 0, 0)), content)
        return path
    with tarfile.open(path, "w:gz", compresslevel=1) as packed:
        for name, content in _images():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return path


@contextlib.contextmanager
def _limited() -> Iterator[Path | None]:
    """The file to which a process writes itself to be killed beyond LIMIT; None where we may not make such a cgroup."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {kinds: path.lstrip("/") for _, kinds, path in lines}
    root = Path("/sys/fs/cgroup")
    group = (root / "memory" / own["memory"] if "memory" in own else root / own.get("", "")) / f"outlast-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        name = "memory.limit_in_bytes" if "memory" in own else "memory.max"
        if (group / name).exists():
            (group / name).write_text(str(LIMIT))
        yield group / "cgroup.procs"
    finally:
        deadline = time.monotonic() + 20
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        group.rmdir()


def _peak(group: Path | None, *command: str) -> tuple[int, float]:
    """Run outlast; the largest sum of its processes' memory, each page that several share counted once; and seconds."""

    def enter() -> None:
        if group:
            group.write_text(str(os.getpid()))

    began, peak = time.monotonic(), 0
    program = [sys.executable, "-m", "outlast", *command]
    with psutil.Popen(program, preexec_fn=enter, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            some = 0
            with contextlib.suppress(psutil.Error):
                for each in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error, OSError):
                        lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
                        some += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
            peak = max(peak, some)
            time.sleep(0.1)
        said = process.stdout.read().decode()
    assert process.returncode == 0, said
    return peak, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_a_hundred_thousand_images_need_no_more_than_512_mib(tmp_path: Path, suffix: str) -> None:
    archive, raw, made = _archive(tmp_path / f"set{suffix}"), tmp_path / "raw", tmp_path / "made"
    with _limited() as group:
        get = _peak(group, "data", "get", f"https://example.org/{archive.name}", "--from", str(archive), "--to", str(raw))
        prepare = _peak(group, "data", "prepare", "images", str(raw), "--to", str(made))
    for what, (peak, seconds) in (("get", get), ("prepare", prepare)):
        print(f"{suffix} {what}: {peak >> 20} MiB in {seconds:.0f} s, {'in' if group else 'without'} a cgroup")
        assert peak < LIMIT
    manifest = shard_format.read(made)
    assert sum(part.samples for part in manifest.parts.values()) == CLASSES * EACH
    assert shard_format.verify(manifest, shard_format.Local(made)) == []
