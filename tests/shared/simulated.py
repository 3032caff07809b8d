"""Simulated cluster in memory, with a simulated clock: an API server, kubelets, and the agents of one job.

`look` is one pass of the operator under test, which may be killed after any of its writes. Agents behave as the real ones
(`rendezvous.membership`, `agent.lifecycle`): they report, join worlds, save when told of a planned interruption, and leave when
told.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from outlast.base.clock import Clock
from outlast.job.contract import LEASE_S, MESH_LEASE_S, MESH_RENEW_S, RENEW_S, Annotation, Label
from outlast.job.report import goodput, incidents
from outlast.kubernetes.api import document_parsing, kinds, pod_status
from outlast.kubernetes.api.kinds import Kind, kind_of
from outlast.kubernetes.board import PROGRESS_S
from outlast.kubernetes.manifests.scheduling import kueue
from outlast.kubernetes.operator import observed_job
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.decide import decide
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures, KueueObjects, WorkloadSlice
from outlast.kubernetes.operator.observed_job import RECEIVED_AT
from outlast.kubernetes.operator.plan import Plan

Document = dict[str, Any]
BEGAN = 1_000_000.0123456789
STEP_S = 1.0
SAVE_S = 0.5
PROBED_S = 120.0
"""Seconds after which a kubelet kills a worker that has never responded."""
LIVE_S = 60.0
"""Seconds after which a kubelet kills a worker that no longer responds."""
GRACE_S = 50.0
"""Seconds until a silent node is marked: kube-controller-manager --node-monitor-grace-period."""
COUNTED_S = 60.0
"""Seconds between two computations of the goodput by the worker of rank 0."""
EVERY = 20
"""Default number of steps between checkpoints."""


class Killed(Exception):
    """The operator died in the middle of its writes."""


@dataclasses.dataclass
class Agent:
    index: int
    uid: str
    standing: str = "waiting"
    generation: int = 0
    since: float = 0.0
    failed: bool = False
    failure: Document | None = None
    told_to_leave: bool = False
    saving_until: float | None = None
    attempt: int = 0
    past: list[Document] = dataclasses.field(default_factory=list)
    """Repairs that the members did without the operator."""
    held: int = 0
    """Newest step that its processes have completed."""
    again: bool = False
    """True if its elastic agent replaced a killed one in this generation."""
    frozen: bool = False
    """True if it no longer responds, because it was stopped or hangs."""
    answered: float = 0.0
    begins: float = 0.0
    beat: float = 0.0
    reported: str = ""


class Cluster:
    def __init__(self, workers: Document, *, steps: int = 400, nodes: int = 6, **fields: Any) -> None:
        self.now = BEGAN
        self.since = BEGAN
        self.limits = observed_job.Limits()
        self.steps = steps
        self.every = EVERY
        self.committed = 0
        self.step = 0
        self.documents: dict[tuple[str, str], Document] = {}
        self.agents: dict[str, Agent] = {}
        self.writes: list[str] = []
        self.made: dict[str, int] = {}
        self.uids = 0
        self.most = 0
        """Maximum number of live pods at one time, since it was last set to 0."""
        self.done_steps: list[tuple[int, int]] = []
        """Generation and step of every completed step."""
        self.accounts = False
        """True if the worker of rank 0 reports the goodput."""
        self.counted: tuple[float, Document] = (BEGAN, {})
        """Time of the last computation of goodput and losses, and their values."""
        self.lost: dict[str, float] = {}
        self.reached = True
        self.cut: set[str] = set()
        self.uploading: set[int] = set()
        """Workers whose agents upload for as long as they may once the job has ended."""
        self.mesh = False
        """True if the members of a world watch one another."""
        self.broken: set[frozenset[str]] = set()
        """Pairs of nodes without a connection."""
        self.lies: dict[int, set[int]] = {}
        """Members that a worker falsely reports as silent, by worker."""
        self.ledger: list[Document] = []
        """The run's ledger in the store, written by rank 0."""
        self.noted: list[Document] = []
        """Operator events that the worker of rank 0 has copied to the ledger."""
        self.trained: list[tuple[float, int]] = []
        """Time and generation of each step."""
        self.unreadable = False
        self.set_by, self.slept = 0.0, 0.0
        """Seconds by which the clock of the operator's machine was changed, and seconds for which the machine slept."""
        self.clock = self.started()
        self.found: frozenset[str] = frozenset()
        self.kueue: Kueue | None = None
        for n in range(nodes):
            self.put(kinds.NODE.document({"name": f"node-{n}"}, spec={}, status=ready(True, self.now)))
        meta = {"name": "train", "namespace": "team", "generation": 1, "creationTimestamp": pod_status.rfc3339(BEGAN)}
        self.put(kinds.ELASTIC_JOB.document(meta, spec={"image": "i", "module": "m", "workers": workers, **fields}))

    # documents

    def put(self, document: Document) -> Document:
        key = (document["kind"], document["metadata"]["name"])
        if key not in self.documents:
            self.uids += 1
            document["metadata"].setdefault("uid", f"{self.uids:08x}-uid")
        self.documents[key] = document
        return document

    def all(self, kind: str) -> list[Document]:
        return [document for (name, _), document in self.documents.items() if name == kind]

    @property
    def job(self) -> Document:
        return self.documents["ElasticJob", "train"]

    @property
    def status(self) -> Document:
        return self.job.get("status") or {}

    @property
    def pods(self) -> list[Document]:
        return self.all("Pod")

    def alive(self) -> list[Document]:
        there = [pod for pod in self.pods if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in there if pod["status"]["phase"] in ("Pending", "Running")]

    def change(self, **workers: Any) -> None:
        """Change the job's `workers`, as a user would."""
        spec = self.job["spec"]
        if "suspend" in workers:
            spec["suspend"] = workers.pop("suspend")
        spec["workers"] = {**spec["workers"], **workers}
        self.job["metadata"]["generation"] += 1

    # the operator

    def started(self) -> Clock:
        """Return the clock of an operator that starts now, synchronizes with the API server, and receives all objects again."""
        self.set_by = self.slept = 0.0
        for (kind, _), document in self.documents.items():
            if kind == "Lease":
                document[RECEIVED_AT] = self.now
        return Clock(lambda: self.now + self.set_by, lambda: self.now - self.slept)

    def sleep(self, seconds: float, *, paused: bool = False) -> None:
        """Let the operator's machine sleep, then restart the operator, because it has lost its leadership.

        With `paused`, the host paused the machine, only the wall clock shows it, and the operator is not restarted.
        """
        for _ in range(round(seconds)):
            self.pass_()
        self.slept += seconds
        if not paused:
            self.since, self.clock = self.now, self.started()

    def look(self, *, dies_after: int | None = None) -> Plan:
        """Do one pass of the operator, which dies after `dies_after` writes."""
        documents = dict(self.documents)
        pods = [d for (kind, _), d in documents.items() if kind == "Pod"]
        leases = [d for (kind, _), d in documents.items() if kind == "Lease"]
        nodes = {name: d for (kind, name), d in documents.items() if kind == "Node"}
        job = documents["ElasticJob", "train"]
        if self.unreadable:
            job = {**job, "spec": {}, document_parsing.UNREADABLE: "its spec is nested too deep; make it flatter"}
        now = self.clock()
        cached = CachedJob(job, pods, leases, nodes, max(self.since - self.slept, self.clock.broken_at))
        plan = decide(observed_job.take_snapshot(cached, now, self.has(), self.limits))
        left = [dies_after if dies_after is not None else 10**6]

        def write(what: str) -> None:
            if left[0] == 0:
                raise Killed(what)
            left[0] -= 1
            self.writes.append(what)

        for document in (*plan.prerequisites, *plan.apply):
            if (document["kind"], document["metadata"]["name"]) not in self.documents or document in plan.apply:
                write(f"set up {document['kind']}")
                self.apply(copy.deepcopy(document))
        if plan.status is not None:
            write(f"status {plan.status['state']}: {plan.status['reason']}")
            self.job["status"] = stored(plan.status)
        for deletion in plan.deletes:
            write(f"delete {deletion.name}: {deletion.reason}")
            self.delete(deletion.kind, deletion.name, deletion.uid, deletion.grace_s)
        for document in plan.statuses:
            write(f"status of {document['metadata']['name']}")
            assert self.kueue, "only Workloads are written to"
            self.kueue.told(copy.deepcopy(document))
        for pod in plan.creates:
            write(f"create {pod['metadata']['name']}")
            self.create(copy.deepcopy(pod))
        if plan.remove:
            write("remove the job")
            self.documents.clear()
        return plan

    def apply(self, document: Document) -> None:
        """Apply a document; fields that it lacks keep their values."""
        there = self.documents.get((document["kind"], document["metadata"]["name"]), {})
        assert document["kind"] != "Workload" or not there or WorkloadSlice(there).is_pending, "what has quota cannot be changed"
        self.put({**there, **document, "metadata": {**there.get("metadata", {}), **document["metadata"]}})

    def has(self) -> ClusterFeatures:
        return ClusterFeatures(self.found | {kueue.GROUP}, self.kueue.sight()) if self.kueue else ClusterFeatures(self.found)

    def create(self, pod: Document) -> None:
        name = pod["metadata"]["name"]
        assert ("Pod", name) not in self.documents, f"{name} is there"
        if self.kueue:
            self.kueue.allows(pod)
        self.made[name] = self.made.get(name, 0) + 1
        pod["metadata"]["creationTimestamp"] = pod_status.rfc3339(self.now)
        pod["status"] = {"phase": "Pending"}
        well = [n["metadata"]["name"] for n in self.all("Node") if not n["spec"].get("taints")]
        busy = [p["spec"].get("nodeName") for p in self.pods]
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
        fields = [field for term in terms for field in term["preference"].get("matchFields", ())]
        avoided = {node for field in fields if field["operator"] == "NotIn" for node in field["values"]}
        free = sorted(well, key=lambda node: (node in avoided, busy.count(node), node))
        if free:
            pod["spec"]["nodeName"] = free[0]
        self.put(pod)
        self.most = max(self.most, len(self.alive()))

    def delete(self, kind: Kind, name: str, uid: str, grace_s: int | None = None) -> None:
        """Delete a document as the API server does; another uid gives a conflict, which is harmless."""
        pod = self.documents.get((kind.kind, name))
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        if kind.kind != "Pod":
            del self.documents[kind.kind, name]
            return
        if grace_s == 0 or (pod["status"]["phase"] in ("Succeeded", "Failed")) or "nodeName" not in pod["spec"]:
            self.gone(pod)
            return
        pod["metadata"].setdefault("deletionTimestamp", pod_status.rfc3339(self.now + (30 if grace_s is None else grace_s)))
        agent = self.agents.get(uid)
        if agent is None:
            if self.answers(pod):
                self.gone(pod)
        else:
            agent.told_to_leave = True

    def gone(self, pod: Document) -> None:
        self.documents.pop(("Pod", pod["metadata"]["name"]), None)
        self.agents.pop(pod["metadata"]["uid"], None)

    def killed_at(self, agent: Agent) -> float:
        """Return the time at which the kubelet kills an agent that does not respond."""
        return agent.answered + LIVE_S if agent.reported else agent.begins + PROBED_S

    def reaches(self, agent: Agent) -> bool:
        return self.reached and self.node_of(agent) not in self.cut

    def answers(self, pod: Document) -> bool:
        node = pod["spec"].get("nodeName", "")
        return ("Node", node) in self.documents and node not in self.lost

    # what happens to pods

    def end(self, pod: Document, code: int, *, reason: str = "", disrupted: str = "") -> None:
        phase = "Succeeded" if code == 0 else "Failed"
        self.end_beside(pod, code, reason=reason)
        pod["status"] = {"phase": phase, "containerStatuses": pod["status"]["containerStatuses"][:1]}
        if disrupted:
            target = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": pod_status.rfc3339(self.now)}
            pod["status"]["conditions"] = [{**target, "reason": disrupted}]
        if "deletionTimestamp" in pod["metadata"]:
            self.gone(pod)

    def end_beside(self, pod: Document, code: int, *, reason: str = "") -> None:
        """End the worker's container of a pod, but not its other container."""
        state = {"terminated": {"exitCode": code, "reason": reason or "Error", "finishedAt": pod_status.rfc3339(self.now)}}
        beside = {"name": "proxy", "state": {"running": {}}}
        pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": state}, beside]}
        self.agents.pop(pod["metadata"]["uid"], None)

    def lose(self, node: str) -> None:
        """Lose a node. Its pods keep their status; for GRACE_S seconds, the node does too."""
        self.lost.setdefault(node, self.now)
        for pod in self.pods:
            if pod["spec"].get("nodeName") == node:
                self.agents.pop(pod["metadata"]["uid"], None)

    def agent_of(self, index: int) -> Agent | None:
        return next((agent for agent in self.agents.values() if agent.index == index), None)

    def fail(self, index: int, *, code: int = 1) -> None:
        """Fail a training process of a worker, which makes the processes of the others fail."""
        agent = self.agent_of(index)
        if agent is None or agent.standing != "training":
            return
        generation = agent.generation
        for other in self.agents.values():
            if other.standing == "training" and other.generation == generation:
                self.drop(other, echo=other is not agent, code=code)

    def repair(self, index: int) -> None:
        """Kill a process of a worker, after which the members restart without the operator."""
        failed = self.agent_of(index)
        assert failed is not None
        said = f"rank {index} on worker {index} was killed by SIGKILL"
        failure = {"rank": index, "code": 137, "reason": said, "time": self.now, "step": self.step, "committed": self.committed}
        for agent in self.agents.values():
            if agent.standing == "training" and agent.generation == failed.generation:
                agent.attempt += 1
                past = {"generation": agent.generation, "attempt": agent.attempt, "worker": index, "failure": failure}
                agent.past = [*agent.past, {**past, "at": self.now - 1000.0 * agent.index}]
        self.step = self.committed

    def relaunch(self, index: int, seconds: float = 0.0) -> None:
        """Kill the elastic agent of a worker; another one starts after `seconds`."""
        self.fail(index, code=137)
        agent = self.agent_of(index)
        assert agent is not None
        agent.again, agent.begins = True, self.now + seconds

    def drop(self, agent: Agent, *, echo: bool, code: int = 1) -> None:
        said = f"rank {agent.index} on worker {agent.index} failed"
        failure = {
            "rank": agent.index, "code": code, "reason": said, "traceback": "", "log_tail": f"{said}\n", "time": self.now,
            "echo": echo, "step": self.step if not echo and code == 1 else None, "committed": self.committed,
        }  # fmt: skip
        agent.standing, agent.failed, agent.failure, agent.since = "waiting", True, failure, self.now
        agent.saving_until = None

    # time

    def operator_dies(self, writes: int, times: int) -> None:
        """Advance the time `times` times. Each time the operator dies after `writes` writes, unless no write is left."""
        for _ in range(times):
            self.pass_()
            try:
                self.look(dies_after=writes)
            except Killed:
                self.since = self.now

    def pass_(self, seconds: float = STEP_S) -> None:
        """Advance the time: kubelets start pods, and agents act."""
        self.now += seconds
        for node, since in self.lost.items():
            document = self.documents.get(("Node", node))
            if document is not None and self.now >= since + GRACE_S and not document["spec"].get("taints"):
                document["status"] = ready(False, self.now)
                document[RECEIVED_AT] = self.clock()
                document["spec"] = {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}
        if self.kueue:
            self.kueue.admits()
        for pod in list(self.pods):
            uid = pod["metadata"]["uid"]
            until = pod_status.timestamp(pod["metadata"].get("deletionTimestamp"))
            if until and self.now > until and self.answers(pod):
                self.gone(pod)
                continue
            if pod["status"]["phase"] == "Pending" and "nodeName" in pod["spec"] and self.answers(pod):
                state = {"running": {"startedAt": pod_status.rfc3339(self.now)}}
                pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "trainer", "ready": False, "state": state}]}
                index = int(pod["metadata"]["labels"][Label.WORKER])
                self.agents[uid] = Agent(index, uid, since=self.now, begins=self.now + 1)
            agent = self.agents.get(uid)
            if agent and not agent.frozen:
                agent.answered = self.now
            elif agent and self.answers(pod) and self.now > self.killed_at(agent):
                self.end(pod, 137)
        for agent in list(self.agents.values()):
            if not agent.frozen:
                self.live(agent)
        self.train(seconds)
        for agent in self.agents.values():
            if not agent.frozen and self.reaches(agent):
                self.report(agent)

    def told(self, agent: Agent) -> Document:
        return self.status.get("rendezvous") or {} if self.reaches(agent) else {}

    def live(self, agent: Agent) -> None:
        pod = next(pod for pod in self.pods if pod["metadata"]["uid"] == agent.uid)
        told = self.told(agent)
        if told.get("run") and told["run"] != f"train-{self.job['metadata']['uid'][:8]}":
            return
        if closed := told.get("closed"):
            if closed["code"] == 75 and agent.standing == "training" and self.step > self.committed:
                self.committed = self.step
                self.saved()
            if self.reaches(agent):
                self.report(agent)
            if self.accounts and closed["code"] != 75 and (lease := self.documents.get(("Lease", f"train-worker-{agent.index}"))):
                notes = lease["metadata"]["annotations"]
                whole = {**self.account(), "whole": True}
                notes[Annotation.PROGRESS] = json.dumps({**json.loads(notes[Annotation.PROGRESS]), **whole})
            if agent.index not in self.uploading:
                self.end(pod, closed["code"])
            return
        world, called = told.get("world"), told.get("called")
        if world and world["generation"] > agent.generation and not called:
            called = {"generation": world["generation"], "planned": False}  # it has missed the call, as in kubernetes/board.py
        if agent.told_to_leave and agent.standing in ("waiting", "done"):
            self.end(pod, 75)
            return
        if agent.told_to_leave and agent.standing == "training":
            agent.standing, agent.since = "leaving", self.now
        if agent.standing in ("training", "leaving") and called and called["generation"] > agent.generation:
            if not called["planned"]:
                agent.saving_until = None
                self.stops(agent, pod)
            elif agent.saving_until is None:
                agent.saving_until = self.now + SAVE_S
            elif self.now >= agent.saving_until:
                agent.saving_until = None
                self.committed = max(self.committed, self.step)
                self.saved()
                self.stops(agent, pod)
        if agent.standing == "done" and called and not called["planned"] and called["generation"] > agent.generation:
            agent.standing, agent.since = "waiting", self.now
        called_in = world and world["generation"] > agent.generation and agent.index in world["members"]
        if agent.standing == "waiting" and self.now >= agent.begins and called_in:
            agent.standing, agent.generation, agent.since = "training", world["generation"], self.now
            agent.failed, agent.failure, agent.again = False, None, False
            others = [each for each in self.agents.values() if each is not agent]
            if not any(each.standing == "training" and each.generation == agent.generation for each in others):
                self.step = self.committed
                self.write("session", generation=agent.generation, rank=0, world_size=len(world["members"]))
                self.write("restored", generation=agent.generation, step=self.step, path=None)

    def write(self, kind: str, ago_s: float = 0.0, **fields: Any) -> None:
        self.ledger.append({"t": self.now - ago_s, "kind": kind, "source": "rank-0", **fields})

    def saved(self) -> None:
        if not self.ledger or self.ledger[-1]["kind"] != "interrupted":
            self.write("committed", SAVE_S, step=self.step)
            self.write("interrupted", SAVE_S, step=self.step, reason=f"saved step {self.step}")

    def account(self) -> Document:
        """Compute goodput and losses as rank 0's worker does, after copying the operator's events."""
        self.noted += [entry for entry in self.status.get("ledger") or () if entry not in self.noted]
        account = goodput.buckets(self.ledger + self.noted, self.now)
        if not account.steps_kept:
            return {}
        lost = incidents.seconds_by_cause(account.incidents)
        return {"goodput": round(account.goodput, 6), "lost": lost, "lostSteps": account.steps_replayed}

    def stops(self, agent: Agent, pod: Document) -> None:
        if agent.standing == "leaving":
            self.end(pod, 75)
        else:
            agent.standing, agent.since = "waiting", self.now

    def train(self, seconds: float) -> None:
        """Train one interval in every world whose members all train."""
        world = (self.status.get("rendezvous") or {}).get("world")
        there = [a for a in self.agents.values() if world and a.generation == world["generation"]]
        inside = [a for a in there if world and a.index in world["members"]]
        if not world or len(inside) < len(world["members"]) or any(a.standing not in ("training", "leaving") for a in inside):
            for agent in inside:  # whose peers are gone fails by it, sooner or later
                lost = len(inside) < len(world["members"]) if world else False
                if lost and agent.standing == "training" and not agent.frozen:
                    self.drop(agent, echo=True)
            return
        if any(a.frozen for a in inside) or any(self.unheard(a)[0] for a in inside if a.index not in self.lies):
            return
        self.trained.append((self.now, world["generation"]))
        for _ in range(round(seconds / STEP_S)):
            if self.step < self.steps and not any(a.saving_until for a in inside):
                self.step += 1
                self.done_steps.append((world["generation"], self.step))
                self.write("step", generation=world["generation"], step=self.step)
                if self.step % self.every == 0:
                    self.committed = self.step
        if self.step >= self.steps:
            for agent in inside:
                agent.standing, agent.since = "done", self.now

    def node_of(self, agent: Agent) -> str:
        return next(str(pod["spec"]["nodeName"]) for pod in self.pods if pod["metadata"]["uid"] == agent.uid)

    def unheard(self, agent: Agent) -> tuple[list[int], list[int]]:
        """Return the members that an agent does not hear, and those of them whose machine reports their end."""
        world = (self.status.get("rendezvous") or {}).get("world")
        if not self.mesh or agent.again or not world:
            return [], []
        if agent.generation != world["generation"] or agent.index not in world["members"]:
            return [], []
        unheard, refused = [], []
        for index in world["members"]:
            peer = next((a for a in self.agents.values() if a.index == index and a.generation == agent.generation), None)
            pod = self.documents.get(("Pod", f"train-worker-{index}"))
            if peer is None or peer.again:
                unheard.append(index)
                if pod is not None and self.answers(pod):
                    refused.append(index)
            elif peer is not agent and frozenset((self.node_of(agent), self.node_of(peer))) in self.broken:
                unheard.append(index)
        lies = self.lies.get(agent.index, set()) & set(world["members"]) - {agent.index}
        return sorted({*unheard, *lies}), refused

    def may_report(self, agent: Agent) -> bool:
        """Return whether the Role of the job's workers names the agent's Lease."""
        leases = (rule for role in self.all("Role") for rule in role["rules"] if "leases" in rule["resources"])
        return any(f"train-worker-{agent.index}" in rule["resourceNames"] for rule in leases)

    def report(self, agent: Agent) -> None:
        if self.now < agent.begins or not self.may_report(agent):
            return
        if agent.standing == "training":
            agent.held = self.step
        said = {
            "run": f"train-{self.job['metadata']['uid'][:8]}", "id": agent.index, "standing": agent.standing,
            "generation": agent.generation, "since": agent.since, "address": f"10.0.0.{agent.index}:1",
            "failed": agent.failed, "failure": agent.failure, "attempt": agent.attempt, "past": agent.past,
            "again": agent.again, "held": agent.held if agent.standing in ("waiting", "leaving") else 0,
        }  # fmt: skip
        watched = self.mesh and agent.standing in ("training", "leaving")
        if self.mesh:
            said["unheard"], said["refused"] = self.unheard(agent)
            said["mesh"] = watched
        renew_s, lasts_s = (MESH_RENEW_S, MESH_LEASE_S) if watched else (RENEW_S, LEASE_S)
        first = agent.index in ((self.status.get("rendezvous") or {}).get("world") or {}).get("members", ())[:1]
        renew_s = PROGRESS_S if first else renew_s
        text = json.dumps(said)
        if text == agent.reported and self.now - agent.beat < renew_s:
            return
        agent.reported, agent.beat = text, self.now
        progress = {
            "generation": agent.generation, "step": self.step, "steps": self.steps, "committed": self.committed,
            "snapshot": self.step, "every": 1, "time": self.now, "bytes": 1000,
        }  # fmt: skip
        if self.accounts and first:
            if self.now - self.counted[0] > COUNTED_S:
                self.counted = self.now, self.account()
            progress |= self.counted[1]
        notes = {Annotation.REPORT: text, Annotation.PROGRESS: json.dumps(progress)}
        labels = {Label.JOB: "train", Label.WORKER: str(agent.index)}
        meta = {"name": f"train-worker-{agent.index}", "labels": labels, "annotations": notes}
        spec = {"holderIdentity": agent.uid, "renewTime": pod_status.rfc3339(self.now), "leaseDurationSeconds": lasts_s}
        self.put({**kinds.LEASE.document(meta, spec=spec), RECEIVED_AT: self.clock()})

    def jump(self, seconds: float) -> None:
        """Set every clock in the cluster, and restart the operator, without longer waits for anyone."""
        self.now += seconds
        self.since, self.clock = self.now, self.started()
        self.lost = {node: since + seconds for node, since in self.lost.items()}
        for agent in self.agents.values():
            agent.begins += seconds
            agent.beat += seconds
            agent.answered += seconds
            if agent.saving_until is not None:
                agent.saving_until += seconds

    # running

    def run(self, seconds: float, *, every: float = STEP_S) -> None:
        end = self.now + seconds
        while self.now < end:
            self.pass_(every)
            self.look()

    def until(self, condition: Any, seconds: float = 300.0) -> None:
        end = self.now + seconds
        while not condition(self):
            assert self.now < end, (self.status, self.writes[-20:])
            self.pass_()
            self.look()


