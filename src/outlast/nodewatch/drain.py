"""Which pods of a node that is about to go are evicted, when, and with how much time to end. Pure; `evictions` acts.

Pods of DaemonSets, the kubelet's own, and pods that have ended or are going already are left alone; volumes on the node are no
reason to stay, since they are lost in any case. A worker of a job that the operator runs leaves by itself, on the node's taint,
and has until shortly before the deadline for that. What is Outlast's own (operator, etcd) goes after the workers, which need it
to leave. All others go at once.

A PodDisruptionBudget is respected: a refused eviction is repeated. Once the time left is shorter than the pod's grace, it cannot
be any longer, as the pod would be lost with the machine: the pod is deleted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outlast.contract import GROUP, Label
from outlast.kube import pods as podwords
from outlast.kube.kinds import LEGACY_JOB

Document = Mapping[str, Any]

LAST_S = 2.0
"""Seconds before the deadline at which a pod must have ended: the kubelet has to report it."""
RESERVE_S = 30.0
"""So long before the deadline workers that have not left by themselves are evicted."""
_SHARE = 1 / 3
"""The same as a share of a short notice."""
_GRACE_S = 30.0
"""terminationGracePeriodSeconds of a pod that sets none."""
_MIRROR = "kubernetes.io/config.mirror"
_PART = "app.kubernetes.io/part-of"


@dataclass(frozen=True)
class Window:
    """The time that there is, in seconds since the epoch."""

    noticed: float
    deadline: float

    @property
    def last_call(self) -> float:
        """When workers that have not left by themselves are evicted."""
        return self.deadline - min(RESERVE_S, _SHARE * (self.deadline - self.noticed))


@dataclass(frozen=True)
class Step:
    """One pod that is to go now."""

    pod: Document
    verb: Literal["evict", "delete"]
    grace_s: int
    """Seconds to end: the pod's own, or what is left."""

    @property
    def name(self) -> str:
        """`namespace/name`."""
        return full_name(self.pod)

    def __str__(self) -> str:
        does = "evicts" if self.verb == "evict" else "deletes, whatever its PodDisruptionBudget says,"
        return f"{does} {self.name}, which has {self.grace_s} s to end"


@dataclass(frozen=True)
class Plan:
    """What to do now, and who is waited for."""

    steps: tuple[Step, ...] = ()
    waiting: tuple[str, ...] = ()
    """Pods that stay for now: `namespace/name`."""

    @property
    def drained(self) -> bool:
        """Whether nothing is left to evict or to wait for."""
        return not self.steps and not self.waiting


def plan(pods: Sequence[Document], window: Window, now: float, refused: Collection[str]) -> Plan:
    """Which of a node's pods go now. `refused`: uids of the pods whose eviction was refused before."""
    movable = [pod for pod in pods if _movable(pod)]
    going = tuple(full_name(pod) for pod in movable if podwords.leaves(pod))
    here = [pod for pod in movable if not podwords.leaves(pod)]
    last_call = now >= window.last_call
    workers_left = any(is_worker(pod) for pod in movable)
    stay = [] if last_call else [pod for pod in here if operated(pod) or (workers_left and _ours(pod))]
    left_s = max(0.0, window.deadline - LAST_S - now)
    steps = tuple(_step(pod, left_s, refused) for pod in here if pod not in stay)
    return Plan(steps, (*going, *map(full_name, stay)))


def _step(pod: Document, left_s: float, refused: Collection[str]) -> Step:
    own_s = pod["spec"].get("terminationGracePeriodSeconds", _GRACE_S)
    verb: Literal["evict", "delete"] = "delete" if pod["metadata"]["uid"] in refused and left_s < own_s else "evict"
    return Step(pod, verb, max(1, math.floor(min(own_s, left_s))))  # 0 would not let it end at all


def full_name(pod: Document) -> str:
    """`namespace/name`."""
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def affected(pods: Sequence[Document]) -> list[str]:
    """The pods that the machine takes along, as `namespace/name`."""
    return sorted(full_name(pod) for pod in pods if _movable(pod))


def is_worker(pod: Document) -> bool:
    """Whether a pod trains."""
    return Label.JOB in (pod["metadata"].get("labels") or {}) or operated(pod)


def operated(pod: Document) -> bool:
    """Whether the operator runs the job of a pod: it moves the pod when it sees the node's taint."""
    owners = pod["metadata"].get("ownerReferences") or ()
    groups = (GROUP, LEGACY_JOB.group)
    return any(each.get("kind") == "ElasticJob" and each.get("apiVersion", "").partition("/")[0] in groups for each in owners)


def _movable(pod: Document) -> bool:
    meta = pod["metadata"]
    daemon = any(each.get("kind") == "DaemonSet" and each.get("controller") for each in meta.get("ownerReferences") or ())
    return not daemon and _MIRROR not in (meta.get("annotations") or {}) and not podwords.over(pod)


def _ours(pod: Document) -> bool:
    """Whether a pod is part of Outlast's installation."""
    return not is_worker(pod) and (pod["metadata"].get("labels") or {}).get(_PART) == "outlast"
