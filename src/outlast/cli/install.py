"""`outlast install` and `outlast uninstall`: the API and the operator in a cluster; an etcd and the node watcher if asked for."""

from __future__ import annotations

import datetime
import enum
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import terminal
from outlast.cli.which import ContextOption
from outlast.contract import OPERATOR_NAMESPACE
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast import kube

_WAIT_S = 120.0
_RUNS = {"StatefulSet": "etcd", "Deployment": "the operator", "DaemonSet": "the node watcher"}


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
    etcd_for: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMESPACE", help="A namespace whose jobs may use that etcd; once for each. It stays so."),
    ] = None,
    node_watch: Annotated[
        bool, typer.Option("--node-watch", help="Also a watcher on each node of AWS, for spot machines and maintenance.")
    ] = False,
    namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Another image of the operator.")] = None,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="The operator, and etcd, run on no spot machine; give it each time.")
    ] = False,
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

    With --etcd workers can meet at outlast-etcd.outlast-system:2379 as well. It speaks TLS and lets in nobody without a
    certificate. A namespace of --etcd-for has a user of its own, for keys of its own, in its Secret outlast-etcd, which its jobs
    find by themselves. Installing again renews certificates. What etcd knows is about runs that train now: when it is lost they
    go on, and tell the next one.

    With --node-watch each node of AWS is watched for notices: see outlast node-watch --help. It runs in the namespace
    outlast-node-watch, with the host's network.

    \b
    Examples:
      outlast install --dry-run
      outlast install --wait
      outlast install --node-watch --on-demand --wait
      outlast install --etcd --etcd-for team-a --etcd-for team-b
      outlast install --etcd --etcd-storage gp3 --context production
      outlast install --etcd --etcd-members 1 --etcd-storage none
    """
    from outlast import kube
    from outlast.cluster import etcd_users, installation
    from outlast.manifests import install

    installation.check_namespace(namespace)
    wished = install.Etcd(int(etcd_members), etcd_storage)
    if not etcd and (wished != install.Etcd() or etcd_for):
        raise OutlastError("--etcd-members, --etcd-storage and --etcd-for configure etcd; add --etcd, or leave them out")
    if wished.storage == "none" and wished.members > 1:
        raise OutlastError(
            f"--etcd-storage none goes with --etcd-members 1 only: of {wished.members}, one that comes back empty is not let in; "
            "say 1, or a storage class"
        )
    cluster = kube.connect(context, namespace)
    try:
        secrets = []
        if etcd:
            now = datetime.datetime.now(datetime.UTC)
            access = etcd_users.access(cluster, namespace, wished.members, now)
            admitted = sorted({*etcd_users.admitted(cluster), *(etcd_for or ())})
            logins = [etcd_users.login(cluster, access, each, now) for each in admitted]
            secrets = [*access.documents, *(secret for _, secret in logins)]
        wanted = installation.documents(
            namespace=namespace,
            image=image or install.IMAGE,
            etcd=wished if etcd else None,
            secrets=secrets,
            watch=node_watch,
            on_demand=on_demand,
        )
        count: dict[str, int] = {}
        for done in installation.bring(cluster, wanted, dry_run=dry_run):
            print(done, flush=True)
            count[done.what] = count.get(done.what, 0) + 1
        would = "would be " if dry_run else ""
        said = ", ".join(f"{number} {would}{what}" for what, number in count.items())
        print(f"{cluster.context or cluster.server}: {said}")
        for warning in cluster.warnings:
            print(f"outlast | the server warns: {warning}", file=sys.stderr)
        if dry_run:
            return
        begun = time.monotonic()
        for workload in [each for each in wanted if each["kind"] in _RUNS]:
            if not wait and workload["kind"] != "StatefulSet":
                continue
            _wait(cluster, workload, begun, timeout)
            if workload["kind"] == "StatefulSet":  # users can only be added to a running etcd
                with etcd_users.as_root(cluster, namespace, access, now) as client:
                    changed = etcd_users.admit(client, access.root, [user for user, _ in logins])
                for_whom = f"jobs of {', '.join(admitted)}" if admitted else "no job yet; say --etcd-for NAMESPACE"
                print(f"etcd has {'changed' if changed else 'the'} users: it is for {for_whom}")
    finally:
        cluster.close()


def _wait(cluster: kube.Cluster, workload: dict[str, Any], begun: float, timeout: float) -> None:
    """Wait until etcd or the operator runs, and say so. Raises typer.Exit when it does not in time, once it is said why."""
    from outlast import diagnosis
    from outlast.cluster import installation

    name = _RUNS[workload["kind"]]
    if causes := installation.wait(cluster, workload, timeout_s=max(1.0, begun + timeout - time.monotonic())):
        said = f"{name[0].upper()}{name[1:]} does not run after {timeout:.0f} s"
        print(f"\n{said}:\n\n{diagnosis.text(causes)}", file=sys.stderr)
        if any(cause.rule == "image" for cause in causes):
            print("\nName another image with: outlast install --image IMAGE (make one: outlast image build)", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{name} runs")


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
    from outlast import kube
    from outlast.cluster import installation

    installation.check_namespace(namespace)
    cluster = kube.connect(context, namespace)
    try:
        if crds and not yes and (there := installation.jobs(cluster)):
            named = ", ".join(there[:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "")
            jobs = f"{len(there)} ElasticJob{'s' * (len(there) > 1)} of {cluster.context or cluster.server}"
            terminal.confirm(f"{jobs} would be deleted with --crds ({named})")
        for done in installation.remove(cluster, namespace=namespace, crds=crds):
            print(done, flush=True)
    finally:
        cluster.close()
