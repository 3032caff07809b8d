"""Reads and makes owner references, by which Kubernetes deletes an object together with its owner. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identified:
    """An object in the cluster that other objects refer to by name and uid."""

    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])


def owners(document: Mapping[str, Any]) -> set[str]:
    return {str(owner["uid"]) for owner in document["metadata"].get("ownerReferences") or () if "uid" in owner}


def owned_by(document: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    return (owner.get("metadata") or {}).get("uid") in owners(document)


def owned_by_predecessor(document: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    """Return whether the document belongs to an earlier object with the owner's group, kind and name. If so, it will be
    garbage-collected."""
    identity = (_group(owner), owner["kind"], owner["metadata"]["name"])
    references = document["metadata"].get("ownerReferences") or ()
    return not owned_by(document, owner) and any((_group(each), each["kind"], each["name"]) == identity for each in references)


def reference(owner: Mapping[str, Any]) -> dict[str, Any]:
    """Return an owner reference for objects that `owner` controls."""
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
