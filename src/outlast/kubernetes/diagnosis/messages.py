"""Meanings of messages of API servers, schedulers, queues, kubelets and container runtimes; messages.yaml has them. Pure."""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any

import yaml

from outlast.kubernetes.diagnosis.finding import Finding


@functools.cache
def tables() -> dict[str, Any]:
    """The meanings of messages, by their authors."""
    text = resources.files("outlast.kubernetes.diagnosis").joinpath("messages.yaml").read_text()
    return dict(yaml.safe_load(text))


def knows(speaker: str, message: str) -> bool:
    """Whether the message has a meaning in the tables."""
    return any(re.search(each["says"], message) for each in tables()[speaker]["meanings"] if "says" in each)


def meaning(speaker: str, message: str, evidence: tuple[str, ...] = (), **words: Any) -> Finding:
    """The meaning of a message. Raises KeyError for a value that a sentence needs and that is missing."""
    table = tables()[speaker]
    each, found = next(
        (each, found) for each in table["meanings"] if (found := re.search(each.get("says", ""), message, re.DOTALL))
    )
    known = {"said": message, **words, **found.groupdict()}
    known["what"] = each.get("what", "").format(**known)
    what, remedy = table.get("what", "{what}").format(**known), each["remedy"].format(**known)
    return Finding(each.get("name") or table["name"], what, remedy, evidence)


def refusal(namespace: str, message: str) -> Finding:
    """The meaning of a refusal of the API server."""
    return meaning("admission", message, namespace=namespace, amounts=_amounts(message))


def _amounts(message: str) -> str:
    """`pods: a pod asks for 1, 3 of 3 are used`, from `requested: pods=1, used: pods=3, limited: pods=3`."""
    if (found := re.search(r"requested: (\S+), used: (\S+), limited: (\S+)", message)) is None:
        return ""
    asked, used, limit = (dict(part.partition("=")[::2] for part in text.split(",")) for text in found.groups())
    said = (f"{name}: a pod asks for {amount}, {used.get(name)} of {limit.get(name)} are used" for name, amount in asked.items())
    return "; ".join(said)
