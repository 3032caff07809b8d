"""Who decides about which kind of job: the one place to name another kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from outlast.controller import legacy
from outlast.controller.decide import decide
from outlast.controller.observe import Limits, observe, silent_since
from outlast.controller.plan import Deletion, Document, Plan
from outlast.kinds import ELASTIC_JOB, LEGACY_JOB


def elastic_job(
    job: Document,
    pods: Sequence[Document],
    leases: Sequence[Document],
    nodes: Mapping[str, Document],
    now: float,
    since: float,
    found: frozenset[str],
) -> Plan:
    """What is to be done about an ElasticJob of ours."""
    return decide(observe(job, pods, leases, nodes, now, since, found))


def legacy_job(
    job: Document,
    pods: Sequence[Document],
    leases: Sequence[Document],
    nodes: Mapping[str, Document],
    now: float,
    since: float,
    found: frozenset[str],
) -> Plan:
    """What is to be done about an ElasticJob of `elastic.pytorch.org`."""
    ends = dict(_lost_at(pods, nodes))
    plan = legacy.decide(job, pods, now, lost={node for node, end in ends.items() if end <= now})
    later = [end for end in ends.values() if end > now]
    return dataclasses.replace(plan, look_again=min([*later, plan.look_again or float("inf")])) if later else plan


def orphans(pods: Sequence[Document], nodes: Mapping[str, Document], now: float) -> Plan:
    """What is to be done about pods whose ElasticJob is gone: they go by themselves, but for those on nodes that are lost."""
    going = [pod for pod in pods if pod["metadata"].get("deletionTimestamp") and _of_an_elastic_job(pod)]
    ends = dict(_lost_at(going, nodes))
    lost = [pod for pod in going if ends.get(pod["spec"].get("nodeName"), float("inf")) <= now]
    deletes = tuple(
        Deletion(pod["metadata"]["name"], pod["metadata"]["uid"], "its job is gone, and its node does not answer", grace_s=0)
        for pod in lost
    )
    return Plan(deletes=deletes, look_again=min((end for end in ends.values() if end > now), default=None))


def _of_an_elastic_job(pod: Document) -> bool:
    """Whether we have made it; pods of Jobs and StatefulSets have the label of their job, too."""
    return any(owner["kind"] == ELASTIC_JOB.kind for owner in pod["metadata"].get("ownerReferences") or ())


def _lost_at(pods: Sequence[Document], nodes: Mapping[str, Document]) -> Iterator[tuple[str, float]]:
    """The pods' nodes that do not answer, or are gone, and from when on they are taken for lost."""
    for pod in pods:
        name = (pod.get("spec") or {}).get("nodeName")
        if name and nodes and (silent := silent_since(nodes.get(name))) is not None:
            yield name, silent + Limits().lost_s


ALL = {ELASTIC_JOB: elastic_job, LEGACY_JOB: legacy_job}
"""By kind."""
