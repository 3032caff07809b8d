"""Cost of a failure in seconds of training: Outlast, torchrun, torchft and DLRover, interleaved. Called by recovery.py.

Three workers train with `lost.py`; a fault happens at a random moment between two saves to disk. Training lost is the time from
the last step before the fault until AHEAD steps later, less what so many steps take without a fault: detection, re-forming,
restoring and steps done again, however a system divides them. Of Outlast its own report gives the parts.

    lost-process   one training process is SIGKILLed
    lost-worker    one worker, agent and all, is SIGKILLed
    silent         all packets of a worker vanish; its processes live
    node           all packets of a worker vanish, and all of its processes are SIGKILLed

In the last two each worker has a network namespace of its own, nothing is ever refused or reset, and the worker that decides
(Outlast) or has the store (torchrun) is spared; the masters of the others run outside. They need root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import psutil

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "shared"))

import netns  # noqa: E402 (of the tests: namespaces whose packets vanish)

SCENARIOS = ("lost-process", "lost-worker", "silent", "node")
WORKERS, MIN = 3, 2
AHEAD = 3
"""Number of steps after the fault at which training counts as recovered."""
START_LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings common to all systems."""

    millions: float = 2.0
    step_s: float = 0.3
    every_s: float = 10.0
    """Seconds between saves to disk."""
    limit_s: float = 60.0
    """Seconds after which a trial counts as `never`."""

    def script(self, system: str, directory: Path) -> list[str]:
        paces = [f"--millions={self.millions}", f"--step={self.step_s}", f"--every={self.every_s}"]
        return [str(HERE / "lost.py"), system, str(directory), *paces]


@dataclasses.dataclass
class Scene:
    """Environment of one trial."""

    directory: Path
    environ: dict[str, str]
    plan: Plan
    hosts: list[netns.Host]
    """Network namespace per worker, and one for processes outside the workers; empty if all use this machine's network."""
    running: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    def address(self, worker: int) -> str:
        return self.hosts[worker].address if self.hosts else "127.0.0.1"

    @property
    def outside(self) -> str:
        """Return the address for processes outside the workers."""
        return self.address(-1)

    def start(self, worker: int | None, command: list[str], name: str, more: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
        """Start a process on a worker, or outside."""
        within = ["ip", "netns", "exec", self.hosts[-1 if worker is None else worker].name] if self.hosts else []
        with (self.directory / f"{name}.log").open("ab") as log:
            own = {"GLOO_SOCKET_IFNAME": "eth0"} if within else {}
            process = subprocess.Popen([*within, *command], env={**self.environ, **own, **(more or {})}, stdout=log, stderr=log)
        self.running.append(process)
        return process

    def processes(self, worker: int) -> list[int]:
        """Return the processes of a worker with a namespace."""
        command = ["ip", "netns", "pids", self.hosts[worker].name]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]

    def port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])


class System(Protocol):
    """System that trains with three workers."""

    name: str

    def missing(self) -> str:
        """Return the reason why the system cannot run on this machine, or ""."""

    def start(self, scene: Scene) -> list[int]:
        """Start the workers, and return the process id of each, if known."""

    def parts(self, scene: Scene) -> dict[str, float] | None:
        """Return the reported seconds of training that the fault cost, by part, if the system reports them."""


