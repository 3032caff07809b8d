"""Errors of an API server, mapped from its Status to Outlast's errors with a remedy.

This is the only place where answers become errors. Pure; tests/kubernetes/test_kube.py checks it with answers of real servers.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outlast.base.errors import Absent, ClusterError, Conflict, Forbidden, NotServed, Refused, Taken, Unanswered, Unauthorized
from outlast.kubernetes.api.kinds import INSTALLED_BY, Kind

_LONGEST = 600
"""Maximum length of the part of a server's message that is passed on, since some messages quote whole documents."""
_DONE = {
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
    """The subject of a request, for its error messages."""

    verb: str
    """get, list, watch, create, apply, patch, update or delete; for a pod also log, exec or proxy."""
    kind: Kind | None = None
    name: str = ""
    namespace: str = ""
    server: str = ""
    subresource: str = ""

    @property
    def thing(self) -> str:
        """The subject in words: `Pod train-0 in namespace team-a`."""
        words = [str(self.kind) if self.kind else "it", self.name]
        words += [f"in namespace {self.namespace}"] if self.namespace else []
        return " ".join(filter(None, words))


def mistake(status: int, body: bytes, asked: Subject) -> ClusterError:
    """The error for an answer other than 2xx."""
    said = _status(body)
    message = _short(str(said.get("message") or body.decode(errors="replace").strip() or f"HTTP {status}"))
    reason = str(said.get("reason") or "")
    details: Mapping[str, Any] = said.get("details") or {}
    undone = f"{asked.thing} cannot be {_DONE.get(asked.verb, 'reached')}"
    if status == 401:
        return Unauthorized(
            f"the API server {asked.server} does not accept the login, which has expired or is not for this cluster; "
            "a person logs in again, a pod goes on with its next token"
        )
    if status == 403 and (found := _CANNOT.search(message)):
        return Forbidden(_forbidden(found))
    if status == 404:
        return _absent(details, message, asked)
    if status == 409 and reason == "AlreadyExists":
        return Taken(f"{asked.thing} exists already")
    if status == 409:
        return Conflict(f"{undone}: somebody else has changed it meanwhile, or deletes it ({message}); try again")
    if "failed calling webhook" in message or "failed to call webhook" in message:
        return Refused(f"{undone}: an admission webhook of the cluster does not answer: {message}")
    if asked.verb == "proxy" and (not said or "error trying to reach service" in message):
        return Unanswered(f"{asked.thing} does not answer on its port (HTTP {status}: {message})")
    if "failed to create typed" in message:  # 500, of what is applied
        return Refused(f"{undone}: {message.partition('): ')[2] or message}")
    if status >= 500 and asked.verb in ("log", "exec"):  # the server only forwards these
        return Unanswered(f"{undone}: its node does not answer, or is not well (HTTP {status}: {message}); try again later")
    if status == 429 and asked.verb == "evict":
        return Refused(f"{undone} now: {message}")
    if status == 429 or status >= 500:
        return Unanswered(f"{undone}: the API server {asked.server} is not well (HTTP {status}: {message}); try again later")
    return Refused(f"{undone}: {_refused(message, details)}")


def _status(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:  # a proxy's page, or plain text
        return {}
    return found if isinstance(found, dict) else {}


def _forbidden(found: re.Match[str]) -> str:
    """A sentence about a missing right, with its verb, resource and namespace."""
    resource = f"{found['resource']}.{found['group']}" if found["group"] else found["resource"]
    where = f" in namespace {found['namespace']}" if found["namespace"] else " in the whole cluster" if found["scope"] else ""
    return (
        f"{found['user']} may not {found['verb']} {resource}{where}; ask the cluster's administrator for a role with that right,"
        " or choose another namespace (-n) or context (--context)"
    )


def _absent(details: Mapping[str, Any], message: str, asked: Subject) -> ClusterError:
    name, kind = details.get("name"), details.get("kind")
    if kind == "namespaces" and asked.namespace:
        return Absent(f"there is no namespace {name}; create it (kubectl create namespace {name}), or choose another with -n")
    if asked.kind and not name and ("requested resource" in message or "page not found" in message or not details):
        if asked.subresource and asked.name:
            return Absent(f"{asked.thing} does not exist, or has no {asked.subresource} ({message})")
        remedy = INSTALLED_BY.get(asked.kind.group, f"this cluster is too old or too new for {asked.kind.api_version}")
        return NotServed(f"{asked.kind} ({asked.kind.api_version}) is not known to this cluster; {remedy}")
    return Absent(f"{asked.thing} does not exist")


def _refused(message: str, details: Mapping[str, Any]) -> str:
    """The server's message, without the parts of the document that it repeats."""
    if found := _WEBHOOK.search(message):
        return f"the admission webhook {found['name']} denied it: {found['said'] or 'it does not say why'}"
    if found := _POLICY.search(message):
        return f"the policy {found['name']} denied it: {found['said']}"
    causes = details.get("causes") or []
    told = [f"{c['field']}: {_cause(str(c.get('message', '')))}" for c in causes if c.get("field") and c["field"] != "<nil>"]
    if told:
        return _short("; ".join(dict.fromkeys(told)))
    return message


def _cause(message: str) -> str:
    """The cause in a message: `field is immutable` for `Invalid value: {a whole pod}: field is immutable`; for a CEL rule, the
    whole message."""
    said = message.removeprefix("Invalid value: ")
    if len(message) < 120 or said == message:
        return message
    with contextlib.suppress(ValueError):  # no value, or as Go writes it: core.PodSpec{...}
        _, end = json.JSONDecoder().raw_decode(said)
        if said.startswith(": ", end):
            return said[end + 2 :]
    return said.rpartition("}: ")[2]


def _short(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= _LONGEST else f"{message[: _LONGEST * 2 // 3]} ... {message[-_LONGEST // 3 :]}"
