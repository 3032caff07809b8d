"""Who decides about which kind of job: the one place to name another kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outlast.controller.decide import decide
from outlast.controller.observe import observe
from outlast.controller.plan import Document, Plan
from outlast.kinds import ELASTIC_JOB


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


ALL = {ELASTIC_JOB: elastic_job}
"""By kind."""