class Outlast:
    """`outlast run`; with namespaces, agents as in pods, with worker 0 as the coordinator."""

    def __init__(self, memory: str) -> None:
        self.name = "outlast" if memory == "auto" else f"outlast, memory: {memory}"
        self._memory = memory

    def missing(self) -> str:
        return ""

    def start(self, scene: Scene) -> list[int]:
        (scene.directory / "job").mkdir()
        (scene.directory / "job" / "lost.py").write_bytes((HERE / "lost.py").read_bytes())
        _, *arguments = scene.plan.script("outlast", scene.directory)
        job = {
            "apiVersion": "outlast.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "bench"},
            "spec": {
                "script": "lost.py",
                "args": arguments,
                "output": str(scene.directory / "out"),
                "workers": {"replicas": WORKERS, "min": MIN, "max": WORKERS},
                "processesPerWorker": 1,
                "resources": {"cpu": 1},
                "checkpoint": {"every": f"{scene.plan.every_s:g}s", "memory": self._memory},
            },
        }
        file = scene.directory / "job" / "job.yaml"
        file.write_text(json.dumps(job))
        return self._agents(scene, file) if scene.hosts else self._run(scene, file)

    def _run(self, scene: Scene, file: Path) -> list[int]:
        scene.environ["OUTLAST_STATE_DIR"] = str(scene.directory / "state")
        self._cli(scene, "run", str(file), "--detach")
        status = json.loads(self._cli(scene, "status", "bench", "-o", "json"))
        return [worker["pid"] for worker in sorted(status["workers"], key=lambda worker: worker["index"])]

    def _cli(self, scene: Scene, *args: str) -> str:
        command = [str(Path(sys.executable).with_name("outlast")), *args]
        done = subprocess.run(command, env=scene.environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr[-2000:]}")
        return done.stdout

    def _agents(self, scene: Scene, file: Path) -> list[int]:
        from outlast.job import contract

        env, port, output = contract.Env, scene.port(), self._output(scene)
        pids = []
        for index in range(WORKERS):
            state = scene.directory / f"state-{index}"
            state.mkdir()
            variables = {
                env.JOB: "bench",
                env.RUN: "bench-1a2b3c4d",
                env.WORKER: str(index),
                env.JOB_FILE: str(file),
                env.CODE: str(file.parent),
                env.OUTPUT: str(output),
                env.CACHE: str(scene.directory / "cache"),
                env.STATE: str(state),
                env.LEDGER: str(output / contract.LEDGER),
                env.NOTICE: str(state / contract.NOTICE),
                env.CHECKPOINT_EVERY: f"{scene.plan.every_s:g}s",
                env.MEMORY: self._memory,
                env.REPLICAS: "1",
                env.ADDRESS: scene.address(index),
                env.RENDEZVOUS_KEY: "bench",
                env.RENDEZVOUS: f"c10d://{scene.address(0)}:{port}",
            }
            pids.append(scene.start(index, [sys.executable, "-m", "outlast", "agent"], f"agent-{index}", variables).pid)
        return pids

    def _output(self, scene: Scene) -> Path:
        return scene.directory / "out" / "bench"

    def fault(self, scene: Scene, scenario: str, worker: int) -> None:
        """Record the fault in the ledger, so that the report has its time."""
        from outlast.job import contract, ledger

        book = ledger.Ledger(self._output(scene) / contract.LEDGER, "chaos")
        book.write("chaos", action=scenario, worker=worker)
        book.close()

    def parts(self, scene: Scene) -> dict[str, float] | None:
        from outlast.job import contract, ledger
        from outlast.job.report import goodput, incidents

        account = goodput.buckets(ledger.read(self._output(scene) / contract.LEDGER), time.time())
        costs = [i.lost for i in account.incidents if i.kind in incidents.FAILURES and i.lost and i.recovery_s is not None]
        if not costs:
            return None
        names = ("detection", "reforming", "restoring", "again")
        return {name: sum(getattr(lost, f"{name}_us") for lost in costs) / 1e6 for name in names}


class Torchrun:
    """Three torchrun nodes with the c10d store in the first and the shortest valid time-outs."""

    name = "torchrun, tuned"

    def missing(self) -> str:
        return ""

    def start(self, scene: Scene) -> list[int]:
        port, pids = scene.port(), []
        for index in range(WORKERS):
            conf = f"is_host={int(index == 0)},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
            options = [f"--nnodes={MIN}:{WORKERS}", "--nproc-per-node=1", "--max-restarts=10", "--rdzv-backend=c10d"]
            options += [f"--rdzv-endpoint={scene.address(0)}:{port}", "--rdzv-id=bench", f"--rdzv-conf={conf}"]
            options += [f"--local-addr={scene.address(index)}"]
            command = [sys.executable, "-m", "torch.distributed.run", *options, *scene.plan.script("torchrun", scene.directory)]
            pids.append(scene.start(index, command, f"node-{index}").pid)
        return pids

    def parts(self, scene: Scene) -> dict[str, float] | None:
        return None


class Peer:
    """Library in a separate installation, see `--peers`."""

    package = ""

    def __init__(self, python: Path | None) -> None:
        self._python = python

    def missing(self) -> str:
        if self._python is None:
            return "no --peers DIR"
        if not self._python.exists():
            return f"{self._python} does not exist"
        done = subprocess.run([self._python, "-c", f"import {self.package}"], capture_output=True, text=True, check=False)
        return (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1] if done.returncode else ""

    def parts(self, scene: Scene) -> dict[str, float] | None:
        return None


