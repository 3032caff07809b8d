"""Doing what was decided, in the order of the plan, which may be broken off between any two writes.

Every write says on which state it is built: a status on a resource version, a deletion on a uid, a creation on a name that is
free. When that is not so any more, somebody was faster, and the next look decides anew; it is not written over.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from outlast.contract import OPERATOR, Label
from outlast.errors import Absent, ClusterError, Conflict, Forbidden, Refused, Taken
from outlast.kube.kinds import EVENT, ROLE, ROLE_BINDING, Kind, kind_of
from outlast.kube.ownership import owned_by
from outlast.operator import job_status
from outlast.operator.parallel import ForEach, immediately, in_order
from outlast.operator.plan import Deletion, Document, Note, Plan

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""A pod of the same name that is not ours is still going: when to look for it again."""
EVENT_S = 600
"""The same sentence within so long is one Event, with a count. Events are kept for an hour."""
FAILED_CREATE = "FailedCreate"
"""Reason of the Event when a pod cannot be made, the same as of Kubernetes' own controllers."""


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

    def patch(self, kind: Kind, name: str, change: Document, *, namespace: str | None = None) -> Document:
        """JSON merge patch. Raises Absent."""

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
    blocked: str = ""
    """What has the name of a pod and will keep it: a sentence."""


def act(
    cluster: Writes,
    job: Mapping[str, Any],
    plan: Plan,
    now: float,
    each: ForEach = in_order,
    later: Callable[[Callable[[], None]], None] = immediately,
    written: Callable[[], None] = lambda: None,
) -> Done:
    """Carry out a plan for a job, as far as the job is still the one that was decided about.

    `each` may make at once what is made, or deleted, of one part of the plan; `later` may have Events written when there is time;
    `written` is called when the status has been written, whatever becomes of the rest.
    Raises ClusterError when a write has failed, with none under way; what is left undone, the next look finds. Of pods, and of
    what they need, that are not accepted it raises Refused or Forbidden, and there is an Event.
    """
    namespace, again = job["metadata"].get("namespace"), plan.look_again

    def note(what: Note) -> None:
        later(functools.partial(_note, cluster, job, what, now))

    foreign: list[str] = []
    set_up = functools.partial(_set_up, cluster, job, foreign)
    first = [document for document in plan.setup if "roleRef" not in document]
    try:
        for part in (first, [document for document in plan.setup if "roleRef" in document]):  # nobody may give an absent Role
            if going := "; ".join(filter(None, each(set_up, part))):
                note(Note("Normal", "NameTaken", going))
                return Done(now + AGAIN_S, going)
        for document in plan.apply:
            if going := _change(cluster, job, foreign, document):
                note(Note("Normal", "NameTaken", going))
                return Done(now + AGAIN_S, going)
        for sentence in foreign:
            log.warning(sentence)
            note(Note("Warning", "NameTaken", sentence))
    except (Forbidden, Refused) as error:
        note(Note("Warning", FAILED_CREATE, str(error)))
        raise
    if plan.status is not None:
        try:
            cluster.replace(_with_status(job, plan.status), subresource="status")
        except Conflict:
            return Done(again, "the job has changed meanwhile")
        except Absent:
            return Done(None, "the job is gone")
        written()
    for said in plan.notes:  # the status says it now, whatever becomes of the rest
        note(said)
    each(lambda deletion: delete(cluster, deletion, namespace), plan.deletes)
    for document in plan.statuses:
        try:
            cluster.replace(document, subresource="status")
        except (Conflict, Absent):
            return Done(again, f"{document['kind']} {document['metadata']['name']} has changed meanwhile")
    try:
        in_the_way = each(
            lambda document: None if _make(cluster, document) else _in_the_way(cluster, document, job), plan.creates
        )
    except (Forbidden, Refused) as error:
        note(Note("Warning", FAILED_CREATE, str(error)))
        raise
    blocked = ""
    for way in filter(None, in_the_way):
        log.warning(way.sentence)
        again = min(again or now + AGAIN_S, now + AGAIN_S)
        if way.stays and not blocked:
            blocked = way.sentence
            note(Note("Warning", FAILED_CREATE, blocked))
    if plan.remove:
        delete(cluster, plan.remove, namespace)
    return Done(again, blocked=blocked)


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


def _set_up(cluster: Writes, job: Mapping[str, Any], foreign: list[str], document: Document) -> str:
    """Create what pods need. What has its name stays; what does so and is not the job's is added to `foreign`, but rights that
    others have given are not handed to pods: Refused. And what was made for a job of this name that is gone will be collected as
    garbage, and nobody would make it anew: then a sentence, and it is to be looked for again."""
    refused: ClusterError | None = None
    try:
        if _make(cluster, document):
            return ""
    except (Forbidden, Refused) as error:  # a quota that is used up is looked at before what is there
        refused = error
    name = f"{kind_of(document)} {document['metadata']['name']}"
    try:
        there = cluster.get(kind_of(document), document["metadata"]["name"], namespace=document["metadata"].get("namespace"))
    except Absent:
        if refused is not None:
            raise refused from None
        return f"{name} was in the way and has just gone"
    return _others(job, foreign, document, there) or ""


