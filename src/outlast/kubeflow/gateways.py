"""Istio's ingress gateways: which lead to Kubeflow, and whether one lets nothing through without a login.

Four things of a mesh close a gateway: a CUSTOM AuthorizationPolicy (oauth2-proxy, Kubeflow from 1.9 on), a policy that denies
requests without a verified token, ALLOW policies that all demand one, and a filter that asks another server (oidc-authservice,
before 1.9). A RequestAuthentication alone closes nothing: it rejects wrong tokens, not missing ones.
https://istio.io/latest/docs/reference/config/security/authorization-policy/. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.kubeflow.documents import GATEWAY, GATEWAY_NAMESPACE, NAMESPACE

Document = dict[str, Any]
_LOGIN_PATHS = re.compile(r"/(dex|oauth2|authservice|login|logout|healthz|\.well-known)(/.*|\*+)?")
"""Paths that nobody can log in without."""
_ASKS = re.compile(r"ext_authz|envoy\.(extensions\.)?filters\.http\.oauth2")
"""Name or type of a filter that asks another server."""
_SKIPS = re.compile(r'"disabled": true|"filter_?[eE]nabled|"pass_?[tT]hrough_?[mM]atcher"|"filterEnabledMetadata"')
"""What exempts some requests from such a filter."""
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
    lenient: frozenset[str] = frozenset()
    """Providers of CUSTOM policies that let everything through when they do not answer: `failOpen` in Istio's configuration."""


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


def leading(mesh: Mesh, workloads: Sequence[Document], notebooks: Collection[tuple[str, str]] = ()) -> list[Document]:
    """The workloads of the gateways that lead to Kubeflow: Istio's usual one, and those of VirtualServices with routes there.

    `notebooks`: namespace and name of the Services of notebooks, which count as well.
    """
    used = {name for each in mesh.virtual_services if _to_kubeflow(each, notebooks) for name in _gateways(each)}
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
    policies = [each for each in mesh.policies if _selects(each, workload, "selector", "matchLabels") and not _is_trial(each)]
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
    asking = [(each, text) for each in filters for text in _asking(each)]
    lenient = [each for each, text in asking if re.search(r'"failure_?[mM]ode_?[aA]llow": true', text)]
    partial = [each for each, text in asking if _SKIPS.search(text)] + [each for each in filters if any(_exempting(each))]
    denied = any(_denies(rule) for each in by_action.get("DENY", ()) for rule in _rules(each))
    allowed = [rule for each in by_action.get("ALLOW", ()) for rule in _rules(each)]
    verified = "ALLOW" in by_action and all(_demands(rule) for rule in allowed)
    custom = [
        _asked(rule) for each in by_action.get("CUSTOM", ()) if _provider(each) not in mesh.lenient for rule in _rules(each)
    ]
    if denied or verified or "all" in custom or (asking and not lenient and not partial):
        return Guard(closed=True, warnings=warnings)
    reason = _reason(by_action, custom, mesh, workload)
    if lenient:
        reason = f", since {identity(lenient[0])} lets everything through when its server does not answer"
    elif asking and partial:
        reason = f", since {identity(partial[0])} lets some requests through without asking"
    return Guard(closed=False, reason=reason, warnings=warnings)


def _reason(
    by_action: Mapping[str, Sequence[Document]],
    custom: Sequence[str],
    mesh: Mesh,
    workload: Document,
) -> str:
    """Why what looks like a login is none."""
    if "tokenless" in custom:
        asked = identity(by_action["CUSTOM"][0])
        return f", since {asked} does not ask about requests that carry any token, and no policy denies those with a wrong one"
    if custom:
        return f", since {identity(by_action['CUSTOM'][0])} asks about some paths only"
    if open_ := [each for each in by_action.get("CUSTOM", ()) if _provider(each) in mesh.lenient]:
        return f", since {identity(open_[0])} asks {_provider(open_[0])}, which lets all through when it is away (failOpen)"
    trials = [each for each in mesh.policies if _is_trial(each) and _selects(each, workload, "selector", "matchLabels")]
    if trials:
        return f", since {identity(trials[0])} is a dry run of Istio and rejects nothing"
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


def _provider(policy: Document) -> str:
    return str(((policy.get("spec") or {}).get("provider") or {}).get("name", ""))


def _is_trial(policy: Document) -> bool:
    """Whether Istio only writes down what a policy would do."""
    return str((policy["metadata"].get("annotations") or {}).get("istio.io/dry-run", "")).lower() == "true"


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


def _to_kubeflow(virtual_service: Document, notebooks: Collection[tuple[str, str]]) -> bool:
    """Whether a VirtualService has a route to a Service of Kubeflow, or to a notebook."""
    namespace = virtual_service["metadata"].get("namespace")
    fields = virtual_service.get("spec") or {}
    routes = [route for kind in ("http", "tls", "tcp") for each in fields.get(kind) or () for route in each.get("route") or ()]
    delegates = [each["delegate"] for each in fields.get("http") or () if each.get("delegate")]
    if any((each.get("namespace") or namespace) == NAMESPACE for each in delegates):
        return True
    for route in routes:
        name, _, rest = str((route.get("destination") or {}).get("host", "")).partition(".")
        to = rest.partition(".")[0] or str(namespace)
        if name and (to == NAMESPACE or (to, name) in notebooks):
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


def _brought(filter_: Document) -> Iterator[tuple[Document, Document]]:
    """Where an EnvoyFilter puts which HTTP filter of a gateway."""
    for each in (filter_.get("spec") or {}).get("configPatches") or ():
        patch, match = each.get("patch") or {}, each.get("match") or {}
        here = match.get("context", "ANY") in ("ANY", "GATEWAY")
        if each.get("applyTo") == "HTTP_FILTER" and patch.get("operation") != "REMOVE" and here:
            yield match, patch.get("value") or {}


def _inserted(filter_: Document) -> Iterator[str]:
    """The HTTP filters that an EnvoyFilter brings, each as text in which quotes are as written."""
    for _, value in _brought(filter_):
        yield json.dumps(value).replace('\\"', '"').replace("\\n", "\n")


def _asking(filter_: Document) -> Iterator[str]:
    """Those of all listeners that ask another server: by name or type, whatever their text says."""
    for match, value in _brought(filter_):
        listener = match.get("listener") or {}
        chain = listener.get("filterChain") or {}
        some = listener.get("portNumber") or listener.get("name") or {*chain} - {"filter"} or match.get("proxy")
        config = value.get("typed_config") or value.get("typedConfig") or {}
        named = (value.get("name"), config.get("@type"), config.get("type_url"), config.get("typeUrl"))
        if not some and any(_ASKS.search(str(each)) for each in named):
            yield json.dumps(value)


def _exempting(filter_: Document) -> Iterator[str]:
    """The changes of an EnvoyFilter that switch such a filter off, or take it away."""
    for each in (filter_.get("spec") or {}).get("configPatches") or ():
        patch, at = each.get("patch") or {}, each.get("applyTo")
        text = json.dumps(patch.get("value") or {})
        off = at in ("ROUTE_CONFIGURATION", "VIRTUAL_HOST", "HTTP_ROUTE") and _ASKS.search(text) and '"disabled": true' in text
        away = at == "HTTP_FILTER" and patch.get("operation") == "REMOVE" and _ASKS.search(json.dumps(each.get("match") or {}))
        if off or away:
            yield text
