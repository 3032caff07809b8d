"""What is to be done about an ElasticJob of `elastic.pytorch.org`: the archived controller's promises, without its defects.

    decide(job, pods, now, lost={"node-a"}, leaving={"node-b": "karpenter.sh/disrupted"})  -> Plan

Its pods run plain torchrun, which finds a new world by itself when workers come and go; here pods are made, replaced and removed,
and the job ends. What is known of failures is in `.status` (`restarts`, `judged`), written before anything is deleted because of
it. The same plan comes out of the same documents, and a job about which nothing is to be done has an empty one. Pure.

Pods are deleted in one look and made anew in a later one, when they are gone: there are never two of one index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outlast import backoff, contract
from outlast.kube import pods as podwords
from outlast.kube.kinds import LEGACY_JOB
from outlast.kube.ownership import owned_by
from outlast.legacy import pods as legacy
from outlast.operator import job_status
from outlast.operator.plan import Deletion, Document, Event, Plan
from outlast.rendezvous import failures
from outlast.rendezvous.world import until

RETRYABLE = (130, 137, 138, 143)
"""Exit codes after which `ExitCode` starts a worker again; all others are permanent."""
OVERDUE_S = 60.0
"""A pod that is there so long after its grace is over is on a node that does not answer."""
CAUSE_S = failures.PLAIN_PODS.cause
"""How long a worker that may have lost the store of worker 0 waits for what became of that one. Kubelets tell within about a
second how a container ended, with times in whole seconds by clocks that are not quite the same; the rest is margin."""
_NODE_STARTED = ("Unknown", "ContainerStatusUnknown")
"""What containerd and the kubelet say of containers that were gone when they came up: the node was started again."""
_AT_ONCE, _PAUSE_S, _LONGEST_S = 3, 10.0, 300.0
"""Restarts before there is a pause between them, the first pause (they double), and the longest."""


def decide(
    job: Mapping[str, Any],
    pods: Sequence[Document],
    now: float,
    *,
    lost: Collection[str] = (),
    leaving: Mapping[str, str] | None = None,
) -> Plan:
    """The plan. `pods` are those that have the job's labels; `lost` are names of nodes that do not answer, or are no more;
    `leaving` those of nodes that will soon be gone, with the taint that says so."""
    sight = _Sight(job, pods, now, frozenset(lost), leaving or {})
    if job["metadata"].get("deletionTimestamp"):
        return Plan(deletes=tuple(sight.stuck()), requeue_at=sight.next_stuck())
    if sight.ended is not None:
        return _afterwards(sight)
    return _end(sight) or _go_on(sight)


def unreadable(job: Mapping[str, Any], pods: Sequence[Document], problem: str, now: float) -> Plan:
    """The plan for a job of which only the metadata could be read: it has failed, unless it was different when its pods were
    made. They go on then, and nothing is done about them."""
    sight = _Sight(job, pods, now, frozenset())
    if job["metadata"].get("deletionTimestamp") or sight.ended is not None or sight.own:
        return Plan()
    message = f"ElasticJob {sight.name} is failed because it cannot be read: {problem}."
    failed = {"type": "Failed", "status": "True", "reason": "InvalidJob", "message": message}
    times = dict.fromkeys(("lastUpdateTime", "lastTransitionTime"), job_status.text(now))
    conditions = [*(sight.status.get("conditions") or ()), {**failed, **times}]
    status = {**sight.status, "state": "Failed", "conditions": conditions, "completionTime": job_status.text(now)}
    return Plan(status=status, events=(Event("Warning", "InvalidJob", message),))


# ---------------------------------------------------------------------------------------------------------------- what is seen


@dataclass(frozen=True)
class _Failure:
    """How a pod has failed."""

    index: int
    pod: Document
    code: int | None
    """None: it was lost, or failed before it began."""
    disrupted: bool
    sentence: str
    time: float

    @property
    def permanent(self) -> bool:
        """Whether `ExitCode` gives it up. Without a code nothing is known that the next try would meet again."""
        return self.code is not None and self.code not in RETRYABLE


@dataclass(frozen=True)
class _Sight:
    """One look at a job."""

    job: Mapping[str, Any]
    pods: Sequence[Document]
    now: float
    lost: frozenset[str]
    leaving: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def status(self) -> Document:
        found: Document = self.job.get("status") or {}
        return found

    @property
    def spec(self) -> Document:
        found: Document = self.job["spec"]
        return found

    @cached_property
    def own(self) -> dict[int, Document]:
        """The job's pods by their index. Names are the index, so there is one of each."""
        return {index: pod for pod in self.pods if (index := podwords.labelled_index(pod)) is not None and self._owned(pod)}

    @cached_property
    def strangers(self) -> dict[int, Document]:
        """Pods that have the names of ours and are somebody else's."""
        names = {contract.worker_name(self.name, index): index for index in range(self.wanted)}
        named = [(names.get(pod["metadata"]["name"]), pod) for pod in self.pods if not self._owned(pod)]
        return {index: pod for index, pod in named if index is not None}

    def _owned(self, pod: Document) -> bool:
        return owned_by(pod, self.job)

    @cached_property
    def wanted(self) -> int:
        return legacy.sizes(self.job)[1]

    @cached_property
    def ended(self) -> str | None:
        """The condition of the end."""
        true = [each["type"] for each in self.status.get("conditions") or () if each["status"] == "True"]
        return next((each for each in ("Failed", "Succeeded") if each in true), None)

    @property
    def ended_at(self) -> str:
        """When it ended. The archived controller did not say so of jobs that failed, but in their condition."""
        told = [each.get("lastTransitionTime") for each in self.status.get("conditions") or () if each["type"] == self.ended]
        times = [self.status.get("completionTime"), *told, self.job["metadata"]["creationTimestamp"]]
        return next(str(each) for each in times if each)

    def phase(self, pod: Document) -> str:
        """The phase of its torchrun. That of the pod is another one when containers beside it fail, or run on."""
        found = podwords.phase(pod)
        if pod["spec"].get("restartPolicy") != "Never" or podwords.leaves(pod):
            return found
        code = next(
            (_end_of(each).get("exitCode") for each in _containers(pod) if each["name"] == legacy.torchrun(self.job)), None
        )
        if code is None or (code == 0 and _disruption(pod) is not None):
            return found
        return "Failed" if code else "Succeeded"

    def over(self, pod: Document) -> bool:
        """Whether its torchrun will never run again."""
        return self.phase(pod) in ("Succeeded", "Failed")

    @cached_property
    def succeeded(self) -> dict[int, Document]:
        return {index: pod for index, pod in self.own.items() if self.phase(pod) == "Succeeded"}

    @cached_property
    def failures(self) -> list[_Failure]:
        """Pods that have failed and are still there, of those that are wanted. A worker that was started when another was done
        found the training closed: that is no failure."""
        found = [_failure(index, pod, self.job) for index, pod in sorted(self.own.items()) if self.phase(pod) == "Failed"]
        found = [
            each for each in found if each.index < self.wanted and not podwords.leaves(each.pod) and not self._late(each.pod)
        ]
        return [self._echo(each) if self._met_elsewhere(each) else each for each in found]

    @cached_property
    def held(self) -> set[int]:
        """Workers whose failures may turn out to be since worker 0 was lost: its kubelet may be the later one to tell."""
        host = self.own.get(0)
        if host is None or self.over(host):
            return set()
        found = [each for each in self.failures if self._may_echo(each) and not each.disrupted]
        return {each.index for each in found if until(each.time, CAUSE_S, self.now) is not None}

    def _may_echo(self, failure: _Failure) -> bool:
        """Whether it ended as torchrun does when the store of worker 0 is gone: with 1, whatever the script does."""
        return failure.index > 0 and _terminated(failure.pod, self.job).get("exitCode") == 1

    def _met_elsewhere(self, failure: _Failure) -> bool:
        """Whether the worker 0 that it met the others at is no more."""
        if not self._may_echo(failure):
            return False
        host = self.own.get(0)
        if host is None or podwords.leaves(host):
            return True
        if self.phase(host) == "Failed":
            how = _failure(0, host, self.job)
            return how.disrupted or not how.permanent
        began = _terminated(failure.pod, self.job).get("startedAt") or failure.pod["metadata"]["creationTimestamp"]
        return podwords.seconds(host["metadata"]["creationTimestamp"]) > podwords.seconds(began)

    def _echo(self, failure: _Failure) -> _Failure:
        sentence = f"{failure.sentence} since worker 0, where workers meet, was lost"
        return dataclasses.replace(failure, disrupted=True, sentence=sentence)

    @cached_property
    def late(self) -> list[Document]:
        """Pods that have nothing to do any more: others were done before they began."""
        return [pod for pod in self.own.values() if self.succeeded and not self.over(pod) and self._late(pod)]

    def _late(self, pod: Document) -> bool:
        ends = [_terminated(each, self.job).get("finishedAt") for each in self.succeeded.values()]
        state = _container(pod, self.job).get("state") or {}
        began = (state.get("terminated") or state.get("running") or {}).get("startedAt")
        if not began:
            return podwords.phase(pod) == "Pending"
        return any(end and podwords.seconds(end) <= podwords.seconds(began) for end in ends)

    @cached_property
    def missing(self) -> list[int]:
        """Workers that are to be made."""
        if self.succeeded or legacy.nameless(self.job):
            return []
        return [index for index in range(self.wanted) if index not in self.own and index not in self.strangers]

    @cached_property
    def stale(self) -> dict[int, Document]:
        """Pods whose torchrun meets others between other numbers of workers than are said now, or, where one is to be made,
        elsewhere than that one will: those of the archived controller."""
        said = legacy.nnodes(self.job)
        told = {index: _nnodes(pod) for index, pod in self.own.items() if not self.over(pod)}
        return {index: self.own[index] for index, each in told.items() if (self.missing if each is None else each != said)}

    # Restarts

    @cached_property
    def counted(self) -> list[_Failure]:
        """Failures that count."""
        return [each for each in self.failures if not each.disrupted and each.index not in self.held]

    @cached_property
    def new(self) -> list[_Failure]:
        """Those that have not been counted yet."""
        judged = self.status.get("judged") or ()
        return [each for each in self.counted if each.pod["metadata"]["uid"] not in judged]

    @cached_property
    def restarts(self) -> int:
        return int(self.status.get("restarts") or 0) + len(self.new) + self.again

    @cached_property
    def started(self) -> dict[str, int]:
        """How often nodes have started the containers of pods again, by the pods' uids."""
        counts = {pod["metadata"]["uid"]: int(_container(pod, self.job).get("restartCount") or 0) for pod in self.own.values()}
        told = self.status.get("started") or {}
        return {uid: most for uid, count in counts.items() if (most := max(count, int(told.get(uid, 0))))}

    @cached_property
    def again(self) -> int:
        """Those that count and have not been counted yet."""
        told = self.status.get("started") or {}
        more = {uid: count - int(told.get(uid, 0)) for uid, count in self.started.items()}
        return sum(more.get(pod["metadata"]["uid"], 0) for i, pod in self.own.items() if not self._interrupted(i, pod))

    def _interrupted(self, index: int, pod: Document) -> bool:
        """Whether its container was started again for no failure of its own: its node was, or worker 0 was lost. All others end
        with 1 then. One that ends so by itself is not counted either: its torchrun has tried often by then."""
        ended = (_container(pod, self.job).get("lastState") or {}).get("terminated") or {}
        return (index > 0 and ended.get("exitCode") == 1) or ended.get("reason") in _NODE_STARTED

    # Nodes that do not answer

    def stuck(self) -> Iterator[Deletion]:
        for pod in self.own.values():
            node = pod["spec"].get("nodeName", "")
            if node in self.lost and not self.over(pod):
                yield _deletion(pod, f"its node {node} is lost", grace_s=0)
            elif (due := _due(pod)) is not None and due <= self.now:
                yield _deletion(pod, f"its node {node or '(none)'} has not ended it in time", grace_s=0)

    def next_stuck(self) -> float | None:
        return min((due for pod in self.own.values() if (due := _due(pod)) is not None and due > self.now), default=None)