class Torchft(Peer):
    """A lighthouse and three replica groups of one rank, each under a torchrun that restarts the rank."""

    name, package = "torchft", "torchft"
    wait_s = 10.0
    """Time-out in seconds of collectives and of a quorum; the library's default is 60."""
    lighthouse = ("--min_replicas=2", "--join_timeout_ms=3000", "--heartbeat_timeout_ms=2000", "--quorum_tick_ms=100")

    def start(self, scene: Scene) -> list[int]:
        assert self._python
        port, pids = scene.port(), []
        scene.start(
            None, [str(self._python.with_name("torchft_lighthouse")), *self.lighthouse, f"--bind=[::]:{port}"], "lighthouse"
        )
        for index in range(WORKERS):
            variables = {
                "TORCHFT_LIGHTHOUSE": f"http://{scene.outside}:{port}",
                "REPLICA_GROUP": str(index),
                "TORCHFT_WAIT_S": str(self.wait_s),
            }
            options = ["--nnodes=1", "--nproc-per-node=1", "--max-restarts=10"]
            options += [f"--master-addr={scene.address(index)}", f"--master-port={scene.port()}"]
            run = [str(self._python), "-m", "torch.distributed.run", *options, *scene.plan.script("torchft", scene.directory)]
            # Its manager is reached by the name of its host, which on nodes with a network of their own must be the node's.
            command = named(scene, index, run) if scene.hosts else run
            pids.append(scene.start(index, command, f"group-{index}", variables).pid)
        return pids


class Dlrover(Peer):
    """A local master and three nodes, each with a separate /dev/shm. Every step is saved to shared memory."""

    name, package = "dlrover", "dlrover"

    def start(self, scene: Scene) -> list[int]:
        assert self._python
        port, pids, job = scene.port(), [], f"bench{os.getpid()}"
        master = [
            "-m",
            "dlrover.python.master.main",
            f"--port={port}",
            f"--node_num={WORKERS}",
            f"--job_name={job}",
            "--platform=local",
        ]
        scene.start(None, [str(self._python), *master], "master")
        for index in range(WORKERS):
            sockets = scene.directory / f"node-{index}" / "sockets"
            sockets.mkdir(parents=True)
            variables = {
                "DLROVER_MASTER_ADDR": f"{scene.outside}:{port}",
                "NODE_TYPE": "worker",
                "NODE_ID": str(index),
                "NODE_RANK": str(index),
                "NODE_NUM": str(WORKERS),
                "ELASTIC_JOB_NAME": job,
                "POD_IP": scene.address(index),
            }
            options = [f"--nnodes={MIN}:{WORKERS}", "--nproc_per_node=1", "--max_restarts=10"]
            run = [str(self._python.with_name("dlrover-run")), *options, *scene.plan.script("dlrover", scene.directory)]
            own = ("mkdir -p /tmp/ckpt_sock", "mount -t tmpfs own /dev/shm", f"mount --bind {sockets} /tmp/ckpt_sock")
            pids.append(scene.start(index, named(scene, index, run, own), f"node-{index}", variables).pid)
        return pids


def named(scene: Scene, worker: int, run: list[str], own: Iterable[str] = ()) -> list[str]:
    """Return a command that runs `run` with the host's name resolved to the worker's address, after the shell commands `own`."""
    hosts = scene.directory / f"hosts-{worker}"
    hosts.write_text(f"127.0.0.1 localhost\n{scene.address(worker)} node-{worker}\n")
    steps = [*own, f"mount --bind {hosts} /etc/hosts", f"hostname node-{worker}", 'exec "$@"']
    return ["unshare", "-m", "-u", "sh", "-c", " && ".join(steps), "sh", *run]


def systems(peers: Path | None) -> dict[str, System]:
    """Return all systems by the value of `--system`. `peers`: directory of the virtual environments torchft and dlrover."""

    def python(name: str) -> Path | None:
        return peers / name / "bin" / "python" if peers else None

    return {
        "outlast": Outlast("auto"),
        "no-memory": Outlast("off"),
        "tuned": Torchrun(),
        "torchft": Torchft(python("torchft")),
        "dlrover": Dlrover(python("dlrover")),
    }


# One trial


@dataclasses.dataclass(frozen=True)
class Trial:
    """Cost of one fault. None means that training did not resume within the limit."""

    lost_s: float | None
    again: int | None = None
    """Number of repeated steps."""
    step_s: float = math.nan
    """Seconds of an undisturbed step."""
    parts: dict[str, float] | None = None
    started: bool = True


@dataclasses.dataclass(frozen=True)
class Ended:
    """Completed step of a rank."""

    time: float
    pid: int
    rank: int
    world_size: int
    step: int


