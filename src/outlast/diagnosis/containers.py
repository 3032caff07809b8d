"""Why a pod with a node does not train: its image, its start, its end and its probes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outlast import contract
from outlast.contract import Label
from outlast.diagnosis.cause import Cause, grouped, verb, workers_text
from outlast.diagnosis.snapshot import Snapshot, event_text
from outlast.kube import pods as kube_pods
from outlast.manifests.request import Document

# Images


@dataclass(frozen=True)
class ImageRule:
    """A message about an image, of containerd, CRI-O or the kubelet, and its meaning."""

    says: str
    what: str
    remedy: str


_LOGIN = "make a Secret (kubectl create secret docker-registry) and name it in the template's imagePullSecrets"
IMAGES = (
    ImageRule(
        r"no match for platform|exec format error",
        "is not built for the processors of that node",
        "build it for them (docker buildx build --platform linux/amd64,linux/arm64), or choose nodes by kubernetes.io/arch",
    ),
    ImageRule(
        r"429|toomanyrequests|rate limit",
        "may not be pulled so often: its registry limits us",
        "log in with an imagePullSecret, or mirror it",
    ),
    ImageRule(
        r"insufficient_scope|pull access denied|requested access to the resource is denied",
        "does not exist, or its registry wants a login",
        f"correct `image`; if it is private {_LOGIN}",
    ),
    ImageRule(
        r"40[13]|[Uu]nauthorized|[Ff]orbidden|no basic auth|denied",
        "may not be pulled: its registry wants a login",
        f"{_LOGIN}, or let the nodes pull",
    ),
    ImageRule(
        r"not found|manifest unknown|name unknown|NAME_UNKNOWN|404",
        "does not exist in its registry",
        "correct the name or the tag of `image`, or push it",
    ),
    ImageRule(
        r"no such host|server misbehaving",
        "cannot be pulled: the name of its registry is unknown (DNS)",
        "correct the registry in `image`, or the DNS of the nodes",
    ),
    ImageRule(
        r"x509|certificate|TLS handshake|server gave HTTP response",
        "cannot be pulled: there is no secure connection to its registry",
        "give the nodes the registry's certificate, or configure it as an insecure one in their container runtime",
    ),
    ImageRule(
        r"connection refused|i/o timeout|timed? ?out|deadline exceeded|unreachable|connection reset|EOF",
        "cannot be pulled: its registry does not answer the nodes",
        "correct the registry in `image`, or let the nodes reach it (proxy, firewall, NAT)",
    ),
    ImageRule(
        r"no space left", "does not fit on the node's disk", "free the disk of the node, use a smaller image or larger disks"
    ),
)
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError")


def images(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """Images that cannot be pulled."""
    found: list[tuple[str, Document]] = []
    for pod in snapshot.pods:
        for status in kube_pods.statuses(pod):
            waits = status.get("state", {}).get("waiting") or {}
            if waits.get("reason") in _IMAGE:
                found.append((f"{waits['reason']} {status.get('image', '')}", pod))
    for key, pods in grouped(found).items():
        reason, image = key.split(" ", 1)
        yield _image(reason, image, pods, _pull_message(snapshot, pods))


def _pull_message(snapshot: Snapshot, pods: Sequence[Document]) -> str:
    """The runtime's message about a failed pull, which the kubelet repeats in some of several places."""
    texts = [message for pod in pods for reason, message in kube_pods.waiting(pod) if reason in _IMAGE]
    texts += [str(event.get("message", "")) for pod in pods for event in reversed(snapshot.about(pod, "Failed", "InspectFailed"))]
    telling = [text for text in texts if any(re.search(rule.says, _without_image(text)) for rule in IMAGES)]
    return (telling or texts or [""])[0]


def _without_image(message: str) -> str:
    """The message without names of images and URLs, which may contain numbers such as 404."""
    return re.sub(r'"[^"]*"|https?://\S+|\S+/\S+:\S+', "", message)


def _image(reason: str, image: str, pods: Sequence[Document], message: str) -> Cause:
    held = f"{workers_text(pods)} {verb(pods, 'waits', 'wait')} for the image {image}"
    evidence = (f"{reason}: {message}",) if message else (reason,)
    if reason == "InvalidImageName":
        return Cause("image", f"{held}, which is no name of an image", evidence, "correct `image`; names are in lower case")
    if reason == "ErrImageNeverPull":
        remedy = "load it into the nodes, or remove imagePullPolicy: Never from the template"
        return Cause("image", f"{held}, which is not on the node and may not be pulled", evidence, remedy)
    for rule in IMAGES:
        if re.search(rule.says, _without_image(message)):
            return Cause("image", f"{held}, which {rule.what}", evidence, rule.remedy)
    return Cause("image", f"{held}, which cannot be pulled", evidence, "correct `image`, or see what the node says")


# Starting

_PER_POD = re.compile(r"[0-9a-f]{64}|/proc/\d+\S*")
"""The parts of a message that differ between pods."""


