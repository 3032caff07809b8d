"""Time until training resumes after a failure: ours and torchrun, with its defaults and tuned, interleaved on one machine.

    python bench/recovery.py              # 5 repeats of everything: about an hour, torchrun waits long for last calls
    python bench/recovery.py --quick      # one repeat without torchrun's defaults: some minutes
    python bench/recovery.py --scenario kill --system outlast --repeats 20

Three workers of one process each, at least 2, at most 4 (so nodes < max), all running `steps.py`. What is measured:

    kill     one training process is SIGKILLed -> every rank of a new world has ended a step
    worker   one worker, agent and all, is SIGKILLed -> every rank of a new world has ended a step
    first    the same with the first worker (for torchrun: the one that holds the store)

What a failure costs in seconds of training, beside more systems: `python -m bench.resilience`.

Beside them: the steps that had to be done again, the start of a Python that imports torch, alone and three at once,
and `outlast --help`. `never` means not within the limit, or that the job had ended; medians count it as longer than
anything. Prints the table and appends it to bench/results/<date>-recovery.md. Whatever is started carries a mark in
its environment, and is killed by it in the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

HERE = Path(__file__).parent
OUTLAST = str(Path(sys.executable).with_name("outlast"))
WORKERS, MIN, MAX = 3, 2, 4
SCENARIOS = ("kill", "worker", "first")
START_LIMIT_S = 120.0
MARK = "OUTLAST_BENCH_MARK"
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"


class System(Protocol):
    """System that runs three workers."""

    name: str

    def start(self, directory: Path, environ: dict[str, str]) -> None:
        """Start the workers, without waiting for their world."""

    def agents(self) -> list[int]:
        """Return the process ids of the workers' agents, by worker."""

    def over(self) -> bool:
        """Return whether no process is left that could resume."""


class Torchrun:
    """Three torchrun nodes with the c10d store in the first."""

    def __init__(self, name: str, conf: str) -> None:
        self.name = name
        self._conf = conf
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start(self, directory: Path, environ: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._directory, self._environ, self._port = directory, environ, port
        self._nodes = []
        for _ in range(WORKERS):
            self.add_node()

    def add_node(self) -> None:
        """Start one more node."""
        number = len(self._nodes)
        conf = ",".join(filter(None, (f"is_host={int(number == 0)}", self._conf)))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={MIN}:{MAX}",
            "--nproc-per-node=1",
            "--max-restarts=10",
        ]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=bench", f"--rdzv-conf={conf}"]
        with (self._directory / f"node-{number}.log").open("wb") as file:
            command += [str(HERE / "steps.py"), str(self._directory)]
            self._nodes.append(subprocess.Popen(command, env=self._environ, stdout=file, stderr=file))

    def agents(self) -> list[int]:
        return [node.pid for node in self._nodes]

    def over(self) -> bool:
        return all(node.poll() is not None for node in self._nodes)


class Outlast:
    """`outlast run --detach` of a job with the same script."""

    name = "outlast"
    script = "steps.py"
    args: Sequence[str] = ()

    def start(self, directory: Path, environ: dict[str, str]) -> None:
        self._directory = directory
        self._environ = {**environ, "OUTLAST_STATE_DIR": str(directory / "state")}
        job = {
            "apiVersion": "outlast.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "bench"},
            "spec": {
                "script": self.script,
                "args": [str(directory), *self.args],
                "output": str(directory / "out"),
                "workers": {"replicas": WORKERS, "min": MIN, "max": MAX},
                "processesPerWorker": 1,
                "resources": {"cpu": 1},
            },
        }
        (directory / "job").mkdir()
        (directory / "job" / self.script).write_bytes((HERE / self.script).read_bytes())
        (directory / "job" / "job.yaml").write_text(json.dumps(job))
        self._cli("run", str(directory / "job" / "job.yaml"), "--detach")

    def _cli(self, *args: str) -> str:
        command = [OUTLAST, *args]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr[-2000:]}")
        return done.stdout

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self._cli("status", "bench", "-o", "json"))
        return status

    def agents(self) -> list[int]:
        return [worker["pid"] for worker in sorted(self._status()["workers"], key=lambda worker: worker["index"])]

    def over(self) -> bool:
        return False


SYSTEMS: dict[str, Callable[[], System]] = {
    "outlast": Outlast,
    "tuned": lambda: Torchrun("torchrun, tuned", TUNED),
    "default": lambda: Torchrun("torchrun", ""),
}


# One trial