# ------------------------------------------------------------------------------------------------------------------ the rules


def _end(sight: _Sight) -> Plan | None:
    """The job is over: it has failed, or all of its workers are done."""
    if said := _failed(sight):
        return _over_with(sight, "Failed", f"ElasticJob {sight.name} is failed because {said}.")
    done = sight.succeeded.keys() & set(range(sight.wanted))
    others = [index for index, pod in sight.own.items() if not sight.over(pod)] + [each.index for each in sight.failures]
    if done and not others:
        return _over_with(sight, "Succeeded", f"ElasticJob {sight.name} is successfully completed.")
    return None


def _failed(sight: _Sight) -> str:
    """Why the job has failed; empty when it has not."""
    deadline = _deadline(sight)
    if deadline is not None and deadline <= sight.now:
        return f"it has run for longer than activeDeadlineSeconds ({sight.spec['activeDeadlineSeconds']})"
    policy = legacy.restart_policy(sight.job)
    for each in sight.counted:
        if policy == "ExitCode" and each.permanent:
            codes = ", ".join(map(str, RETRYABLE))
            return f"worker {each.index} {each.sentence}, which is permanent: restartPolicy ExitCode restarts after {codes}"
        if policy == "Never":
            return f"worker {each.index} {each.sentence}, and restartPolicy is Never"
    limit = int(sight.spec.get("backoffLimit", legacy.MAX_RESTARTS))
    if sight.restarts > limit:
        last = sight.counted[-1:]
        what = f"worker {last[0].index} {last[0].sentence}, and " if last else ""
        return f"{what}backoffLimit ({limit}) is used up by {sight.restarts} restarts"
    return ""


