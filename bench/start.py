"""Timeline from the start of a worker to the first step: a waterfall of all processes, and their CPU seconds.

    python bench/start.py                 # 5 repeats of everything, some minutes
    python bench/start.py --quick         # one repeat
    python bench/start.py --case pods-s3 --plot start.png

Two workers of one process each, all processes cold, the disk cache warm. A case is one of

    machine    `outlast run` of a job on this machine, from the start of the command
    pods       two agents as pods start them, worker 0 coordinates; each has an output of its own, the store is a directory
    pods-s3    the same with a store on `rclone serve s3`: claim, code, restore and uploads go through it
    torchrun   two torchrun nodes with a c10d store, the same network

Seconds are until every rank has ended its first step. CPU seconds (user and system, of all processes together and of each kind)
do not depend on what else runs, so compare these. Prints tables and appends them to bench/results/<date>-start.md.
`starting/sitecustomize.py` takes the notes; it costs each Python some milliseconds, in every case alike.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from outlast.job import contract
from outlast.job.contract import Env
from push import serve
from recovery import machine, marked

HERE = Path(__file__).parent
PROBE = HERE / "starting"
OUTLAST = str(Path(sys.executable).with_name("outlast"))
WORKERS = 2
LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Note:
    """Line written by `starting/sitecustomize.py`."""

    time: float
    cpu_s: float
    pid: int
    parent: int
    modules: int
    what: str


@dataclasses.dataclass(frozen=True)
class Process:
    """A process at the time of the last rank's first step. Times are seconds since the start of the case."""

    kind: str
    worker: str
    pid: int
    began: float
    cpu_s: float
    notes: list[Note]


@dataclasses.dataclass(frozen=True)
class Trial:
    """Measurement of one start."""

    seconds: float
    processes: list[Process]

    def cpu(self) -> dict[str, float]:
        """Return CPU seconds by kind of process."""
        found: dict[str, float] = collections.defaultdict(float)
        for process in self.processes:
            found[process.kind] += process.cpu_s
        return dict(found)


# Cases


def job(code: str, output: str) -> dict[str, object]:
    """Return the job file of two workers."""
    spec = {
        "script": "first.py",
        "code": code,
        "output": output,
        "workers": {"replicas": WORKERS, "min": WORKERS},
        "processesPerWorker": 1,
        "resources": {"cpu": 1},
        "checkpoint": {"every": "10 steps", "keep": 2},
    }
    return {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "start"}, "spec": spec}


