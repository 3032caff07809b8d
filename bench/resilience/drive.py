"""One trial: starts a job, injects the faults of the trace, and plays the cluster that replaces what is gone.

The cluster is the same for all systems: a worker that is gone is started again after `Trace.replace_s`, unless the system does so
itself; a silent machine is taken for lost after `Trace.silent_s`. A job that does not train within the limit after a fault is
killed and started again by hand, with what it has saved, and the fault counts as one that the system did not come back from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from bench.recovery import machine, marked
from bench.resilience import account, systems, trace
from bench.resilience.account import Cost, Event, Line
from tests.shared import netns

START_LIMIT_S = 120.0
POLL_S = 0.05
WINDOW = 2000
"""Lines before a fault that its cost is worked out from."""


class Lost(RuntimeError):
    """The job cannot be brought back, not even by hand."""


class Book:
    """Reader of the lines, which reads only new ones."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()
        self._rest = ""
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        whole, newline, self._rest = (self._rest + self._file.read()).rpartition("\n")
        self.lines += account.read(whole + newline)
        return self.lines


def tree(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def end(pids: list[int], by: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes, which may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, by)


@dataclasses.dataclass
class Run:
    """One job under its faults."""

    system: systems.System
    leg: trace.Leg
    scene: systems.Scene
    living: Callable[[], list[psutil.Process]]
    book: Book = dataclasses.field(init=False)
    faults: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    by_hand: int = 0
    start_s: float = 0.0
    chores: list[Callable[[], bool]] = dataclasses.field(default_factory=list)
    """What the cluster still has to do; each returns whether it is done."""

    def __post_init__(self) -> None:
        self.book = Book(self.scene.directory / "steps")

    def until(self, limit_s: float, seen: Callable[[], bool]) -> bool:
        """Play the cluster until `seen` or the limit, and return which."""
        until = time.monotonic() + limit_s
        while not (found := seen()) and time.monotonic() < until:
            self.chores = [chore for chore in self.chores if not chore()]
            time.sleep(POLL_S)
        return found

    def whole(self) -> bool:
        """Whether all workers train."""
        workers, lines = self.scene.trace.workers, self.book.read()[-8 * self.scene.trace.workers :]
        last = {line.rank: line for line in lines}
        return len(last) == workers and all(line.world == workers and time.time() - line.time < 3 for line in last.values())

    def __call__(self, step_s: float) -> None:
        """Train until the end of the leg. Raises Lost. `step_s`: seconds of an undisturbed step."""
        began = time.time()
        self.system.start(self.scene)
        if not self.until(START_LIMIT_S, lambda: any(line.step > 0 for line in self.book.read())):
            raise Lost(f"no step within {START_LIMIT_S:g} s")
        self.start_s = self.book.lines[0].time - began
        for fault in self.leg.faults:
            if fault.kind in self.system.claims:
                self.reach(fault.step)
                time.sleep(fault.phase * trace.STEP_S)
                self.strike(fault, step_s)
        self.reach(self.leg.steps)

    def reach(self, step: int) -> None:
        """Wait for a step. A job that stands still is started again by hand."""
        while (now := self.book.read()[-1]).step < step:
            if not self.until(self.scene.trace.limit_s, lambda now=now: self.book.read()[-1] is not now):
                self.start_again()

    def start_again(self) -> None:
        """Kill what is left of the job, and start it again."""
        before = len(self.book.read())
        self.by_hand += 1
        self.chores.clear()
        end([process.pid for process in self.living()])
        for host in self.scene.hosts:
            host.join()
        self.system.start(self.scene)
        if not self.until(START_LIMIT_S, lambda: len(self.book.read()) > before):
            raise Lost(f"no step within {START_LIMIT_S:g} s after a start by hand")

    def strike(self, fault: trace.Fault, step_s: float) -> None:
        """Inject a fault, wait until training goes on and all workers train, and note what it cost."""
        trial, seen = self.scene.trace, len(self.book.read())
        event = self.inject(fault)
        cost = Cost(None)

        def found(part: str) -> bool:
            nonlocal cost
            cost = account.cost(self.book.read()[max(0, seen - WINDOW) :], event, step_s)
            return getattr(cost, part) is not None

        back = self.until(trial.limit(fault.kind), lambda: found("lost_s"))
        if fault.kind == "hang" and back:
            end(sorted(event.gone))  # training goes on without the stopped process: the cluster removes it
        whole = back and self.until(trial.limit_s, lambda: found("whole_s"))
        self.until(60.0, lambda: not self.chores)  # a cluster that replaces a worker does so in any case
        whole = whole and (fault.kind == "resize" or self.until(trial.limit_s, self.whole))
        if not back or (not whole and fault is not self.leg.faults[-1]):
            self.start_again()
        at = {"kind": fault.kind, "step": fault.step, "time": event.time, "hit": event.hit}
        self.faults.append({**at, **dataclasses.asdict(cost)})

    def inject(self, fault: trace.Fault) -> Event:
        """Inject a fault, and note what the cluster has to do after it."""
        trial, system, scene = self.scene.trace, self.system, self.scene
        latest = {line.rank: line.pid for line in self.book.read()[-8 * trial.workers :]}
        system.struck(scene, fault)
        now, gone, size = time.time(), frozenset({latest[fault.worker % len(latest)]}), trial.workers
        if fault.kind in ("process", "hang"):
            end(sorted(gone), signal.SIGKILL if fault.kind == "process" else signal.SIGSTOP)
        elif fault.kind == "resize":
            gone, size = frozenset(), fault.size
            system.resize(scene, size)
        elif fault.kind == "silent":
            training, others = set(latest.values()), range(1, trial.workers)  # a scheduler may leave a machine idle
            worker = next((each for each in (fault.worker, *others) if training & {*self.inside(each)}), fault.worker)
            host, gone = scene.hosts[worker], frozenset(self.inside(worker))
            host.cut()
            self.chores.append(self.replaced(worker, now + trial.silent_s, lambda: self.inside(worker), host))
        else:
            agent = system.agent(scene, fault.worker)
            now, members = time.time(), tree(agent)
            gone = frozenset(members)
            end(members if fault.kind == "worker" else [agent], signal.SIGKILL if fault.kind == "worker" else signal.SIGTERM)
            leaves = now + (0 if fault.kind == "worker" else trial.notice_s)
            self.chores.append(self.replaced(fault.worker, leaves, lambda: tree(agent) if agent in living(members) else []))
        return Event(fault.kind, now, gone, size, hit=fault.kind == "resize" or not gone.isdisjoint(latest.values()))

    def inside(self, worker: int) -> list[int]:
        """Return the processes of a worker with a network of its own."""
        command = ["ip", "netns", "pids", self.scene.hosts[worker].name]
        return [int(pid) for pid in os.popen(" ".join(command)).read().split()]

    def replaced(
        self, worker: int, until: float, left: Callable[[], list[int]], host: netns.Host | None = None
    ) -> Callable[[], bool]:
        """Return a chore: ends what is left of a worker at a time, and replaces it some seconds after it is gone."""
        gone_at: float | None = None

        def chore() -> bool:
            nonlocal gone_at
            if gone_at is None:
                if time.time() < until and (host or left()):
                    return False
                end(left())
                gone_at = time.time()
            if self.system.replaces and not self.scene.hosts:
                return True
            if time.time() < gone_at + self.scene.trace.replace_s:
                return False
            if host:
                host.join()
            self.system.launch(self.scene, worker)
            return True

        return chore


def place(device: str) -> str:
    """Describe the machine, with its GPUs if they are used."""
    if device == "cpu":
        return machine()
    import torch

    return machine().replace("gloo", f"NCCL, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")


def living(pids: list[int]) -> set[int]:
    """Return those of the processes that are not gone, nor zombies."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


def head(trace_: trace.Trace, device: str, millions: float) -> dict[str, Any]:
    """Return what a record says of the circumstances."""
    return {
        "trace": trace_.name,
        "seed": trace_.seed,
        "workers": trace_.workers,
        "device": device,
        "millions": millions,
        "at": time.strftime("%Y-%m-%d %H:%M"),
        "machine": place(device),
        "version": "–",
        "load": [],
        "legs": [],
        "failure": "",
    }


def trial(
    system: systems.System, trace_: trace.Trace, device: str = "cpu", millions: float = 2.0, keep: bool = False
) -> dict[str, Any]:
    """Run all legs of a trace, and return the record. Directories with the logs stay if a job did not come back, or to `keep`."""
    record = head(trace_, device, millions) | {"version": system.versions(), "load": [round(os.getloadavg()[0], 2)]}
    calm: dict[int, list[Line]] = {}
    step_s = trace.STEP_S
    for leg in trace_.legs:
        if leg.name == "network" and netns.lacking():
            continue
        directory = Path(tempfile.mkdtemp(prefix="resil-"))
        apart = netns.Network(trace_.workers + 1) if leg.name == "network" else contextlib.nullcontext()
        failure = ""
        settings = {"directory": str(directory), "device": device, "workers": trace_.workers, "every": trace.SAVED_EVERY}
        settings |= {"samples": trace.SAMPLES, "timeout_s": system.timeout_s, "millions": millions}
        more = {"RESILIENCE": json.dumps(settings), "PYTHONPATH": str(systems.SCRIPTS), "LOGLEVEL": "INFO"}
        with apart as network, marked(**more) as (environ, living_):
            scene = systems.Scene(directory, environ, trace_, network.hosts if network else [], device, millions)
            run = Run(system, leg, scene, living_)
            try:
                run(step_s)
            except RuntimeError as error:
                failure = record["failure"] = f"{leg.name}: {error}"
            end([process.pid for process in living_()])
        lines = run.book.read()
        if leg.name == "calm":
            calm, step_s = account.final(lines), account.pace(lines)
        record["legs"].append(figures(run, lines, calm, step_s))
        if failure or run.by_hand or keep:
            print(f"{leg.name}: {failure or f'{run.by_hand} starts by hand'}: see {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
        if failure:
            break
    record["pace_s"] = step_s
    record["load"].append(round(os.getloadavg()[0], 2))
    return record


def figures(run: Run, lines: list[Line], calm: dict[int, list[Line]], step_s: float) -> dict[str, Any]:
    """Return what is kept of a leg."""
    steps, leg, workers = account.final(lines), run.leg, run.scene.trace.workers
    known = {"name": leg.name, "start_s": run.start_s, "by_hand": run.by_hand, "faults": run.faults}
    if not lines:
        return known
    retained = min(max(steps), leg.steps)
    ended = next(line.time for line in lines if line.step >= retained)
    repeated, missing = account.samples(steps, trace.SAMPLES)
    since = run.faults[0]["step"] if run.faults else leg.steps
    return known | {
        "steps": retained,
        "wall_s": ended - lines[0].time,
        "repeated": repeated,
        "missing": missing,
        "same": account.same(calm, steps, workers, since),
        "struck": [round(fault.pop("time") - lines[0].time, 2) for fault in run.faults],
        "parts": run.system.parts(run.scene),
        "curve": account.curve([line for line in lines if line.time <= ended], 5 if run.scene.trace.name == "short" else 40),
    }