@dataclasses.dataclass(frozen=True)
class Line:
    """Line written by a rank; step None is the start of a process."""

    time: float
    pid: int
    rank: int
    world_size: int
    step: int | None


@dataclasses.dataclass(frozen=True)
class Trial:
    """Results of one job. None stands for never."""

    recovery_s: float | None
    lost: int | None = None
    started: bool = True
    ended: bool = False


class Book:
    """Reader of the ranks' lines, which reads only new lines, so that polling costs the job nothing."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""
        self._lines: list[Line] = []

    def lines(self) -> list[Line]:
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for t, pid, rank, size, step in (line.decode().split() for line in whole):
            self._lines.append(Line(float(t), int(pid), int(rank), int(size), None if step == "start" else int(step)))
        return self._lines


def complete(found: list[Line]) -> float | None:
    """Return the time at which all ranks of some world had written a line, or None."""
    said: dict[tuple[int, int], float] = {}
    for line in found:
        said.setdefault((line.world_size, line.rank), line.time)
        times = [said.get((line.world_size, rank)) for rank in range(line.world_size)]
        if None not in times:
            return max(t for t in times if t is not None)
    return None


@contextlib.contextmanager
def marked(**variables: str) -> Iterator[tuple[dict[str, str], Callable[[], list[psutil.Process]]]]:
    """Yield an environment and a function that lists its processes, and kill the processes afterwards."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"

    def living() -> list[psutil.Process]:
        entry = f"{MARK}={mark}".encode()
        return [process for process in psutil.process_iter() if _has(Path(f"/proc/{process.pid}/environ"), entry)]

    try:
        yield {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", **variables}, living
    finally:
        while processes := living():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)


def _has(environ: Path, entry: bytes) -> bool:
    try:
        return entry in environ.read_bytes().split(b"\0")  # empty for zombies
    except OSError:
        return False


def waited(limit_s: float, look: Callable[[], float | None], over: Callable[[], bool] = lambda: False) -> float | None:
    """Poll `look` until it returns a value. Returns None at the limit, or when `over` is true."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        ended = over()
        seen = look()
        if seen is not None or ended:
            return seen
        time.sleep(0.05)
    return None


def trial(system: System, scenario: str, limit_s: float, rng: random.Random) -> Trial:
    """Run one job in a separate directory, which is kept if training did not resume."""
    directory = Path(tempfile.mkdtemp(prefix=f"outlast-bench-{scenario}-"))
    done = attempt(system, directory, scenario, limit_s, rng)
    if done.recovery_s is None:
        print(f"never: see {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return done


def attempt(system: System, directory: Path, scenario: str, limit_s: float, rng: random.Random) -> Trial:
    """Start the job, wait for training, inject the fault, and observe."""
    with marked(LOGLEVEL="INFO") as (environ, _):
        (directory / "steps").touch()
        book = Book(directory / "steps")
        system.start(directory, environ)

        def trains() -> float | None:
            return complete([line for line in book.lines() if line.world_size == WORKERS and (line.step or 0) >= 5])

        if waited(START_LIMIT_S, trains, system.over) is None:
            return Trial(None, started=False, ended=system.over())
        time.sleep(rng.uniform(0.5, 1.5))
        if scenario == "kill":
            training = {line.rank: line.pid for line in book.lines()}
            victims = [training[rng.randrange(WORKERS)]]
        else:
            agents = system.agents()
            agent = psutil.Process(agents[0] if scenario == "first" else agents[rng.randrange(1, WORKERS)])
            victims = [agent.pid, *(child.pid for child in agent.children(recursive=True))]
        before = time.time()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        old = {line.pid for line in book.lines()}

        def stepped() -> list[Line]:
            return [line for line in book.lines() if line.time > before and line.pid not in old and line.step is not None]

        after = waited(limit_s, lambda: complete(stepped()), system.over)
        if after is None:
            return Trial(None, ended=system.over())
        reached = max(line.step or 0 for line in book.lines() if line.pid in old)
        return Trial(after - before, reached + 1 - min(line.step or 0 for line in stepped()))


# The whole run


def timed(command: list[str], at_once: int = 1) -> float:
    """Return the seconds until `at_once` parallel runs of a command have ended."""
    before = time.perf_counter()
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(at_once)]
    for process in running:
        if process.wait():
            raise SystemExit(f"{' '.join(command)} exited with {process.returncode}")
    return time.perf_counter() - before


Seconds = list[float | None]
"""Seconds of several trials; None is never."""


def median(seconds: Seconds) -> float:
    """Return the median, with never as longer than anything; NaN for an empty list."""
    return statistics.median([math.inf if s is None else s for s in seconds]) if seconds else math.nan


def said(seconds: Seconds) -> str:
    """Format median and range: `1.42 (1.31 – 1.60)`, `never (6.10 – 8.31)`."""
    back = [s for s in seconds if s is not None]
    middle = median(seconds)
    shown = "never" if math.isinf(middle) else f"{middle:.2f}"
    return f"{shown} ({min(back):.2f} – {max(back):.2f})" if len(back) > 1 else shown


def table(results: dict[str, dict[str, list[Trial]]]) -> list[str]:
    """Return rows of Markdown: every scenario with every system."""
    rows = ["| scenario | system | seconds: median (range) | came back | job ended | steps again | ours / this |"]
    rows.append("|---|---|---|---|---|---|---|")
    for scenario in SCENARIOS:
        ours = math.nan
        for system, done in results.items():
            trials = [t for t in done.get(scenario, []) if t.started]
            seconds = [t.recovery_s for t in trials]
            if not trials:
                continue
            middle = median(seconds)
            if system == "outlast":
                ours = middle
            ratio = f"{ours / middle:.2f}" if system != "outlast" and math.isfinite(ours + middle) else ""
            back = sum(s is not None for s in seconds)
            ended = sum(t.ended for t, s in zip(trials, seconds, strict=True) if s is None)
            lost = [t.lost for t in trials if t.lost is not None]
            again = f"{statistics.median(lost):g} ({min(lost)} – {max(lost)})" if lost else ""
            name = SYSTEMS[system]().name
            rows.append(f"| {scenario} | {name} | {said(seconds)} | {back} of {len(seconds)} | {ended} | {again} | {ratio} |")
    return rows


def machine() -> str:
    """Describe the machine, without its name."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = psutil.virtual_memory().total / 2**30
    python = ".".join(map(str, sys.version_info[:3]))
    cpu = model.group(1) if model else "CPU"
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB; Python {python}, torch {importlib.metadata.version('torch')}, gloo"


