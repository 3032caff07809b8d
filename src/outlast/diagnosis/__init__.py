"""Why a job does not train: from a snapshot of it to causes, each with its evidence and a remedy.

    gather.job(cluster, name) -> Snapshot      reads documents from a cluster
    causes(snapshot, now)           -> [Cause]   decides; pure
    local_job.causes(status, events, now)         the same for a job of this machine
    text(causes, about)                      what `outlast why` prints

A rule is a function from a `Snapshot` to causes; `RULES` is their order: first what ended the job, then what keeps workers from
being made, from getting a node, from starting, from training. Several rules may find a cause.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator

from outlast.diagnosis import admission, containers, job, nodes, scheduling, storage
from outlast.diagnosis.cause import Cause, joined
from outlast.diagnosis.snapshot import Snapshot
from outlast.kube import pods as kube_pods

__all__ = ["RULES", "Cause", "Snapshot", "causes", "text"]

RULES: tuple[Callable[[Snapshot, float], Iterator[Cause]], ...] = (
    job.given_up,
    job.absent,
    job.wishes,
    job.queues,
    containers.ends,
    nodes.lost,
    nodes.taken,
    job.cut_off,
    admission.creations,
    storage.claims,
    storage.references,
    scheduling.unschedulable,
    storage.mounts,
    containers.images,
    containers.starts,
    containers.probing,
    job.gangs,
    job.failing,
    job.beginning,
    job.others,
)
_FOLLOWS = ("failed", "gang", "others")
"""Rules that tell what follows from other causes: these come first, if there are any."""
_WIDTH = 110


def causes(snapshot: Snapshot, now: float) -> list[Cause]:
    """What keeps a job on a cluster from training, most important first; when it trains, that."""
    if done := job.finished(snapshot):
        return [done]
    found = [cause for rule in RULES for cause in rule(snapshot, now)]
    found.sort(key=lambda cause: cause.rule in _FOLLOWS)
    if any(cause.rule == "suspended" for cause in found):
        found = [cause for cause in found if cause.rule in ("suspended", "deleted")]  # what went before is why, or over
    if any(cause.wrong for cause in found):
        found = [cause for cause in found if cause.wrong or cause.rule not in ("starting",)]
    return found or [_well(snapshot)]


def _well(snapshot: Snapshot) -> Cause:
    if not snapshot.workload and not snapshot.pods:
        what = f"there is no job {snapshot.name} in namespace {snapshot.namespace}"
        return Cause("absent", what, (), "`outlast list` shows those there are")
    running = [pod for pod in snapshot.pods if kube_pods.phase(pod) == "Running"]
    if not running:
        return Cause("starting", "no worker has a pod yet, and no event says why", (), "look again in a few seconds", wrong=False)
    inside, wanted = (snapshot.workload.get("status") or {}).get("world"), snapshot.wanted()
    if snapshot.kind == "ElasticJob" and inside and len(inside) < wanted:
        return Cause("training", f"it trains with {len(inside)} of {wanted} workers; the others are joining", wrong=False)
    return Cause("training", f"nothing is wrong: {len(running)} of {wanted} workers run", wrong=False)


def text(causes: Iterable[Cause], *, unseen: Iterable[str] = ()) -> str:
    """One paragraph a cause: the sentence, its evidence and its remedy."""
    paragraphs = []
    for cause in causes:
        lines = _wrapped(cause.what[:1].upper() + cause.what[1:], "", "")
        for each in cause.evidence:
            if each.startswith(" "):  # of a log: as it is
                lines.append(f"  {each}")
            else:
                lines += _wrapped(each, "  ", "    ")
        if cause.remedy:
            lines += _wrapped(cause.remedy, "  → ", "    ")
        paragraphs.append("\n".join(lines))
    if blind := joined(unseen):
        paragraphs.append(f"Not checked, because you may not read them: {blind}.")
    return "\n\n".join(paragraphs)


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )
