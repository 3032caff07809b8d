"""Submits a job by applying its documents, after removing earlier workloads that are in the way."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.base.backoff import RANDOM
from outlast.base.errors import Absent, AlreadyRunning, Conflict, Forbidden, OutlastError, StoreError, Taken
from outlast.job import ownership
from outlast.job.contract import Annotation, Label
from outlast.job.status import State
from outlast.kubernetes import api
from outlast.kubernetes.api import apply_documents, dropins, kinds, owner_references
from outlast.kubernetes.jobs import job_status
from outlast.kubernetes.jobs.job_documents import COMPANIONS, KINDS, Workloads, has_claim, job_name, workload_in
from outlast.kubernetes.manifests import configmaps_and_service

if TYPE_CHECKING:
    from outlast.job.spec import Job

Document = api.Document

FILE_ANNOTATION = "outlast.dev/file"
"""Annotation that identifies the job file. Its value is the `run` label that the workload would have if the file were applied
without `submit`."""


def _release_owner(url: str) -> str:
    from outlast.storage import store
    from outlast.storage.runs import heartbeat as alive

    owner = alive.release(store.open_(url))
    return f"took the run in {url} from {owner}" if owner else f"no unfinished run in {url} has an owner"


_REMEDY = "submit under another --name, or in another namespace (-n)"


class Submission:
    def __init__(self, workloads: Workloads, topology: str, say: Callable[[str], None]) -> None:
        """`say` is called with a sentence about where code is shipped."""
        self.workloads, self.topology, self.say, self.cluster = workloads, topology, say, workloads.cluster

    def apply(self, job: Job, *, source: Path, fresh: bool = False, take_over: bool = False) -> Iterator[str]:
        """Submit a job, and yield a sentence for each step, such as `Job train-0a1b2c3d created`. With `take_over`, take the run
        in the store from the job that trains it elsewhere. Raises AlreadyRunning if this namespace already has a job of this name
        that must not be replaced."""
        url = self._store_to_take_over(job, fresh) if take_over else ""
        from_file = workload_in(self._documents(job, source))
        if not (fresh or take_over):
            for existing in self.workloads.of(job.metadata.name):
                ended = self._ended(existing)
                if ended is not State.FAILED and self._is_same(existing, from_file, ended):
                    yield self._resume_existing(existing, from_file, ended)
                    return
        # Each submission owns the run under a new id, because an earlier submission of the file may have ended or be stopped.
        documents = self._documents(job, source, f"{job.metadata.name}-{RANDOM.getrandbits(32):08x}", fresh=fresh)
        workload = workload_in(documents)
        if run := (from_file["metadata"].get("labels") or {}).get(Label.RUN):
            workload["metadata"].setdefault("annotations", {})[FILE_ANNOTATION] = run
        if not fresh:
            yield from self._reopen_run(job)
        yield from self.make_room(job.metadata.name, documents, fresh=fresh)
        if take_over:
            yield _release_owner(url)
        there = [each for each in self.workloads.of(job.metadata.name) if "deletionTimestamp" not in each["metadata"]]
        alive = {each["metadata"]["uid"] for each in there}
        companions: list[Document] = []
        for document in documents:
            kind, meta = kinds.kind_of(document), document["metadata"]
            if document is workload and (secret := configmaps_and_service.key_secret(job, workload, secrets.token_hex(32))):
                key, sentence = self._create_key(secret, there, alive)
                companions += key
                yield sentence
            title = f"{kind} {meta['name']}"
            old = self._existing(document, alive)
            if old is not None and kind is kinds.CLAIM:
                yield configmaps_and_service.existing_claim(old)
                continue
            if kind not in dropins.ELASTIC_JOBS:  # includes objects created since `make_room`
                ownership.check(old, {Label.JOB: job.metadata.name}, instead=_REMEDY)
            result = apply_documents.apply(self.cluster, document, old=old)
            yield f"{title} {result.what}"
            if kind in COMPANIONS:
                companions.append(result.new)
            elif kind in KINDS:
                for each in companions:
                    self.workloads.adopt(each, result.new)
                if kind is kinds.ELASTIC_JOB and any(kinds.kind_of(each) is kinds.SECRET for each in companions):
                    change = {"metadata": {"annotations": {Annotation.KEY: result.new["metadata"]["uid"]}}}
                    self.cluster.patch(kind, meta["name"], change, namespace=meta.get("namespace"))

    def _documents(self, job: Job, source: Path, run: str | None = None, *, fresh: bool = False) -> list[Document]:
        """Return a job's documents. If there is a run, they are to be applied, and the code is uploaded."""
        from outlast.kubernetes.jobs.parcel import rendered

        namespace = self.cluster.namespace
        with rendered(job, self.topology, source=source, namespace=namespace, run=run, fresh=fresh) as (made, parcel):
            if run is not None:
                if parcel.sentence:
                    self.say(parcel.sentence)
                parcel.upload()
            return made

    def _reopen_run(self, job: Job) -> Iterator[str]:
        """Reopen a succeeded job's run if the job now requests more steps or epochs."""
        from outlast.job.spec import version_differences
        from outlast.kubernetes.manifests import volumes as places
        from outlast.storage import runs, store
        from outlast.storage.checkpoints import register

        name, url = job.metadata.name, places.store_url(job)
        existing = next(iter(self.workloads.of(name)), None)
        old = self.workloads.job(existing) if existing and self._ended(existing) is State.SUCCEEDED else None
        if old is None or not version_differences.longer(old, new := places.document(job), 0):
            return
        if not url:
            yield f"{name} has succeeded, and begins anew: only a run whose output is in a store goes on when more is asked for"
            return
        try:
            place = store.open_(url)
            run = runs.read(place)
            newest = register.read(place, run.run) if run and run.succeeded else None
        except StoreError as problem:
            raise OutlastError(
                f"{name} has succeeded and is asked for more, but {url} cannot be read: {problem}; --fresh starts anew"
            ) from problem
        if run and newest and version_differences.longer(old, new, newest.step):
            runs.end(place, run.run, State.CANCELLED, "more steps or epochs are asked for", None, by=run.owner)
            yield f"{name} has succeeded; as it asks for more now, its run goes on from step {newest.step}; --fresh starts anew"

    def _store_to_take_over(self, job: Job, fresh: bool) -> str:
        """Return the URL of the store with the run to take over. Raises AlreadyRunning if this namespace already has a job of
        this name."""
        from outlast.kubernetes.manifests import volumes as places

        if not (url := places.store_url(job)):
            raise OutlastError("--take-over is for a run in a store, and output names none; leave it out")
        name = job.metadata.name
        if not fresh and (existing := self.workloads.of(name)):
            raise AlreadyRunning(
                f"{name} is there already, as {existing[0]['kind']} {existing[0]['metadata']['name']}; "
                f"outlast cancel {name} removes it, then --take-over takes the run from whoever trains it elsewhere"
            )
        return url

    def _create_key(self, secret: Document, there: Sequence[Document], alive: AbstractSet[str]) -> tuple[list[Document], str]:
        """Create the Secret with which workers authenticate each other, if it is missing and the job does not run: its workers
        would have another key than those that replace them. Return a list, which contains the Secret if the job should own it,
        and a sentence for the user."""
        title = f"Secret {secret['metadata']['name']}"
        readable = True
        try:
            try:
                old = self._existing(secret, alive)
            except Forbidden:  # as in a notebook, which may create Secrets but not read them
                old, readable = None, False
            if old is not None:
                own = (old["metadata"].get("labels") or {}).get(Label.JOB) == secret["metadata"]["labels"][Label.JOB]
                return [old] if own else [], f"{title} unchanged"
            if any(self._ended(each) is None for each in there):
                return [], f"{title} left as it is, since workers of a running job keep their key"
            created = self.cluster.create(secret)
            return [created] if readable else [], f"{title} created"
        except Taken:
            return [], f"{title} unchanged"
        except Forbidden:
            remedy = "have it created before the job, with any text under the key `key`"
            return [], f"you may not create {title}: anyone who knows the job file can connect to its workers; {remedy}"

    def _ended(self, workload: Document) -> State | None:
        """Return a workload's final state, or None if it has not ended. Agents are queried about a StatefulSet, because only they
        know its end."""
        if kinds.kind_of(workload) is kinds.STATEFUL_SET and not job_status.is_suspended(workload):
            state = self.workloads.status(job_name(workload)).state
            return state if state.final else None
        return job_status.final_state(workload)

    def _is_same(self, existing: Document, desired: Document, ended: State | None) -> bool:
        """Return whether two workloads are from the same file. An unfinished ElasticJob counts as different, so that the file is
        applied again."""
        if existing["kind"] != "ElasticJob":
            return _same_file(existing, desired)
        if ended is None or desired["kind"] != "ElasticJob" or "deletionTimestamp" in existing["metadata"]:
            return False
        new = self.cluster.apply(desired, dry_run=True)
        return _training_spec(new) == _training_spec(existing)

    def _continuation(self, name: str) -> str:
        if self.workloads.store_url(name) or has_claim(self.workloads.existing(name)[0]):
            return "goes on from its newest checkpoint"
        return "begins anew, since its output was in its pods"

    def _resume_existing(self, existing: Document, desired: Document, ended: State | None) -> str:
        title = existing["metadata"]["name"]
        if ended is not None:
            return f"{existing['kind']} {title} has ended ({ended}) and is not run again; --fresh does"
        if job_status.is_suspended(existing) and not job_status.is_suspended(desired):
            self.workloads.set_suspended(existing, False)
            return f"{existing['kind']} {title} is resumed"
        return f"{existing['kind']} {title} runs this very file already"

    def _existing(self, document: Document, alive: AbstractSet[str]) -> Document | None:
        """Return the existing object, or None. An object whose owners are gone is deleted and not returned, because garbage
        collection might otherwise delete it while the new workload uses it."""
        if (existing := apply_documents.existing(self.cluster, document)) is None:
            return None
        kind, meta, owners = kinds.kind_of(document), document["metadata"], owner_references.owners(existing)
        if kind not in (*COMPANIONS, kinds.SECRET) or not ownership.owned(existing) or not owners or owners & alive:
            return existing
        try:
            self.cluster.delete(kind, meta["name"], namespace=meta.get("namespace"), uid=existing["metadata"]["uid"])
        except Forbidden:
            return existing
        except (Absent, Conflict):  # garbage collection was faster
            pass
        return None

    def make_room(self, name: str, documents: Sequence[Document], *, fresh: bool, dry_run: bool = False) -> list[str]:
        """Delete workloads that block a new job, and return messages for the user. Raises AlreadyRunning if such a workload must
        stay."""
        desired = {(kinds.kind_of(document), document["metadata"]["name"]) for document in documents}
        sentences: list[str] = []
        for number, old in enumerate(self.workloads.of(name)):
            kind, title = kinds.kind_of(old), old["metadata"]["name"]
            same, ended = (kind, title) in desired, self._ended(old)
            if not fresh and not ended and not same:
                raise AlreadyRunning(
                    f"{name} is there already, as {old['kind']} {title} of another file or topology; "
                    f"end it with outlast cancel {name}, or submit with --fresh, which ends it first"
                )
            if fresh:
                sentences.append(f"{old['kind']} {title} is ended first")
            elif ended is State.FAILED and not number:
                sentences.append(f"{old['kind']} {title} has failed; its run {self._continuation(name)}; --fresh starts anew")
            if (fresh or (same and job_status.final_state(old))) and not dry_run:  # nothing trains an ElasticJob that has ended
                self.workloads.delete(kind, old, grace_s=None)
                self.workloads.wait_until_gone(kind, old)
        own = [each for each in documents if kinds.kind_of(each) not in (kinds.CLAIM, *dropins.ELASTIC_JOBS)]
        apply_documents.check(self.cluster, own, {Label.JOB: name}, instead=_REMEDY)
        return sentences


def _training_spec(elastic_job: Document) -> Document:
    """Return an ElasticJob's spec without `replicas`, which scaling changes."""
    spec = api.without_server_fields(elastic_job)["spec"]
    return {**spec, "workers": {**spec.get("workers", {}), "replicas": None}}


def _same_file(existing: Document, desired: Document) -> bool:
    meta, run = existing["metadata"], (desired["metadata"].get("labels") or {}).get(Label.RUN)
    if existing["kind"] != desired["kind"] or "deletionTimestamp" in meta:
        return False
    return run in ((meta.get("annotations") or {}).get(FILE_ANNOTATION), (meta.get("labels") or {}).get(Label.RUN))