def starts(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """Containers that cannot be created or started."""
    found: list[tuple[str, Document]] = []
    for pod in snapshot.pods:
        for reason, message in kube_pods.waiting(pod):
            if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PostStartHookError"):
                found.append((f"{reason}: {message}", pod))
        over = kube_pods.termination(pod)
        if over and over.get("reason") in ("StartError", "ContainerCannotRun"):
            found.append((f"{over['reason']}: {over.get('message', '')}", pod))
    for text, pods in grouped((_PER_POD.sub("...", text), pod) for text, pod in found).items():
        if re.search(r"(secret|configmap) \"[^\"]+\" not found|couldn't find key", text):
            continue  # `storage.references` reports it
        whom = f"{workers_text(pods)} cannot be started"
        if (named := kube_pods.command_missing(text)) is not None:
            remedy = "use an image that has Outlast, or correct the template's command; `outlast doctor --image` tries an image"
            if named == "outlast":
                remedy = kube_pods.WITHOUT_OUTLAST
            named = named or "the command"
            yield Cause(
                "command-missing",
                f"{whom}: there is no {named} in the image {kube_pods.container(pods[0]).get('image', '')}",
                (text,),
                remedy,
            )
        elif "exec format error" in text:
            yield Cause("image", f"{whom}: the image is not built for that processor", (text,), IMAGES[0].remedy)
        elif "will run as root" in text or "non-numeric user" in text:
            remedy = "build the image with a numeric user (USER 1000), or set runAsUser in the template's securityContext"
            yield Cause("root", f"{whom}: the image wants to run as root, and the pod may not", (text,), remedy)
        elif "permission denied" in text:
            remedy = "give it the x bit in the image, and to user 1000"
            yield Cause("start", f"{whom}: the command may not be executed", (text,), remedy)
        else:
            yield Cause("start", f"{whom}", (text,), "correct what the message names in the template or the image")


# Ends

_RAISED = re.compile(r"(?:^|[\]:|] )((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b(?:: .*)?)$")
"""`ValueError: no labels`, perhaps after torchrun's prefix of the line."""
_LAST_LINES = 12
_SIGNALS = {each.value: each.name for each in signal.Signals}


def ends(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """Workers whose container failed: out of memory, misconfigured, or any other failure."""
    found = grouped(
        ("OOMKilled" if how.get("reason") == "OOMKilled" else str(how["exitCode"]), pod)
        for pod in snapshot.pods
        if (how := stayed(snapshot, pod) or kube_pods.termination(pod)) and _bad(snapshot, pod, how)
    )
    if pods := found.pop("OOMKilled", None):
        yield _out_of_memory(snapshot, pods)
    if pods := found.pop(str(contract.Exit.MISCONFIGURED), None):
        reason = _reason(snapshot, pods) or "the configuration is wrong"
        what = f"{workers_text(pods)} ended with exit code 78: {reason}; starting again would not help"
        remedy = "correct the job file as the log says and submit it again"
        evidence = tuple(line for line in _said(snapshot, pods) if reason not in line)
        yield Cause("configuration", what, evidence, remedy)
    for code, pods in found.items():
        yield _failed(snapshot, pods, int(code))


def stayed(snapshot: Snapshot, pod: Document) -> Document | None:
    """How the worker in a pod that stays up has ended, as in a StatefulSet: the last line of its log tells."""
    lines = [line for line in snapshot.logs.get(kube_pods.name(pod), ()) if line.strip()]
    if not lines or not lines[-1].endswith(contract.STAYS):
        return None
    codes = [end[1] for line in lines if (end := contract.ended(line)) and end[1] is not None]
    return {"exitCode": codes[-1]} if codes else None


def _recovered(snapshot: Snapshot, pod: Document) -> bool:
    """Whether this worker trains again, in this pod or a later one."""
    return any(
        kube_pods.born(other) >= kube_pods.born(pod) and kube_pods.condition(other, "Ready") for other in snapshot.of_worker(pod)
    )


def _bad(snapshot: Snapshot, pod: Document, how: Document) -> bool:
    """Whether this termination is a failure of its own, not requested, a failed start or an eviction, and not recovered from."""
    code = how.get("exitCode", 0)
    return (
        code not in (0, contract.Exit.INTERRUPTED, 143)
        and not _recovered(snapshot, pod)
        and not _killed_by_probe(snapshot, pod)
        and how.get("reason") not in ("StartError", "ContainerCannotRun")
        and pod["status"].get("reason") != "Evicted"
    )


def _out_of_memory(snapshot: Snapshot, pods: Sequence[Document]) -> Cause:
    limit = kube_pods.container(pods[0]).get("resources", {}).get("limits", {}).get("memory")
    had, remedy = "the node's memory was used up", "set resources.memory, so that the pod is put where there is room"
    if limit:
        had = f"it may use {limit}"
        remedy = "raise resources.memory, or lower the batch or resources.sharedMemory, which counts as memory"
    what = f"{workers_text(pods)} {verb(pods, 'was', 'were')} killed for lack of memory: {had}"
    return Cause("out-of-memory", what, _said(snapshot, pods), remedy)


def _failed(snapshot: Snapshot, pods: Sequence[Document], code: int) -> Cause:
    by = f" ({name})" if (name := _SIGNALS.get(code - 128)) else ""
    reason = ": ".join(filter(None, (_reason(snapshot, pods), _exception(snapshot, pods))))
    what = f"{workers_text(pods)} ended with exit code {code}{by}" + (f": {reason}" if reason else "")
    if code == contract.Exit.GIVEN_UP:
        remedy = "fix why the workers failed, or raise restarts.limit, and submit it again"
    elif code == 137:
        remedy = "see whether the node ran out of memory or somebody deleted the pod; if it recurs, set resources.memory"
    elif code in (132, 134, 135, 136, 139):
        remedy = "a native library crashed: see the log; /dev/shm that is too small shows as SIGBUS (resources.sharedMemory)"
    elif Label.DATASET in (snapshot.workload.get("metadata", {}).get("labels") or {}):
        remedy = f"correct what it says, and give the command that made it again; `outlast logs {snapshot.name}` shows all"
    else:
        remedy = f"correct the script: `outlast logs {snapshot.name}` shows all; `outlast run` tries it on this machine"
    return Cause("failing-script", what, _said(snapshot, pods), remedy)


def _reason(snapshot: Snapshot, pods: Sequence[Document]) -> str:
    """The reason in the agent's last line."""
    for pod in pods:
        for line in reversed(snapshot.logs.get(kube_pods.name(pod), ())):
            if end := contract.ended(line):
                return end[0]
    return ""


def _exception(snapshot: Snapshot, pods: Sequence[Document]) -> str:
    """The last line of the first traceback: later ones are usually secondary failures."""
    for pod in pods:
        inside = False
        for line in snapshot.logs.get(kube_pods.name(pod), ()):
            inside = inside or "Traceback (most recent call last)" in line
            if inside and (found := _RAISED.search(line)):
                return found[1]
    return ""


def _said(snapshot: Snapshot, pods: Sequence[Document]) -> tuple[str, ...]:
    """The last lines of the first log that has any, without empty lines."""
    for pod in pods:
        lines = [line for line in snapshot.logs.get(kube_pods.name(pod), ()) if line.strip()]
        if lines:
            return (f"the log of {workers_text([pod])} ends with:", *(f"    {line}" for line in lines[-_LAST_LINES:]))
    return ()


# Probes


def probing(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """Containers that run and do not answer their probes, or were killed for it."""
    found: list[tuple[str, Document]] = []
    for pod in snapshot.pods:
        if killer := _killed_by_probe(snapshot, pod):
            found.append((f"killed {killer}", pod))
        elif (
            (asked := _failing(snapshot, pod))
            and kube_pods.any_running(pod)
            and not _started(pod)
            and (asked[-1].get("count") or 1) > 3
        ):
            found.append(("silent", pod))
    for key, pods in grouped(found).items():
        evidence = (event_text(_failing(snapshot, pods[-1])[-1]),)
        if key == "silent":
            remedy = "wait; if it stays so, the command is not `outlast agent`, or the node has no cores left for it"
            whom = f"{workers_text(pods)} {verb(pods, 'runs', 'run')}"
            yield Cause("probe", f"{whom}, and {verb(pods, 'does', 'do')} not answer the startup probe yet", evidence, remedy)
            continue
        at_start = key == "killed Startup"
        what = f"{workers_text(pods)} {verb(pods, 'was', 'were')} killed, not having answered"
        remedy = (
            "the command must be `outlast agent`; on a busy node give it more cores (resources.cpu)"
            if at_start
            else "see its log: a native call that never returns, or a node without cores left"
        )
        yield Cause("probe", f"{what} {'at the start' if at_start else 'any more'}", evidence, remedy)


def _failing(snapshot: Snapshot, pod: Document) -> list[Document]:
    """Events of failed probes that may end a container."""
    return [each for each in snapshot.about(pod, "Unhealthy") if str(each.get("message")).startswith(("Startup", "Liveness"))]


def _killed_by_probe(snapshot: Snapshot, pod: Document) -> str:
    """`Startup` or `Liveness` if the kubelet ended the container because of that probe; empty otherwise.

    Its event names the probe only for containers that it restarts. Otherwise a container of a pod that was deleted or evicted
    was stopped for that.
    """
    killing, asked = snapshot.about(pod, "Killing"), _failing(snapshot, pod)
    if not killing or not asked or (kube_pods.termination(pod) or {}).get("reason") == "OOMKilled":
        return ""
    removed = kube_pods.leaves(pod) or pod["status"].get("reason") or kube_pods.disruption(pod)
    if "probe" not in str(killing[-1].get("message")) and (removed or not kube_pods.termination(pod)):
        return ""
    return str(asked[-1]["message"]).split()[0]


def _started(pod: Document) -> bool:
    return any(status.get("started") for status in kube_pods.statuses(pod) if status.get("name") in contract.Pod.AGENT)
