"""Cost of the operator: delay from an applied job to its pods, pods per second beside a loop of POSTs, writes, memory, idle CPU.

    python bench/operating.py --quick               120 jobs, about a minute
    python bench/operating.py                       1,000 jobs of 4 pods

With $KUBECONFIG it uses that cluster, in a namespace of its own that goes afterwards: pods that no node takes, so that the API
server alone works. Without, a small server in Python in a process of its own, the bottleneck: all writes cost it the same, so
the ratio of pods is that of writes, while a real one spends several times as much on a pod as on anything else. `--latency`
makes it wait before each write, as a real one does for its etcd. The raw loop is the same client with as many threads (and with
one), and POSTs pods of the same bytes; they take turns. The ElasticJob API has to be in the cluster (`kubectl apply -f
deploy/crd.yaml`) and no other operator. What a whole life writes is counted in the simulated cluster of the tests.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import gc
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from outlast.job.contract import Label
from outlast.kubernetes import api
from outlast.kubernetes.api import kinds

Document = dict[str, Any]
PODS, THREADS = 4, 8
NOWHERE = {"outlast.dev/bench": "nowhere"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--single", type=int, default=100, help="jobs that are applied one at a time")
    parser.add_argument("--failures", type=int, default=100, help="pods that fail one at a time, with all jobs live")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds of which the CPU is measured when all is settled")
    parser.add_argument("--rounds", type=int, default=4, help="turns of the operator and of the raw loop")
    parser.add_argument("--latency", type=float, default=0.0, help="ms that the small server waits before each write")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--operate", metavar="NAMESPACE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args.latency / 1000)
    if args.operate:
        return operate(args.operate)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and clean up
    if args.quick:
        args.jobs, args.single, args.failures, args.idle, args.rounds = 120, 30, 30, 10.0, 3
    with contextlib.ExitStack() as stack:
        where = "the API server of $KUBECONFIG"
        if not os.environ.get("KUBECONFIG"):
            where = f"a small API server in Python that waits {args.latency:g} ms before each write"
            os.environ["KUBECONFIG"] = str(stack.enter_context(small_server(args.latency)))
        cluster = stack.enter_context(contextlib.closing(api.connect()))
        namespace = f"bench-{uuid.uuid4().hex[:8]}"
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        stack.callback(cluster.delete, kinds.NAMESPACE, namespace)
        lines = measured(args, cluster, namespace, where)
    text = "\n".join(lines)
    print(text)
    args.results.mkdir(exist_ok=True)
    with open(args.results / f"{time.strftime('%Y-%m-%d')}-operator.md", "a") as file:
        file.write(f"# The operator, {time.strftime('%H:%M')}\n\n{text}\n\n")


def measured(args: argparse.Namespace, cluster: api.Cluster, namespace: str, where: str) -> list[str]:
    begun_load = os.getloadavg()[0]
    with Watched(cluster, namespace) as watched, operator(namespace) as process:
        mine = psutil.Process(process.pid)
        say("one job at a time")
        single = [one(cluster, namespace, watched, f"single-{n}") for n in range(args.single)]
        sample = watched.sample("single-0-worker-0")
        say("many jobs at once, in turn with the raw loop")
        ours, raw, alone, made = [], [], [], args.jobs // args.rounds
        before = args.single
        for turn in range(args.rounds):
            names = [f"many-{turn}-{n}" for n in range(made)]
            raws = [f"raw-{turn}-{n}" for n in range(made)]
            alones = [f"alone-{turn}-{n}" for n in range(made)]
            load = os.getloadavg()[0]
            kinds_of_turn: list[Callable[[], None]] = [
                lambda names=names: ours.append(many(cluster, namespace, watched, names, mine)),
                lambda raws=raws: raw.append(loop(cluster, namespace, watched, raws, sample, THREADS)),
                lambda names=alones: alone.append(loop(cluster, namespace, watched, names, sample, 1)),
            ]
            for each in kinds_of_turn if turn % 2 == 0 else reversed(kinds_of_turn):
                each()
            before += made
            rates = ", ".join(
                f"{name} {made * PODS / took[-1].wall:.0f}"
                for name, took in (("operator", ours), (f"raw loop of {THREADS} threads", raw), ("of one", alone))
            )
            say(f"{turn + 1} of {args.rounds}, pods a second: {rates} (load {load:.1f})")
        settle(process)
        writes = asked(process)["writes"]
        say("pods fail, one at a time")
        failures = [fail(cluster, namespace, watched, f"many-0-{n % made}-worker-0") for n in range(args.failures)]
        settle(process)
        say("idle")
        before_cpu, begun = spent(mine), time.monotonic()
        settled, looks = sum(asked(process)["writes"].values()), asked(process)["looks"]
        time.sleep(args.idle)
        idle = (spent(mine) - before_cpu) / (time.monotonic() - begun)
        looks = asked(process)["looks"] - looks
        idle_writes = sum(asked(process)["writes"].values()) - settled
        memory = mine.memory_info().rss
    jobs = before
    pods_written = writes.pop("create Pod", 0)
    events = writes.pop("create Event", 0)
    others = ", ".join(f"{value / jobs:.2f} × {name}" for name, value in sorted(writes.items()))
    lived = life()
    lived_others = {name: count for name, count in lived.items() if name not in ("create Pod", "create Event")}
    turns = ", ".join(f"{theirs.wall / own.wall:.2f}" for own, theirs in zip(ours, raw, strict=True))
    return [
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}; {where}; "
        f"load {begun_load:.1f} when this began",
        f"{jobs:,} jobs of {PODS} pods ({args.single} of them applied one at a time), {args.rounds} turns",
        "",
        "| what | operator | raw loop | ratio, or goal |",
        "|---|---|---|---|",
        f"| job applied → its {PODS} pods created, p50 | {1000 * statistics.median(single):.0f} ms | | ≤ 100 ms |",
        f"| the same, p99 | {1000 * percentile(single, 99):.0f} ms | | ≤ 300 ms |",
        f"| pods a second, {made} jobs at once, median | {rate(ours, made):.0f} | {rate(raw, made):.0f} "
        f"| {rate(ours, made) / rate(raw, made):.2f} (goal 0.7); each turn: {turns} |",
        f"| the same beside a loop that waits for each answer | {rate(ours, made):.0f} | {rate(alone, made):.0f} "
        f"| {rate(ours, made) / rate(alone, made):.2f} |",
        f"| CPU time of the client a job | {cpu(ours, made):.1f} ms | {cpu(raw, made):.1f} ms | |",
        f"| failed pod → its replacement created, p50 | {1000 * statistics.median(failures):.0f} ms | | |",
        f"| the same, p99 | {1000 * percentile(failures, 99):.0f} ms | | ≤ 150 ms |",
        f"| writes a job until its pods are there | {pods_written / jobs:.2f} pods + {sum(writes.values()) / jobs:.2f} "
        f"(and {events / jobs:.2f} Events) | {PODS} pods | |",
        f"| writes of a whole life, simulated | {lived['create Pod']} pods + {sum(lived_others.values())} "
        f"(and {lived['create Event']} Events) | | ≤ pods + 6 |",
        f"| memory | {memory / 2**20:.0f} MiB | | ≤ 150 MB |",
        f"| CPU when nothing happens (but {looks} looks) | {100 * idle:.2f} % | | ≤ 1 % |",
        f"| writes when nothing happens | {idle_writes} in {args.idle:.0f} s | | 0 |",
        "",
        f"Until its pods are there, a job costs {others}; in a whole life "
        f"{', '.join(f'{count} × {name}' for name, count in sorted(lived_others.items()))}. When pods are there is seen by one "
        "watch. Many jobs at once are applied while the operator is stopped (SIGSTOP); its time begins when it goes on, and ends "
        "with the last pod; Events may come later.",
    ]


@dataclasses.dataclass(frozen=True)
class Took:
    """Seconds until many pods existed, and CPU seconds of their creator."""

    wall: float
    cpu: float


def rate(took: Sequence[Took], jobs: int) -> float:
    return jobs * PODS / statistics.median(each.wall for each in took)


def cpu(took: Sequence[Took], jobs: int) -> float:
    """Return the CPU milliseconds per job."""
    return 1000 * statistics.median(each.cpu for each in took) / jobs


def spent(process: psutil.Process) -> float:
    """Return the CPU seconds of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def life() -> collections.Counter[str]:
    """Count a job's writes from its first reconcile to its success, by verb and kind."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))
    import simulated

    cluster, notes = simulated.Cluster({"replicas": PODS}, steps=25), 0
    while cluster.now < simulated.BEGAN + 120:
        cluster.pass_()
        notes += len(cluster.look().events)
    assert cluster.status["state"] == "Succeeded"
    words = {"set": "create {2}", "create": "create Pod", "status": "update status", "delete": "delete Pod"}
    written = [words[each.split()[0]].format(*each.split()) for each in cluster.writes]
    return collections.Counter([*written, *["create Event"] * notes])


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(len(values) * percent / 100) - 1)]


def say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


class Watched:
    """Time of the first event of each pod, from one watch."""

    def __init__(self, cluster: api.Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.seen: dict[str, tuple[str, float]] = {}
        self.kept: dict[str, Document] = {}
        self.stop = api.Stop()
        self.news = threading.Condition()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        for change in self.cluster.watch(kinds.POD, stop=self.stop, namespace=self.namespace):
            meta = change.document["metadata"]
            if change.type == "added":
                with self.news:
                    self.seen[meta["name"]] = (meta["uid"], time.monotonic())
                    if meta["name"].endswith("-0-worker-0"):
                        self.kept[meta["name"]] = change.document
                    self.news.notify_all()

    def __enter__(self) -> Watched:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(5)

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.news:
            if not self.news.wait_for(condition, timeout=300):
                sys.exit(f"after 300 s there are {len(self.seen)} pods; look at what the operator says")

    def sample(self, name: str) -> Document:
        """Return a pod as the operator wrote it, as a template for POSTs."""
        return api.without_server_fields(self.kept[name])


def job(namespace: str, name: str) -> Document:
    spec = {
        "image": "example.invalid/none:1",
        "script": "train.py",
        "workers": {"replicas": PODS},
        "resources": {"cpu": "1", "memory": "1Gi"},
        "nodeSelector": NOWHERE,
        "scheduling": {"gang": "none"},
        "output": "s3://bench/runs",
    }
    return {
        "apiVersion": kinds.ELASTIC_JOB.api_version,
        "kind": "ElasticJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def workers(name: str) -> list[str]:
    return [f"{name}-worker-{n}" for n in range(PODS)]


def one(cluster: api.Cluster, namespace: str, watched: Watched, name: str) -> float:
    """Return the seconds from the response to a job's creation until its last pod exists."""
    cluster.create(job(namespace, name))
    begun = time.monotonic()
    watched.wait(lambda: all(worker in watched.seen for worker in workers(name)))
    return max(watched.seen[worker][1] for worker in workers(name)) - begun


