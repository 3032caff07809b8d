"""Jobs on a cluster: whatever topology they were rendered as, found by their labels.

The thin part that talks to the API server; what it sees is judged by `observed` and `pods`, which are pure. A job is the newest
workload (ElasticJob, Job, StatefulSet, Job of Volcano) that carries its name; `name` is always that of the job file. Nothing is
remembered here: any machine with the right to it may steer any job.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from outlast import backoff, kube
from outlast import chaos as schedules
from outlast.backends import LogLine
from outlast.backoff import RANDOM
from outlast.cluster import fault_injection, job_status
from outlast.cluster import logs as podlogs
from outlast.contract import Label, Pod
from outlast.errors import (
    Absent,
    AlreadyRunning,
    ClusterError,
    Conflict,
    Forbidden,
    NotFound,
    NotServed,
    OutlastError,
    Unanswered,
)
from outlast.kube import dropins, ownership, pods
from outlast.manifests import evaluation, objects
from outlast.runs import output as stored
from outlast.status import JobStatus, State

if TYPE_CHECKING:
    from builtins import list as List

    from outlast.ledger import Events
    from outlast.spec import Job

Document = kube.Document

_KINDS = (kube.ELASTIC_JOB, kube.LEGACY_JOB, kube.JOB, kube.STATEFUL_SET, kube.VOLCANO_JOB)
"""What a job can be made as."""
_MINOR = (kube.CONFIG_MAP, kube.SERVICE, kube.POD_GROUP, kube.VOLCANO_GROUP)
"""What is made beside it, and goes with it. Claims stay: they hold data and output."""
FILE = "outlast.dev/file"
"""Annotation of a workload that was submitted: the label `run` that its file would have got when it is applied by itself."""
_NAMED = (kube.ELASTIC_JOB, kube.LEGACY_JOB)
"""Those that are called as the job; the others carry its label."""
_WORKER = "app.kubernetes.io/component=worker"
_WORKERS = f"app.kubernetes.io/component!={evaluation.COMPONENT}"
"""Of pods with the job's label, those that are workers. Pods of `elastic.pytorch.org` have the labels of their template."""
_ASK_S = 3.0
"""How long an agent may take to say how far it is."""
_ASKED = 16
"""Agents that are asked at once."""
_AGENTS_S = 5.0
"""How often they are asked whether they are done while logs are followed."""


def rendered(job: Job, source: Path, run: str | None, fresh: bool) -> list[Document]:
    """The documents of a job for the operator: of a submission that is called `run`, or as its file is; `fresh` begins anew."""
    from outlast import manifests

    del source
    return manifests.render(job, "elasticjob", run=run, fresh=fresh)


def _released(url: str) -> str:
    """Take the run in a store from its present owner, and say so."""
    from outlast import store
    from outlast.runs import alive

    owner = alive.release(store.open_(url))
    return f"took the run in {url} from {owner}" if owner else f"nobody has an unfinished run in {url}"


def new_run(job: Job) -> str:
    """The id of a submission that is not to be taken for any other, although its file is the same."""
    return f"{job.metadata.name}-{RANDOM.getrandbits(32):08x}"


