"""Syncs that are killed at any moment, and large ones: nothing is lost, nothing sent twice without need, memory stays small."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.storage import store
from outlast.storage.sync import push_and_pull
from servers import Place

pytestmark = pytest.mark.slow
OUTLAST = str(Path(sys.executable).with_name("outlast"))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def counts(report: push_and_pull.Report) -> tuple[int, int, int]:
    assert report.failed == []
    return report.transferred, report.unchanged, report.deleted


def edited(tree: Path, rng: random.Random) -> None:
    """A tree of some hundred small files and some large ones, after somebody worked on it."""
    for n in rng.sample(range(400), 300):
        path = tree / f"{n % 7}" / f"{n}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice((0, 10, 10, 1000, 100_000))))
        if rng.random() < 0.5:
            os.utime(path, (time.time() - 100,) * 2)
    for n in rng.sample(range(3), 2):
        (tree / f"large-{n}").write_bytes(rng.randbytes(rng.choice((9 << 20, 40 << 20))))
    for n in rng.sample(range(400), 20):
        (tree / f"{n % 7}" / f"{n}").unlink(missing_ok=True)


def killed(command: list[str], environ: dict[str, str], after_s: float) -> bool:
    """Run a command and SIGKILL it after some time; whether it was still running then."""
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            child.wait(after_s)
        except subprocess.TimeoutExpired:
            child.kill()
    return child.returncode < 0


def test_whenever_a_sync_is_killed_the_next_ones_make_all_alike(s3: Place, tmp_path: Path) -> None:
    rng = random.Random(0)
    source, target, environ = tmp_path / "source", tmp_path / "target", {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    kills = 0
    for _ in range(12):
        edited(source, rng)
        delete = ["--delete"] if rng.random() < 0.5 else []
        for command in ([OUTLAST, "sync", str(source), s3.url, *delete], [OUTLAST, "sync", s3.url, str(target), *delete]):
            for _ in range(2):
                kills += killed(command, environ, rng.uniform(0.2, 1.5))
            if rng.random() < 0.5:
                subprocess.run(command, env=environ, check=True, capture_output=True)
    assert kills > 10
    place = store.open_(s3.url)
    for command in ([OUTLAST, "sync", str(source), s3.url, "--delete"], [OUTLAST, "sync", s3.url, str(target), "--delete"]):
        subprocess.run(command, env=environ, check=True, capture_output=True)
    left = {name for name in contents(target) if name not in contents(source)}
    # A push killed between its manifest and its deletions leaves objects that only a listing shows
    assert left == set() or all(Path(name).name.startswith(".outlast-") for name in left)
    assert {name: content for name, content in contents(target).items() if name not in left} == contents(source)
    assert counts(push_and_pull.push(source, place, tmp_path / "state", push_and_pull.Options(check=True, delete=True)))[0] == 0
    assert {entry.key for entry in place.entries()} == {*contents(source), push_and_pull.MANIFEST}


PEAK = """
import os, resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
sys.exit(code)
"""


def peak(*command: str, environ: dict[str, str]) -> int:
    """MiB that a command needs at most."""
    done = subprocess.run([sys.executable, "-c", PEAK, *command], env=environ, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def test_a_file_of_two_gibibytes_takes_little_memory(rclone: Place, tmp_path: Path) -> None:
    source, target, environ = tmp_path / "source", tmp_path / "target", {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    source.mkdir()
    rng = random.Random(0)
    with (source / "large").open("wb") as file:
        block = rng.randbytes(64 << 20)
        for n in range(32):
            file.write(n.to_bytes(8) + block[8:])
    for n in range(50):
        (source / f"small-{n}").write_bytes(rng.randbytes(4 << 20))
    assert peak(OUTLAST, "sync", str(source), rclone.url, environ=environ) < 256
    assert peak(OUTLAST, "sync", rclone.url, str(target), environ=environ) < 256
    assert subprocess.run(["diff", "-r", str(source), str(target)], check=False).returncode == 0
