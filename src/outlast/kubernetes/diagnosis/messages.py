"""Looks up messages from API servers, schedulers, queues, kubelets and container runtimes in messages.yaml. Pure."""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any

import yaml

from outlast.kubernetes.diagnosis.finding import Finding


@functools.cache
def tables() -> dict[str, Any]:
    """Return the tables of messages and their meanings, keyed by component."""
    text = resources.files("outlast.kubernetes.diagnosis").joinpath("messages.yaml").read_text()
    return dict(yaml.safe_load(text))


def has_meaning(component: str, message: str) -> bool:
    """Return whether messages.yaml has a specific explanation of a message."""
    return any(re.search(entry["pattern"], message) for entry in tables()[component]["meanings"] if "pattern" in entry)


def meaning(component: str, message: str, evidence: tuple[str, ...] = (), **words: Any) -> Finding:
    """Return the finding that messages.yaml defines for a message. Raises KeyError if the finding's text needs a value that
    `words` lacks."""
    table = tables()[component]
    entry, match = next(
        ({**table.get("default", {}), **entry}, match)
        for entry in table["meanings"]
        if (match := re.search(entry.get("pattern", ""), message, re.DOTALL))
    )
    values = {"message": message, **words, **match.groupdict()}
    values["what"] = entry.get("what", "").format(**values)
    what, remedy = table.get("what", "{what}").format(**values), entry["remedy"].format(**values)
    return Finding((entry.get("name") or table["name"]).format(**values), what, remedy, evidence)


def refusal(namespace: str, message: str) -> Finding:
    """Return the finding for a refusal by the API server."""
    return meaning("admission", message, namespace=namespace, amounts=_amounts(message))


def _amounts(message: str) -> str:
    """Format a quota message's amounts, as in `pods: a pod asks for 1, 3 of 3 are used`."""
    if (match := re.search(r"requested: (\S+), used: (\S+), limited: (\S+)", message)) is None:
        return ""
    requested, used, limit = (dict(part.partition("=")[::2] for part in text.split(",")) for text in match.groups())
    sentences = (
        f"{name}: a pod asks for {amount}, {used.get(name)} of {limit.get(name)} are used" for name, amount in requested.items()
    )
    return "; ".join(sentences)