def on_this_machine(directory: Path, environ: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Run the job with `outlast run`."""
    file = directory / "job.json"
    file.write_text(json.dumps(job(str(PROBE), str(directory / "out"))))
    return [
        started([OUTLAST, "run", str(file), "--detach"], {**environ, "OUTLAST_STATE_DIR": str(directory / "jobs")}, directory)
    ]


def pods(directory: Path, environ: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Run the agents of two pods with a directory as their store."""
    store = directory / "store"
    store.mkdir()
    return agents(directory, environ, f"file://{store}", str(PROBE))


def pods_s3(directory: Path, environ: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Run the agents of two pods with an S3 server as their store."""
    bucket = directory / "buckets" / "bucket"
    (bucket / "code").mkdir(parents=True)
    (bucket / "code" / "first.py").write_bytes((PROBE / "first.py").read_bytes())
    endpoint, server = serve(directory / "buckets")
    access = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "outlast",
        "AWS_SECRET_ACCESS_KEY": "outlastsecret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    return [server, *agents(directory, {**environ, **access}, "s3://bucket", "s3://bucket/code")]


def agents(directory: Path, environ: dict[str, str], store: str, code: str) -> list[subprocess.Popen[bytes]]:
    """Start agents with the environment of pods."""
    file = directory / "job.json"
    file.write_text(json.dumps(job(code, f"{store}/out")))
    found = []
    rendezvous = f"c10d://localhost:{free_port()}"
    for index in range(WORKERS):
        state, output = directory / f"state-{index}", directory / f"out-{index}"
        state.mkdir()
        pod = {
            Env.JOB: "start",
            Env.RUN: "start-1a2b3c4d",
            Env.WORKER: str(index),
            Env.JOB_FILE: str(file),
            Env.CODE: str(directory / f"code-{index}") if "://" in code else code,
            Env.OUTPUT: str(output),
            Env.SHARED: str(directory / f"shared-{index}"),
            Env.STORE: f"{store}/out",
            Env.CACHE: str(directory / f"cache-{index}"),
            Env.STATE: str(state),
            Env.LEDGER: str(output / contract.LEDGER),
            Env.NOTICE: str(state / contract.NOTICE),
            Env.CHECKPOINT_EVERY: "10 steps",
            Env.ADDRESS: "127.0.0.1",
            Env.RENDEZVOUS: rendezvous,
        }
        found.append(started([sys.executable, "-m", "outlast", "agent"], {**environ, **pod}, directory))
    return found


def torchrun(directory: Path, environ: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Run two torchrun nodes."""
    port = free_port()
    found = []
    for index in range(WORKERS):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={WORKERS}", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench"]
        command += [f"--rdzv-conf=is_host={int(index == 0)}", str(PROBE / "first.py")]
        found.append(started(command, {**environ, Env.WORKER: str(index)}, directory))
    return found


CASES: dict[str, Callable[[Path, dict[str, str]], list[subprocess.Popen[bytes]]]] = {
    "machine": on_this_machine,
    "pods": pods,
    "pods-s3": pods_s3,
    "torchrun": torchrun,
}


def started(command: list[str], environ: dict[str, str], directory: Path) -> subprocess.Popen[bytes]:
    """Start a process with its output in a log."""
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def free_port() -> int:
    """A free TCP port."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# One trial


def read(path: Path) -> list[Note]:
    """Read all notes so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    split = [line.split(" ", 5) for line in lines]
    return [Note(float(t), float(cpu), int(pid), int(parent), int(n), what) for t, cpu, pid, parent, n, what in split]


def trial(case: str) -> Trial:
    """Start a case in a separate directory, and wait for the first step of all ranks."""
    with tempfile.TemporaryDirectory(prefix="outlast-start-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        notes = directory / "notes"
        with marked(OUTLAST_BENCH_NOTES=str(notes), PYTHONPATH=str(PROBE)) as (environ, alive):
            environ.pop("PYTHONDONTWRITEBYTECODE", None)
            begun = time.time()
            ours = CASES[case](directory, environ)
            while sum(note.what == "step 1" for note in read(notes)) < WORKERS:
                if time.time() - begun > LIMIT_S:
                    logs = [directory / "log", *directory.rglob("worker-*.log"), *directory.rglob("launcher.log")]
                    sys.exit(
                        f"{case}: no first step within {LIMIT_S:g} s\n" + "\n".join(p.read_text() for p in logs if p.exists())
                    )
                time.sleep(0.01)
            found = read(notes)
            processes = [p for each in alive() if (p := observed(each, begun, found))]
            seconds = max(note.time for note in found if note.what == "step 1") - begun
            ended = {note.pid for note in found} - {p.pid for p in processes}
            processes += [gone(pid, begun, found) for pid in ended]
        for process in ours:
            process.kill()
            process.wait(10)
        return Trial(seconds, sorted(processes, key=lambda p: (p.worker, p.began)))


def observed(process: psutil.Process, begun: float, notes: list[Note]) -> Process | None:
    """Describe a living process."""
    try:
        with process.oneshot():
            times, title, environ = process.cpu_times(), " ".join(process.cmdline()), process.environ()
            mine = [note for note in notes if note.pid == process.pid]
            began = (mine[0].time if mine else process.create_time()) - begun
            return Process(kind(title), environ.get(Env.WORKER, ""), process.pid, began, times.user + times.system, mine)
    except psutil.Error:
        return None


def gone(pid: int, begun: float, notes: list[Note]) -> Process:
    """Describe a process that has ended. Its last note gives a lower bound of its CPU time."""
    mine = [note for note in notes if note.pid == pid]
    return Process(kind(mine[0].what) + " (ended)", "", pid, mine[0].time - begun, mine[-1].cpu_s, mine)


def kind(title: str) -> str:
    """Return the kind of a process, by its title."""
    for pattern, name in (
        (r"rclone", "S3 server"),
        (r"warm", "warm process"),
        (r"upload", "uploader"),
        (r"store of worker", "store"),
        (r"outlast: rank", "rank"),
        (r"agent", "agent"),
        (r"launcher", "launcher"),
        (r"outlast (run|--)|bin/outlast", "command"),
        (r"distributed.run|torchrun", "torchrun"),
        (r"first.py", "rank"),
    ):
        if re.search(pattern, title):
            return name
    return title[:30] or "?"


# Results


def waterfall(done: Trial) -> list[str]:
    """Return rows of Markdown: the timeline of each process."""
    rows = ["| worker | process | at s | CPU s then | what |", "|---|---|---|---|---|"]
    origin = next(p.notes[0].time - p.began for p in done.processes if p.notes)
    for process in done.processes:
        for note in process.notes:
            what = note.what if len(note.what) < 80 else note.what[:77] + "..."
            cells = (process.worker, process.kind, f"{note.time - origin:.2f}", f"{note.cpu_s:.2f}", what.replace("|", " "))
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def table(results: dict[str, list[Trial]]) -> list[str]:
    """Return rows of Markdown: seconds and CPU seconds of each case."""
    rows = ["| case | first step after s: median (range) | CPU s until then | of which |", "|---|---|---|---|"]
    for case, trials in results.items():
        seconds = [t.seconds for t in trials]
        kinds = {kind for t in trials for kind in t.cpu() if kind != "S3 server"}
        cpu = {kind: statistics.median([t.cpu().get(kind, 0.0) for t in trials]) for kind in kinds}
        total = statistics.median([sum(s for kind, s in t.cpu().items() if kind != "S3 server") for t in trials])
        parts = ", ".join(f"{kind} {s:.2f}" for kind, s in sorted(cpu.items(), key=lambda item: -item[1]) if s >= 0.01)
        rows.append(
            f"| {case} | {statistics.median(seconds):.2f} ({min(seconds):.2f} – {max(seconds):.2f}) | {total:.2f} | {parts} |"
        )
    return rows


def plot(done: Trial, path: Path, title: str) -> None:
    """Plot one trial: a bar per process, with imports within it."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 0.5 + 0.45 * len(done.processes)))
    origin = next(p.notes[0].time - p.began for p in done.processes if p.notes)
    for row, process in enumerate(done.processes):
        axes.barh(row, done.seconds - process.began, left=process.began, height=0.7, color="0.9")
        open_: dict[str, float] = {}
        for note in process.notes:
            verb, _, name = note.what.partition(" ")
            at = note.time - origin
            if verb == "begins":
                open_[name] = at
            elif verb == "imported" and name in open_:
                axes.barh(row, at - open_[name], left=open_[name], height=0.7, alpha=0.6, color="tab:blue")
                if at - open_[name] > 0.03 * done.seconds:
                    axes.text(open_[name], row, name.replace("torch.distributed", "t.d"), fontsize=6, va="center")
            elif verb not in ("python", "forked"):
                axes.plot([at, at], [row - 0.35, row + 0.35], color="tab:red", linewidth=0.8)
    axes.set_yticks(
        range(len(done.processes)), [f"{p.kind} {p.worker} ({p.cpu_s:.2f} s CPU)" for p in done.processes], fontsize=7
    )
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", choices=CASES, action="append", help="only these (may be repeated)")
    parser.add_argument("--plot", type=Path, help="a picture of the last trial of the first case")
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--waterfall", action="store_true", help="also print every note of the last trials")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    cases = args.case or list(CASES)
    repeats = 1 if args.quick else args.repeats
    load = os.getloadavg()[0]
    results: dict[str, list[Trial]] = {case: [] for case in cases}
    for repeat in range(repeats):
        for case in cases if repeat % 2 == 0 else reversed(cases):
            done = trial(case)
            results[case].append(done)
            print(f"{repeat + 1}/{repeats} {case:<9} {done.seconds:6.2f} s, CPU {sum(done.cpu().values()):6.2f} s", flush=True)
    text = "\n".join([f"{machine()}; load before {load:.1f}; {repeats} repeats", "", *table(results)])
    print(text)
    for case in cases:
        if args.waterfall:
            print(f"\n{case}\n" + "\n".join(waterfall(results[case][-1])))
    args.results.mkdir(exist_ok=True)
    with (args.results / f"{time.strftime('%Y-%m-%d')}-start.md").open("a") as file:
        file.write(f"# From start to first step, {time.strftime('%H:%M')}\n\n{text}\n\n")
    if args.plot:
        plot(results[cases[0]][-1], args.plot, f"{cases[0]}: first step after {results[cases[0]][-1].seconds:.2f} s")


if __name__ == "__main__":
    main()
