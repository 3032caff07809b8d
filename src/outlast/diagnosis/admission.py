"""Why pods are not created: how the API server answered the controller of the Job or StatefulSet, or the operator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from outlast.contract import Label
from outlast.diagnosis.cause import Cause
from outlast.diagnosis.snapshot import Snapshot, event_text, event_time
from outlast.kube import pods as kube_pods
from outlast.manifests.request import Document


@dataclass(frozen=True)
class Rule:
    """A message of admission and its meaning; `{...}` are groups of the expression."""

    name: str
    says: str
    what: str
    remedy: str


_EXCEEDED = r"exceeded quota: (?P<quota>[^,]+), requested: (?P<asked>\S+?), used: (?P<used>\S+?), limited: (?P<limit>\S+)"
RULES = (
    Rule(
        "quota",
        _EXCEEDED,
        "the quota {quota} of the namespace leaves too little: {each}",
        "remove what is no longer needed, lower `resources` or workers.replicas, or have the quota raised",
    ),
    Rule(
        "quota",
        r"failed quota: (?P<quota>[^:]+): must specify (?P<needed>.+?) for",
        "the quota {quota} of the namespace lets in only pods that say what they need: {needed} is not set",
        "set it in `resources` of the job file (limits.cpu is resources.cpuLimit)",
    ),
    Rule(
        "limit-range",
        r"(?P<said>(?:maximum|minimum) \S+ usage per (?:Container|Pod) is .*|.*limit to request ratio.*)",
        "a LimitRange of the namespace refuses the pods: {said}",
        "change `resources` of the job file so that it is within, or have the LimitRange changed",
    ),
    Rule(
        "pod-security",
        r'violates PodSecurity "(?P<level>[^"]+)": (?P<said>.*)',
        "the Pod Security level {level} of the namespace refuses the pods: {said}",
        "remove that from `template`, or train in a namespace with a lower level (its label pod-security.kubernetes.io/enforce)",
    ),
    Rule(
        "webhook",
        r'failed calling webhook "(?P<webhook>[^"]+)": (?P<said>.*)',
        "the webhook {webhook}, which must admit all pods, does not answer: {said}",
        "bring its service back, or have it removed (kubectl get validating,mutatingwebhookconfigurations)",
    ),
    Rule(
        "webhook",
        r'admission webhook "(?P<webhook>[^"]+)" denied the request: ?(?P<said>.*)',
        "the webhook {webhook} refuses the pods: {said}",
        "change the job as it says, or ask the cluster's administrator",
    ),
    Rule(
        "policy",
        r"ValidatingAdmissionPolicy '(?P<policy>[^']+)'.*denied request: ?(?P<said>.*)",
        "the policy {policy} refuses the pods: {said}",
        "change the job as it says, or ask the cluster's administrator",
    ),
    Rule(
        "account-missing",
        r'serviceaccount "(?P<account>[^"]+)" not found',
        "the ServiceAccount {account} does not exist in namespace {namespace}",
        "make it (kubectl create serviceaccount {account}), or correct serviceAccountName in the template",
    ),
    Rule(
        "priority-missing",
        r"no PriorityClass with name (?P<priority>\S+) was found",
        "there is no PriorityClass {priority}",
        "correct scheduling.priorityClassName (kubectl get priorityclasses), or make it",
    ),
    Rule(
        "runtime-class-missing",
        r"RuntimeClass \"?(?P<runtime>[^\" ]+)\"? not found",
        "there is no RuntimeClass {runtime}",
        "correct runtimeClassName in the template (kubectl get runtimeclasses), or make it",
    ),
    Rule(
        "rights",
        r"is forbidden: (?P<said>User .* cannot .*)",
        "the controller that creates the pods lacks a right: {said}",
        "give it the right, or install Outlast again (`outlast install`)",
    ),
    Rule(
        "namespace-ends",
        r"because it is being terminated",
        "the namespace {namespace} is being deleted",
        "submit the job in another one",
    ),
    Rule(
        "cpu-limit",
        r'Invalid value: "(?P<cpu>[^"]+)": must be less than or equal to cpu limit of (?P<most>[^\s,;\]]+)',
        "a worker asks for {cpu} cores, and its limit is {most}, which a LimitRange of the namespace sets",
        "set resources.cpuLimit of the job file to {cpu} or more, or lower resources.cpu (kubectl describe limitrange)",
    ),
    Rule(
        "invalid",
        r"is invalid: (?P<said>.*)",
        "the API server rejects the pods as invalid: {said}",
        "correct that in `template`",
    ),
)


def creations(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """Pods that could not be created, while there are fewer than the job asks for."""
    alive = [pod for pod in snapshot.pods if kube_pods.phase(pod) in ("Pending", "Running", "Succeeded")]
    if len(alive) >= snapshot.wanted():
        return
    told: dict[str, Cause] = {}
    for event in sorted((each for each in snapshot.events if _failed_to_make(each, snapshot)), key=event_time, reverse=True):
        cause = refusal(snapshot, event.get("message", ""))
        told.setdefault(cause.what, Cause(cause.rule, cause.what, (event_text(event),), cause.remedy))
    missing = snapshot.wanted() - len(alive)
    for cause in told.values():
        one = "the worker" if Label.JOB in (snapshot.workload["metadata"].get("labels") or {}) else "it"
        some = f"{missing} of {snapshot.wanted()} workers" if snapshot.wanted() > 1 else one
        have = "have" if missing > 1 else "has"
        yield Cause(cause.rule, f"{some} {have} no pod: {cause.what}", cause.evidence, cause.remedy)


def _failed_to_make(event: Document, snapshot: Snapshot) -> bool:
    """Whether it is about a pod of the workload that could not be created; ReplicaSets create those of a Deployment."""
    about, name = event.get("involvedObject", {}), kube_pods.name(snapshot.workload)
    mine = about.get("name") == name or (about.get("kind") == "ReplicaSet" and str(about.get("name")).startswith(f"{name}-"))
    return bool(event.get("reason") == "FailedCreate" and name and mine)


def refusal(snapshot: Snapshot, message: str) -> Cause:
    """The cause behind a refusal of the API server."""
    for rule in RULES:
        if found := re.search(rule.says, message, re.DOTALL):
            words = {**found.groupdict(), "namespace": snapshot.namespace}
            if "asked" in words:
                words["each"] = _amounts(words["asked"], words["used"], words["limit"])
            return Cause(rule.name, rule.what.format(**words), (), rule.remedy.format(**words))
    return Cause(
        "refused", f"the API server refused: {message}", (), "change the job as it says, or ask the cluster's administrator"
    )


def _amounts(*texts: str) -> str:
    """`pods: a pod asks for 1, 3 of 3 are used`, from `pods=1`, `pods=3` and `pods=3`."""
    asked, used, limit = (dict(part.partition("=")[::2] for part in text.split(",")) for text in texts)
    said = (f"{name}: a pod asks for {amount}, {used.get(name)} of {limit.get(name)} are used" for name, amount in asked.items())
    return "; ".join(said)
