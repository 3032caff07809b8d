"""What the operator knows of the cluster: documents as the watches brought them, and what it has written itself since then.

A watch is behind: what we have just created is not in it yet. Whoever decided from it alone would create it twice. So every
answer to our own writes is kept as well, and stands before what the watch said last, until the watch has come as far: then the
watch is right, whatever it says. Nothing has to be expected or counted, and nothing is waited for.

How far a watch has come is said by resource versions, which are numbers that grow, within a kind (KEP-5504; in fact always). Pure
but for a lock; `operator` fills it and looks into it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from outlast import contract
from outlast.contract import Annotation, Label
from outlast.kube.kinds import LEASE, NODE, POD, Kind

Document = dict[str, Any]
Place = tuple[str, str]
"""Namespace and name."""
_LONG = (Annotation.JOB_FILE, "kubectl.kubernetes.io/last-applied-configuration")
"""Annotations that say what other documents say as well."""
_WORKER = re.compile(re.escape(contract.worker_name("@", 0)).replace("@", "(?P<job>.+)").replace("0", "[0-9]+"))
"""The name of a worker."""
Urgency = Literal["now", "later"]
"""When a change has to be looked at: at once; or with the next look, and within some seconds."""


class Key(NamedTuple):
    """A job."""

    kind: Kind
    namespace: str
    name: str


@dataclass(frozen=True)
class Looked:
    """All that is known of one job now. The documents are the reader's own, but for the nodes, which nobody may change."""

    job: Document | None
    pods: list[Document]
    leases: list[Document]
    nodes: Mapping[str, Document]
    since: float
    """From when on everything has been listened to without a break; now, while a watch is lost."""
    refused: str = ""
    """Why its pods could not be made when that was tried last: a sentence."""
    jobs: int = 1
    """How many there are of its kind."""


class _Held(NamedTuple):
    """A document, as small as can be: Python's dictionaries take five times as much."""

    body: bytes
    """Without its version."""
    uid: str
    version: int
    means: int
    """A hash of what has to be looked at when it is another."""
    told: int
    """A hash of what has to be looked at some time when it is another."""
    job: str
    node: str


