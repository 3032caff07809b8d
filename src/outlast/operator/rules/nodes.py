"""A node does not answer, is gone, or will be. Pure."""

from __future__ import annotations

from outlast.operator.plan import Note
from outlast.operator.reconcile import Look
from outlast.operator.rules import failures
from outlast.operator.rules.workers import FAST_LOSS_S


def lost_workers(look: Look) -> None:
    """Pods on nodes that do not answer, or are gone: they are deleted whatever their node says."""
    explained = set()
    silent = look.memory.silent_uids
    for pod in look.seen.pods:
        if pod.node_lost is None or pod.uid in look.ends or pod.uid in look.deletes:
            continue
        gone = pod.node not in look.seen.nodes
        told = look.seen.told.get(pod.index)
        quiet = look.heard(told) if told and not gone else max(pod.node_lost, pod.born, look.seen.since)
        if (end := look.until(quiet, look.seen.limits.lost_s)) is not None:
            look.again(end)
            continue
        how = "is gone" if gone else f"has not answered for {look.seen.limits.lost_s:g} s"
        sentence = f"worker {pod.index} was lost: its node {pod.node} {how}"
        if pod.uid in silent or (not pod.leaves and pod.uid not in look.expected):
            look.know(interruptions=look.memory.interruptions + 1)
            explained.add(pod.uid)
            look.notes.append(Note("Warning", "NodeLost", sentence))
            failures.went(look, pod)
        look.delete(pod, sentence, grace_s=0)
    if explained & silent:
        look.know(silent=tuple(each for each in look.memory.silent if each.uid not in explained))


def leaving_nodes(look: Look) -> None:
    """A node has been told that it will be gone: its workers save and leave while there is time."""
    for pod in look.alive:
        if pod.node_leaves:
            if (rest := look.until(pod.born, FAST_LOSS_S)) is not None:
                look.again(rest)  # it was put there all the same; the next one would be, too
                continue
            sentence = f"worker {pod.index} leaves: its node {pod.node} is going away ({pod.node_leaves})"
            failures.interrupted(look, pod, "NodeLeaving", sentence)
            look.delete(pod, sentence)
