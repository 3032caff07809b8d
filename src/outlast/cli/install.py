"""`outlast install` and `outlast uninstall`: the API and the operator in a cluster."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from outlast.cli.which import ContextOption
from outlast.contract import OPERATOR_NAMESPACE
from outlast.errors import OutlastError

_WAIT_S = 120.0

OperatorNamespace = Annotated[str, typer.Option("--namespace", metavar="NAME", help="Namespace of the operator.")]


def install(
    etcd: Annotated[bool, typer.Option("--etcd", help="Also an etcd of three members, for rendezvous without operator.")] = False,
    namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Another image of the operator.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be changed, as the API server sees it.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the operator runs; when it does not, say why.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="How long --wait waits.")] = _WAIT_S,
    context: ContextOption = None,
) -> None:
    """Install Outlast in a cluster, or bring what is installed up to date.

    That is the definition of ElasticJob, a namespace, the operator and its rights. Doing it again changes nothing. The same
    documents are in deploy/, for kustomize: kubectl apply -k deploy.

    \b
    Examples:
      outlast install --dry-run
      outlast install --wait
      outlast install --etcd --context production
    """
    from outlast import diagnosis, installation, kube
    from outlast.manifests import install

    installation.check_namespace(namespace)
    cluster = kube.connect(context, namespace)
    try:
        wanted = installation.documents(namespace=namespace, image=image or install.IMAGE, etcd=etcd)
        count: dict[str, int] = {}
        for done in installation.bring(cluster, wanted, dry_run=dry_run):
            print(done, flush=True)
            count[done.what] = count.get(done.what, 0) + 1
        would = "would be " if dry_run else ""
        said = ", ".join(f"{number} {would}{what}" for what, number in count.items())
        print(f"{cluster.context or cluster.server}: {said}")
        for warning in cluster.warnings:
            print(f"outlast | the server warns: {warning}", file=sys.stderr)
        if wait and not dry_run:
            if causes := installation.wait(cluster, namespace, timeout_s=timeout):
                print(f"\nThe operator does not run after {timeout:.0f} s:\n\n{diagnosis.text(causes)}", file=sys.stderr)
                raise typer.Exit(1)
            print("the operator runs")
    finally:
        cluster.close()


def uninstall(
    namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    crds: Annotated[bool, typer.Option("--crds", help="Also the definition of ElasticJob, and with it all ElasticJobs.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    context: ContextOption = None,
) -> None:
    """Take away what `outlast install` has brought into a cluster.

    The definition of ElasticJob stays unless --crds is given: all jobs would be deleted with it, and their workers.

    \b
    Examples:
      outlast uninstall
      outlast uninstall --crds --yes
    """
    from outlast import installation, kube

    installation.check_namespace(namespace)
    cluster = kube.connect(context, namespace)
    try:
        if crds and not yes and (there := installation.jobs(cluster)):
            _confirm(there, cluster.context or cluster.server)
        for done in installation.remove(cluster, namespace=namespace, crds=crds):
            print(done, flush=True)
    finally:
        cluster.close()


def _confirm(jobs: list[str], where: str) -> None:
    """Ask whether these jobs may be deleted. Raises OutlastError when not, or when nobody can be asked."""
    named = ", ".join(jobs[:5]) + (f" and {len(jobs) - 5} more" if len(jobs) > 5 else "")
    what = f"{len(jobs)} ElasticJob{'s' * (len(jobs) > 1)} of {where} would be deleted with --crds ({named})"
    if not sys.stdin.isatty():
        raise OutlastError(f"{what}; add --yes if they may be")
    if input(f"{what}. Type yes to go on: ").strip() != "yes":
        raise OutlastError("nothing was changed")
