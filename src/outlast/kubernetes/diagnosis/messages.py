"""Meanings of messages of API servers, schedulers, queues, kubelets and container runtimes, as listed in messages.yaml. Pure."""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any

import yaml

from outlast.kubernetes.diagnosis.finding import Finding


@functools.cache
def tables() -> dict[str, Any]:
    """The meanings of messages, by the component that writes them."""
    text = resources.files("outlast.kubernetes.diagnosis").joinpath("messages.yaml").read_text()
    return dict(yaml.safe_load(text))


def knows(speaker: str, message: str) -> bool:
    """Whether the tables have a specific meaning for the message."""
    return any(re.search(each["says"], message) for each in tables()[speaker]["meanings"] if "says" in each)


def meaning(speaker: str, message: str, evidence: tuple[str, ...] = (), **words: Any) -> Finding:
    """The meaning of a message. Raises KeyError if a value that the sentence needs is missing."""
    table = tables()[speaker]
    each, found = next(
        (each, found) for each in table["meanings"] if (found := re.search(each.get("says", ""), message, re.DOTALL))
    )
    known = {"said": message, **words, **found.groupdict()}
    known["what"] = each.get("what", "").format(**known)
    what, remedy = table.get("what", "{what}").format(**known), each["remedy"].format(**known)
    return Finding(each.get("name") or table["name"], what, remedy, evidence)


def refusal(namespace: str, message: str) -> Finding:
    """The meaning of a refusal by the API server."""
    return meaning("admission", message, namespace=namespace, amounts=_amounts(message))


def _amounts(message: str) -> str:
    """The amounts in a message about a quota: `pods: a pod asks for 1, 3 of 3 are used` for `requested: pods=1, used: pods=3,
    limited: pods=3`."""
    if (found := re.search(r"requested: (\S+), used: (\S+), limited: (\S+)", message)) is None:
        return ""
    asked, used, limit = (dict(part.partition("=")[::2] for part in text.split(",")) for text in found.groups())
    said = (f"{name}: a pod asks for {amount}, {used.get(name)} of {limit.get(name)} are used" for name, amount in asked.items())
    return "; ".join(said)
