"""Which documents own a document, so that it goes with them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def owners(document: Mapping[str, Any]) -> set[str]:
    """The uids of a document's owners."""
    return {str(owner["uid"]) for owner in document["metadata"].get("ownerReferences") or () if "uid" in owner}


def owned_by(document: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    """Whether one of a document's owners is this one."""
    return (owner.get("metadata") or {}).get("uid") in owners(document)