@dataclass
class Shelf:
    """The documents of one kind."""

    kind: Kind
    held: dict[Place, _Held] = field(default_factory=dict)
    """As the watch says."""
    reached: int = 0
    """The version up to which it has said everything."""
    listening: bool = False
    synced: bool = False
    """Whether everything was heard at least once."""
    since: float = 0.0
    """From when on it has been listened to without a break."""
    ours: dict[Place, _Held] = field(default_factory=dict)
    """What our own writes left, of versions that the watch has not reached."""
    gone: set[str] = field(default_factory=set)
    """Uids that we have deleted and the watch still shows."""
    unseen: set[Place] | None = None
    """While a new watch says what there is: what was there before and has not been said again."""
    jobs: dict[Place, set[Place]] = field(default_factory=dict)
    """Places of the documents of a job, by its namespace and name."""

    def begin(self) -> None:
        """A new watch begins to say everything from the start."""
        self.unseen = set(self.held)

    def heard(self, version: str | None, now: float) -> list[_Held]:
        """The watch stands, and has said all up to a version; or is lost. Returns what has vanished unsaid."""
        if version is None:
            self.listening = False
            return []
        if not self.listening:
            self.listening, self.since = True, now
        self.synced = True
        self.reached = max(self.reached, int(version))
        vanished = [self.held[place] for place in self.unseen or ()]
        for place in self.unseen or ():
            self._drop(place)
        self.unseen = None
        return vanished

    def put(self, document: Document) -> Urgency | None:
        """The watch says that a document is there. When that has to be looked at."""
        place, new = _place(document), _held(self.kind, document)
        before = self.effective(place)
        if self.unseen is not None:
            self.unseen.discard(place)
        if (old := self.held.get(place)) and old.uid != new.uid:
            self.gone.discard(old.uid)
        self.held[place] = new
        self._list(place, old)
        self._reach(new.version)
        after = self.effective(place)
        if (before and (before.uid, before.means)) != (after and (after.uid, after.means)):
            return "now"
        return "later" if before and after and before.told != after.told else None

    def remove(self, document: Document) -> bool:
        """The watch says that a document is gone. Whether that has to be looked at."""
        place, uid = _place(document), document["metadata"]["uid"]
        before = self.effective(place)
        self._reach(int(document["metadata"]["resourceVersion"]))
        if (old := self.held.get(place)) and old.uid == uid:
            self._drop(place)
        self.gone.discard(uid)
        return before is not None and self.effective(place) is None

    def wrote(self, document: Document) -> None:
        """The answer to a write of ours."""
        place, new = _place(document), _held(self.kind, document)
        last = self.ours.get(place)
        if new.version > self.reached and (last is None or last.version < new.version):
            self.ours[place] = new
            self._list(place, last)

    def deleted(self, place: Place, uid: str) -> None:
        """We have deleted this, and nothing of it is left."""
        if any(each is not None and each.uid == uid for each in (self.held.get(place), self.ours.get(place))):
            self.gone.add(uid)

    def effective(self, place: Place) -> _Held | None:
        """What there is, as far as anybody here can know."""
        found = self.ours.get(place)
        if found is not None and found.version <= self.reached:
            del self.ours[place]
            if place not in self.held:
                self.gone.discard(found.uid)
            self._list(place, found)
            found = None
        found = found or self.held.get(place)
        return None if found is None or found.uid in self.gone else found

    def of(self, job: Place) -> list[Document]:
        """The documents of a job, by name."""
        found = [self.effective(place) for place in sorted(self.jobs.get(job, ()))]
        return [_read(each) for each in found if each is not None and each.job == job[1]]

    def _reach(self, version: int) -> None:
        """Lists come in no order; only what a standing watch says tells how far it is."""
        if self.listening and self.unseen is None:
            self.reached = max(self.reached, version)

    def _drop(self, place: Place) -> None:
        old = self.held.pop(place)
        self.gone.discard(old.uid)
        self._list(place, old)

    def _list(self, place: Place, old: _Held | None) -> None:
        """List what is in a place by the jobs that it is of now, and no more by the one that it was of."""
        now = {each.job for each in (self.held.get(place), self.ours.get(place)) if each is not None}
        for job in now:
            self.jobs.setdefault((place[0], job), set()).add(place)
        if old is not None and old.job not in now:
            left = self.jobs.get((place[0], old.job), set())
            left.discard(place)
            if not left:
                self.jobs.pop((place[0], old.job), None)


