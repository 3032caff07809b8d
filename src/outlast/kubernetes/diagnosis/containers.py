"""Why a pod that has a node does not train: its image, its start, its end and its probes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

from outlast.job import contract
from outlast.job.contract import Label
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.diagnosis import claims_and_secrets, messages
from outlast.kubernetes.diagnosis.evidence import Snapshot, event_text, of_pods
from outlast.kubernetes.diagnosis.finding import Finding, grouped, workers
from outlast.kubernetes.manifests.render_request import Document

# Images and starts

_IMAGE = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError")
_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PostStartHookError")
_NEVER_RAN = ("StartError", "ContainerCannotRun")


@of_pods
def images(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Images that cannot be pulled. The kubelet repeats the container runtime's message in several places."""
    for status in pod_status.statuses(pod):
        waits = status.get("state", {}).get("waiting") or {}
        if (reason := waits.get("reason")) in _IMAGE:
            events = reversed(snapshot.about(pod, "Failed", "InspectFailed"))
            texts = [str(each.get("message") or "") for each in (waits, *events)]
            said = [f"{reason}: {text}" for text in texts if text] or [str(reason)]
            text = next((each for each in said if messages.knows("images", _without_image(each))), said[0])
            yield messages.meaning("images", _without_image(text), (text,), image=status.get("image", ""))


def _without_image(message: str) -> str:
    """The message without image names and URLs, which may contain numbers such as 404."""
    return re.sub(r'"[^"]*"|https?://\S+|\S+/\S+:\S+', "", message)