def _go_on(sight: _Sight) -> Plan:
    """What makes the pods those that are wanted."""
    deletes = list(sight.stuck())
    later = [sight.next_stuck(), _deadline(sight)]
    going = {each.uid for each in deletes}

    def delete(pod: Document, reason: str, *, grace_s: int | None = None) -> None:
        if not podwords.leaves(pod) and pod["metadata"]["uid"] not in going:
            going.add(pod["metadata"]["uid"])
            deletes.append(_deletion(pod, reason, grace_s=grace_s))

    for index, pod in sorted(sight.own.items(), reverse=True):
        if index >= sight.wanted and sight.phase(pod) != "Succeeded":
            delete(pod, f"{sight.wanted} workers are wanted")
    for pod in sight.late:
        delete(pod, "others are done: there is nothing left to train", grace_s=0)
    for pod in sight.own.values():
        node = pod["spec"].get("nodeName", "")
        if (taint := sight.leaving.get(node)) is None or sight.over(pod):
            continue
        if (rest := until(podwords.born(pod), _PAUSE_S, sight.now)) is not None:
            later.append(rest)  # it was put there all the same; the next one would be, too
        else:
            delete(pod, f"its node {node} is going away ({taint}); it is made anew elsewhere")
    for pod in sight.stale.values():
        said, told = legacy.nnodes(sight.job), _nnodes(pod)
        why = f"there may be {said} now, and not {told}" if told else "this one meets elsewhere than a new one would"
        delete(pod, f"all workers are started again: {why}")
    for each in sight.failures:
        grace_s = 0 if podwords.over(each.pod) else None  # containers beside torchrun may run on
        pause = _pause(sight.restarts) if not each.disrupted else _breath(each)
        if each.index in sight.held:
            later.append(until(each.time, CAUSE_S, sight.now))
        elif sight.succeeded:
            delete(each.pod, "others are done: it is not started again", grace_s=grace_s)
        elif (end := until(each.time, pause, sight.now)) is None:
            delete(each.pod, f"{each.sentence}; it is started again", grace_s=grace_s)
        else:
            later.append(end)

    made = [] if sight.stale else sight.missing
    status, events = _status(sight)
    return Plan(
        prerequisites=(legacy.service(sight.job),) if made else (),
        status=status,
        deletes=tuple(deletes),
        creates=tuple(legacy.pod(sight.job, index) for index in made),
        events=events,
        requeue_at=min((each for each in later if each is not None), default=None),
    )


