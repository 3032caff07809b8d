"""Caches the cluster's state for the operator: objects from the watches, and the responses to the operator's own writes.

A watch lags: a decision based on the watch alone would create again what we have just created. So the response to each write
takes precedence until the watch has reached its resource version. Resource versions of one kind are increasing numbers
(guaranteed by KEP-5504, and true in practice before it).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from outlast.job import contract
from outlast.job.contract import Annotation, Label
from outlast.kubernetes.api.kinds import LEASE, NODE, POD, Kind
from outlast.kubernetes.operator import leaving_nodes

Document = dict[str, Any]
NamespacedName = tuple[str, str]
_NODE_ANNOTATIONS = (Annotation.LEAVING_AT, Annotation.LEAVING_REASON)
_REDUNDANT_ANNOTATIONS = (Annotation.JOB_FILE, "kubectl.kubernetes.io/last-applied-configuration")
"""Large annotations whose content the operator gets from elsewhere."""
_WORKER_LEASE = re.compile(re.escape(contract.worker_name("@", 0)).replace("@", "(?P<job>.+)").replace("0", "[0-9]+"))
Urgency = Literal["now", "later"]
"""When to reconcile a change: immediately, or within seconds together with other changes."""


class Key(NamedTuple):
    kind: Kind
    namespace: str
    name: str


@dataclass(frozen=True)
class CachedJob:
    """A job's objects at one point in time. They are copies, except for the nodes, which must not be modified."""

    job: Document | None
    pods: list[Document]
    leases: list[Document]
    nodes: Mapping[str, Document]
    observed_since: float
    """When the last of the required watches connected; the current time while any of them is disconnected."""
    refusal: str = ""
    """Why the last attempt to create the job's pods failed; empty if it did not fail."""
    job_count: int = 1


class _Entry(NamedTuple):
    """An object as JSON, which takes a fifth of the memory that dictionaries would take."""

    body: bytes
    """The object without its resource version."""
    uid: str
    version: int
    urgent_hash: int
    """Hash of the fields whose changes must be reconciled immediately."""
    progress_hash: int
    """Hash of the parts of a progress report whose changes may be reconciled later."""
    job: str
    node: str


