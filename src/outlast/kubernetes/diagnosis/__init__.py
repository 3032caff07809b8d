"""Findings, each with its remedy: why a job does not train (`outlast why`), and whether jobs would train (`outlast doctor`).

    gather.job(cluster, name) -> Snapshot        reads what a cluster shows of a job
    causes(snapshot, now)     -> [Finding]       why it does not train; pure
    local_job.causes(status, events, now)        the same for a job on this machine

    gather.place(cluster)     -> Snapshot        reads what a cluster shows of a place for jobs
    cluster.checks(snapshot)  -> [Finding]       whether jobs would train there; pure
    machine.checks(), inside.checks(cluster)     the same for this machine, and from inside temporary pods

A rule is a function from a `Snapshot` to findings. `RULES` has them in order: first causes that ended the job, then causes that
keep pods from being created, from getting a node, from starting, and from training. messages.yaml has the meanings of messages
from Kubernetes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from outlast.kubernetes.api import pod_status
from outlast.kubernetes.diagnosis import claims_and_secrets, containers, job, nodes
from outlast.kubernetes.diagnosis.evidence import Rule, Snapshot
from outlast.kubernetes.diagnosis.finding import Finding, joined, passed

__all__ = ["RULES", "Finding", "Snapshot", "causes", "line", "text"]

RULES: tuple[Rule, ...] = (
    job.given_up,
    job.absent,
    job.stopped,
    job.queues,
    containers.ends,
    nodes.lost,
    nodes.taken,
    job.cut_off,
    job.creations,
    claims_and_secrets.claims,
    claims_and_secrets.references,
    nodes.unschedulable,
    claims_and_secrets.mounts,
    containers.images,
    containers.starts,
    containers.probing,
    job.gangs,
    job.gates,
    job.failing,
    job.beginning,
    job.others,
)
_FOLLOWS = ("failed", "gang", "others")
"""Names of findings that are consequences of other findings, and are listed after them."""
_WIDTH = 110


def causes(snapshot: Snapshot, now: float) -> list[Finding]:
    """The causes that keep a job on a cluster from training, the most important first; for a job that trains, a single finding
    that says so."""
    if done := job.finished(snapshot):
        return [done]
    found = [each for rule in RULES for each in rule(snapshot, now)]
    found.sort(key=lambda each: each.name in _FOLLOWS)
    if any(each.name == "suspended" for each in found):
        found = [each for each in found if each.name in ("suspended", "deleted")]  # earlier findings explain it, or are over
    if any(each.wrong for each in found):
        found = [each for each in found if each.wrong or each.name != "starting"]
    return found or [_well(snapshot)]


def _well(snapshot: Snapshot) -> Finding:
    if not snapshot.workload and not snapshot.pods:
        what = f"there is no job {snapshot.name} in namespace {snapshot.namespace}"
        return Finding("absent", what, "`outlast list` shows those there are")
    running = [pod for pod in snapshot.pods if pod_status.phase(pod) == "Running"]
    if not running:
        return passed("starting", "no worker has a pod yet, and no event says why", "look again in a few seconds")
    inside, wanted = (snapshot.workload.get("status") or {}).get("world"), snapshot.wanted()
    if snapshot.kind == "ElasticJob" and inside and len(inside) < wanted:
        return passed("training", f"it trains with {len(inside)} of {wanted} workers; the others are joining")
    return passed("training", f"nothing is wrong: {len(running)} of {wanted} workers run")


def text(findings: Iterable[Finding], *, unseen: Iterable[str] = ()) -> str:
    """One paragraph for each finding: the sentence, its evidence and its remedy."""
    paragraphs = []
    for each in findings:
        lines = _wrapped(each.what[:1].upper() + each.what[1:], "", "")
        for said in each.evidence:  # keep lines of logs unchanged
            lines += [f"  {said}"] if said.startswith(" ") else _wrapped(said, "  ", "    ")
        paragraphs.append("\n".join([*lines, *_wrapped(each.remedy, "  → ", "    ")]))
    if blind := joined(unseen):
        paragraphs.append(f"Not checked, because you may not read them: {blind}.")
    return "\n\n".join(paragraphs)


def line(check: Finding) -> str:
    """A check as text: outcome, name and sentence, wrapped if necessary, and the remedy below."""
    head = f"{check.outcome}  {check.name:<18}  "
    deep = " " * len(head)
    return "\n".join([*_wrapped(check.what, head, deep), *_wrapped(check.remedy, f"{deep}→ ", f"{deep}  ")])


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )
