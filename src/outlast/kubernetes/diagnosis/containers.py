"""Rules about pods that have a node: images, starts, failures and probes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

from outlast.job import contract
from outlast.job.contract import Label
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.diagnosis import claims_and_secrets, messages
from outlast.kubernetes.diagnosis.evidence import Snapshot, event_text, per_pod
from outlast.kubernetes.diagnosis.finding import Finding, grouped, workers
from outlast.kubernetes.manifests.render_request import Document

# Images and starts

_IMAGE_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "RegistryUnavailable",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
)
_START_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PostStartHookError")
_NEVER_RAN = ("StartError", "ContainerCannotRun")


@per_pod
def images(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find images that cannot be pulled."""
    for status in pod_status.statuses(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        if (reason := waiting.get("reason")) in _IMAGE_REASONS:
            events = reversed(snapshot.events_about(pod, "Failed", "InspectFailed"))
            texts = [str(each.get("message") or "") for each in (waiting, *events)]
            texts_with_reason = [f"{reason}: {text}" for text in texts if text] or [str(reason)]
            known = (each for each in texts_with_reason if messages.has_meaning("images", _without_image(each)))
            text = next(known, texts_with_reason[0])
            yield messages.meaning("images", _without_image(text), (text,), image=status.get("image", ""))


def _without_image(message: str) -> str:
    """Remove image names and URLs, because they may contain numbers such as 404."""
    return re.sub(r'"[^"]*"|https?://\S+|\S+/\S+:\S+', "", message)


@per_pod
def start_failures(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find containers that cannot be created or started."""
    texts = [f"{reason}: {message}" for reason, message in pod_status.waiting_states(pod) if reason in _START_REASONS]
    termination = pod_status.termination(pod) or {}
    texts += [f"{termination['reason']}: {termination.get('message', '')}"] if termination.get("reason") in _NEVER_RAN else []
    for text in texts:
        if claims_and_secrets.missing(text):
            continue  # `claims_and_secrets.references` reports it
        if (missing := pod_status.command_missing(text)) is None:
            yield messages.meaning("starts", text, (text,))
            continue
        remedy = "use an image that has Outlast, or correct the template's command; `outlast doctor --image` tries an image"
        image = pod_status.container(pod).get("image", "")
        what = f"cannot be started: there is no {missing or 'the command'} in the image {image}"
        yield Finding("command-missing", what, pod_status.WITHOUT_OUTLAST if missing == "outlast" else remedy, (text,))


# Ends

_RAISED = re.compile(r"(?:^|[\]:|] )((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b(?:: .*)?)$")
"""Pattern for a line that names an exception, such as `ValueError: no labels`, with or without torchrun's prefix."""
_LAST_LINES = 12
_SIGNALS = {each.value: each.name for each in signal.Signals}


def failures(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Find workers whose container failed."""
    by_end = grouped(
        (_end_text(pod, termination), pod)
        for pod in snapshot.pods
        if (termination := end_in_running_pod(snapshot, pod) or pod_status.termination(pod))
        and _is_failure(snapshot, pod, termination)
    )
    download = Label.DATASET in (snapshot.workload.get("metadata", {}).get("labels") or {})
    for end, pods in sorted(by_end.items(), key=lambda each: (not each[0].startswith("OOMKilled"), each[0] != "78")):
        reason = ": ".join(filter(None, (_reason(snapshot, pods), _exception(snapshot, pods))))
        code = end.partition(" ")[0]
        signal_name = _SIGNALS.get(int(code) - 128) if code.isdecimal() else ""
        yield messages.meaning(
            "exits",
            f"{end} download" if download else end,
            _last_lines(snapshot, pods),
            pods=workers(pods),
            were=workers(pods, "was"),
            code=f"{code} ({signal_name})" if signal_name else code,
            reason=f": {reason}" if reason else "",
            job=snapshot.name,
            field=pod_status.memory_field(pods[0]),
        )


def _end_text(pod: Document, termination: Document) -> str:
    if termination.get("reason") != "OOMKilled":
        early = "" if pod_status.has_started(pod) else f" in {termination.get('container')}"  # before the worker's
        return f"{termination['exitCode']}{early}"
    return f"OOMKilled {pod_status.container(pod).get('resources', {}).get('limits', {}).get('memory', '')}"


def end_in_running_pod(snapshot: Snapshot, pod: Document) -> Document | None:
    """Return a termination with the exit code of a worker whose pod keeps running, as in a StatefulSet. Return None if the last
    line of the log does not say that the worker has ended."""
    lines = [line for line in snapshot.logs.get(pod_status.name(pod), ()) if line.strip()]
    if not lines or not lines[-1].endswith(contract.STAYS):
        return None
    codes = [end[1] for line in lines if (end := contract.parse_end_line(line)) and end[1] is not None]
    return {"exitCode": codes[-1]} if codes else None


def _recovered(snapshot: Snapshot, pod: Document) -> bool:
    return any(
        pod_status.created_at(other) >= pod_status.created_at(pod) and pod_status.condition(other, "Ready")
        for other in snapshot.pods_of_worker(pod)
    )


def _is_failure(snapshot: Snapshot, pod: Document, termination: Document) -> bool:
    """Return whether a worker failed for a reason that no other rule reports, and has not recovered."""
    code = termination.get("exitCode", 0)
    return (
        code not in (0, contract.Exit.INTERRUPTED, 143)
        and not _recovered(snapshot, pod)
        and not _killed_by_probe(snapshot, pod)
        and termination.get("reason") not in _NEVER_RAN
        and pod["status"].get("reason") != "Evicted"
    )


def _reason(snapshot: Snapshot, pods: Sequence[Document]) -> str:
    for pod in pods:
        for line in reversed(snapshot.logs.get(pod_status.name(pod), ())):
            if end := contract.parse_end_line(line):
                return end[0]
    return ""


def _exception(snapshot: Snapshot, pods: Sequence[Document]) -> str:
    """Return the line that names the exception of the first traceback. Later failures are usually consequences of the first."""
    for pod in pods:
        in_traceback = False
        for line in snapshot.logs.get(pod_status.name(pod), ()):
            in_traceback = in_traceback or "Traceback (most recent call last)" in line
            if in_traceback and (match := _RAISED.search(line)):
                return match[1]
    return ""


def _last_lines(snapshot: Snapshot, pods: Sequence[Document]) -> tuple[str, ...]:
    for pod in pods:
        lines = [line for line in snapshot.logs.get(pod_status.name(pod), ()) if line.strip()]
        if lines:
            return (f"the log of {workers([pod])} ends with:", *(f"    {line}" for line in lines[-_LAST_LINES:]))
    return ()


# Probes


@per_pod
def failed_probes(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find containers that were killed because they failed a probe."""
    if probe := _killed_by_probe(snapshot, pod):
        when, remedy = "any more", "see its log: a native call that never returns, or a node without cores left"
        if probe == "Startup":
            when = "at the start"
            remedy = "the command must be `outlast agent`; on a busy node give it more cores (resources.cpu)"
        evidence = event_text(_failing(snapshot, pod)[-1])
        yield Finding("probe", f"was killed, not having answered {when}", remedy, (evidence,))


def _failing(snapshot: Snapshot, pod: Document) -> list[Document]:
    return [
        each for each in snapshot.events_about(pod, "Unhealthy") if str(each.get("message")).startswith(("Startup", "Liveness"))
    ]


def _killed_by_probe(snapshot: Snapshot, pod: Document) -> str:
    """Return `Startup` or `Liveness` if the kubelet killed the container because of that probe, otherwise an empty string. The
    kubelet's event mentions the probe only if the container is restarted. If the event does not mention it, a deletion or
    eviction of the pod counts as the cause."""
    killing, failing = snapshot.events_about(pod, "Killing"), _failing(snapshot, pod)
    if not killing or not failing or (pod_status.termination(pod) or {}).get("reason") == "OOMKilled":
        return ""
    removed = pod_status.terminating(pod) or pod["status"].get("reason") or pod_status.disruption(pod)
    if "probe" not in str(killing[-1].get("message")) and (removed or not pod_status.termination(pod)):
        return ""
    return str(failing[-1]["message"]).split()[0]