@dataclass
class KindCache:
    kind: Kind
    watched: dict[NamespacedName, _Entry] = field(default_factory=dict)
    delivered_version: int = 0
    """The resource version up to which the watch has delivered everything."""
    connected: bool = False
    synced: bool = False
    connected_at: float = 0.0
    written: dict[NamespacedName, _Entry] = field(default_factory=dict)
    """Responses to our own writes, kept until the watch reaches their versions."""
    deleted_uids: set[str] = field(default_factory=set)
    """Uids of objects that we have deleted but that the watch still shows."""
    unconfirmed: set[NamespacedName] | None = None
    """Names from the previous watch that the new watch has not listed yet; None while no watch is listing."""
    jobs: dict[NamespacedName, set[NamespacedName]] = field(default_factory=dict)

    def begin_listing(self) -> None:
        """Record that the watch starts to list all objects."""
        self.unconfirmed = set(self.watched)

    def set_version(self, version: str | None, now: float) -> list[_Entry]:
        """Record that the watch has delivered everything up to `version`, or if that is None, that the watch is disconnected.
        Returns the objects that have vanished without an event."""
        if version is None:
            self.connected = False
            return []
        if not self.connected:
            self.connected, self.connected_at = True, now
        self.synced = True
        self.delivered_version = max(self.delivered_version, int(version))
        vanished = [self.watched[name] for name in self.unconfirmed or ()]
        for name in self.unconfirmed or ():
            self._drop(name)
        self.unconfirmed = None
        return vanished

    def put(self, document: Document) -> Urgency | None:
        """Store an object from the watch. Returns when to reconcile the change, or None if that is not necessary."""
        name, new = _name_of(document), _entry(self.kind, document)
        previous = self.newest(name)
        if self.unconfirmed is not None:
            self.unconfirmed.discard(name)
        if (old := self.watched.get(name)) and old.uid != new.uid:
            self.deleted_uids.discard(old.uid)
        self.watched[name] = new
        self._index(name, old)
        self._advance(new.version)
        after = self.newest(name)
        if (previous and (previous.uid, previous.urgent_hash)) != (after and (after.uid, after.urgent_hash)):
            return "now"
        return "later" if previous and after and previous.progress_hash != after.progress_hash else None

    def remove(self, document: Document) -> bool:
        """Remove an object that the watch reports as deleted. Returns False if the deletion was already known."""
        name, uid = _name_of(document), document["metadata"]["uid"]
        previous = self.newest(name)
        self._advance(int(document["metadata"]["resourceVersion"]))
        if (old := self.watched.get(name)) and old.uid == uid:
            self._drop(name)
        self.deleted_uids.discard(uid)
        return previous is not None and self.newest(name) is None

    def add_written(self, document: Document) -> None:
        name, new = _name_of(document), _entry(self.kind, document)
        last = self.written.get(name)
        if new.version > self.delivered_version and (last is None or last.version < new.version):
            self.written[name] = new
            self._index(name, last)

    def mark_deleted(self, name: NamespacedName, uid: str) -> None:
        """Record that we have deleted an object and that it is gone."""
        if any(each is not None and each.uid == uid for each in (self.watched.get(name), self.written.get(name))):
            self.deleted_uids.add(uid)

    def newest(self, name: NamespacedName) -> _Entry | None:
        """Return the newest version of an object, or None if the object is unknown or deleted."""
        entry = self.written.get(name)
        if entry is not None and entry.version <= self.delivered_version:
            del self.written[name]
            if name not in self.watched:
                self.deleted_uids.discard(entry.uid)
            self._index(name, entry)
            entry = None
        entry = entry or self.watched.get(name)
        return None if entry is None or entry.uid in self.deleted_uids else entry

    def of_job(self, job: NamespacedName) -> list[Document]:
        """Return a job's objects, sorted by name."""
        found = [self.newest(name) for name in sorted(self.jobs.get(job, ()))]
        return [_decoded(each) for each in found if each is not None and each.job == job[1]]

    def _advance(self, version: int) -> None:
        """Record the version that the watch has reached, unless the watch is listing: a list's items come in no particular
        order."""
        if self.connected and self.unconfirmed is None:
            self.delivered_version = max(self.delivered_version, version)

    def _drop(self, name: NamespacedName) -> None:
        old = self.watched.pop(name)
        self.deleted_uids.discard(old.uid)
        self._index(name, old)

    def _index(self, name: NamespacedName, old: _Entry | None) -> None:
        now = {each.job for each in (self.watched.get(name), self.written.get(name)) if each is not None}
        for job in now:
            self.jobs.setdefault((name[0], job), set()).add(name)
        if old is not None and old.job not in now:
            left = self.jobs.get((name[0], old.job), set())
            left.discard(name)
            if not left:
                self.jobs.pop((name[0], old.job), None)