def _change(cluster: Writes, job: Mapping[str, Any], foreign: list[str], document: Document) -> str:
    """Make what we say of a document true, if it is the job's, or nobody has its name: what others have made is theirs, also when
    they have made it since. The same sentences as of `_set_up`."""
    meta = document["metadata"]
    try:
        there = cluster.get(kind_of(document), meta["name"], namespace=meta.get("namespace"))
    except Absent:
        return "" if _make(cluster, document) else f"{kind_of(document)} {meta['name']} has just come; it is looked at anew"
    if (others := _others(job, foreign, document, there)) is not None:
        return others
    cluster.apply(document)
    return ""


def _others(job: Mapping[str, Any], foreign: list[str], document: Document, there: Document) -> str | None:
    """None when what has a document's name is the job's; otherwise what `_set_up` says of it."""
    name = f"{kind_of(document)} {document['metadata']['name']}"
    if not document["metadata"].get("ownerReferences"):
        return ""
    if owned_by(there, job):
        return None
    owners = there["metadata"].get("ownerReferences") or ()
    if any(_of(owner) == (kind_of(job).group, job["kind"], job["metadata"]["name"]) for owner in owners):
        return f"{name} of an earlier job of this name is still there; this job's is made when it has gone"
    if kind_of(document) in (ROLE, ROLE_BINDING):
        raise Refused(f"{name} is there and not of this job; delete it, or give the job another name")
    foreign.append(f"{name} is there and not of this job, and stays as it is; give the job another name if that is not meant")
    return ""


def _of(owner: Mapping[str, Any]) -> tuple[str, str, str]:
    """Group, kind and name of an owner."""
    return owner["apiVersion"].partition("/")[0], owner["kind"], owner["name"]


def delete(cluster: Writes, deletion: Deletion, namespace: str | None) -> None:
    """Delete what is meant, and nothing that came after it."""
    try:
        cluster.delete(deletion.kind, deletion.name, namespace=namespace, grace_s=deletion.grace_s, uid=deletion.uid)
    except (Absent, Conflict):  # it is gone, whatever has its name now
        return
    log.info("%s %s is deleted: %s", deletion.kind, deletion.name, deletion.reason)


@dataclass(frozen=True)
class _Way:
    """What has the name of a pod that could not be created."""

    sentence: str
    stays: bool = False
    """Whether it will not go by itself."""


def _in_the_way(cluster: Writes, wanted: Document, job: Mapping[str, Any]) -> _Way | None:
    """What has the name of a pod that could not be created; None when that is a pod of this very job. One without our label
    gets it, for by that pods are watched: the controller that we stand in for has made it, or somebody has changed the label."""
    kind, meta = kind_of(wanted), wanted["metadata"]
    try:
        found = cluster.get(kind, meta["name"], namespace=meta.get("namespace"))
    except Absent:
        return _Way(f"{kind} {meta['name']} was in the way and has just gone; it is made in a moment")
    there = found["metadata"]
    if owned_by(found, job):
        if there.get("deletionTimestamp"):
            return _Way(f"{kind} {meta['name']} is still going; it is made anew when it has gone")
        if (there.get("labels") or {}).get(Label.JOB) != meta["labels"].get(Label.JOB):
            log.info("%s %s of this job had not its label, by which it is watched, and goes on with it", kind, meta["name"])
            cluster.patch(kind, meta["name"], {"metadata": {"labels": meta["labels"]}}, namespace=meta.get("namespace"))
        return None
    if there.get("deletionTimestamp"):
        return _Way(f"{kind} {meta['name']} of another job is still going; this job's is made when it has gone")
    return _Way(f"{kind} {meta['name']} is there and not of this job; delete it, or give the job another name", stays=True)


def _note(cluster: Writes, job: Mapping[str, Any], note: Note, now: float) -> None:
    """Write an Event. Its name holds what it says and roughly when: what is said again is counted on the one that is there, also
    after a restart. Nothing depends on it, so that a failure is only said."""
    made = event(job, note, now)
    try:
        if not _make(cluster, made):
            name, namespace = made["metadata"]["name"], made["metadata"]["namespace"]
            count = int(cluster.get(EVENT, name, namespace=namespace).get("count") or 1) + 1
            cluster.patch(EVENT, name, {"count": count, "lastTimestamp": made["lastTimestamp"]}, namespace=namespace)
    except ClusterError as error:
        log.warning("an Event could not be written (%s): %s", note.message, error)


def event(job: Mapping[str, Any], note: Note, now: float) -> Document:
    """The Event of a note."""
    meta = job["metadata"]
    said = "\0".join((meta["uid"], note.type, note.reason, note.message, str(int(now // EVENT_S))))
    time = job_status.text(now)
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
