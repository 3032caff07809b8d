"""Carries out the operator's plans. It is safe to kill the process between any two writes.

Most writes have a precondition: a resource version for a status, a uid for a deletion, a free name for a creation. If a
precondition does not hold, somebody else has changed the object, and the next reconcile pass decides again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outlast.base.errors import Absent, ClusterError, Conflict, Forbidden, Refused, Taken
from outlast.job.contract import OPERATOR, Label
from outlast.kubernetes.api import owner_references, pod_status
from outlast.kubernetes.api.kinds import EVENT, POD, ROLE, ROLE_BINDING, SERVICE_ACCOUNT, kind_of
from outlast.kubernetes.operator.plan import Deletion, Document, Event, Plan
from outlast.kubernetes.operator.writer import Parallel, Writer

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before retrying to create an object whose name is still taken."""
EVENT_WINDOW_S = 600
"""Identical Events within this window, in seconds, are merged into one Event with a count."""
FAILED_CREATE = "FailedCreate"


@dataclass(frozen=True)
class Outcome:
    requeue_at: float | None
    """When to reconcile the job again even if nothing changes."""
    stale_reason: str = ""
    """Why the rest of the plan was dropped; empty if the plan was carried out."""
    blocked_reason: str = ""
    """A sentence about a foreign object that keeps a pod from being created; empty if there is none."""


def carry_out(
    cluster: Writer,
    job: Mapping[str, Any],
    plan: Plan,
    now: float,
    parallel: Parallel,
    background: Callable[[Callable[[], None]], None],
    on_status_written: Callable[[], None] = lambda: None,
) -> Outcome:
    """Carry out a plan, but stop if a status write shows that the job has changed since the plan was made.

    `parallel` runs the writes of one part of the plan concurrently, and `background` writes Events. `on_status_written` is called
    even if a later write fails. If a write fails, raises ClusterError once no other write is in flight. If the API server rejects
    a pod or an object that pods need, writes an Event and raises Refused or Forbidden.
    """
    execution = _Execution(cluster, job, now, parallel, background)
    try:
        if obstacle := execution.prerequisites(plan):
            execution.write_event(Event("Normal", "NameTaken", obstacle))
            return Outcome(now + RETRY_S, obstacle)
    except (Forbidden, Refused) as error:
        execution.write_event(Event("Warning", FAILED_CREATE, str(error)))
        raise
    if plan.status is not None:
        try:
            cluster.replace(_with_status(job, plan.status), subresource="status")
        except Conflict:
            return Outcome(plan.requeue_at, "the job has changed meanwhile")
        except Absent:
            return Outcome(None, "the job is gone")
        on_status_written()
    for event in plan.events:
        execution.write_event(event)
    parallel(lambda deletion: delete(cluster, deletion, execution.namespace), plan.deletes)
    for document in plan.statuses:
        try:
            cluster.replace(document, subresource="status")
        except (Conflict, Absent):
            return Outcome(plan.requeue_at, f"{document['kind']} {document['metadata']['name']} has changed meanwhile")
    try:
        outcome = execution.create_pods(plan)
    except (Forbidden, Refused) as error:
        execution.write_event(Event("Warning", FAILED_CREATE, str(error)))
        raise
    if plan.remove:
        delete(cluster, plan.remove, execution.namespace)
    return outcome