def _over_with(sight: _Sight, end: str, message: str) -> Plan:
    """Say that the job is over. Its pods are cleaned up by the next look, when that is known."""
    status = _counted(sight)
    status["conditions"] = _conditions(sight, end, message)
    status["state"] = end
    status["completionTime"] = job_status.text(sight.now)
    note = Event("Normal" if end == "Succeeded" else "Warning", f"ElasticJob{end}", message)
    return Plan(status=status, events=(note,))


def _afterwards(sight: _Sight) -> Plan:
    """Clean up once, and delete the job when its time is over."""
    policy = sight.spec.get("cleanPodPolicy") or "None"
    deletes = list(sight.stuck())
    for pod in sight.own.values():
        # A job that has ended trains no more, whatever is kept of it.
        if (
            not podwords.leaves(pod)
            and (policy == "All" or not podwords.over(pod))
            and pod["metadata"]["uid"] not in {e.uid for e in deletes}
        ):
            deletes.append(_deletion(pod, f"the job is over, and cleanPodPolicy is {policy}"))
    later, remove = [sight.next_stuck()], None
    if (ttl := sight.spec.get("ttlSecondsAfterFinished")) is not None:
        at = podwords.seconds(sight.ended_at) + ttl
        later.append(at if at > sight.now else None)
        if at <= sight.now:
            meta, reason = sight.job["metadata"], f"ttlSecondsAfterFinished ({ttl}) is over"
            remove = Deletion(meta["name"], meta["uid"], reason, kind=LEGACY_JOB)
    # How many were done and how many failed is known, also of pods that are gone.
    told, seen = (sight.status.get("replicaStatuses") or {}).get("Worker") or {}, _replicas(sight)["Worker"]
    ended = {key: max(int(told.get(key) or 0), seen[key]) for key in ("succeeded", "failed")}
    status = {**sight.status, "replicaStatuses": {"Worker": {**seen, **ended}}}
    return Plan(
        status=status if status != sight.status else None,
        deletes=tuple(deletes),
        remove=remove,
        requeue_at=min((each for each in later if each is not None), default=None),
    )


