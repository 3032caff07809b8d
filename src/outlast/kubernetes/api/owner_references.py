"""Ownership between documents: a document is deleted with its owner. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def owners(document: Mapping[str, Any]) -> set[str]:
    return {str(owner["uid"]) for owner in document["metadata"].get("ownerReferences") or () if "uid" in owner}


def owned_by(document: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    return (owner.get("metadata") or {}).get("uid") in owners(document)


def owned_by_predecessor(document: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    """Whether an earlier object of this group, kind and name owns the document, which is then garbage that is not collected
    yet."""
    same = (_group(owner), owner["kind"], owner["metadata"]["name"])
    references = document["metadata"].get("ownerReferences") or ()
    return not owned_by(document, owner) and any((_group(each), each["kind"], each["name"]) == same for each in references)


def reference(owner: Mapping[str, Any]) -> dict[str, Any]:
    """The owner reference for objects that `owner` controls."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _group(document: Mapping[str, Any]) -> str:
    return str(document["apiVersion"]).rpartition("/")[0]