def many(cluster: api.Cluster, namespace: str, watched: Watched, names: Sequence[str], mine: psutil.Process) -> Took:
    """Measure from the operator's resumption, with all jobs present, until their last pod exists."""
    mine.suspend()  # for less than it may be without renewing its lease
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda name: cluster.create(job(namespace, name)), names))
    wanted = [worker for name in names for worker in workers(name)]
    begun, before = time.monotonic(), spent(mine)
    mine.resume()
    watched.wait(lambda: all(worker in watched.seen for worker in wanted))
    return Took(max(watched.seen[worker][1] for worker in wanted) - begun, spent(mine) - before)


def loop(cluster: api.Cluster, namespace: str, watched: Watched, names: Sequence[str], sample: Document, threads: int) -> Took:
    """POST as many pods of the same size, without owners, from several threads."""

    def post(worker: str) -> None:
        pod = copy.deepcopy(sample)
        meta = pod["metadata"]
        pod["metadata"] = {**meta, "name": worker, "labels": {k: v for k, v in meta["labels"].items() if k != Label.JOB}}
        pod["metadata"].pop("ownerReferences", None)
        cluster.create(pod)

    wanted = [worker for name in names for worker in workers(name)]
    mine = psutil.Process()
    begun, before = time.monotonic(), spent(mine)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(post, wanted))
    watched.wait(lambda: all(worker in watched.seen for worker in wanted))
    return Took(max(watched.seen[worker][1] for worker in wanted) - begun, spent(mine) - before)