class KubernetesBackend:
    """The jobs in one namespace of a cluster."""

    poll_s = 2.0

    def __init__(
        self, cluster: kube.Cluster, *, documents: Callable[[Job, Path, str | None, bool], list[Document]] = rendered
    ) -> None:
        self.cluster = cluster
        self._documents = documents
        self._unserved: set[kube.Kind] = set()
        self.notices: list[str] = []

    # what there is

    def list(self) -> Sequence[JobStatus]:
        """All jobs of the namespace, the newest last. Agents are not asked, so steps are those that an operator has written."""
        found: dict[str, list[Document]] = {}
        for workload in self._workloads():
            found.setdefault(_name(workload), []).append(workload)
        workers = self.cluster.list_(kube.POD, labels=f"{Label.JOB},{_WORKERS}") if found else []
        statuses = [job_status.status(self._seen(name, each, workers, ask=False)) for name, each in found.items()]
        return sorted(statuses, key=lambda status: status.submitted)

    def status(self, name: str) -> JobStatus:
        """Where a job stands."""
        return job_status.status(self._seen(name, self._known(name), self._pods(name), ask=True))

    def output(self, name: str) -> str:
        """Where its output is."""
        return job_status.status(self._seen(name, self._known(name), (), ask=False)).output

    def events(self, name: str) -> Events:
        """The ledger of the run, as far as it is in the store."""
        place = self._store(name)
        if not place:
            raise NotFound(f"the ledger of {name} is in its pods only; give the job an output in a store to read it from here")
        from outlast import store

        return stored.events(store.open_(place))

    def nowhere(self) -> Absent:
        """The error that says that its namespace does not exist."""
        here, there = self.cluster.namespace, self.cluster.context
        return Absent(f"there is no namespace {here} in {there}; create it, or choose another with -n")

    def pods(self, name: str) -> Sequence[Document]:
        """The pods of its workers that there are now, by index."""
        self._known(name)
        return sorted(self._pods(name), key=lambda pod: (pods.index(pod), pods.born(pod)))

    def pod(self, name: str, worker: int) -> Document:
        """The pod in which a worker runs. Raises NotFound."""
        found = [pod for pod in self.pods(name) if pods.index(pod) == worker]
        running = [pod for pod in found if pods.running(pod)]
        if running:
            return running[-1]
        if found:
            end = pods.end(found[-1])
            why = pods.waits(found[-1]) or (end.sentence if end else "does not run")
            raise NotFound(f"worker {worker} of {name} does not run: it {why}")
        raise self._unknown(name, worker, self.pods(name))

    def logs(
        self,
        name: str,
        *,
        worker: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since_s: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[LogLine]:
        """The workers' lines, merged by time; of pods that are gone, what the store has."""

        def wanted(pod: Document) -> bool:
            return worker is None or pods.index(pod) == worker

        if follow:
            if not (known := self._all(name)):
                if not self.cluster.has_namespace():
                    raise self.nowhere()
                say(f"waiting for {name}: there is no such job in namespace {self.cluster.namespace} yet")
                while not (known := backoff.until_answered(lambda: self._all(name), say, every_s=self.poll_s)):
                    time.sleep(self.poll_s)
        else:
            known = self._known(name)
        every = backoff.until_answered(lambda: self._pods(name), say, every_s=self.poll_s) if follow else self._pods(name)
        found = [pod for pod in every if wanted(pod)]
        began = any(pods.began(pod) for pod in found)
        if follow and (began or job_status.over(known[0]) is None):
            labels, course = f"{Label.JOB}={name},{_WORKERS}", _Course(self, name)
            yield from podlogs.follow(
                self.cluster,
                labels,
                over=course.over,
                finished=course.done.__contains__,
                why=course.why,
                wanted=wanted,
                tail=tail,
                since_s=since_s,
                say=say,
            )
        elif began:
            yield from podlogs.merged(self.cluster, found, tail=tail, since_s=since_s, say=say)
        elif url := job_status.status(self._seen(name, known, (), ask=False)).output if self._store(name) else "":
            say(f"no pod of {name} has a log; these lines are from {url}")
            yield from stored.logs(url, worker=worker, tail=tail)
        elif found:
            raise NotFound(f"worker {pods.index(found[0])} of {name} has no log yet: it {pods.waits(found[0])}; wait with -f")
        elif every and worker is not None:
            raise self._unknown(name, worker, every)
        else:
            raise NotFound(f"{name} has no pods now, and its output is in no store: there are no logs to be had")

    # what is wished

    def submit(
        self,
        job: Job,
        *,
        source: Path,
        chaos: Path | None = None,
        fresh: bool = False,
        take_over: bool = False,
        command: str = "",
        say: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Apply a job's documents; the same file again changes nothing. `fresh` ends what there is of it before.

        Raises AlreadyRunning when the job runs from another file.
        """
        if chaos is not None:
            raise OutlastError(f"`outlast submit` carries out no schedule of harm; submit, then: outlast chaos NAME {chaos}")
        for sentence in self.apply(job, source=source, fresh=fresh, take_over=take_over):
            say(sentence)
        found = self._all(job.metadata.name)[0]
        return str((found["metadata"].get("labels") or {}).get(Label.RUN, found["metadata"]["name"]))

    def apply(self, job: Job, *, source: Path, fresh: bool = False, take_over: bool = False) -> Iterator[str]:
        """Submit a job; what is done is told as it is done: `Job train-0a1b2c3d created`. `take_over`: whoever trains its run in
        the store now, in another namespace for instance, is made to stop. Raises AlreadyRunning when that may be this job."""
        url = self._to_take(job, fresh) if take_over else ""
        of_file = _workload(self._documents(job, source, None, False))
        if not (fresh or take_over):
            for there in self._all(job.metadata.name):
                ended = self._ended(there)
                if ended is not State.FAILED and self._same(there, of_file, ended):
                    yield self._again(there, of_file, ended)
                    return
        # Each submission is another owner: one that has ended, or is made to stop, may have been given the same file.
        documents = self._documents(job, source, new_run(job), fresh)
        wanted = _workload(documents)
        if run := (of_file["metadata"].get("labels") or {}).get(Label.RUN):
            wanted["metadata"].setdefault("annotations", {})[FILE] = run
        yield from self.make_room(job.metadata.name, documents, fresh=fresh)
        if take_over:
            yield _released(url)
        workloads = [each["metadata"] for each in self._all(job.metadata.name)]
        alive = {meta["uid"] for meta in workloads if "deletionTimestamp" not in meta}
        beside: List[Document] = []
        service = next((each for each in documents if kube.kind_of(each) is kube.SERVICE), None)
        for document in documents:
            kind, meta = kube.kind_of(document), document["metadata"]
            if document is wanted and service and objects.keyed(wanted):
                key, sentence = self._key(objects.key(service, secrets.token_hex(32)), alive)
                beside += key
                yield sentence
            title = f"{kind} {meta['name']}"
            old = self._there(kind, meta, alive)
            if old is not None and kind is kube.CLAIM:
                yield objects.kept(document, old)
                continue
            new = self.cluster.apply(document)
            same = old is not None and kube.without_server_fields(old) == kube.without_server_fields(new)
            yield f"{title} {'created' if old is None else 'unchanged' if same else 'changed'}"
            if kind in _MINOR:
                beside.append(new)
            elif kind in _KINDS:
                for each in beside:
                    self._give(each, new)

    def _to_take(self, job: Job, fresh: bool) -> str:
        """The store with the run that a job is to take from whoever trains it, who is not this job as it is here."""
        from outlast.manifests import volumes as places

        if not (url := places.store(job)):
            raise OutlastError("--take-over is for a run in a store, and output names none; leave it out")
        name = job.metadata.name
        if not fresh and (there := self._all(name)):
            raise AlreadyRunning(
                f"{name} is there already, as {there[0]['kind']} {there[0]['metadata']['name']}; "
                f"outlast cancel {name} removes it, then --take-over takes the run from whoever trains it elsewhere"
            )
        return url

    def _key(self, secret: Document, alive: AbstractSet[str]) -> tuple[List[Document], str]:
        """See that there is the Secret by which workers know each other; it stays as it is while a workload uses it."""
        title = f"Secret {secret['metadata']['name']}"
        try:
            if (old := self._there(kube.SECRET, secret["metadata"], alive)) is not None:
                ours = (old["metadata"].get("labels") or {}).get(Label.JOB) == secret["metadata"]["labels"][Label.JOB]
                return [old] if ours else [], f"{title} unchanged"
            return [self.cluster.create(secret)], f"{title} created"
        except Forbidden:
            remedy = "let somebody make it, with any text as its key `key`, before the job"
            return [], f"{title} may not be made by you: whoever knows the job file can speak to its workers; {remedy}"

    def _ended(self, workload: Document) -> State | None:
        """The state in which a workload has ended; of a StatefulSet only its agents know."""
        if kube.kind_of(workload) is kube.STATEFUL_SET and not job_status.suspended(workload):
            state = self.status(_name(workload)).state
            return state if state.final else None
        return job_status.over(workload)

    def _same(self, there: Document, wanted: Document, ended: State | None) -> bool:
        """Whether a workload was made of the very file of which another is to be. An ElasticJob that has not ended is changed."""
        if there["kind"] != "ElasticJob":
            return _same_file(there, wanted)
        if ended is None or wanted["kind"] != "ElasticJob" or "deletionTimestamp" in there["metadata"]:
            return False
        new = self.cluster.apply(wanted, dry_run=True)
        return _trained(new) == _trained(there)

    def _onward(self, name: str) -> str:
        """What becomes of the run of a job that has failed when it is submitted again."""
        if self._store(name) or _claimed(self._known(name)[0]):
            return "goes on from its newest checkpoint"
        return "begins anew, since its output was in its pods"

    def _again(self, there: Document, wanted: Document, ended: State | None) -> str:
        """See that what was submitted before goes on, as many workers as there are to be by now; what was done."""
        title = there["metadata"]["name"]
        if ended is not None:
            return f"{there['kind']} {title} has ended ({ended}) and is not run again; --fresh does"
        if job_status.suspended(there) and not job_status.suspended(wanted):
            self._suspended(there, kube.kind_of(there), title, False)
            return f"{there['kind']} {title} is resumed"
        return f"{there['kind']} {title} runs this very file already"

    def _there(self, kind: kube.Kind, meta: Document, alive: AbstractSet[str]) -> Document | None:
        """A document as the cluster has it; None when there is none, or it was of workloads that are gone.

        The latter is deleted: the cluster may be about to do so, and would take it from the new workload.
        """
        try:
            found = self.cluster.get(kind, meta["name"], namespace=meta.get("namespace"))
        except (Absent, NotServed):
            return None
        owners = ownership.owners(found)
        if kind not in (*_MINOR, kube.SECRET) or not owners or owners & alive:
            return found
        try:
            self.cluster.delete(kind, meta["name"], namespace=meta.get("namespace"), uid=found["metadata"]["uid"])
        except Forbidden:
            return found
        except (Absent, Conflict):  # the cluster was faster
            pass
        return None

    def _give(self, document: Document, workload: Document) -> None:
        """Make a workload an owner of what was made beside it, which goes with the last of its owners, whoever deletes them."""
        meta, uid = document["metadata"], workload["metadata"]["uid"]
        owners = meta.get("ownerReferences") or []
        if uid not in [owner["uid"] for owner in owners]:
            named = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": workload["metadata"]["name"]}
            change = {"metadata": {"ownerReferences": [*owners, {**named, "uid": uid}]}}
            self.cluster.patch(kube.kind_of(document), meta["name"], change, namespace=meta.get("namespace"))

    def make_room(self, name: str, documents: Sequence[Document], *, fresh: bool, dry_run: bool = False) -> List[str]:
        """See that a job may be made: end what is to be ended before, or refuse. What was done, as sentences."""
        made = {(kube.kind_of(document), document["metadata"]["name"]) for document in documents}
        done: List[str] = []
        for number, old in enumerate(self._all(name)):
            kind, title = kube.kind_of(old), old["metadata"]["name"]
            same, ended = (kind, title) in made, self._ended(old)
            if not fresh and not ended and not same:
                raise AlreadyRunning(
                    f"{name} is there already, as {old['kind']} {title} of another file or topology; "
                    f"end it with outlast cancel {name}, or submit with --fresh, which ends it first"
                )
            if fresh:
                done.append(f"{old['kind']} {title} is ended first")
            elif ended is State.FAILED and not number:
                done.append(f"{old['kind']} {title} has failed; its run {self._onward(name)}; --fresh starts anew")
            if (fresh or (same and job_status.over(old))) and not dry_run:  # nothing trains an ElasticJob that has ended
                self._delete(kind, old, grace_s=None)
                self._gone(kind, old)
        for document in documents:
            self._ours(name, document)
        return done

    def ensure(self, name: str) -> bool:
        """Nothing has to be started here: controllers of the cluster drive the job."""
        self._known(name)
        return False

    def scale(self, name: str, replicas: int) -> None:
        """Wish for another number of workers."""
        workload, kind, title = self._active(name)
        low, high = self._allowed(workload) or (1, replicas)
        if not replicas and kind not in _NAMED:
            raise OutlastError(f"0 workers train nothing; outlast suspend {name} saves, and holds the job until outlast resume")
        if replicas and not low <= replicas <= high:
            raise OutlastError(
                f"{replicas} workers are not between workers.min ({low}) and max ({high}) of {name}; choose another"
            )
        if kind is kube.ELASTIC_JOB:
            self.cluster.patch(kind, title, {"spec": {"replicas": replicas}}, subresource="scale")
        elif kind is kube.LEGACY_JOB:
            self._wish(kind, title, None, replicas)
        elif kind is kube.STATEFUL_SET:
            if job_status.suspended(workload):
                self.cluster.patch(kind, title, {"metadata": {"annotations": {job_status.WISHED: str(replicas)}}})
            else:
                self.cluster.patch(kind, title, {"spec": {"replicas": replicas}}, subresource="scale")
        elif kind is kube.VOLCANO_JOB:
            self.cluster.patch(kind, title, [{"op": "replace", "path": "/spec/tasks/0/replicas", "value": replicas}], type="json")
        elif workload["spec"].get("completionMode") == "Indexed":
            self.cluster.patch(kind, title, {"spec": {"parallelism": replicas, "completions": replicas}})
        else:
            raise OutlastError(f"{name} is one pod (topology job) and cannot be scaled; submit it as indexed-job or elasticjob")

    def steer(self, name: str, verb: str) -> None:
        """Carry out a verb that needs nothing but the job's name; to interrupt a job in a cluster is to suspend it."""
        verbs = {
            "suspend": self.suspend,
            "interrupt": self.suspend,
            "resume": self.resume,
            "cancel": self.cancel,
            "kill": self.kill,
        }
        verbs[verb](name)

    def suspend(self, name: str) -> None:
        """Save and give the pods back until `resume`."""
        workload, kind, title = self._active(name)
        self._suspended(workload, kind, title, True)

    def resume(self, name: str) -> None:
        """Go on with a suspended job."""
        workload, kind, title = self._active(name)
        if not job_status.suspended(workload):
            raise OutlastError(
                f"{name} is not suspended ({self.status(name).state}); outlast status {name} shows where it stands"
            )
        if kind is kube.ELASTIC_JOB and not workload["spec"].get("suspend"):
            low, _ = self._allowed(workload) or (1, 1)
            raise OutlastError(f"{name} is to have 0 workers, which suspends it; go on with: outlast scale {name} {low}")
        self._suspended(workload, kind, title, False)

    def _suspended(self, workload: Document, kind: kube.Kind, title: str, value: bool) -> None:
        if kind is kube.VOLCANO_JOB:
            verb = "suspend" if value else "resume"
            raise OutlastError(f"a Job of Volcano has no field for it; use vcctl job {verb} -N {title}")
        if kind not in (kube.STATEFUL_SET, kube.LEGACY_JOB):
            self.cluster.patch(kind, title, {"spec": {"suspend": value}})
            return
        annotation = (workload["metadata"].get("annotations") or {}).get(job_status.WISHED)
        if value and not job_status.suspended(workload):
            drop_in = dropins.of(workload)
            now = drop_in.sizes(workload)[1] if drop_in else workload["spec"].get("replicas", 1)
            self._wish(kind, title, str(now), 0)
        elif not value:
            before = int(annotation or (self._allowed(workload) or (1, 1))[1])
            self._wish(kind, title, None, before)

    def _wish(self, kind: kube.Kind, title: str, before: str | None, replicas: int) -> None:
        """Set how many pods a workload has that knows no suspension, and how many it had."""
        spec = {"replicaSpecs": {"Worker": {"replicas": replicas}}} if kind is kube.LEGACY_JOB else {"replicas": replicas}
        self.cluster.patch(kind, title, {"metadata": {"annotations": {job_status.WISHED: before}}, "spec": spec})

    def cancel(self, name: str) -> None:
        """End the job for good: its workload, its configuration and its Service go, its claims and its output stay."""
        self._remove(name, grace_s=None)

    def kill(self, name: str) -> None:
        """End the job now; nothing is saved."""
        self._remove(name, grace_s=0)

    def chaos(self, name: str, action: str, *, worker: int | None, rng: random.Random) -> str:
        """Do harm to a worker's pod; `harm` says how."""
        schedules.check(action)
        if worker is not None:
            return fault_injection.strike(self.cluster, self.pod(name, worker), action, rng)
        running = [pod for pod in self.pods(name) if pods.running(pod) and not pods.leaves(pod)]
        if not running:
            raise NotFound(f"{name} has no running worker; wait until it runs")
        return fault_injection.strike(self.cluster, rng.choice(running), action, rng)

    def evaluate(
        self, name: str, args: Sequence[str], *, show: Callable[[LogLine], None] = lambda line: print(line.text, flush=True)
    ) -> int:
        """Run the job's module with `--evaluate` in one pod, show its log, and return its exit code."""
        known = self._known(name)
        workload = known[0]
        if job_status.archived(workload):
            raise OutlastError(f"{name} is of {kube.LEGACY_JOB.group} and has a script of its own; evaluate with that")
        if not self._store(name) and not _claimed(workload):
            raise OutlastError(f"the output of {name} is in its pods only; give it one in a store, or a volume, and train again")
        unique = f"{RANDOM.getrandbits(32):08x}"
        made = self.cluster.create(evaluation.document(name, self._template(workload), args, unique=unique))
        title = made["metadata"]["name"]
        print(f"outlast | Job {title} evaluates {name}", file=sys.stderr, flush=True)

        def over() -> bool:
            return job_status.over(self.cluster.get(kube.JOB, title)) is not None

        def say(sentence: str) -> None:
            print(f"outlast | {sentence.replace('worker 0', 'the evaluation')}", file=sys.stderr, flush=True)

        labels = f"batch.kubernetes.io/job-name={title}"
        try:
            for line in podlogs.follow(self.cluster, labels, over=over, wanted=lambda _: True, say=say):
                show(line)
        except KeyboardInterrupt:
            self.cluster.delete(kube.JOB, title)
            raise
        ends = [end for pod in self.cluster.list_(kube.POD, labels=labels) if (end := pods.end(pod)) is not None]
        if not ends:
            raise OutlastError(f"Job {title} ended without a pod; look at it with: kubectl describe job {title}")
        return ends[-1].code if ends[-1].code >= 0 else 1

    def _template(self, workload: Document) -> Document:
        """The template of its workers' pods. Raises OutlastError when an ElasticJob's job file is of another version."""
        spec = workload["spec"]
        if workload["kind"] != "ElasticJob":
            found: Document = (spec.get("tasks") or [spec])[0]["template"]
            return found
        if (job := self._job(workload)) is None:
            raise OutlastError(
                f"the job file of {_name(workload)} is of another version of Outlast; install that, or this one there"
            )
        from outlast import manifests

        one = {"workers": job.spec.workers.model_copy(update={"min": 1, "replicas": 1, "max": 1, "step": None, "sizes": None})}
        run = str((workload.get("status") or {}).get("run") or "") or None
        documents = manifests.render(job.model_copy(update={"spec": job.spec.model_copy(update=one)}), "job", run=run)
        for document in documents:
            if kube.kind_of(document) is kube.CONFIG_MAP:
                self._give(self.cluster.apply(document), workload)
        template: Document = _workload(documents)["spec"]["template"]
        return template

    # requests

    def _unknown(self, name: str, worker: int, found: Sequence[Document]) -> NotFound:
        there = ", ".join(str(index) for index in sorted({pods.index(pod) for pod in found}))
        return NotFound(f"{name} has no worker {worker}; {f'there are {there}' if there else 'it has no pods now'}")

    def _workloads(self, name: str = "", kinds: Sequence[kube.Kind] = _KINDS) -> List[Document]:
        """The workloads of one job, or of all."""
        found: List[Document] = []
        denied: dict[kube.Kind, Forbidden] = {}
        listed = 0
        for kind in kinds:
            if kind in self._unserved:
                continue
            try:  # who may only make some of these kinds has jobs of these only
                if kind in _NAMED:
                    fields = f"metadata.name={name}" if name else ""
                    found += self.cluster.list_(kind, fields=fields)
                else:
                    found += self.cluster.list_(kind, labels=f"{Label.JOB}{f'={name}' if name else ''},{_WORKER}")
                listed += 1
            except NotServed:
                self._unserved.add(kind)
            except Forbidden as error:
                denied[kind] = error
        if denied and not listed:
            raise denied.get(kube.JOB) or next(iter(denied.values()))
        return found

    def _all(self, name: str, kinds: Sequence[kube.Kind] = _KINDS) -> List[Document]:
        """The workloads of a job, the newest first."""
        return sorted(self._workloads(name, kinds), key=lambda each: each["metadata"]["creationTimestamp"], reverse=True)

    def _known(self, name: str) -> List[Document]:
        if found := self._all(name):
            return found
        here = self.cluster.namespace
        if not self.cluster.has_namespace():
            raise self.nowhere()
        known = ", ".join(sorted({_name(workload) for workload in self._workloads()}))
        raise NotFound(
            f"there is no job {name} in namespace {here} of {self.cluster.context}; "
            + (f"there are {known}" if known else "there is none at all; choose another with -n, or submit one")
        )

    def _active(self, name: str) -> tuple[Document, kube.Kind, str]:
        """The workload that stands for a job that has not ended."""
        workload = self._known(name)[0]
        if (state := job_status.over(workload)) is not None:
            more = "goes on with it" if state is State.FAILED else "--fresh runs it again"
            raise OutlastError(f"{name} has ended ({state}); outlast submit FILE {more}")
        return workload, kube.kind_of(workload), workload["metadata"]["name"]

    def _pods(self, name: str) -> List[Document]:
        return self.cluster.list_(kube.POD, labels=f"{Label.JOB}={name},{_WORKERS}")

    def _seen(self, name: str, workloads: Sequence[Document], found: Sequence[Document], *, ask: bool) -> job_status.Seen:
        current = max(workloads, key=lambda each: each["metadata"]["creationTimestamp"])
        older = [each["metadata"]["name"] for each in workloads if each is not current and job_status.over(each) is None]
        own = [pod for pod in found if (pod["metadata"].get("labels") or {}).get(Label.JOB) == name and _of(pod, current)]
        told, unknown = self._told(own) if ask and not job_status.archived(current) else ({}, "")
        processes, allowed = 1, None
        if (drop_in := dropins.of(current)) is not None:
            low, _, high = drop_in.sizes(current)
            processes, allowed = drop_in.processes(current), (low, high)
        elif (ask or current["kind"] == "ElasticJob") and (job := self._job(current)):
            processes, allowed = job.spec.processes(), _sizes(job)
        return job_status.Seen(name, current, own, told, allowed, processes, older, unknown, time.time())

    def _told(self, found: Sequence[Document]) -> tuple[Mapping[str, job_status.Metrics], str]:
        """What agents say of themselves, and why some cannot be asked."""
        names = [pod["metadata"]["name"] for pod in found if pods.running(pod)]

        def ask(name: str) -> job_status.Metrics | ClusterError:
            try:
                return job_status.metrics(self.cluster.proxy(name, Pod.PROBE_PORT, "/metrics", timeout_s=_ASK_S))
            except ClusterError as error:
                return error

        if not names:
            return {}, ""
        with ThreadPoolExecutor(min(_ASKED, len(names))) as crew:
            answers = dict(zip(names, crew.map(ask, names), strict=True))
        denied = next((str(answer) for answer in answers.values() if isinstance(answer, Forbidden)), "")
        return {name: answer for name, answer in answers.items() if not isinstance(answer, ClusterError)}, denied

    def _job(self, workload: Document) -> Job | None:
        """The job file of a workload, as its pods read it; None when we may not, or it is of another version."""
        from outlast import spec

        try:
            if workload["kind"] == "ElasticJob":
                meta = {"name": workload["metadata"]["name"]}
                text = json.dumps({**{k: workload[k] for k in ("apiVersion", "kind", "spec")}, "metadata": meta})
                return spec.parse(text)
            tasks = workload["spec"].get("tasks") or [workload["spec"]]
            volumes = tasks[0]["template"]["spec"].get("volumes") or ()
            name = next((v["configMap"]["name"] for v in volumes if v["name"] == "config" and "configMap" in v), "")
            return spec.parse(self.cluster.get(kube.CONFIG_MAP, name)["data"]["job.yaml"]) if name else None
        except (OutlastError, KeyError):
            return None

    def _allowed(self, workload: Document) -> tuple[int, int] | None:
        if (drop_in := dropins.of(workload)) is not None:
            low, _, high = drop_in.sizes(workload)
            return low, high
        job = self._job(workload)
        return _sizes(job) if job else None

    def _store(self, name: str) -> str:
        found = job_status.status(self._seen(name, self._known(name), (), ask=False)).store
        return found.url if found else ""

    def _ours(self, name: str, document: Document) -> None:
        """Refuse to take over a document that somebody else has made."""
        kind, title = kube.kind_of(document), document["metadata"]["name"]
        try:
            there = self.cluster.get(kind, title, namespace=document["metadata"].get("namespace"))
        except (Absent, NotServed):  # the latter is said when it is applied
            return
        labels = there["metadata"].get("labels") or {}
        if kind is kube.CLAIM or kind in _NAMED:
            return
        if labels.get(Label.JOB) != name:
            owner = labels.get("app.kubernetes.io/managed-by") or "somebody else"
            raise OutlastError(
                f"{kind} {title} is in namespace {self.cluster.namespace} already and belongs to {owner}, not to a job {name}; "
                "submit under another --name, or in another namespace (-n)"
            )

    def _remove(self, name: str, *, grace_s: float | None) -> None:
        workloads, beside = self._all(name), list(self._beside(name))
        for workload in workloads or (() if beside else self._known(name)):
            self._delete(kube.kind_of(workload), workload, grace_s=grace_s)
        for kind, document in beside:
            with contextlib.suppress(Absent):
                self.cluster.delete(kind, document["metadata"]["name"], uid=document["metadata"]["uid"])

    def _beside(self, name: str) -> Iterator[tuple[kube.Kind, Document]]:
        """What was made beside the workloads of a job; it may be there when they are not."""
        component = f"app.kubernetes.io/component={evaluation.COMPONENT}"
        for kind, labels in [*((kind, "") for kind in _MINOR), (kube.JOB, f",{component}")]:
            with contextlib.suppress(NotServed, Forbidden):
                for document in self.cluster.list_(kind, labels=f"{Label.JOB}={name}{labels}"):
                    yield kind, document

    def _delete(self, kind: kube.Kind, workload: Document, *, grace_s: float | None) -> None:
        meta = workload["metadata"]
        with contextlib.suppress(Absent):
            self.cluster.delete(kind, meta["name"], uid=meta["uid"])
        if grace_s is not None:
            for pod in self._pods(_name(workload)):
                with contextlib.suppress(Absent):
                    self.cluster.delete(kube.POD, pod["metadata"]["name"], grace_s=grace_s)

    def _gone(self, kind: kube.Kind, workload: Document) -> None:
        """Wait until a workload and its pods are gone, as long as they may take to leave."""
        meta = workload["metadata"]
        deadline = (
            time.monotonic()
            + 60
            + max((p["spec"].get("terminationGracePeriodSeconds", 30) for p in self._own(workload)), default=0)
        )
        while time.monotonic() < deadline:
            try:
                same = self.cluster.get(kind, meta["name"])["metadata"]["uid"] == meta["uid"]
            except Absent:
                same = False
            if not same and not self._own(workload):
                return
            time.sleep(1)
        raise Unanswered(
            f"{workload['kind']} {meta['name']} was deleted and is still there; look at it with: outlast status {_name(workload)}"
        )

    def _own(self, workload: Document) -> List[Document]:
        return [pod for pod in self._pods(_name(workload)) if _of(pod, workload)]


class _Course:
    """Looks again and again whether a job goes on, with few requests: it stays of its kind, and agents are asked now and then."""

    def __init__(self, backend: KubernetesBackend, name: str) -> None:
        self._backend, self._name = backend, name
        self._kinds: Sequence[kube.Kind] = _KINDS
        self._asked = -_AGENTS_S
        self._workload: Document = {}
        self.done: set[str] = set()
        """Pods whose workers have ended; those of a StatefulSet stay up."""

    def over(self) -> bool:
        """Whether there is nothing more to come, unless somebody takes the job up again."""
        workloads = self._backend._all(self._name, self._kinds) or self._backend._all(self._name)
        if not workloads or job_status.over(workloads[0]) is not None:
            return True
        self._workload, self._kinds = workloads[0], [kube.kind_of(workloads[0])]
        if job_status.suspended(workloads[0]):
            return not any(pods.running(pod) for pod in self._backend._pods(self._name))
        if self._kinds != [kube.STATEFUL_SET] or time.monotonic() - self._asked < _AGENTS_S:
            return False
        status = self._backend.status(self._name)
        self._asked = time.monotonic()
        self.done.update(worker.pod for worker in status.workers if worker.state in ("done", "failed"))
        return status.state in (State.SUCCEEDED, State.FAILED)

    def why(self) -> str:
        """Why it has no pods, as far as its workload says."""
        return job_status.status(self._backend._seen(self._name, [self._workload], (), ask=False)).reason


def _workload(documents: Sequence[Document]) -> Document:
    """The document that has the pods."""
    return next(document for document in documents if kube.kind_of(document) in _KINDS)


def _claimed(workload: Document) -> bool:
    """Whether its pods have a claim, on which the output may be."""
    spec = workload["spec"]
    if workload["kind"] == "ElasticJob":
        return bool(spec.get("volumes"))
    volumes = (spec.get("tasks") or [spec])[0]["template"]["spec"].get("volumes") or ()
    return any("persistentVolumeClaim" in volume for volume in volumes)


def _trained(elastic_job: Document) -> Document:
    """What an ElasticJob is to train; how many workers it has may have been scaled."""
    spec = kube.without_server_fields(elastic_job)["spec"]
    return {**spec, "workers": {**spec.get("workers", {}), "replicas": None}}


def _same_file(there: Document, wanted: Document) -> bool:
    """Whether a workload was made of the very file of which another is to be."""
    meta, run = there["metadata"], (wanted["metadata"].get("labels") or {}).get(Label.RUN)
    if there["kind"] != wanted["kind"] or "deletionTimestamp" in meta:
        return False
    return run in ((meta.get("annotations") or {}).get(FILE), (meta.get("labels") or {}).get(Label.RUN))


def _sizes(job: Job) -> tuple[int, int]:
    """The fewest and the most workers that it may have."""
    allowed = job.spec.workers.allowed()
    return allowed[0], allowed[-1]


def _name(workload: Document) -> str:
    """The name of the job that a workload is."""
    return str((workload["metadata"].get("labels") or {}).get(Label.JOB) or workload["metadata"]["name"])


def _of(pod: Document, workload: Document) -> bool:
    """Whether a pod is one of this workload's."""
    return not ownership.owners(pod) or ownership.owned_by(pod, workload)