class Cache:
    """Jobs, their pods and Leases, and the nodes. `changed` is told of every job that has to be looked at, and when."""

    def __init__(self, jobs: Iterable[Kind], changed: Callable[[Key, Urgency], None]) -> None:
        self.jobs = tuple(jobs)
        self.changed = changed
        self._shelves = {kind: Shelf(kind) for kind in (*self.jobs, POD, LEASE, NODE)}
        self._needed = tuple(self._shelves)
        self._nodes: dict[str, Document] = {}
        self._guard = threading.RLock()

    def also(self, kind: Kind) -> None:
        """Keep another kind, from nothing on. Nobody waits for it, and nobody's silence depends on it."""
        with self._guard:
            self._shelves[kind] = Shelf(kind)

    # what watches say

    def begin(self, kind: Kind) -> None:
        """A watch of this kind begins, or begins anew after it broke for good."""
        with self._guard:
            self._shelves[kind].begin()

    def heard(self, kind: Kind, version: str | None, now: float) -> None:
        """A watch stands and has said everything up to this version, or is lost (None)."""
        with self._guard:
            shelf = self._shelves[kind]
            for each in shelf.heard(version, now):
                self._tell(kind, _read(each))

    def put(self, kind: Kind, document: Document) -> None:
        """A watch says that a document is there."""
        with self._guard:
            old = self._shelves[kind].held.get(_place(document))
            urgency = self._shelves[kind].put(document)
            if old and kind not in self.jobs and old.job != _job(kind, document):
                self._concerns(_place(document)[0], old.job)  # it has lost what is another's now
            if kind == NODE:  # whoever has looked keeps the nodes of then: they are replaced, never changed
                self._nodes = {**self._nodes, document["metadata"]["name"]: document}
            if urgency:
                self._tell(kind, document, urgency)

    def remove(self, kind: Kind, document: Document) -> None:
        """A watch says that a document is gone."""
        with self._guard:
            place = _place(document)
            old = self._shelves[kind].held.get(place)
            if self._shelves[kind].remove(document):
                self._tell(kind, _read(old) if old else document)

    # what we write

    def wrote(self, kind: Kind, document: Document) -> None:
        """The answer to a write of ours."""
        with self._guard:
            if kind in self._shelves:
                self._shelves[kind].wrote(trimmed(kind, document))

    def deleted(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """We have deleted this, and nothing of it is left."""
        with self._guard:
            if kind in self._shelves:
                self._shelves[kind].deleted((namespace, name), uid)

    # what is known

    def look(self, key: Key, now: float) -> Looked:
        """All that is known of a job."""
        place = (key.namespace, key.name)
        with self._guard:
            job = self._shelves[key.kind].effective(place)
            needed = [self._shelves[kind] for kind in self._needed]
            since = max(shelf.since if shelf.listening else now for shelf in needed)
            pods, leases = self._shelves[POD].of(place), self._shelves[LEASE].of(place)
            jobs = len(self._shelves[key.kind].held)
            return Looked(_read(job) if job else None, pods, leases, self._nodes, since, jobs=jobs)

    def listening(self, kinds: Iterable[Kind] | None = None) -> bool:
        """Whether all watches stand: while one does not, nothing is known of what happens."""
        with self._guard:
            return all(self._shelves[kind].listening for kind in kinds or self._needed)

    def unsynced(self, kinds: Iterable[Kind] | None = None) -> list[Kind]:
        """Kinds of which nothing is known yet."""
        with self._guard:
            return [kind for kind in kinds or self._needed if not self._shelves[kind].synced]

    def of(self, kind: Kind, key: Key) -> list[Document]:
        """The documents of a kind that are of one job."""
        with self._guard:
            return self._shelves[kind].of((key.namespace, key.name))

    def every(self, kind: Kind) -> list[Document]:
        """All documents of a kind of which there are few."""
        with self._guard:
            shelf = self._shelves[kind]
            return [_read(each) for place in sorted(shelf.held) if (each := shelf.effective(place)) is not None]

    def forgo(self, kind: Kind, now: float) -> None:
        """A kind that the cluster does not serve: there is none of it, until a watch says otherwise."""
        with self._guard:
            shelf = self._shelves[kind]
            if not shelf.listening:
                shelf.synced, shelf.listening, shelf.since = True, True, now

    def all(self) -> list[Key]:
        """All jobs."""
        with self._guard:
            return [Key(kind, *place) for kind in self.jobs for place in self._shelves[kind].held]

    def count(self, kind: Kind) -> int:
        """How many there are of a kind."""
        with self._guard:
            return len(self._shelves[kind].held)

    def _tell(self, kind: Kind, document: Document, urgency: Urgency = "now") -> None:
        """Say which jobs a change concerns."""
        namespace, name = _place(document)
        if kind in self.jobs:
            self.changed(Key(kind, namespace, name), urgency)
        elif kind == NODE:
            if (namespace, name) not in self._shelves[NODE].held:
                self._nodes = {each: node for each, node in self._nodes.items() if each != name}
            for place, each in self._shelves[POD].held.items():
                if each.node == name:
                    self._concerns(place[0], each.job)
        else:
            self._concerns(namespace, _job(kind, document), urgency)

    def _concerns(self, namespace: str, job: str, urgency: Urgency = "now") -> None:
        for kind in self.jobs:
            if job:
                self.changed(Key(kind, namespace, job), urgency)


def trimmed(kind: Kind, document: Document) -> Document:
    """A document without what nobody here looks at. Of pods, what they were told to run goes: that is in the job."""
    meta = {name: value for name, value in document["metadata"].items() if name not in ("managedFields", "selfLink")}
    meta["annotations"] = {name: value for name, value in (meta.get("annotations") or {}).items() if name not in _LONG}
    made: Document = {**document, "metadata": meta}
    if kind == POD:
        spec = document.get("spec") or {}
        dropped = ("volumes", "tolerations", "affinity", "topologySpreadConstraints", "initContainers")
        made["spec"] = {name: value for name, value in spec.items() if name not in dropped}
        made["spec"]["containers"] = [_container(each) for each in spec.get("containers") or ()]
    elif kind == NODE:
        spec, status = document.get("spec") or {}, document.get("status") or {}
        # A heartbeat every few minutes is no news, nor are the images that a node has.
        conditions = [
            {name: value for name, value in each.items() if name != "lastHeartbeatTime"}
            for each in status.get("conditions") or ()
        ]
        meta["annotations"] = {}
        made["spec"] = {name: spec[name] for name in ("taints", "unschedulable", "providerID") if name in spec}
        made["status"] = {"conditions": conditions}
    return made


def _container(container: Document) -> Document:
    """Of what a container was told to run, the memory that it may use: one that is OOMKilled has used more."""
    limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    return {"name": container["name"], **({"resources": {"limits": {"memory": limit}}} if limit else {})}


def _held(kind: Kind, document: Document) -> _Held:
    meta = dict(document["metadata"])
    version = int(meta.pop("resourceVersion"))
    body = _written({**document, "metadata": meta})
    return _Held(
        body,
        meta["uid"],
        version,
        hash(_means(kind, document, body)),
        hash(_trains((meta.get("annotations") or {}).get(Annotation.PROGRESS))) if kind == LEASE else 0,
        _job(kind, document),
        (document.get("spec") or {}).get("nodeName", "") if kind == POD else "",
    )


def _trains(progress: str | None) -> tuple[Any, bool]:
    """In which world a member makes steps, and whether it has made one: the first is told soon."""
    try:
        said = json.loads(progress or "{}")
        return said.get("generation"), said.get("step") is not None
    except (ValueError, AttributeError):  # somebody else wrote there
        return None, False


def _job(kind: Kind, document: Document) -> str:
    """The name of the job that a document is of. That of a Lease is in its name: labels are what its worker writes, who may write
    no other's Lease."""
    meta = document["metadata"]
    if kind == LEASE:
        found = _WORKER.fullmatch(meta["name"])
        return found["job"] if found else ""
    return str((meta.get("labels") or {}).get(Label.JOB, ""))


def _means(kind: Kind, document: Document, body: bytes) -> bytes:
    """What has to be looked at at once when it is another. A Lease is renewed all the time, and reports progress, which is looked
    at every so often anyway; of a node, taints, readiness and being there are what jobs are looked at for."""
    meta, spec = document["metadata"], document.get("spec") or {}
    if kind == LEASE:
        said = meta.get("annotations") or {}
        report = [said.get(Annotation.REPORT), said.get(Annotation.DECIDED)]
        return _written([report, spec.get("holderIdentity"), meta.get("labels"), meta.get("deletionTimestamp")])
    if kind == NODE:
        ready = [(c["type"], c["status"]) for c in (document.get("status") or {}).get("conditions") or () if c["type"] == "Ready"]
        return _written([meta.get("labels"), meta.get("deletionTimestamp"), spec.get("taints"), spec.get("unschedulable"), ready])
    return body


def _written(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _read(held: _Held) -> Document:
    try:
        found: Document = from_json(held.body)
    except ValueError:  # it takes half the time, and gives up on what is nested deeply
        found = json.loads(held.body)
    found["metadata"]["resourceVersion"] = str(held.version)
    return found


def _place(document: Document) -> Place:
    meta = document["metadata"]
    return meta.get("namespace", ""), meta["name"]
