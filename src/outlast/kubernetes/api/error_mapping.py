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
_CANNOT = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)"(?: in API group "(?P<group>[^"]*)")?'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?(?P<scope> at the cluster scope)?'
)
_WEBHOOK = re.compile(
    r'admission webhook "(?P<name>[^"]+)" denied the request(?: without explanation|: (?P<said>.*))?', re.DOTALL
)
_POLICY = re.compile(r"ValidatingAdmissionPolicy '(?P<name>[^']+)'.* denied request: (?P<said>.*)", re.DOTALL)


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
    reason = str(status_body.get("reason") or "")
    details: Mapping[str, Any] = status_body.get("details") or {}
    cannot = f"{subject.description} cannot be {_PARTICIPLES.get(subject.verb, 'reached')}"
    if status == 401:
        return Unauthorized(
            f"the API server {subject.server} does not accept the login, which has expired or is not for this cluster; "
            "log in again (a pod retries with its next token)"
        )
    if status == 403 and (match := _CANNOT.search(message)):
        return Forbidden(_forbidden(match))
    if status == 404:
        return _absent(details, message, subject)
    if status == 409 and reason == "AlreadyExists":
        return Taken(f"{subject.description} exists already")
    if status == 409:
        return Conflict(f"{cannot}: it has been changed since it was read, or is being deleted ({message}); try again")
    if "failed calling webhook" in message or "failed to call webhook" in message:
        return Refused(f"{cannot}: an admission webhook of the cluster does not answer: {message}")
    if subject.verb == "proxy" and (not status_body or "error trying to reach service" in message):
        return Unanswered(f"{subject.description} does not answer on its port (HTTP {status}: {message})")
    if "failed to create typed" in message:  # 500, from server-side apply
        return Refused(f"{cannot}: {message.partition('): ')[2] or message}")
    if status >= 500 and subject.verb in ("log", "exec"):  # the server forwards these requests to the kubelet
        return Unanswered(f"{cannot}: its node does not answer, or is not well (HTTP {status}: {message}); try again later")
    if status == 429 and subject.verb == "evict":
        return Refused(f"{cannot} now: {message}")
    if status == 429 or status >= 500:
        return Unanswered(f"{cannot}: the API server {subject.server} is not well (HTTP {status}: {message}); try again later")
    return Refused(f"{cannot}: {_refused(message, details)}")


def _status(body: bytes) -> Mapping[str, Any]:
    try:
        status = json.loads(body)
    except ValueError:  # a proxy's page, or plain text
        return {}
    return status if isinstance(status, dict) else {}


def _forbidden(match: re.Match[str]) -> str:
    resource = f"{match['resource']}.{match['group']}" if match["group"] else match["resource"]
    where = f" in namespace {match['namespace']}" if match["namespace"] else " in the whole cluster" if match["scope"] else ""
    return (
        f"{match['user']} may not {match['verb']} {resource}{where}; ask the cluster's administrator for a role with that right,"
        " or choose another namespace (-n) or context (--context)"
    )


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


def _refused(message: str, details: Mapping[str, Any]) -> str:
    if match := _WEBHOOK.search(message):
        return f"the admission webhook {match['name']} denied it: {match['said'] or 'it does not say why'}"
    if match := _POLICY.search(message):
        return f"the policy {match['name']} denied it: {match['said']}"
    causes = details.get("causes") or []
    texts = [f"{c['field']}: {_cause(str(c.get('message', '')))}" for c in causes if c.get("field") and c["field"] != "<nil>"]
    if texts:
        return _shortened("; ".join(dict.fromkeys(texts)))
    return message


def _cause(message: str) -> str:
    """Return the cause in a message, such as `field is immutable` in `Invalid value: {a whole pod}: field is immutable`. A CEL
    rule's message is returned unchanged."""
    rest = message.removeprefix("Invalid value: ")
    if len(message) < 120 or rest == message:
        return message
    with contextlib.suppress(ValueError):  # no value, or a value in Go's format: core.PodSpec{...}
        _, end = json.JSONDecoder().raw_decode(rest)
        if rest.startswith(": ", end):
            return rest[end + 2 :]
    return rest.rpartition("}: ")[2]


def _shortened(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= _MAX_LENGTH else f"{message[: _MAX_LENGTH * 2 // 3]} ... {message[-_MAX_LENGTH // 3 :]}"
