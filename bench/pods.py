"""Cost of a failure in real pods, in seconds of training: a process killed, a pod deleted by force, a node frozen.

    outlast install --image registry/outlast:dev --wait
    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev python bench/pods.py [--repeats 3]
        [--memory auto --memory off] [--min 3] [--freeze 'docker pause {node}' --thaw 'docker unpause {node}']

Three pods train with the script of `resilience`, looked after by the operator that is installed, in a namespace of their own;
what they write of their steps is read from their logs. A frozen node needs a cluster of several nodes, and commands of yours that
freeze and thaw one; the pods are spread over the nodes. The clocks of the nodes and of this machine are taken to agree to some
hundredths of a second. Appends a table to results/<date>-pods.md. How a cost is measured is said in resilience/account.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilience import account
from resilience.account import Event, Line
from resilience.trace import SAMPLES

HERE = Path(__file__).parent
WORKERS = 3
SCENARIOS = ("process killed", "pod deleted", "node frozen")
_LOOK_S = 8.0
"""Seconds between two reads of the logs. Each read starts three programs beside the recovering pods."""


class Cluster:
    """Temporary namespace with the job in it."""

    def __init__(self, image: str) -> None:
        self.namespace, self._image = f"bench-{secrets.token_hex(3)}", image
        self.kubectl("create", "namespace", self.namespace)
        self._lines: dict[str, Line] = {}

    def kubectl(self, *words: str, given: str | None = None, check: bool = True) -> str:
        done = subprocess.run(["kubectl", "-n", self.namespace, *words], input=given, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise SystemExit(f"kubectl {' '.join(words)} exited with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def start(self, memory: str, options: argparse.Namespace) -> None:
        """Apply the job, with its script in a ConfigMap."""
        from outlast.job import spec
        from outlast.kubernetes import manifests
        from outlast.kubernetes.jobs.parcel import pack

        self._lines = {}
        settings = {
            "directory": "-",
            "device": "cpu",
            "workers": WORKERS,
            "every": 0,
            "timeout_s": 0,
            "millions": options.millions,
            "samples": SAMPLES,
        }
        fields = {
            "image": self._image,
            "script": "outlast_loop.py",
            "env": {"RESILIENCE": json.dumps(settings)},
            "workers": {"replicas": WORKERS, "min": options.min, "max": WORKERS},
            "resources": {"cpu": "0.2", "memory": "1Gi"},
            "checkpoint": {"every": f"{options.every:g}s", "memory": memory},
        }
        document = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "bench"}, "spec": fields}
        with tempfile.TemporaryDirectory() as name:
            for script in ("outlast_loop.py", "body.py"):
                (Path(name) / script).write_bytes((HERE / "resilience" / "scripts" / script).read_bytes())
            job = spec.anchor(spec.parse(json.dumps(document)), Path(name))
            with pack(job) as parcel:
                documents = manifests.render(parcel.job.in_namespace(self.namespace), "elasticjob", code=parcel.code)
        self.kubectl(
            "apply", "--server-side", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
        )

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", "-l", "outlast.dev/job=bench", "-o", "json"))[
            "items"
        ]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def leader_node(self) -> str:
        """Return the node of the operator that leads."""
        lease = json.loads(self.kubectl("get", "lease", "outlast-operator", "-n", "outlast-system", "-o", "json"))
        pod = lease["spec"]["holderIdentity"]
        return self.kubectl("get", "pod", pod, "-n", "outlast-system", "-o", "jsonpath={.spec.nodeName}")

    def ended(self) -> list[Line]:
        """Return the steps of all ranks so far, including those in the logs of deleted pods."""
        for pod in self.pods():
            said = self.kubectl("logs", pod["metadata"]["name"], "--tail=300", check=False)
            for line in said.splitlines():
                _, mark, text = line.partition("[STEP] ")
                if mark:
                    (ended,) = account.read(text)
                    # processes of different pods may have the same number
                    self._lines[text] = dataclasses.replace(ended, pid=hash((pod["metadata"]["uid"], ended.pid)))
        return sorted(self._lines.values(), key=lambda each: each.time)

    def remove(self) -> None:
        self.kubectl("delete", "elasticjobs.outlast.dev", "bench", "--ignore-not-found", "--wait=true")
        waited(120, lambda: not self.pods())

    def close(self) -> None:
        self.kubectl("delete", "namespace", self.namespace, "--wait=false", check=False)


def waited(limit_s: float, look: Callable[[], bool], every_s: float = 0.5) -> bool:
    """Look until it is so or the limit, and return which."""
    end = time.monotonic() + limit_s
    while not (seen := look()) and time.monotonic() < end:
        time.sleep(every_s)
    return seen


def trial(cluster: Cluster, scenario: str, memory: str, options: argparse.Namespace, rng: random.Random) -> account.Cost:
    """Run one job with one fault."""
    cluster.start(memory, options)

    def steady() -> bool:
        there = [each for each in cluster.ended() if each.world == WORKERS and each.step >= 5]
        return len({each.rank for each in there}) == WORKERS

    if not waited(300, steady):
        return account.Cost(None)
    time.sleep(options.every * (1 + rng.random()))
    step_s = account.pace(cluster.ended())
    pods = cluster.pods()
    if scenario == "node frozen":
        leads = cluster.leader_node()
        pods = [pod for pod in pods if (pod["spec"]["nodeName"] == leads) == options.leader]
    victim = pods[-1] if options.leader else rng.choice(pods[1:] or pods)
    name, node = victim["metadata"]["name"], victim["spec"]["nodeName"]
    fault = time.time()
    if scenario == "process killed":
        kill = "for p in /proc/[0-9]*; do grep -q '^outlast: [r]ank' $p/cmdline && kill -9 ${p#/proc/}; done"
        cluster.kubectl("exec", name, "--", "sh", "-c", kill, check=False)
    elif scenario == "pod deleted":
        cluster.kubectl("delete", "pod", name, "--grace-period=0", "--force")
    else:
        subprocess.run(shlex.split(options.freeze.format(node=node)), check=True)
    time.sleep(_LOOK_S)
    try:
        pids = () if scenario == "process killed" else range(1, 1 << 16)
        gone = frozenset(hash((victim["metadata"]["uid"], pid)) for pid in pids)
        event = Event(scenario, fault, gone, WORKERS)
        waited(options.limit, lambda: account.cost(cluster.ended(), event, step_s).lost_s is not None, _LOOK_S)
        return account.cost(cluster.ended(), event, step_s)
    finally:
        if scenario == "node frozen":
            subprocess.run(shlex.split(options.thaw.format(node=node)), check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", choices=("auto", "off"), action="append", help="default: both, in turn")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="default: all that can be had")
    parser.add_argument("--millions", type=float, default=2.0)
    parser.add_argument("--min", type=int, default=2, help="workers without which nobody trains")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between saves to disk")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until `never`")
    parser.add_argument("--freeze", default="", help="command that freezes a node: {node} is its name")
    parser.add_argument("--thaw", default="", help="command that thaws it")
    parser.add_argument("--leader", action="store_true", help="freeze the node where the operator's leader is, not another")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    image = os.environ.get("OUTLAST_TEST_IMAGE", "")
    if not image or "KUBECONFIG" not in os.environ:
        sys.exit("set KUBECONFIG, and OUTLAST_TEST_IMAGE to an image with Outlast and torch that the nodes can pull")
    scenarios = list(options.scenario or SCENARIOS)
    if not (options.freeze and options.thaw) and "node frozen" in scenarios:
        scenarios.remove("node frozen")
        print("node frozen is left out: --freeze and --thaw say how", flush=True)
    rng, memories = random.Random(options.seed), options.memory or ["auto", "off"]
    rows = []
    cluster = Cluster(image)
    try:
        for repeat in range(options.repeats):
            for scenario in scenarios:
                for memory in memories if repeat % 2 == 0 else reversed(memories):
                    done = trial(cluster, scenario, memory, options, rng)
                    cluster.remove()
                    rows.append(f"| {scenario} | {memory} | {done.lost_s} | {done.again} |")
                    print(f"{repeat + 1}/{options.repeats} {scenario:<15} memory {memory:<5} {done}", flush=True)
    finally:
        cluster.close()
    lines = ["| fault | memory | training lost, s | steps again |", "|---|---|---|---|", *sorted(rows)]
    begun, asked = time.strftime("%H:%M"), f"{WORKERS} pods, at least {options.min}"
    text = f"\n## {begun}: {asked}, {options.millions:g} M parameters\n\n" + "\n".join(lines) + "\n"
    print(text)
    with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-pods.md").open("a") as file:
        file.write(text)


if __name__ == "__main__":
    main()
