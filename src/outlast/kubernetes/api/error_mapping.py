"""Maps an API server's error responses to Outlast's errors, each with a remedy. No other module does this. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outlast.base.errors import Absent, ClusterError, Conflict, Forbidden, NotServed, Refused, Taken, Unanswered, Unauthorized
from outlast.kubernetes.api.kinds import INSTALLED_BY, Kind

_MAX_LENGTH = 600
"""Maximum length of a server's message in an error, as some messages quote whole documents."""
_PARTICIPLES = {
    "get": "read",
    "list": "listed",
    "watch": "watched",
    "create": "created",
    "apply": "applied",
    "patch": "changed",
    "update": "replaced",
    "delete": "deleted",
    "evict": "evicted",
}


@dataclass(frozen=True)
class Subject:
    """The object or collection that a request concerns, for error messages."""

    verb: str
    """The action, such as get or apply; on a pod also log, exec, evict or proxy."""
    kind: Kind | None = None
    name: str = ""
    namespace: str = ""
    server: str = ""
    subresource: str = ""

    @property
    def description(self) -> str:
        """The subject as text, such as `Pod train-0 in namespace team-a`."""
        words = [str(self.kind) if self.kind else "it", self.name]
        words += [f"in namespace {self.namespace}"] if self.namespace else []
        return " ".join(filter(None, words))


def error_for(status: int, body: bytes, subject: Subject) -> ClusterError:
    """Return the error for a response whose HTTP status is not 2xx."""
    status_body = _status(body)
    message = _shortened(str(status_body.get("message") or body.decode(errors="replace").strip() or f"HTTP {status}"))
    details: Mapping[str, Any] = status_body.get("details") or {}
    cannot = f"{subject.description} cannot be {_PARTICIPLES.get(subject.verb, 'reached')}"
    answer = f"(HTTP {status}: {message})"
    if status == 401:
        return Unauthorized(
            f"the API server {subject.server} does not accept the login, which has expired or is not for this cluster; "
            "log in again (a pod retries with its next token)"
        )
    if status == 403 and re.search(r'User ".*" cannot ', message):
        remedy = "ask the cluster's administrator for a role with that right, or choose another namespace (-n) or --context"
        return Forbidden(f"{message}; {remedy}")
    if status == 404:
        return _absent(details, message, subject)
    if status == 409 and status_body.get("reason") == "AlreadyExists":
        return Taken(f"{subject.description} exists already")
    if status == 409:
        return Conflict(f"{cannot}: it has been changed since it was read, or is being deleted ({message}); try again")
    if re.search("failed calling webhook|failed to call webhook|failed to create typed", message):  # 500, and no outage
        return Refused(f"{cannot}: {message}")
    if subject.verb == "proxy" and (not status_body or "error trying to reach service" in message):
        return Unanswered(f"{subject.description} does not answer on its port {answer}")
    if status >= 500 and subject.verb in ("log", "exec"):  # the server forwards these requests to the kubelet
        return Unanswered(f"{cannot}: its node does not answer, or is not well {answer}; try again later")
    if status >= 500 or (status == 429 and subject.verb != "evict"):
        return Unanswered(f"{cannot}: the API server {subject.server} is not well {answer}; try again later")
    causes = [each for each in details.get("causes") or [] if each.get("field") and each["field"] != "<nil>"]
    texts = dict.fromkeys(_shortened(f"{each['field']}: {_cause(str(each.get('message', '')))}") for each in causes)
    return Refused(f"{cannot}: {_shortened('; '.join(texts)) or message}")


def _cause(message: str) -> str:
    """Return the cause in a message, such as `field is immutable` in `Invalid value: {a whole pod}: field is immutable`, because
    the value may hold secrets. A CEL rule's message is returned unchanged."""
    rest = message.removeprefix("Invalid value: ")
    if len(message) < 120 or rest == message:
        return message
    with contextlib.suppress(ValueError):  # no value, or a value in Go's format: core.PodSpec{...}
        _, end = json.JSONDecoder().raw_decode(rest)
        if rest.startswith(": ", end):
            return rest[end + 2 :]
    return rest.rpartition("}: ")[2]


def _status(body: bytes) -> Mapping[str, Any]:
    try:
        status = json.loads(body)
    except ValueError:  # a proxy's page, or plain text
        return {}
    return status if isinstance(status, dict) else {}


def _absent(details: Mapping[str, Any], message: str, subject: Subject) -> ClusterError:
    name, kind = details.get("name"), details.get("kind")
    if kind == "namespaces" and subject.namespace:
        return Absent(f"there is no namespace {name}; create it (kubectl create namespace {name}), or choose another with -n")
    if subject.kind and not name and ("requested resource" in message or "page not found" in message or not details):
        if subject.subresource and subject.name:
            return Absent(f"{subject.description} does not exist, or has no {subject.subresource} ({message})")
        remedy = INSTALLED_BY.get(subject.kind.group, f"this cluster is too old or too new for {subject.kind.api_version}")
        return NotServed(f"{subject.kind} ({subject.kind.api_version}) is not known to this cluster; {remedy}")
    return Absent(f"{subject.description} does not exist")


def _shortened(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= _MAX_LENGTH else f"{message[: _MAX_LENGTH * 2 // 3]} ... {message[-_MAX_LENGTH // 3 :]}"
