"""`outlast install` and `outlast uninstall`: add or remove the API, the operator and optionally the node watcher in a cluster."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import completion, terminal
from outlast.cli.find_job import ContextOption, YesOption
from outlast.job.contract import OPERATOR_NAMESPACE

if TYPE_CHECKING:
    from outlast.kubernetes import api

_WAIT_S = 120.0
_RUNS = {"Deployment": "the operator", "DaemonSet": "the node watcher"}


OperatorNamespace = Annotated[
    str, typer.Option("--namespace", metavar="NAME", help="Namespace of the operator.", autocompletion=completion.namespaces)
]


def install(
    node_watch: Annotated[
        bool, typer.Option("--node-watch", help="Also watch each AWS node for notices about spot machines and maintenance.")
    ] = False,
    namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Another image of the operator.")] = None,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="Keep the operator off spot machines. Repeat this option at every update.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would change, according to the API server.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until everything runs, and print the reason if it does not.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Timeout of --wait.")] = _WAIT_S,
    context: ContextOption = None,
) -> None:
    """Install Outlast in a cluster, or update it.

    This applies the definition of ElasticJob, a namespace, the operator and its rights. Running it again changes nothing. The
    same documents are in deploy/, for kustomize (kubectl apply -k deploy), and in deploy/chart, for Helm.

    With --node-watch, each AWS node is watched for notices: see outlast node-watch --help. The watcher runs in the namespace
    outlast-node-watch, with the host's network.

    \b
    Examples:
      outlast install --dry-run
      outlast install --wait
      outlast install --node-watch --on-demand --wait
    """
    from outlast.kubernetes import api
    from outlast.kubernetes.jobs import installation, parcel

    installation.check_namespace(namespace)
    cluster = api.connect(context, namespace)
    try:
        documents = installation.documents(
            namespace=namespace, image=image or parcel.operator_image(), watch=node_watch, on_demand=on_demand
        )
        count: dict[str, int] = {}
        for done in installation.ensure(cluster, documents, dry_run=dry_run):
            print(done, flush=True)
            count[done.action] = count.get(done.action, 0) + 1
        would = "would be " if dry_run else ""
        counts = ", ".join(f"{number} {would}{what}" for what, number in count.items())
        print(f"{cluster.context or cluster.server}: {counts}")
        for warning in cluster.warnings:
            terminal.say(f"the server warns: {warning}")
        begun = time.monotonic()
        for workload in [each for each in documents if each["kind"] in _RUNS and wait and not dry_run]:
            _wait(cluster, workload, begun, timeout)
    finally:
        cluster.close()


def _wait(cluster: api.Cluster, workload: dict[str, Any], began: float, timeout: float) -> None:
    """Wait until the operator or the node watcher runs. After the timeout, prints the reason and raises typer.Exit."""
    from outlast.kubernetes import diagnosis
    from outlast.kubernetes.jobs import installation

    name = _RUNS[workload["kind"]]
    if causes := installation.wait(cluster, workload, timeout_s=max(1.0, began + timeout - time.monotonic())):
        problem = f"{name[0].upper()}{name[1:]} does not run after {timeout:.0f} s"
        print(f"\n{problem}:\n\n{diagnosis.text(causes)}", file=sys.stderr)
        if any(cause.name == "image" for cause in causes):
            print("\nName another image with: outlast install --image IMAGE (make one: docs/guide/images.md)", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{name} runs")


def uninstall(
    namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    crds: Annotated[
        bool, typer.Option("--crds", help="Also delete the definition of ElasticJob, and with it all ElasticJobs.")
    ] = False,
    yes: YesOption = False,
    context: ContextOption = None,
) -> None:
    """Remove Outlast from a cluster.

    Everything that `outlast install` applied is deleted, except the namespace, which may hold other objects. The definition of
    ElasticJob stays unless --crds is given, because deleting it also deletes all jobs and their workers.

    \b
    Examples:
      outlast uninstall
      outlast uninstall --crds --yes
    """
    from outlast.kubernetes import api
    from outlast.kubernetes.jobs import installation

    installation.check_namespace(namespace)
    cluster = api.connect(context, namespace)
    try:
        if crds and not yes and (there := installation.jobs(cluster)):
            named = ", ".join(there[:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "")
            jobs = f"{len(there)} ElasticJob{'s' * (len(there) > 1)} of {cluster.context or cluster.server}"
            terminal.confirm(f"{jobs} would be deleted with --crds ({named})")
        for done in installation.remove(cluster, namespace=namespace, crds=crds):
            print(done, flush=True)
    finally:
        cluster.close()