class Cache:
    """Caches jobs, their pods and Leases, and nodes. Calls `on_change` for each job that must be reconciled."""

    def __init__(self, jobs: Iterable[Kind], on_change: Callable[[Key, Urgency], None]) -> None:
        self.jobs = tuple(jobs)
        self.on_change = on_change
        self._kinds = {kind: KindCache(kind) for kind in (*self.jobs, POD, LEASE, NODE)}
        self._required = tuple(self._kinds)
        self._nodes: dict[str, Document] = {}
        self._lock = threading.RLock()

    def add_kind(self, kind: Kind) -> None:
        """Start an empty cache for an optional kind. `CachedJob.observed_since` ignores optional kinds, and so does `unsynced` by
        default."""
        with self._lock:
            self._kinds[kind] = KindCache(kind)

    # called by the watches

    def begin_listing(self, kind: Kind) -> None:
        with self._lock:
            self._kinds[kind].begin_listing()

    def set_version(self, kind: Kind, version: str | None, now: float) -> None:
        with self._lock:
            for each in self._kinds[kind].set_version(version, now):
                self._notify(kind, _decoded(each))

    def put(self, kind: Kind, document: Document) -> None:
        with self._lock:
            old = self._kinds[kind].watched.get(_name_of(document))
            urgency = self._kinds[kind].put(document)
            if old and kind not in self.jobs and old.job != _job_of(kind, document):
                self._notify_job(_name_of(document)[0], old.job)  # the object now belongs to another job
            if kind == NODE:  # the old dict is not modified, as readers may still hold it
                self._nodes = {**self._nodes, document["metadata"]["name"]: document}
            if urgency:
                self._notify(kind, document, urgency)

    def remove(self, kind: Kind, document: Document) -> None:
        with self._lock:
            name = _name_of(document)
            old = self._kinds[kind].watched.get(name)
            if self._kinds[kind].remove(document):
                self._notify(kind, _decoded(old) if old else document)

    # called after our own writes

    def add_written(self, kind: Kind, document: Document) -> None:
        with self._lock:
            if kind in self._kinds:
                self._kinds[kind].add_written(trimmed(kind, document))

    def mark_deleted(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        with self._lock:
            if kind in self._kinds:
                self._kinds[kind].mark_deleted((namespace, name), uid)

    # called by the reconcilers

    def job(self, key: Key, now: float) -> CachedJob:
        name = (key.namespace, key.name)
        with self._lock:
            job = self._kinds[key.kind].newest(name)
            required = [self._kinds[kind] for kind in self._required]
            since = max(kind_cache.connected_at if kind_cache.connected else now for kind_cache in required)
            pods, leases = self._kinds[POD].of_job(name), self._kinds[LEASE].of_job(name)
            jobs = len(self._kinds[key.kind].watched)
            return CachedJob(_decoded(job) if job else None, pods, leases, self._nodes, since, job_count=jobs)

    def unsynced(self, kinds: Iterable[Kind] | None = None) -> list[Kind]:
        """Return the kinds whose watches have not yet delivered all existing objects."""
        with self._lock:
            return [kind for kind in kinds or self._required if not self._kinds[kind].synced]

    def of_job(self, kind: Kind, key: Key) -> list[Document]:
        with self._lock:
            return self._kinds[kind].of_job((key.namespace, key.name))

    def documents(self, kind: Kind) -> list[Document]:
        """Return all objects of a kind that has few."""
        with self._lock:
            newest = map(self._kinds[kind].newest, sorted(self._kinds[kind].watched))
            return [_decoded(each) for each in newest if each is not None]

    def mark_unserved(self, kind: Kind, now: float) -> None:
        """Record that the cluster does not serve this kind, so that nothing waits for its watch."""
        with self._lock:
            kind_cache = self._kinds[kind]
            if not kind_cache.connected:
                kind_cache.synced, kind_cache.connected, kind_cache.connected_at = True, True, now

    def job_keys(self) -> list[Key]:
        with self._lock:
            return [Key(kind, *name) for kind in self.jobs for name in self._kinds[kind].watched]

    def count(self, kind: Kind) -> int:
        with self._lock:
            return len(self._kinds[kind].watched)

    def _notify(self, kind: Kind, document: Document, urgency: Urgency = "now") -> None:
        namespace, name = _name_of(document)
        if kind in self.jobs:
            self.on_change(Key(kind, namespace, name), urgency)
        elif kind == NODE:
            if (namespace, name) not in self._kinds[NODE].watched:
                self._nodes = {each: node for each, node in self._nodes.items() if each != name}
            for pod, each in self._kinds[POD].watched.items():
                if each.node == name:
                    self._notify_job(pod[0], each.job)
        else:
            self._notify_job(namespace, _job_of(kind, document), urgency)

    def _notify_job(self, namespace: str, job: str, urgency: Urgency = "now") -> None:
        for kind in self.jobs:
            if job:
                self.on_change(Key(kind, namespace, job), urgency)


def trimmed(kind: Kind, document: Document) -> Document:
    """Return an object without the fields that the operator does not read."""
    meta = {name: value for name, value in document["metadata"].items() if name not in ("managedFields", "selfLink")}
    meta["annotations"] = {
        name: value for name, value in (meta.get("annotations") or {}).items() if name not in _REDUNDANT_ANNOTATIONS
    }
    reduced: Document = {**document, "metadata": meta}
    if kind == POD:
        spec = document.get("spec") or {}
        dropped = ("volumes", "tolerations", "affinity", "topologySpreadConstraints", "initContainers")
        reduced["spec"] = {name: value for name, value in spec.items() if name not in dropped}
        reduced["spec"]["containers"] = [_container(each) for each in spec.get("containers") or ()]
    elif kind == NODE:
        spec, status = document.get("spec") or {}, document.get("status") or {}
        # Heartbeats and the list of images on a node are ignored.
        conditions = [
            {name: value for name, value in each.items() if name != "lastHeartbeatTime"}
            for each in status.get("conditions") or ()
        ]
        meta["annotations"] = {name: value for name, value in meta["annotations"].items() if name in _NODE_ANNOTATIONS}
        reduced["spec"] = {name: spec[name] for name in ("taints", "unschedulable", "providerID") if name in spec}
        reduced["status"] = {"conditions": conditions}
    return reduced


def _container(container: Document) -> Document:
    """Return only the container's name and memory limit, which the message about an OOMKilled container needs."""
    limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    return {"name": container["name"], **({"resources": {"limits": {"memory": limit}}} if limit else {})}


def _entry(kind: Kind, document: Document) -> _Entry:
    meta = dict(document["metadata"])
    version = int(meta.pop("resourceVersion"))
    body = _encoded({**document, "metadata": meta})
    return _Entry(
        body,
        meta["uid"],
        version,
        hash(_urgent_fields(kind, document, body)),
        hash(_urgent_progress((meta.get("annotations") or {}).get(Annotation.PROGRESS))) if kind == LEASE else 0,
        _job_of(kind, document),
        (document.get("spec") or {}).get("nodeName", "") if kind == POD else "",
    )


def _urgent_progress(progress: str | None) -> tuple[Any, bool, Any]:
    """Return the parts of a progress report whose changes are reconciled within seconds: the member's generation, whether it has
    completed a step, and the final goodput."""
    try:
        progress_ = json.loads(progress or "{}")
        return progress_.get("generation"), progress_.get("step") is not None, progress_.get("whole") and progress_.get("goodput")
    except (ValueError, AttributeError):  # not written by an agent
        return None, False, None


def _job_of(kind: Kind, document: Document) -> str:
    """Return the name of the job that an object belongs to. A Lease's job is taken from its name, not from its labels: a worker
    can relabel its own Lease, but cannot write another worker's Lease."""
    meta = document["metadata"]
    if kind == LEASE:
        match = _WORKER_LEASE.fullmatch(meta["name"])
        return match["job"] if match else ""
    return str((meta.get("labels") or {}).get(Label.JOB, ""))


def _urgent_fields(kind: Kind, document: Document, body: bytes) -> bytes:
    """Return the fields whose changes must be reconciled immediately. For Leases and nodes, these exclude what changes with each
    renewal, step or heartbeat."""
    meta, spec = document["metadata"], document.get("spec") or {}
    if kind == LEASE:
        report = (meta.get("annotations") or {}).get(Annotation.REPORT)
        return _encoded([report, spec.get("holderIdentity"), meta.get("labels"), meta.get("deletionTimestamp")])
    if kind == NODE:
        conditions = (document.get("status") or {}).get("conditions") or ()
        ready = [(each["type"], each["status"]) for each in conditions if each["type"] in ("Ready", *leaving_nodes.CONDITIONS)]
        fields = [meta.get("labels"), meta.get("annotations"), meta.get("deletionTimestamp")]
        return _encoded([*fields, spec.get("taints"), spec.get("unschedulable"), ready])
    return body


def _encoded(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _decoded(entry: _Entry) -> Document:
    try:
        document: Document = from_json(entry.body)
    except ValueError:  # from_json is twice as fast as json, but limits the depth
        document = json.loads(entry.body)
    document["metadata"]["resourceVersion"] = str(entry.version)
    return document


def _name_of(document: Document) -> NamespacedName:
    meta = document["metadata"]
    return meta.get("namespace", ""), meta["name"]
