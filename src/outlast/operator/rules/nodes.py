"""A node does not answer, is gone, or will be. Pure."""

from __future__ import annotations

from outlast.operator.plan import Event
from outlast.operator.reconcile import Reconcile
from outlast.operator.rules import failures
from outlast.operator.rules.workers import FAST_LOSS_S


def lost_workers(rec: Reconcile) -> None:
    """Force-delete pods whose node does not answer or is gone."""
    explained = set()
    silent = rec.status.silent_uids
    for pod in rec.snapshot.pods:
        if pod.node_lost is None or pod.uid in rec.ends or pod.uid in rec.deletes:
            continue
        gone = pod.node not in rec.snapshot.nodes
        report = rec.snapshot.reports.get(pod.index)
        quiet = rec.last_heard(report) if report and not gone else max(pod.node_lost, pod.created, rec.snapshot.since)
        if (end := rec.until(quiet, rec.snapshot.limits.lost_s)) is not None:
            rec.requeue_at(end)
            continue
        how = "is gone" if gone else f"has not answered for {rec.snapshot.limits.lost_s:g} s"
        sentence = f"worker {pod.index} was lost: its node {pod.node} {how}"
        if pod.uid in silent or (not pod.terminating and pod.uid not in rec.handled):
            rec.update(interruptions=rec.status.interruptions + 1)
            explained.add(pod.uid)
            rec.events.append(Event("Warning", "NodeLost", sentence))
            failures.expect_others(rec, pod)
        rec.delete(pod, sentence, grace_s=0)
    if explained & silent:
        rec.update(silent=tuple(each for each in rec.status.silent if each.uid not in explained))


def leaving_nodes(rec: Reconcile) -> None:
    """A node is about to be terminated: its workers save and exit while there is time."""
    for pod in rec.alive:
        if pod.node_leaves:
            if (rest := rec.until(pod.created, FAST_LOSS_S)) is not None:
                rec.requeue_at(rest)  # scheduled there despite the taint; the next one would be, too
                continue
            sentence = f"worker {pod.index} leaves: its node {pod.node} is about to be terminated ({pod.node_leaves})"
            failures.interrupted(rec, pod, "NodeLeaving", sentence)
            rec.delete(pod, sentence)