def fail(cluster: api.Cluster, namespace: str, watched: Watched, name: str) -> float:
    """Return the seconds from the response to an eviction until the replacement exists."""
    old = watched.seen[name][0]
    change = {"status": {"phase": "Failed", "reason": "Evicted", "message": "the bench evicts it"}}
    cluster.patch(kinds.POD, name, change, namespace=namespace, subresource="status")
    begun = time.monotonic()
    watched.wait(lambda: watched.seen[name][0] != old)
    return watched.seen[name][1] - begun


# ----------------------------------------------------------------------------------------------------------- other processes


@contextlib.contextmanager
def operator(namespace: str) -> Iterator[subprocess.Popen[str]]:
    """Run the operator in a separate process, which answers each line of its input with its number of writes so far."""
    command = [sys.executable, __file__, "--operate", namespace]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        while not asked(process)["ready"]:
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(15)


def asked(process: subprocess.Popen[str]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("writes\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def settle(process: subprocess.Popen[str]) -> None:
    """Wait until the operator has reconciled nothing for 5 s. The scheduler reports every pod as unschedulable."""
    deadline, looks = time.monotonic() + 180, -1
    while looks != (looks := asked(process)["looks"]):
        if time.monotonic() > deadline:
            sys.exit("the operator never rests; look at what its decider wants to do")
        time.sleep(5)


def operate(namespace: str) -> None:
    import logging

    from outlast.kubernetes.operator.leader import Leadership
    from outlast.kubernetes.operator.main import reconcilers
    from outlast.kubernetes.operator.observed_job import Limits
    from outlast.kubernetes.operator.operator import Operator
    from outlast.kubernetes.operator.watches import Settings

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    cluster = api.connect()
    made = Operator(
        cluster,
        reconcilers(Limits()),
        Leadership(cluster, "bench", namespace),
        Settings(namespace=namespace, host="127.0.0.1", workers=THREADS),
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def answer() -> None:
        for _ in sys.stdin:
            ready = made.leadership.is_leader() and not made.cache.unsynced()
            samples = [each for metric in made.metrics.registry.collect() for each in metric.samples]
            writes = {
                f"{each.labels['verb']} {each.labels['kind']}": int(each.value)
                for each in samples
                if each.name == "outlast_operator_writes_total"
            }
            looks = next(int(each.value) for each in samples if each.name == "outlast_reconcile_seconds_count")
            print(json.dumps({"ready": ready, "writes": writes, "looks": looks}), flush=True)

    threading.Thread(target=answer, daemon=True).start()
    sys.exit(made.run(stop))


@contextlib.contextmanager
def small_server(latency_ms: float) -> Iterator[Path]:
    """Yield a kubeconfig of the tests' API server, which runs in a separate process."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config"
        server = subprocess.Popen([sys.executable, __file__, "--serve", str(config), "--latency", str(latency_ms)])
        try:
            deadline = time.monotonic() + 20
            while not config.exists():
                if time.monotonic() > deadline or server.poll() is not None:
                    sys.exit("the small API server did not start")
                time.sleep(0.05)
            yield config
        finally:
            server.terminate()
            server.wait()


def serve(config: Path, latency_s: float) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))
    import apiserver

    gc.disable()  # with all these documents it would stop the server for 200 ms, again and again

    class Server(apiserver.ApiServer):
        def answer(self, handler: Any) -> None:
            if handler.command != "GET":
                time.sleep(latency_s)
            super().answer(handler)

    with apiserver.serving(Server(unserved=("kueue.x-k8s.io", "scheduling.x-k8s.io"))) as url:
        apiserver.kubeconfig(config.with_suffix(".new"), url)
        config.with_suffix(".new").rename(config)
        threading.Event().wait()


if __name__ == "__main__":
    main()
