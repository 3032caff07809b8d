"""Fault injection for `outlast chaos`.

A fault in a worker deletes or evicts its pod. A fault in a training process is injected by `fault_in_pod`, which needs Python in
the container. Errors from the cluster are passed on; `Forbidden` names the missing right.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from outlast.base.errors import NotFound, OutlastError
from outlast.job import faults
from outlast.kubernetes import api
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.jobs import fault_in_pod

_NO_PROCESS = 3
_START = 'p=$(command -v python3 || command -v python) || { echo "it has no Python" >&2; exit 127; }; exec "$p" - "$@"'


def inject(cluster: api.Cluster, pod: api.Document, action: str, rng: random.Random) -> str:
    """Inject a fault into this pod's worker, and return a sentence about it."""
    meta, worker = pod["metadata"], f"worker {pod_status.index(pod)}"
    name, namespace = meta["name"], meta["namespace"]
    match faults.check(action):
        case "kill-worker":
            cluster.delete(kinds.POD, name, namespace=namespace, grace_s=0, uid=meta["uid"])
            return f"killed {worker}: deleted pod {name} without grace"
        case "term":
            cluster.delete(kinds.POD, name, namespace=namespace, uid=meta["uid"])
            return f"terminated {worker}: deleted pod {name}"
        case "evict":
            cluster.evict(name, namespace=namespace, uid=meta["uid"])
            return f"evicted {worker}: pod {name}"
    turns, stopped_s, running_s = faults.SLOW
    arguments = [action, f"{rng.random():.6f}", str(turns), str(stopped_s), str(running_s)]
    program = Path(fault_in_pod.__file__).read_bytes()
    command = ["sh", "-c", _START, "sh", *arguments]
    result = cluster.exec_(name, command, namespace=namespace, container=pod_status.container_name(pod), stdin=program)
    if result.code == _NO_PROCESS:
        raise NotFound(f"{worker} has no training process now; wait until it trains")
    if result.code:
        raise OutlastError(f"{action} failed in pod {name}: {result.error_line}")
    target = json.loads(result.output)
    verb = {"kill-process": "killed", "stop": "stopped", "slow": "slowed down"}[action]
    return f"{verb} rank {target['rank']} on {worker} (pid {target['pid']} in pod {name})"