# -------------------------------------------------------------------------------------------------------------------- status


def _status(sight: _Sight) -> tuple[Document | None, tuple[Event, ...]]:
    """The status to be, if it is not as it is, and what is to be told about it."""
    status, name = _counted(sight), sight.name
    before = sight.status.get("state")
    here = {i: pod for i, pod in sight.own.items() if i < sight.wanted and not podwords.leaves(pod)}
    running = [pod for pod in here.values() if sight.phase(pod) == "Running"]
    whole = len(here) == sight.wanted or before in ("Running", "Suspended")
    if not sight.wanted:
        state, message = "Suspended", f"ElasticJob {name} is suspended: 0 workers are wanted."
    elif sight.succeeded:
        state, message = "Running", f"ElasticJob {name} is running."
    elif sight.held and len(sight.held) == len(sight.failures) and before in ("Running", "Restarting"):
        state, message = before, _message(sight, before)
    elif sight.failures:
        state, message = "Restarting", f"ElasticJob {name} is restarting because {len(sight.failures)} Worker replica(s) failed."
    elif len(running) >= sight.wanted or (len(running) >= legacy.sizes(sight.job)[0] and whole):
        state, message = "Running", f"ElasticJob {name} is running."
    elif before in ("Restarting", "Running", "Suspended"):
        state = "Restarting"
        message = _message(sight, "Restarting") or f"ElasticJob {name} is restarting because Worker replica(s) are missing."
    else:
        state, message = "Created", f"ElasticJob {name} is created."
    status["state"] = state
    status["conditions"] = _conditions(sight, state, message)
    events: tuple[Event, ...] = ()
    if state != before:
        events = (Event("Warning" if state == "Restarting" else "Normal", f"ElasticJob{state}", message),)
    return (status if status != sight.status else None), events