class Book:
    """Reader of the completed steps, which reads only new lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""
        self.ended: list[Ended] = []

    def read(self) -> list[Ended]:
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for t, pid, rank, size, step in (line.decode().split() for line in whole):
            if step != "start":
                self.ended.append(Ended(float(t), int(pid), int(rank), int(size), int(step)))
        return self.ended


def cost(ended: Iterable[Ended], fault: float, outside: Iterable[int]) -> tuple[float, int, float] | None:
    """Return the seconds of training that a fault cost, the number of repeated steps, and the length of an undisturbed step, or
    None if not yet known.

    `outside`: processes of the lost worker, whose later steps do not count.
    """
    gone, first = set(outside), {}
    before = [each for each in ended if each.time <= fault]
    after = [each for each in ended if each.time > fault and each.pid not in gone]
    for each in before:
        first.setdefault(each.step, each.time)
    last = max(first)
    pace = statistics.median(first[step] - first[step - 1] for step in range(max(2, last - 20), last + 1) if step - 1 in first)
    reached = [each.time for each in after if each.step == last + AHEAD]
    if not reached:
        return None
    again = max(0, last + 1 - min(each.step for each in after))
    return min(reached) - first[last] - AHEAD * pace, again, pace


def trial(system: System, scenario: str, plan: Plan, rng: random.Random, environ: dict[str, str]) -> Trial:
    """Run one job with one fault in a separate directory, which is kept if training did not resume."""
    directory = Path(tempfile.mkdtemp(prefix=f"outlast-bench-{scenario}-"))
    (directory / "steps").touch()
    apart = netns.Network(WORKERS + 1) if scenario in ("silent", "node") else contextlib.nullcontext()
    with apart as network:
        scene = Scene(directory, dict(environ), plan, network.hosts if network else [])
        try:
            done = attempt(system, scenario, scene, rng)
        finally:
            for process in scene.running:
                process.kill()
            for worker in range(len(scene.hosts)):
                for pid in scene.processes(worker):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    if done.lost_s is None:
        print(f"never: see {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return done


def attempt(system: System, scenario: str, scene: Scene, rng: random.Random) -> Trial:
    """Start, train until after a save to disk, inject the fault, and observe."""
    book, plan = Book(scene.directory / "steps"), scene.plan
    workers = system.start(scene)

    def steady() -> bool:
        return len({each.rank for each in book.read() if each.world_size == WORKERS and each.step >= 5}) == WORKERS

    if not waited(START_LIMIT_S, steady):
        return Trial(None, started=False)
    time.sleep(plan.every_s + rng.uniform(0, plan.every_s))
    worker = rng.randrange(1, WORKERS)
    pid = {each.rank: each.pid for each in book.read()}[rng.randrange(WORKERS)]
    victims = tree(workers[worker])
    if isinstance(system, Outlast):
        system.fault(scene, scenario, worker)
    fault = time.time()
    if scenario in ("silent", "node"):
        scene.hosts[worker].cut()
        victims = scene.processes(worker)
    if scenario != "silent":
        for each in [pid] if scenario == "lost-process" else victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
    lost = set() if scenario == "lost-process" else set(victims)

    def went_on() -> bool:
        if scenario == "silent":
            lost.update(scene.processes(worker))
        return cost(book.read(), fault, lost) is not None

    if not waited(plan.limit_s, went_on):
        return Trial(None)
    found = cost(book.read(), fault, lost)
    assert found
    return Trial(*found, parts=system.parts(scene))


def waited(limit_s: float, look: Callable[[], bool], every_s: float = 0.05) -> bool:
    end = time.monotonic() + limit_s
    while not (seen := look()) and time.monotonic() < end:
        time.sleep(every_s)
    return seen


def tree(pid: int) -> list[int]:
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


# The whole run


def table(
    results: Mapping[str, Mapping[str, list[Trial]]], names: Mapping[str, str], scenarios: Iterable[str] = SCENARIOS
) -> list[str]:
    """Return rows of Markdown with the cost of each fault for each system."""
    heads = ("fault", "system", "training lost, s: median (range)", "went on", "steps again", "ours / this")
    heads += ("detection + re-forming + restoring + again",)
    rows = [f"| {' | '.join(heads)} |"]
    rows.append("|---" * len(heads) + "|")
    for scenario in scenarios:
        ours = math.nan
        for system, done in results.items():
            trials = done.get(scenario, [])
            if not trials:
                continue
            costs = [math.inf if each.lost_s is None else each.lost_s for each in trials]
            middle, back = statistics.median(costs), [c for c in costs if math.isfinite(c)]
            ours = middle if system == "outlast" else ours
            shown = "never" if math.isinf(middle) else f"{middle:.2f}"
            shown += f" ({min(back):.2f} – {max(back):.2f})" if len(back) > 1 else ""
            again = [each.again for each in trials if each.again is not None]
            steps = f"{statistics.median(again):g} ({min(again)} – {max(again)})" if again else ""
            ratio = f"{ours / middle:.2f}" if system != "outlast" and math.isfinite(ours + middle) and middle > 0 else ""
            said = [each.parts for each in trials if each.parts]
            parts = " + ".join(f"{statistics.median(p[name] for p in said):.2f}" for name in said[0]) if said else ""
            rows.append(
                f"| {scenario} | {names[system]} | {shown} | {len(back)} of {len(trials)} | {steps} | {ratio} | {parts} |"
            )
    return rows