@of_pods
def starts(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Containers that cannot be created or started."""
    found = [f"{reason}: {message}" for reason, message in pod_status.waiting_states(pod) if reason in _START]
    over = pod_status.termination(pod) or {}
    found += [f"{over['reason']}: {over.get('message', '')}"] if over.get("reason") in _NEVER_RAN else []
    for text in found:
        if claims_and_secrets.missing(text):
            continue  # `claims_and_secrets.references` reports it
        if (named := pod_status.command_missing(text)) is None:
            yield messages.meaning("starts", text, (text,))
            continue
        remedy = "use an image that has Outlast, or correct the template's command; `outlast doctor --image` tries an image"
        what = (
            f"cannot be started: there is no {named or 'the command'} in the image {pod_status.container(pod).get('image', '')}"
        )
        yield Finding("command-missing", what, pod_status.WITHOUT_OUTLAST if named == "outlast" else remedy, (text,))


# Ends

_RAISED = re.compile(r"(?:^|[\]:|] )((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b(?:: .*)?)$")
"""`ValueError: no labels`, optionally after the prefix that torchrun adds to a line."""
_LAST_LINES = 12
_SIGNALS = {each.value: each.name for each in signal.Signals}


def ends(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Workers whose container failed: out of memory, misconfiguration, or any other failure."""
    found = grouped(
        ("OOMKilled" if how.get("reason") == "OOMKilled" else str(how["exitCode"]), pod)
        for pod in snapshot.pods
        if (how := stayed(snapshot, pod) or pod_status.termination(pod)) and _bad(snapshot, pod, how)
    )
    if pods := found.pop("OOMKilled", None):
        yield _out_of_memory(snapshot, pods)
    if pods := found.pop(str(contract.Exit.MISCONFIGURED), None):
        reason = _reason(snapshot, pods) or "the configuration is wrong"
        what = f"{workers(pods)} ended with exit code 78: {reason}; starting again would not help"
        remedy = "correct the job file as the log says and submit it again"
        yield Finding("configuration", what, remedy, tuple(line for line in _last_lines(snapshot, pods) if reason not in line))
    for code, pods in found.items():
        yield _failed(snapshot, pods, int(code))


def stayed(snapshot: Snapshot, pod: Document) -> Document | None:
    """How the worker ended in a pod that keeps running, as in a StatefulSet, according to the log if its last line shows that the
    pod stays."""
    lines = [line for line in snapshot.logs.get(pod_status.name(pod), ()) if line.strip()]
    if not lines or not lines[-1].endswith(contract.STAYS):
        return None
    codes = [end[1] for line in lines if (end := contract.parse_end_line(line)) and end[1] is not None]
    return {"exitCode": codes[-1]} if codes else None


def _recovered(snapshot: Snapshot, pod: Document) -> bool:
    """Whether this worker trains again, in this pod or in a later one."""
    return any(
        pod_status.created_at(other) >= pod_status.created_at(pod) and pod_status.condition(other, "Ready")
        for other in snapshot.of_worker(pod)
    )


def _bad(snapshot: Snapshot, pod: Document, how: Document) -> bool:
    """Whether this termination counts as a failure from which the worker has not recovered. Requested ends do not count, nor do
    failed starts, failed probes and evictions, which have findings of their own."""
    code = how.get("exitCode", 0)
    return (
        code not in (0, contract.Exit.INTERRUPTED, 143)
        and not _recovered(snapshot, pod)
        and not _killed_by_probe(snapshot, pod)
        and how.get("reason") not in _NEVER_RAN
        and pod["status"].get("reason") != "Evicted"
    )


def _out_of_memory(snapshot: Snapshot, pods: Sequence[Document]) -> Finding:
    limit = pod_status.container(pods[0]).get("resources", {}).get("limits", {}).get("memory")
    field = pod_status.memory_field(pods[0])
    had, remedy = "the node's memory was used up", f"set {field}, so that the pod is put where there is room"
    if limit:
        had = f"it may use {limit}"
        shared = "resources.sharedMemory" if field == "resources.memory" else "what is in /dev/shm"
        remedy = f"raise {field}, or lower the batch or {shared}, which counts as memory"
    what = f"{workers(pods, 'was')} killed for lack of memory: {had}"
    return Finding("out-of-memory", what, remedy, _last_lines(snapshot, pods))


_CRASHED = "a native library crashed: see the log; /dev/shm that is too small shows as SIGBUS (resources.sharedMemory)"
_REMEDIES = {
    int(contract.Exit.GIVEN_UP): "fix why the workers failed, or raise restarts.limit, and submit it again",
    137: "see whether the node ran out of memory or somebody deleted the pod; if it recurs, set resources.memory",
    **dict.fromkeys((132, 134, 135, 136, 139), _CRASHED),
}
"""Remedies for exit codes that do not come from the script."""


def _failed(snapshot: Snapshot, pods: Sequence[Document], code: int) -> Finding:
    by = f" ({name})" if (name := _SIGNALS.get(code - 128)) else ""
    reason = ": ".join(filter(None, (_reason(snapshot, pods), _exception(snapshot, pods))))
    what = f"{workers(pods)} ended with exit code {code}{by}" + (f": {reason}" if reason else "")
    remedy = f"correct the script: `outlast logs {snapshot.name}` shows all; `outlast run` tries it on this machine"
    if Label.DATASET in (snapshot.workload.get("metadata", {}).get("labels") or {}):
        remedy = f"correct what it says, and give the command that made it again; `outlast logs {snapshot.name}` shows all"
    return Finding("failing-script", what, _REMEDIES.get(code, remedy), _last_lines(snapshot, pods))


def _reason(snapshot: Snapshot, pods: Sequence[Document]) -> str:
    """The reason in the last line of the agent about an end; empty if there is none."""
    for pod in pods:
        for line in reversed(snapshot.logs.get(pod_status.name(pod), ())):
            if end := contract.parse_end_line(line):
                return end[0]
    return ""


def _exception(snapshot: Snapshot, pods: Sequence[Document]) -> str:
    """The last line of the first traceback; later tracebacks usually show secondary failures."""
    for pod in pods:
        inside = False
        for line in snapshot.logs.get(pod_status.name(pod), ()):
            inside = inside or "Traceback (most recent call last)" in line
            if inside and (found := _RAISED.search(line)):
                return found[1]
    return ""


def _last_lines(snapshot: Snapshot, pods: Sequence[Document]) -> tuple[str, ...]:
    """The last non-empty lines of the first log that has any."""
    for pod in pods:
        lines = [line for line in snapshot.logs.get(pod_status.name(pod), ()) if line.strip()]
        if lines:
            return (f"the log of {workers([pod])} ends with:", *(f"    {line}" for line in lines[-_LAST_LINES:]))
    return ()


# Probes


@of_pods
def probing(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Containers that were killed because they failed their probes."""
    if killer := _killed_by_probe(snapshot, pod):
        when, remedy = "any more", "see its log: a native call that never returns, or a node without cores left"
        if killer == "Startup":
            when = "at the start"
            remedy = "the command must be `outlast agent`; on a busy node give it more cores (resources.cpu)"
        said = event_text(_failing(snapshot, pod)[-1])
        yield Finding("probe", f"was killed, not having answered {when}", remedy, (said,))


def _failing(snapshot: Snapshot, pod: Document) -> list[Document]:
    """Events of failed probes, limited to probes that may end a container."""
    return [each for each in snapshot.about(pod, "Unhealthy") if str(each.get("message")).startswith(("Startup", "Liveness"))]


def _killed_by_probe(snapshot: Snapshot, pod: Document) -> str:
    """`Startup` or `Liveness` if the kubelet ended the container because of that probe; otherwise empty. The kubelet's event
    names the probe only for containers that are restarted. If a container without such an event is in a pod that was deleted or
    evicted, the deletion or eviction counts as the cause."""
    killing, asked = snapshot.about(pod, "Killing"), _failing(snapshot, pod)
    if not killing or not asked or (pod_status.termination(pod) or {}).get("reason") == "OOMKilled":
        return ""
    removed = pod_status.terminating(pod) or pod["status"].get("reason") or pod_status.disruption(pod)
    if "probe" not in str(killing[-1].get("message")) and (removed or not pod_status.termination(pod)):
        return ""
    return str(asked[-1]["message"]).split()[0]
