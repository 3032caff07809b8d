"""Diagnoses why a job does not train (`outlast why`), and whether jobs would train (`outlast doctor`).

    causes(gather_evidence.job(cluster, name), now)        why a job on a cluster does not train
    local_job.causes(status, events, now)                  the same for a job on this machine
    cluster.checks(gather_evidence.namespace(cluster))     whether jobs would train there
    machine.checks(), check_pods.checks(...)               the same for this machine, and from inside temporary pods

`RULES` are pure functions from a `Snapshot` to findings. Rules about what ended the job come first, then rules about what keeps
pods from being created, scheduled or started, and then rules about what stops training. messages.yaml explains Kubernetes'
messages.
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
    job.permanent_failure,
    job.not_reconciled,
    job.suspended,
    job.queues,
    containers.failures,
    nodes.lost_pods,
    nodes.removed_pods,
    job.excluded_workers,
    job.failed_creations,
    claims_and_secrets.claims,
    claims_and_secrets.references,
    nodes.unschedulable,
    claims_and_secrets.mounts,
    containers.images,
    containers.start_failures,
    containers.failed_probes,
    job.gangs,
    job.gates,
    job.repeatedly_failing,
    job.deaf,
    job.starting,
    job.waiting_for_workers,
)
_CONSEQUENCES = ("failed", "gang", "others")
"""Names of findings that only follow from other findings. They are listed last."""
_WIDTH = 110


def causes(snapshot: Snapshot, now: float) -> list[Finding]:
    """Return findings about what keeps a job on a cluster from training, the most important first. If nothing does, return one
    finding that says so."""
    if finished_ := job.finished(snapshot):
        return [finished_]
    findings = [each for rule in RULES for each in rule(snapshot, now)]
    findings.sort(key=lambda each: each.name in _CONSEQUENCES)
    if any(each.name == "suspended" for each in findings):
        # The other findings explain the suspension, or are outdated.
        findings = [each for each in findings if each.name in ("suspended", "deleted", "operator")]
    if not any(each.failed for each in findings):
        findings = [*job.reported(snapshot), *findings]
    if any(each.failed for each in findings):
        findings = [each for each in findings if each.failed or each.name != "starting"]
    return findings or [_healthy(snapshot)]


def _healthy(snapshot: Snapshot) -> Finding:
    if not snapshot.workload and not snapshot.pods:
        what = f"there is no job {snapshot.name} in namespace {snapshot.namespace}"
        return Finding("absent", what, "`outlast list` shows those there are")
    running = [pod for pod in snapshot.pods if pod_status.phase(pod) == "Running"]
    status, replicas = snapshot.workload.get("status") or {}, snapshot.replicas()
    told = (str(status["reason"]),) if status.get("reason") else ()
    if not running:
        return passed("starting", "no worker has a pod yet, and no event says why", "look again in a few seconds", told)
    world = status.get("world")
    if snapshot.kind == "ElasticJob" and world and len(world) < replicas:
        return passed("training", f"it trains with {len(world)} of {replicas} workers; the others are joining", "", told)
    return passed("training", f"nothing is wrong: {len(running)} of {replicas} workers run", "", told)


def text(findings: Iterable[Finding], *, forbidden: Iterable[str] = ()) -> str:
    """Format findings as paragraphs, followed by the kinds that could not be read (`forbidden`)."""
    paragraphs = []
    for each in findings:
        lines = _wrapped(each.what[:1].upper() + each.what[1:], "", "")
        for line_ in each.evidence:  # do not wrap lines of logs
            lines += [f"  {line_}"] if line_.startswith(" ") else _wrapped(line_, "  ", "    ")
        paragraphs.append("\n".join([*lines, *_wrapped(each.remedy, "  → ", "    ")]))
    if kinds := joined(forbidden):
        paragraphs.append(f"Not checked, because you may not read them: {kinds}.")
    return "\n\n".join(paragraphs)


def line(check: Finding) -> str:
    """Format a check as its outcome, name and sentence, with the remedy below."""
    head = f"{check.outcome}  {check.name:<18}  "
    indent = " " * len(head)
    return "\n".join([*_wrapped(check.what, head, indent), *_wrapped(check.remedy, f"{indent}→ ", f"{indent}  ")])


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )
