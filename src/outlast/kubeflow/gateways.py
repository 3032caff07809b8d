"""Istio's ingress gateways: which lead to Kubeflow, and whether one lets nothing through without a login.

Four things of a mesh close a gateway: a CUSTOM AuthorizationPolicy (oauth2-proxy, Kubeflow from 1.9 on), a policy that denies
requests without a verified token, ALLOW policies that all demand one, and a filter that asks another server (oidc-authservice,
before 1.9). A RequestAuthentication alone closes nothing: it rejects wrong tokens, not missing ones.
https://istio.io/latest/docs/reference/config/security/authorization-policy/. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.kubeflow.documents import GATEWAY, GATEWAY_NAMESPACE, NAMESPACE

Document = dict[str, Any]
_LOGIN_PATHS = re.compile(r"/(dex|oauth2|authservice|login|logout|healthz|\.well-known)(/.*|\*+)?")
"""Paths that nobody can log in without."""
_ASKS = re.compile(r"ext_authz|envoy\.filters\.http\.oauth2")
_TRUSTS = re.compile(r'get\("kubeflow-userid"\)\s*~=\s*nil\s*then\s*return')
"""What the filter of AWS's distribution does with the header that names the user to Kubeflow."""
_TOKENLESS = {"key": "request.headers[authorization]", "notValues": ["*"]}
"""Condition of Kubeflow's own policy: requests with a token are left to a RequestAuthentication."""


@dataclass(frozen=True)
class Mesh:
    """Istio's objects."""

    gateways: Sequence[Document] = ()
    virtual_services: Sequence[Document] = ()
    policies: Sequence[Document] = ()
    """AuthorizationPolicies."""
    authentications: Sequence[Document] = ()
    """RequestAuthentications."""
    filters: Sequence[Document] = ()
    """EnvoyFilters."""


@dataclass(frozen=True)
class Guard:
    """Whether a gateway lets nothing through without a login."""

    closed: bool
    reason: str = ""
    """Why something that looks like a login is none, for the end of a sentence; begins with a comma."""
    warnings: list[str] = field(default_factory=list)
    """What is wrong with it, whether it is closed or not."""


def labels_of(workload: Document) -> Mapping[str, str]:
    """The labels of a workload's pods."""
    return ((workload["spec"].get("template") or {}).get("metadata") or {}).get("labels") or {}


def identity(document: Document) -> str:
    """`Service istio-system/istio-ingressgateway`."""
    meta = document["metadata"]
    return (
        f"{document['kind']} {meta['namespace']}/{meta['name']}"
        if meta.get("namespace")
        else f"{document['kind']} {meta['name']}"
    )


