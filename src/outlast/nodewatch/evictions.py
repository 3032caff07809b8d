"""Evictions and deletions of the pods of a node, several at once."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outlast.errors import Absent, ClusterError, Conflict
from outlast.kube import POD, Cluster
from outlast.nodewatch.drain import Step

_AT_ONCE = 8
"""Requests in flight."""


@dataclass(frozen=True)
class Outcome:
    """What became of one step."""

    step: Step
    error: ClusterError | None = None
    """Why the pod stays; None when it goes, or is gone."""


def carry_out(cluster: Cluster, steps: Sequence[Step], timeout_s: float) -> list[Outcome]:
    """Evict and delete; errors are returned."""
    if not steps:
        return []
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="evict") as pool:
        return list(pool.map(lambda step: _act(cluster, step, timeout_s), steps))


def _act(cluster: Cluster, step: Step, timeout_s: float) -> Outcome:
    meta = step.pod["metadata"]
    where: dict[str, Any] = {"namespace": meta["namespace"], "uid": meta["uid"], "grace_s": step.grace_s, "timeout_s": timeout_s}
    try:
        if step.verb == "evict":
            cluster.evict(meta["name"], **where)
        else:
            cluster.delete(POD, meta["name"], **where)
    except Absent:
        return Outcome(step)
    except Conflict:  # a pod of the same name has come since: it is another one, on another node
        return Outcome(step)
    except ClusterError as error:
        return Outcome(step, error)
    return Outcome(step)