def _counted(sight: _Sight) -> Document:
    """The status without the state and its sentence. The time of a job begins anew when it was suspended."""
    told = ("judged", "restarts", "started", "startTime", "completionTime")
    kept = {key: value for key, value in sight.status.items() if key not in told}
    judged = [each.pod["metadata"]["uid"] for each in sight.counted]
    return {
        **kept,
        "selector": ",".join(f"{key}={value}" for key, value in legacy.selector(sight.name).items()),
        **({"startTime": sight.status.get("startTime") or job_status.text(sight.now)} if sight.wanted else {}),
        "replicaStatuses": _replicas(sight),
        "restarts": sight.restarts,
        **({"judged": judged} if judged else {}),
        **({"started": sight.started} if sight.started else {}),
    }


def _replicas(sight: _Sight) -> Document:
    phases = [sight.phase(pod) for pod in sight.own.values() if not podwords.leaves(pod)]
    counts = {"succeeded": phases.count("Succeeded"), "failed": phases.count("Failed")}
    return {"Worker": {"active": len(phases) - sum(counts.values()), **counts}}


def _conditions(sight: _Sight, state: str, message: str) -> list[Document]:
    """The conditions with a new one on top. Running and Restarting go for each other; an end leaves Running, which is False."""
    before: dict[str, Document] = {each["type"]: each for each in sight.status.get("conditions") or ()}
    now = job_status.text(sight.now)

    def condition(kind: str, truth: str, reason: str, text: str) -> Document:
        old: Document = before.get(kind, {})
        if (old.get("status"), old.get("reason"), old.get("message")) == (truth, reason, text):
            return old
        since = old.get("lastTransitionTime", now) if old.get("status") == truth else now
        said = {"type": kind, "status": truth, "reason": reason, "message": text}
        return {**said, "lastUpdateTime": now, "lastTransitionTime": since}

    made = before.get("Created") or condition("Created", "True", "ElasticJobCreated", f"ElasticJob {sight.name} is created.")
    found = [made]
    limits = [*legacy.limits(sight.job)]
    limits += [
        f"Pod {pod['metadata']['name']} is there and is not of this job, so worker {index} is not made; delete the pod"
        for index, pod in sorted(sight.strangers.items())
    ]
    if limits:
        found.append(condition("Limited", "True", "NotHonoured", "; ".join(limits)))
    if state in ("Running", "Restarting"):
        found.append(condition(state, "True", f"ElasticJob{state}", message))
    elif state != "Created":
        if "Running" in before or state == "Suspended":
            found.append(condition("Running", "False", f"ElasticJob{state}", message))
        if state in ("Succeeded", "Failed"):
            found.append(condition(state, "True", f"ElasticJob{state}", message))
    return found


def _message(sight: _Sight, kind: str) -> str:
    return next((str(each["message"]) for each in sight.status.get("conditions") or () if each["type"] == kind), "")


# ----------------------------------------------------------------------------------------------------------------------- pods