def within(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a selector finds pods with these labels."""
    return all(labels.get(name) == value for name, value in selector.items())


def leading(mesh: Mesh, workloads: Sequence[Document]) -> list[Document]:
    """The workloads of the gateways that lead to Kubeflow: Istio's usual one, and those of VirtualServices with routes there."""
    used = {name for each in mesh.virtual_services if _to_kubeflow(each) for name in _gateways(each)}
    selectors = [
        _selector(each) for each in mesh.gateways if (each["metadata"].get("namespace"), each["metadata"]["name"]) in used
    ]
    usual = {"app": GATEWAY}
    return [each for each in workloads if any(one and within(one, labels_of(each)) for one in (usual, *selectors))]


def plain(mesh: Mesh, workload: Document) -> Iterator[Document]:
    """The Gateways that have a workload serve HTTP without sending people to HTTPS."""
    for each in mesh.gateways:
        servers = (each.get("spec") or {}).get("servers") or ()
        http = [one for one in servers if str((one.get("port") or {}).get("protocol", "")).upper() in ("HTTP", "HTTP2")]
        if within(_selector(each), labels_of(workload)) and any(not (one.get("tls") or {}).get("httpsRedirect") for one in http):
            yield each


def guard(mesh: Mesh, workload: Document) -> Guard:
    """Whether a gateway lets nothing through without a login, and why not."""
    policies = [each for each in mesh.policies if _selects(each, workload, "selector", "matchLabels")]
    filters = [each for each in mesh.filters if _selects(each, workload, "workloadSelector", "labels")]
    by_action: dict[str, list[Document]] = {}
    for each in policies:
        by_action.setdefault((each.get("spec") or {}).get("action") or "ALLOW", []).append(each)
    warnings = [
        f"{identity(each)} takes the kubeflow-userid that a client sends, so whoever is logged in can act as anybody else; "
        "have its Lua replace that header"
        for each in filters
        if any(_TRUSTS.search(text) for text in _inserted(each))
    ]
    asking = [(each, text) for each in filters for text in _inserted(each) if _ASKS.search(text)]
    lenient = [each for each, text in asking if re.search(r'"failure_?[mM]ode_?[aA]llow": true', text)]
    denied = any(_denies(rule) for each in by_action.get("DENY", ()) for rule in _rules(each))
    allowed = [rule for each in by_action.get("ALLOW", ()) for rule in _rules(each)]
    verified = "ALLOW" in by_action and all(_demands(rule) for rule in allowed)
    custom = [_asked(rule) for each in by_action.get("CUSTOM", ()) for rule in _rules(each)]
    if denied or verified or "all" in custom or (asking and not lenient):
        return Guard(closed=True, warnings=warnings)
    return Guard(closed=False, reason=_reason(by_action, custom, lenient, mesh, workload), warnings=warnings)


def _reason(
    by_action: Mapping[str, Sequence[Document]],
    custom: Sequence[str],
    lenient: Sequence[Document],
    mesh: Mesh,
    workload: Document,
) -> str:
    """Why what looks like a login is none."""
    if "tokenless" in custom:
        asked = identity(by_action["CUSTOM"][0])
        return f", since {asked} does not ask about requests that carry any token, and no policy denies those with a wrong one"
    if custom:
        return f", since {identity(by_action['CUSTOM'][0])} asks about some paths only"
    if lenient:
        return f", since {identity(lenient[0])} lets everything through when its server does not answer"
    if found := [each for each in mesh.authentications if _selects(each, workload, "selector", "matchLabels")]:
        return f", since {identity(found[0])} rejects wrong tokens but not missing ones"
    return ""


def _selects(document: Document, workload: Document, selector: str, labels: str) -> bool:
    """Whether a policy or filter is about a workload: by its selector, in the same namespace or in Istio's."""
    fields = document.get("spec") or {}
    namespace = document["metadata"].get("namespace")
    if fields.get("targetRefs") or fields.get("targetRef"):
        return False
    if namespace not in (workload["metadata"].get("namespace"), GATEWAY_NAMESPACE):
        return False
    return within((fields.get(selector) or {}).get(labels) or {}, labels_of(workload))


def _rules(policy: Document) -> list[Document]:
    return (policy.get("spec") or {}).get("rules") or []


def _everywhere(rule: Document) -> bool:
    """Whether a rule is about all paths but those of the login."""
    for each in rule.get("to") or ():
        operation = each.get("operation") or {}
        excepted = operation.get("notPaths") or ()
        if set(operation) <= {"notPaths"} and all(_LOGIN_PATHS.fullmatch(path) for path in excepted):
            return True
    return not rule.get("to")


def _asked(rule: Document) -> str:
    """About which requests a rule of a CUSTOM policy asks: all | tokenless | some."""
    if not _everywhere(rule) or rule.get("from"):
        return "some"
    if not rule.get("when"):
        return "all"
    return "tokenless" if rule["when"] == [_TOKENLESS] else "some"


def _denies(rule: Document) -> bool:
    """Whether a rule of a DENY policy is about all requests without a verified token."""
    sources = [each.get("source") or {} for each in rule.get("from") or ()]
    tokenless = any(source == {"notRequestPrincipals": ["*"]} for source in sources)
    return _everywhere(rule) and not rule.get("when") and (tokenless or not sources)


def _demands(rule: Document) -> bool:
    """Whether a rule of an ALLOW policy lets through only requests with a verified token, or to the login."""
    sources = [each.get("source") or {} for each in rule.get("from") or ()]
    if sources and all(source.get("requestPrincipals") for source in sources):
        return True
    operations = [each.get("operation") or {} for each in rule.get("to") or ()]
    paths = [each.get("paths") or [""] for each in operations]
    return bool(paths) and all(_LOGIN_PATHS.fullmatch(path) for each in paths for path in each)


def _to_kubeflow(virtual_service: Document) -> bool:
    """Whether a VirtualService has a route to a Service of Kubeflow."""
    namespace = virtual_service["metadata"].get("namespace")
    fields = virtual_service.get("spec") or {}
    routes = [route for kind in ("http", "tls", "tcp") for each in fields.get(kind) or () for route in each.get("route") or ()]
    for route in routes:
        name, _, rest = str((route.get("destination") or {}).get("host", "")).partition(".")
        if name and (rest.partition(".")[0] or namespace) == NAMESPACE:
            return True
    return False


def _gateways(virtual_service: Document) -> Iterator[tuple[str, str]]:
    """Namespace and name of the Gateways of a VirtualService."""
    own = str(virtual_service["metadata"].get("namespace"))
    for each in (virtual_service.get("spec") or {}).get("gateways") or ():
        namespace, _, name = str(each).rpartition("/")
        yield namespace or own, name


def _selector(gateway: Document) -> Mapping[str, str]:
    return (gateway.get("spec") or {}).get("selector") or {}


def _inserted(filter_: Document) -> Iterator[str]:
    """The HTTP filters that an EnvoyFilter brings, each as text in which quotes are as written."""
    for each in (filter_.get("spec") or {}).get("configPatches") or ():
        patch = each.get("patch") or {}
        if each.get("applyTo") == "HTTP_FILTER" and patch.get("operation") != "REMOVE":
            yield json.dumps(patch.get("value") or {}).replace('\\"', '"').replace("\\n", "\n")