class _Execution:
    def __init__(
        self,
        cluster: Writer,
        job: Mapping[str, Any],
        now: float,
        parallel: Parallel,
        background: Callable[[Callable[[], None]], None],
    ) -> None:
        self.cluster, self.job, self.now, self._parallel, self._background = cluster, job, now, parallel, background
        self.namespace = job["metadata"].get("namespace")
        self._conflicts: list[str] = []

    def write_event(self, event: Event) -> None:
        self._background(functools.partial(_write_event, self.cluster, self.job, event, self.now))

    def prerequisites(self, plan: Plan) -> str:
        """Create the plan's `prerequisites`, and update the objects in `apply`. Returns a sentence about an object that must
        disappear first, or an empty string."""
        bindings = [document for document in plan.prerequisites if "roleRef" in document]
        others = [document for document in plan.prerequisites if "roleRef" not in document]
        for part in (others, bindings):  # a Role must exist before it is bound
            if obstacle := "; ".join(filter(None, self._parallel(self._create_unless_exists, part))):
                return obstacle
        for document in plan.apply:
            if obstacle := self._apply(document):
                return obstacle
        for sentence in self._conflicts:
            log.warning(sentence)
            self.write_event(Event("Warning", "NameTaken", sentence))
        return ""

    def create_pods(self, plan: Plan) -> Outcome:
        requeue_at, blocked = plan.requeue_at, ""
        for obstacle in filter(None, self._parallel(self._create_pod, plan.creates)):
            sentence, permanent = obstacle
            log.warning(sentence)
            requeue_at = min(requeue_at or self.now + RETRY_S, self.now + RETRY_S)
            if permanent and not blocked:
                blocked = sentence
                self.write_event(Event("Warning", FAILED_CREATE, blocked))
        return Outcome(requeue_at, blocked_reason=blocked)

    def _create_unless_exists(self, document: Document) -> str:
        refused: ClusterError | None = None
        if kind_of(document) is SERVICE_ACCOUNT:  # its pods pull images as those of the namespace's default account do
            default = self.cluster.find(SERVICE_ACCOUNT, "default", namespace=self.namespace) or {}
            document = {**document, "imagePullSecrets": default.get("imagePullSecrets") or []}
        try:
            if _create(self.cluster, document):
                return ""
        except (Forbidden, Refused) as error:  # the API server checks quotas before names
            refused = error
        if (existing := self._existing(document)) is None:
            if refused is not None:
                raise refused
            return f"{_name(document)} existed and is just gone"
        return self._check_owner(document, existing) or ""

    def _apply(self, document: Document) -> str:
        if (existing := self._existing(document)) is None:
            return "" if _create(self.cluster, document) else f"{_name(document)} was just created; it is checked again"
        if (conflict := self._check_owner(document, existing)) is not None:
            return conflict
        self.cluster.apply(document)
        return ""

    def _check_owner(self, document: Document, existing: Document) -> str | None:
        """Return None if the existing object belongs to this job, and a sentence if it belongs to an earlier job of this name and
        must be garbage-collected first. For a foreign object, record a warning and return an empty string. Raises Refused for a
        foreign Role or RoleBinding, because pods must not get rights that somebody else granted."""
        name = _name(document)
        if not document["metadata"].get("ownerReferences"):
            return ""
        if owner_references.owned_by(existing, self.job):
            return None
        if owner_references.owned_by_predecessor(existing, self.job):
            return f"{name} of an earlier job of this name still exists; this one is created when it is gone"
        if kind_of(document) in (ROLE, ROLE_BINDING):
            raise Refused(f"{name} exists and does not belong to this job; delete it, or give the job another name")
        remedy = "give the job another name if that is not meant"
        self._conflicts.append(f"{name} exists and does not belong to this job, and stays as it is; {remedy}")
        return ""

    def _existing(self, document: Document) -> Document | None:
        meta = document["metadata"]
        return self.cluster.find(kind_of(document), meta["name"], namespace=meta.get("namespace"))

    def _create_pod(self, pod: Document) -> tuple[str, bool] | None:
        """Create a pod, or return a sentence about the obstacle and whether it is permanent. If the job's pod exists but lacks
        the label that the watch selects, add the label."""
        if _create(self.cluster, pod):
            return None
        name, meta = _name(pod), pod["metadata"]
        if (document := self._existing(pod)) is None:
            return f"{name} existed and is just gone; it is created in a moment", False
        existing = document["metadata"]
        if owner_references.owned_by(document, self.job):
            if existing.get("deletionTimestamp"):
                return f"{name} is still terminating; it is created again when it is gone", False
            if (existing.get("labels") or {}).get(Label.JOB) != meta["labels"].get(Label.JOB):
                log.info("%s of this job lacked the label that the watch selects; it has it now", name)
                self.cluster.patch(POD, meta["name"], {"metadata": {"labels": meta["labels"]}}, namespace=meta.get("namespace"))
            return None
        if existing.get("deletionTimestamp"):
            return f"{name} of another job is still terminating; this one is created when it is gone", False
        return f"{name} exists and does not belong to this job; delete it, or give the job another name", True


def _with_status(job: Mapping[str, Any], status: Mapping[str, Any]) -> Document:
    """Return the job with its new status, for a PUT to the status subresource. Unlike a merge patch, a PUT removes missing keys.
    The resource version makes the write conditional."""
    meta = {name: job["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion") if name in job["metadata"]}
    return kind_of(job).document(meta, spec=job.get("spec", {}), status=dict(status))


def _name(document: Mapping[str, Any]) -> str:
    return f"{kind_of(document)} {document['metadata']['name']}"


def _create(cluster: Writer, document: Document) -> bool:
    try:
        cluster.create(document)
    except Taken:
        return False
    return True


def delete(cluster: Writer, deletion: Deletion, namespace: str | None) -> None:
    """Delete an object, unless it is gone or a newer object has its name."""
    try:
        cluster.delete(deletion.kind, deletion.name, namespace=namespace, grace_s=deletion.grace_s, uid=deletion.uid)
    except (Absent, Conflict):
        return
    log.info("%s %s is deleted: %s", deletion.kind, deletion.name, deletion.reason)


def _write_event(cluster: Writer, job: Mapping[str, Any], event: Event, now: float) -> None:
    """Write an Event. The Event's name contains a hash of its content and time window, so writing it again only increments its
    count. Failures are only logged."""
    document = event_document(job, event, now)
    try:
        if not _create(cluster, document):
            name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
            count = int(cluster.get(EVENT, name, namespace=namespace).get("count") or 1) + 1
            cluster.patch(EVENT, name, {"count": count, "lastTimestamp": document["lastTimestamp"]}, namespace=namespace)
    except ClusterError as error:
        log.warning("an Event could not be written (%s): %s", event.message, error)


def event_document(job: Mapping[str, Any], event: Event, now: float) -> Document:
    meta = job["metadata"]
    namespace, time = meta.get("namespace", "default"), pod_status.rfc3339(now)
    content = "\0".join((meta["uid"], event.type, event.reason, event.message, str(int(now // EVENT_WINDOW_S))))
    name = f"{meta['name']}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    involved = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": meta["name"], "namespace": namespace}
    return EVENT.document(
        {"name": name, "namespace": namespace},
        involvedObject={**involved, "uid": meta["uid"]},
        type=event.type,
        reason=event.reason,
        message=event.message[:1024],  # the server accepts no more
        source={"component": OPERATOR},
        firstTimestamp=time,
        lastTimestamp=time,
        count=1,
    )