def _failure(index: int, pod: Document, job: Mapping[str, Any]) -> _Failure:
    status, ended, before = pod.get("status") or {}, _terminated(pod, job), _before(pod)
    why, disruption = status.get("reason") or "", _disruption(pod)
    code = int(ended["exitCode"]) if ended else None
    if disruption is not None:
        sentence = f"was lost ({disruption})" if disruption else "was lost"
    elif ended.get("reason") == "OOMKilled":
        sentence = podwords.out_of_memory(pod, _container(pod, job)["name"])
    elif ended:
        sentence = f"failed with exit code {code}"
    elif before:
        ended = before["state"]["terminated"]
        code = int(ended["exitCode"])
        sentence = f"failed with exit code {code} in its init container {before['name']}"
    else:
        sentence = f"failed before it began{f' ({why})' if why else ''}"
    times = [each.get("lastTransitionTime") for each in podwords.conditions(pod)]
    when = [podwords.seconds(each) for each in [ended.get("finishedAt"), *times] if each]
    return _Failure(index, pod, code, disruption is not None, sentence, when[0] if when else 0.0)


def _disruption(pod: Document) -> str | None:
    """The word for what ended a pod from outside; None when nothing did."""
    why = (pod.get("status") or {}).get("reason") or ""
    if (target := podwords.disruption(pod)) is not None:
        return target.get("reason") or why
    return why if why == "Evicted" or podwords.refused(why) else None


def _before(pod: Document) -> Document:
    """The status of the first init container that failed. Sidecars among them end when another one fails."""
    sidecars = {each["name"] for each in pod["spec"].get("initContainers") or () if each.get("restartPolicy") == "Always"}
    found = [each for each in (pod.get("status") or {}).get("initContainerStatuses") or () if each["name"] not in sidecars]
    first: Document = next((each for each in found if _end_of(each).get("exitCode")), {})
    return first


def _container(pod: Document, job: Mapping[str, Any]) -> Document:
    """The status of the container with torchrun, else of the one that failed first."""
    found = _containers(pod)
    named = [each for each in found if each["name"] == legacy.torchrun(job)]
    failed = [each for each in found if _end_of(each).get("exitCode")]
    first: Document = next(iter([*named, *failed, *found]), {})
    return first


def _terminated(pod: Document, job: Mapping[str, Any]) -> Document:
    return _end_of(_container(pod, job))


def _containers(pod: Document) -> Sequence[Document]:
    return (pod.get("status") or {}).get("containerStatuses") or ()


def _end_of(container: Document) -> Document:
    """How a container ended; empty when it has not."""
    found: Document = (container.get("state") or {}).get("terminated") or {}
    return found


def _nnodes(pod: Document) -> str | None:
    """Between how many and how many workers its torchrun meets; None when the archived controller has made it."""
    found: str | None = (pod["metadata"].get("annotations") or {}).get(legacy.NNODES)
    return found


def _due(pod: Document) -> float | None:
    """When a pod that is being deleted is overdue; its deletionTimestamp is when its grace ends."""
    return podwords.seconds(pod["metadata"]["deletionTimestamp"]) + OVERDUE_S if podwords.leaves(pod) else None


def _deletion(pod: Document, reason: str, *, grace_s: int | None = None) -> Deletion:
    return Deletion(pod["metadata"]["name"], pod["metadata"]["uid"], reason, grace_s)


def _deadline(sight: _Sight) -> float | None:
    """When the job has run for too long; never while no workers are wanted."""
    limit, start = sight.spec.get("activeDeadlineSeconds"), sight.status.get("startTime")
    return podwords.seconds(start) + limit if limit and start and sight.wanted else None


def _pause(restarts: int) -> float:
    """How long after a failure its worker is started again."""
    return 0.0 if restarts <= _AT_ONCE else backoff.exponential(restarts - _AT_ONCE - 1, _PAUSE_S, _LONGEST_S)


def _breath(failure: _Failure) -> float:
    """A pause for a pod that was lost as soon as it was made: its node would refuse the next one as well."""
    return _PAUSE_S if failure.time - podwords.seconds(failure.pod["metadata"]["creationTimestamp"]) < _PAUSE_S else 0.0
