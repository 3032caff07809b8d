"""Permissions of the operator's roles, and permissions that requests require. For tests."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

from outlast.kubernetes.manifests.installed import operator_deployment

Right = tuple[str, str, str]
"""Verb, group and resource."""
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
INSTALLED = operator_deployment.files(operator_namespace="default")
RULES: dict[str, list[dict[str, Any]]] = {
    each["kind"]: each["rules"]
    for each in INSTALLED["rbac.yaml"]
    if "rules" in each and each["metadata"]["name"] not in operator_deployment.USER_ROLES
}


def rights(rules: list[dict[str, Any]], name: str | None = None) -> set[Right]:
    return {
        (verb, group, resource)
        for rule in rules
        if name is None or name in rule.get("resourceNames", [name])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def needed(asked: str) -> tuple[Right, str, str] | None:
    """Return the permission that a request requires, and the namespace and name of its object; None for discovery."""
    method, _, url = asked.partition(" ")
    whole = urlsplit(url)
    found = re.fullmatch(
        r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
        r"(?:/(?P<name>[^/]+))?(?:(?P<sub>/[a-z]+)(?:/.*)?)?",
        whole.path,
    )
    if found is None or whole.path.count("/") < 3:
        return None
    verb = VERBS.get(method) or ("get" if found["name"] else "watch" if "watch" in parse_qs(whole.query) else "list")
    if verb == "delete" and not found["name"]:
        verb = "deletecollection"
    right = verb, found["group"] or "", found["plural"] + (found["sub"] or "")
    return right, found["namespace"] or "", found["name"] or ""


def node_watch(asked: str) -> bool:
    rules = [rule for each in INSTALLED["node-watch/node-watch.yaml"] for rule in each.get("rules", ())]
    found = needed(asked)
    return found is None or found[0] in rights(rules)


def may(asked: str) -> bool:
    """Return whether the roles of an operator in the namespace `default` permit a request."""
    if (found := needed(asked)) is None:
        return True
    right, namespace, name = found
    return right in rights(RULES["ClusterRole"]) or (namespace == "default" and right in rights(RULES["Role"], name))
