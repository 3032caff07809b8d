"""`outlast install` and `outlast uninstall`: the API and the operator in a cluster, and an etcd for who wants one."""

from __future__ import annotations

import enum
import sys
import time
from typing import Annotated

import typer

from outlast.cli import terminal
from outlast.cli.which import ContextOption
from outlast.contract import OPERATOR_NAMESPACE
from outlast.errors import OutlastError

_WAIT_S = 120.0


_RUNS = {"StatefulSet": "etcd", "Deployment": "the operator"}


class Members(enum.StrEnum):
    """How many members an etcd may have: of two, none may be lost."""

    ONE = "1"
    THREE = "3"


OperatorNamespace = Annotated[str, typer.Option("--namespace", metavar="NAME", help="Namespace of the operator.")]


def install(
    etcd: Annotated[bool, typer.Option("--etcd", help="Also an etcd, for jobs that ask for one.")] = False,
    etcd_members: Annotated[
        Members, typer.Option(metavar="1|3", help="Of how many members; three go on when one of their nodes is lost.")
    ] = Members.THREE,
    etcd_storage: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="Storage class of its volumes; none: no volumes, for one member, which comes back empty.",
            show_default="that of the cluster",
        ),
    ] = None,
    namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Another image of the operator.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be changed, as the API server sees it.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all of it runs; when it does not, say why.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="How long --wait waits.")] = _WAIT_S,
    context: ContextOption = None,
) -> None:
    """Install Outlast in a cluster, or bring what is installed up to date.

    That is the definition of ElasticJob, a namespace, the operator and its rights. Doing it again changes nothing. The same
    documents are in deploy/, for kustomize: kubectl apply -k deploy.

    With --etcd workers can meet at etcd://outlast-etcd.outlast-system:2379 as well. What it knows is about runs that train now;
    they go on when it is lost, and tell the next one.

    \b
    Examples:
      outlast install --dry-run
      outlast install --wait
      outlast install --etcd --etcd-storage gp3 --context production
      outlast install --etcd --etcd-members 1 --etcd-storage none
    """
    from outlast import diagnosis, installation, kube
    from outlast.manifests import install

    installation.check_namespace(namespace)
    wished = install.Etcd(int(etcd_members), etcd_storage)
    if not etcd and wished != install.Etcd():
        raise OutlastError("--etcd-members and --etcd-storage say how etcd is to be; add --etcd, or leave them out")
    if wished.storage == "none" and wished.members > 1:
        raise OutlastError(
            f"--etcd-storage none goes with --etcd-members 1 only: of {wished.members}, one that comes back empty is not let in; "
            "say 1, or a storage class"
        )
    cluster = kube.connect(context, namespace)
    try:
        wanted = installation.documents(namespace=namespace, image=image or install.IMAGE, etcd=wished if etcd else None)
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
            begun = time.monotonic()
            for workload in [each for each in wanted if each["kind"] in _RUNS]:
                name = _RUNS[workload["kind"]]
                if causes := installation.wait(cluster, workload, timeout_s=max(1.0, begun + timeout - time.monotonic())):
                    said = f"{name[0].upper()}{name[1:]} does not run after {timeout:.0f} s"
                    print(f"\n{said}:\n\n{diagnosis.text(causes)}", file=sys.stderr)
                    raise typer.Exit(1)
                print(f"{name} runs")
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
    terminal.confirm(what, "they may be")
