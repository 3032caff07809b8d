"""Shell completion for the names of jobs, namespaces and contexts. These functions never print or fail, and wait at most a second
for a cluster. If there are no names, the shell offers files."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from outlast.kubernetes.api import Cluster

PLUGIN = "kubectl outlast"
"""Name of the program as a kubectl plug-in, which looks for jobs only in the cluster."""
_TIMEOUT_S = 1.0


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return job names from the cluster that the preceding options select, or else from this directory or the current cluster."""
    return _offered(lambda: _jobs(ctx), incomplete)


def actions_and_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the actions of `outlast chaos`, followed by job names."""
    from outlast.job import faults

    return [*_matching(faults.ACTIONS, incomplete), *jobs(ctx, incomplete)]


def namespaces(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the namespaces in the kubeconfig's contexts, and the cluster's namespaces if the user may list them."""
    return _offered(lambda: _namespaces(ctx), incomplete)


def contexts(incomplete: str) -> list[str]:
    """Return the context names in the kubeconfig."""
    return _offered(lambda: [entry["name"] for entry in _kubeconfig()], incomplete)


def topologies(incomplete: str) -> list[str]:
    """Return the topologies that a job in a cluster can have."""
    from outlast.kubernetes.manifests import TOPOLOGIES

    return _matching(TOPOLOGIES, incomplete)


def datasets(incomplete: str) -> list[str]:
    """Return the names of datasets for `outlast data get`."""
    from outlast.data import named_datasets

    return _matching(named_datasets.NAMES, incomplete)


def _jobs(ctx: typer.Context) -> Iterator[str]:
    from outlast.kubernetes.api import kubeconfig
    from outlast.local import state_dir
    from outlast.local.backend import LocalBackend

    if not (ctx.params.get("namespace") or ctx.params.get("context") or ctx.find_root().info_name == PLUGIN):
        local = [status.name for status in LocalBackend(state_dir.root()).list()]
        yield from local
        if local or not kubeconfig.available(os.environ):
            return
    from outlast.kubernetes.jobs.job_documents import Workloads, job_name

    yield from _answered(ctx, lambda cluster: map(job_name, Workloads(cluster).list_()))


def _namespaces(ctx: typer.Context) -> Iterator[str]:
    from outlast.kubernetes.api import kinds

    for entry in _kubeconfig():
        if name := entry["context"].get("namespace"):
            yield name
    yield from _answered(ctx, lambda cluster: (each["metadata"]["name"] for each in cluster.list_(kinds.NAMESPACE)))


def _kubeconfig() -> list[dict[str, Any]]:
    from outlast.kubernetes.api import kubeconfig

    entries: list[dict[str, Any]] = kubeconfig.read(kubeconfig.files(os.environ))["contexts"]
    return entries


def _answered(ctx: typer.Context, names: Callable[[Cluster], Iterable[str]]) -> list[str]:
    from outlast.kubernetes import api

    api.load()
    answer: list[str] = []

    def ask() -> None:
        with (
            contextlib.suppress(Exception),  # without a login, a permission or a response, offer no names
            contextlib.closing(api.connect(ctx.params.get("context"), ctx.params.get("namespace"))) as cluster,
        ):
            answer.extend(names(cluster))

    thread = threading.Thread(target=ask, name="completion", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return answer.copy()


def _offered(names: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    """Return the names that begin with `incomplete`, without duplicates. An error ends the list but is not raised."""
    offered: dict[str, None] = {}
    with contextlib.suppress(Exception):  # e.g. a damaged file: completion must not print errors
        for name in names():
            offered[name] = None
    return _matching(offered, incomplete)


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