def recovery(args: argparse.Namespace, scenarios: list[str]) -> list[str]:
    """Measure the time until training resumes. Returns lines of the report."""
    systems = [name for name in args.system or SYSTEMS if name in SYSTEMS and not (args.quick and name == "default")]
    rng = random.Random(args.seed)
    results: dict[str, dict[str, list[Trial]]] = {system: {scenario: [] for scenario in scenarios} for system in systems}
    starts: dict[str, Seconds] = {
        "python with torch": [],
        f"python with torch, {WORKERS} at once": [],
        "outlast --help": [],
    }
    torch = [sys.executable, "-c", "import torch, torch.distributed"]
    for repeat in range(args.repeats):
        for label, command, at_once in zip(starts, (torch, torch, [OUTLAST, "--help"]), (1, WORKERS, 1), strict=True):
            starts[label].append(timed(command, at_once))
        for scenario in scenarios:
            for system in systems if repeat % 2 == 0 else reversed(systems):  # ABC CBA: a drift of the machine falls on all
                done = trial(SYSTEMS[system](), scenario, args.limit, rng)
                results[system][scenario].append(done)
                print(f"{repeat + 1}/{args.repeats} {scenario:<7} {system:<8} {done}", flush=True)
    report = [*table(results), "", "| start | seconds: median (range) |", "|---|---|"]
    return [*report, *(f"| {label} | {said(values)} |" for label, values in starts.items()), ""]


def publish(name: str, title: str, report: list[str]) -> None:
    """Print a report, and append it to results/<date>-<name>.md."""
    print("\n" + "\n".join(report))
    path = HERE / "results" / f"{time.strftime('%Y-%m-%d')}-{name}.md"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("\n".join([*([] if path.stat().st_size else [f"# {title}", ""]), *report, "", ""]))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--scenario",
        choices=SCENARIOS,
        action="append",
        help="only these (may be repeated)",
    )
    parser.add_argument("--system", choices=tuple(SYSTEMS), action="append", help="only these (may be repeated)")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds until `never`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one repeat, 30 s limit, no defaults of torchrun")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.limit = 1, 30.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that what was started is ended
    chosen = args.scenario or ["kill", "worker", "first"]
    load = os.getloadavg()[0]
    report = [
        f"## {time.strftime('%Y-%m-%d %H:%M')}",
        "",
        f"{machine()}. Load before: {load:.2f}. Limit {args.limit:.0f} s, seed {args.seed}.",
        "",
    ]
    report += recovery(args, chosen)
    publish("recovery", "Recovery", report)


if __name__ == "__main__":
    main()