class Kueue:
    """Kueue with a quota of pods in one flavor; it admits Workloads in the order of their creation."""

    def __init__(self, cluster: Cluster, quota: int, *, partly: bool = True) -> None:
        self.cluster, self.quota, self.partly = cluster, quota, partly
        tolerated = [{"key": "spot", "operator": "Exists"}]
        self.flavors: dict[str, Document] = {"spot": {"spec": {"nodeLabels": {"pool": "spot"}, "tolerations": tolerated}}}
        self.classes: list[Document] = []
        self.held = False
        """True while nothing is admitted."""
        self.serial = 0
        cluster.kueue = self

    def sight(self) -> KueueObjects:
        workloads = copy.deepcopy(self.cluster.all("Workload"))
        return KueueObjects(kinds.WORKLOAD_V1BETA2, workloads, dict(self.flavors), self.classes)

    def shares(self) -> list[WorkloadSlice]:
        return [WorkloadSlice(each) for each in self.cluster.all("Workload")]

    @property
    def used(self) -> int:
        return sum(share.count for share in self.shares() if share.is_true("QuotaReserved") and not share.is_true("Finished"))

    def admits(self) -> None:
        for document in self.cluster.all("Workload"):
            if "creationTimestamp" not in document["metadata"]:
                self.serial += 1
                document["metadata"]["creationTimestamp"] = pod_status.rfc3339(BEGAN + self.serial)
                document["spec"]["podSets"][0].setdefault("count", 1)
        waiting = [share for share in self.shares() if share.is_pending and share.document["spec"].get("active", True)]
        for share in [] if self.held else sorted(waiting, key=lambda each: str(each.document["metadata"]["creationTimestamp"])):
            free, least = self.quota - self.used, share.document["spec"]["podSets"][0].get("minCount", share.requested)
            count = share.requested if share.requested <= free else free if self.partly and least <= free else 0
            if count:
                assignment = {"name": "main", "flavors": {"cpu": "spot"}, "count": count}
                self._say(share, admission={"clusterQueue": "all", "podSetAssignments": [assignment]})
                self._say(share, ("QuotaReserved", True, "Reserved", ""), ("Evicted", False, "Reserved", ""))
                self._say(share, ("Admitted", True, "Admitted", "The workload is admitted"))
            else:
                self._say(share, ("QuotaReserved", False, "Pending", f"{share.requested} more pods are needed, {free} are free"))

    def evict(self, share: WorkloadSlice, message: str = "Preempted to accommodate a workload") -> None:
        self._say(share, ("Evicted", True, "Preempted", message))

    def told(self, document: Document) -> None:
        before = self.cluster.documents.get(("Workload", document["metadata"]["name"]))
        assert before is not None
        assert before["metadata"]["uid"] == document["metadata"]["uid"]
        before["status"] = document["status"]
        if not WorkloadSlice(before).is_true("QuotaReserved") or WorkloadSlice(before).is_true("Finished"):
            assert not self.using(before["metadata"]["name"]), "quota is given back while pods use it"
        assert self.using(before["metadata"]["name"]) <= WorkloadSlice(before).count

    def allows(self, pod: Document) -> None:
        named = pod["metadata"]["annotations"][kueue.WORKLOAD]
        share = WorkloadSlice(self.cluster.documents["Workload", named])
        assert share.is_admitted, f"{named} is not admitted"
        assert self.using(named) < share.count, f"{named} has no quota for another pod"
        assert pod["spec"]["nodeSelector"]["pool"] == "spot"
        assert {"key": "spot", "operator": "Exists"} in pod["spec"]["tolerations"]

    def using(self, name: str) -> int:
        there = [pod for pod in self.cluster.pods if pod["status"]["phase"] in ("Pending", "Running")]
        return sum(pod["metadata"]["annotations"].get(kueue.WORKLOAD) == name for pod in there)

    def _say(self, share: WorkloadSlice, *conditions: tuple[str, bool, str, str], **fields: Any) -> None:
        said = WorkloadSlice(self.cluster.documents["Workload", share.name])
        changed = [each for each in conditions if each[1] != said.is_true(each[0]) or each[3] or said.condition(each[0])]
        share.document["status"] = said.with_status(self.cluster.now, changed, **fields)["status"]


def stored(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: stored(each) for key, each in value.items() if each is not None}
    return [stored(each) for each in value] if isinstance(value, list | tuple) else value


def ready(well: bool, now: float) -> Document:
    status = "True" if well else "Unknown"
    return {"conditions": [{"type": "Ready", "status": status, "lastTransitionTime": pod_status.rfc3339(now)}]}


def trains(workers: int) -> Any:
    """Return a condition: exactly this number of workers exists, and all of them train."""

    def so(cluster: Cluster) -> bool:
        in_world = len(cluster.status.get("world") or ())
        return in_world == workers == len(cluster.pods) and cluster.status.get("state") == "Running"

    return so


def training(replicas: int = 2, *, low: int = 1, high: int = 4, **fields: Any) -> Cluster:
    """Return a cluster whose job has trained with so many workers for some seconds."""
    cluster = Cluster({"replicas": replicas, "min": low, "max": high}, **fields)
    cluster.until(trains(replicas))
    cluster.run(10)
    return cluster


assert kind_of({"apiVersion": "v1", "kind": "Pod"}) is kinds.POD
