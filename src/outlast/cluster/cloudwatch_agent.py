"""CloudWatch's agent in a cluster: brought and removed. `manifests.cloudwatch` renders it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from outlast.cluster.installation import Done
from outlast.errors import OutlastError
from outlast.kube import kinds, without_server_fields
from outlast.kube.kinds import kind_of
from outlast.manifests import cloudwatch
from outlast.manifests.request import Document

if TYPE_CHECKING:
    from outlast.kube import Cluster


def bring(cluster: Cluster, settings: dict[str, Any], *, operator: str, dry_run: bool = False) -> Iterator[Done]:
    """Apply the agent's objects, and yield what happened to each. Raises OutlastError when there is no operator to scrape."""
    if not cluster.has_namespace(operator):
        raise OutlastError(
            f"there is no namespace {operator}, so no operator to read metrics from; outlast install, or --operator"
        )
    place = cloudwatch.namespace()
    if not (there := cluster.has_namespace(cloudwatch.NAMESPACE)) and not dry_run:
        cluster.apply(place)
    yield Done("unchanged" if there else "created", place)
    for document in cloudwatch.documents(settings, operator=operator):
        old = _find(cluster, document)
        if not there and dry_run:
            yield Done("created", document)
            continue
        new = cluster.apply(document, dry_run=dry_run)
        same = old is not None and without_server_fields(old) == without_server_fields(new)
        yield Done("created" if old is None else "unchanged" if same else "changed", document)


def remove(cluster: Cluster, *, operator: str, dry_run: bool = False) -> Iterator[Done]:
    """Delete the agent's objects that are ours; its namespace stays, as others use it."""
    for document in reversed(cloudwatch.documents({}, operator=operator)):
        old = _find(cluster, document)
        if old is None:
            continue
        meta = document["metadata"]
        if not cloudwatch.LABELS.items() <= (old["metadata"].get("labels") or {}).items():
            yield Done("kept", document, "it was not made by Outlast")
            continue
        if not dry_run:
            cluster.delete(kind_of(document), meta["name"], namespace=meta["namespace"])
        yield Done("deleted", document)
    if cluster.has_namespace(cloudwatch.NAMESPACE) and cluster.find(kinds.NAMESPACE, cloudwatch.NAMESPACE):
        yield Done("kept", cloudwatch.namespace(), "Container Insights runs there as well")


def _find(cluster: Cluster, document: Document) -> Document | None:
    return cluster.find(kind_of(document), document["metadata"]["name"], namespace=document["metadata"]["namespace"])
