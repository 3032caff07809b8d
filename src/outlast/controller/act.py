"""Doing what was decided, in the order of the plan, which may be broken off between any two writes.

Every write says on which state it is built: a status on a resource version, a deletion on a uid, a creation on a name that is
free. When that is not so any more, somebody was faster, and the next look decides anew; it is not written over.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from outlast.contract import OPERATOR
from outlast.controller import memory
from outlast.controller.plan import Deletion, Document, Note, Plan
from outlast.errors import Absent, ClusterError, Conflict, Taken
from outlast.kinds import EVENT, Kind, kind_of

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""A pod of the same name that is not ours is still going: when to look for it again."""
EVENT_S = 600
"""The same sentence is no new Event within so long. Events are kept for an hour."""


class Writes(Protocol):
    """What is needed of `kube.Cluster`."""

    def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> Document:
        """Raises Absent."""

    def create(self, document: Document) -> Document:
        """Raises Taken."""

    def apply(self, document: Document) -> Document:
        """Server-side apply."""

    def replace(self, document: Document, *, subresource: str = "") -> Document:
        """Raises Conflict."""

    def delete(
        self, kind: Kind, name: str, *, namespace: str | None = None, grace_s: float | None = None, uid: str | None = None
    ) -> Document:
        """Raises Absent; Conflict for another uid."""


@dataclass(frozen=True)
class Done:
    """What became of a plan."""

    look_again: float | None
    """When to look again although nothing happens; seconds since the epoch."""
    stale: str = ""
    """What somebody else had changed meanwhile, so that the rest of the plan was left: a sentence."""


def act(cluster: Writes, job: Mapping[str, Any], plan: Plan, now: float) -> Done:
    """Carry out a plan for a job, as far as the job is still the one that was decided about.

    Raises ClusterError at the first write that fails; what is left undone, the next look finds.
    """
    namespace, again = job["metadata"].get("namespace"), plan.look_again
    for document in plan.setup:
        _make(cluster, document)
    for document in plan.apply:
        cluster.apply(document)
    if plan.status is not None:
        try:
            cluster.replace(_with_status(job, plan.status), subresource="status")
        except Conflict:
            return Done(again, "the job has changed meanwhile")
        except Absent:
            return Done(None, "the job is gone")
    for deletion in plan.deletes:
        delete(cluster, deletion, namespace)
    for document in plan.creates:
        if not _make(cluster, document) and (wrong := _in_the_way(cluster, document, job)):
            log.warning(wrong)
            again = min(again or now + AGAIN_S, now + AGAIN_S)
    if plan.remove:
        delete(cluster, plan.remove, namespace)
    for note in plan.notes:
        _note(cluster, job, note, now)
    return Done(again)


def _with_status(job: Mapping[str, Any], status: Mapping[str, Any]) -> Document:
    """The job as it is written to its subresource: of all that is in it, only the status counts there.

    A PUT and no patch: the status is replaced as a whole, so that a key that was left out is gone; a merge patch would keep it
    unless every one that is to go were named. The version makes it a condition.
    """
    meta = {name: job["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion") if name in job["metadata"]}
    return {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "metadata": meta,
        "spec": job.get("spec", {}),
        "status": dict(status),
    }


def _make(cluster: Writes, document: Document) -> bool:
    """Create it; False when one of its name is there."""
    try:
        cluster.create(document)
    except Taken:
        return False
    return True


def delete(cluster: Writes, deletion: Deletion, namespace: str | None) -> None:
    """Delete what is meant, and nothing that came after it."""
    try:
        cluster.delete(deletion.kind, deletion.name, namespace=namespace, grace_s=deletion.grace_s, uid=deletion.uid)
    except (Absent, Conflict):  # it is gone, whatever has its name now
        return
    log.info("%s %s is deleted: %s", deletion.kind, deletion.name, deletion.reason)


def _in_the_way(cluster: Writes, wanted: Document, job: Mapping[str, Any]) -> str:
    """What has the name of a pod that could not be created; nothing when that is a pod of this very job."""
    kind, meta = kind_of(wanted), wanted["metadata"]
    try:
        there = cluster.get(kind, meta["name"], namespace=meta.get("namespace"))["metadata"]
    except Absent:
        return f"{kind} {meta['name']} was in the way and has just gone; it is made in a moment"
    if any(owner["uid"] == job["metadata"]["uid"] for owner in there.get("ownerReferences") or ()):
        if there.get("deletionTimestamp"):
            return f"{kind} {meta['name']} is still going; it is made anew when it has gone"
        return ""
    if there.get("deletionTimestamp"):
        return f"{kind} {meta['name']} of another job is still going; this job's is made when it has gone"
    return f"{kind} {meta['name']} is there and not of this job; delete it, or give the job another name"


def _note(cluster: Writes, job: Mapping[str, Any], note: Note, now: float) -> None:
    """Write an Event. Its name holds what it says and roughly when, so that saying it again makes no second one, not even after a
    restart. Nothing depends on it, so that a failure is only said."""
    try:
        _make(cluster, event(job, note, now))
    except ClusterError as error:
        log.warning("an Event could not be written (%s): %s", note.message, error)


def event(job: Mapping[str, Any], note: Note, now: float) -> Document:
    """The Event of a note."""
    meta = job["metadata"]
    said = "\0".join((meta["uid"], note.type, note.reason, note.message, str(int(now // EVENT_S))))
    time = memory.text(now)
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {
            "name": f"{meta['name']}.{hashlib.sha256(said.encode()).hexdigest()[:16]}",
            "namespace": meta.get("namespace", "default"),
        },
        "involvedObject": {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": meta["name"],
            "namespace": meta.get("namespace", "default"),
            "uid": meta["uid"],
        },
        "type": note.type,
        "reason": note.reason,
        "message": note.message[:1024],  # the server takes no more
        "source": {"component": OPERATOR},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
