"""Orders to workers that no operator runs: they learn by when they must have left before SIGTERM tells them to.

An order has to be signed with the key of the run, which is in a Secret. The node watcher may read none unless somebody allows it
to. A worker that gets no order takes the grace of its job.
"""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast import contract
from outlast.contract import Env
from outlast.errors import Absent, ClusterError, Forbidden
from outlast.kube import SECRET, Cluster
from outlast.kube import pods as podwords
from outlast.nodewatch import drain, notices
from outlast.rendezvous.transports import orders, seal

Document = Mapping[str, Any]

_AT_ONCE = 8
"""Orders in flight."""


@dataclass(frozen=True)
class Order:
    """What workers are told."""

    deadline: float
    reason: str
    timeout_s: float
    """How long an agent may take to answer."""


def send(cluster: Cluster, pods: Sequence[Document], order: Order, now: float) -> dict[str, str]:
    """Order the workers among these pods that no operator runs to leave; what became of each order, by `namespace/name`. Pods
    whose key we may not know are not in it."""
    ordered = [pod for pod in pods if drain.is_worker(pod) and not drain.operated(pod) and podwords.running(pod)]
    if not ordered:
        return {}
    body = json.dumps({"deadline": notices.utc(order.deadline), "reason": order.reason}).encode()

    def one(pod: Document) -> tuple[str, str]:
        try:
            key = _key(cluster, pod)
            headers = orders.signed(key, worker=podwords.index(pod), body=body, now=now)
            said = _post(pod, headers, body, order.timeout_s) if key else ""
        except (ClusterError, OSError, http.client.HTTPException, ValueError) as error:
            said = f"cannot be ordered to leave: {error}"
        return drain.full_name(pod), said

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="order") as pool:
        return {name: said for name, said in pool.map(one, ordered) if said}


def _key(cluster: Cluster, pod: Document) -> bytes:
    """The key of the pod's run, as its agent finds it; empty when we may not know."""
    given = {each["name"]: each for each in podwords.container(pod).get("env") or ()}
    environ = {name: each["value"] for name, each in given.items() if "value" in each}
    environ[Env.NAMESPACE] = pod["metadata"]["namespace"]
    environ.pop(Env.JOB_FILE, None)  # a path in the pod
    secret = ((given.get(Env.RENDEZVOUS_KEY) or {}).get("valueFrom") or {}).get("secretKeyRef")
    if secret:
        try:
            data = cluster.get(SECRET, secret["name"], namespace=environ[Env.NAMESPACE]).get("data") or {}
            environ[Env.RENDEZVOUS_KEY] = base64.b64decode(data.get(secret["key"], "")).decode()
        except Forbidden:
            return b""
        except Absent:
            if environ.get(Env.RENDEZVOUS, "").startswith("c10d://"):  # a digest of the job file, which is in a ConfigMap
                return b""
    return seal.key(environ)


def _post(pod: Document, headers: Mapping[str, str], body: bytes, timeout_s: float) -> str:
    """Send one order; what the agent answered."""
    given = {each["name"]: each.get("value", "") for each in podwords.container(pod).get("env") or ()}
    port = int(given.get(Env.PROBE_PORT) or contract.Pod.PROBE_PORT)
    connection = http.client.HTTPConnection(pod["status"]["podIP"], port, timeout=timeout_s)
    try:
        connection.request("POST", orders.PATH, body, dict(headers))
        answer = connection.getresponse()
        said = answer.read(1024).decode(errors="replace").strip()
    finally:
        connection.close()
    return "is told by when it must have left" if answer.status == 202 else f"does not take the order to leave: {said}"
