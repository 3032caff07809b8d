"""`outlast volume`: shared file systems for the jobs of an EKS cluster, by EFS and FSx for Lustre."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outlast.cli import eks, show, terminal, which
from outlast.cli.eks import ClusterArgument, Dry, RegionOption, Wait
from outlast.cli.which import ContextOption
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast import kube
    from outlast.cloud.filesystem import FileSystem, Wanted
    from outlast.cloud.network import Network
    from outlast.cluster.shared_volumes import Claim
    from outlast.manifests.storage import Shared

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Shared file systems of an EKS cluster.")


@app.callback()
def group() -> None:
    """Shared file systems of an EKS cluster."""


@app.command()
def create(
    cluster: ClusterArgument,
    type: Annotated[Literal["efs", "fsx"], typer.Option(help="EFS, or FSx for Lustre.")] = "efs",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the volume. Default: efs or fsx.")] = None,
    region: RegionOption = None,
    namespace: Annotated[str, typer.Option("-n", "--namespace", metavar="NAME", help="Namespace of the claim.")] = "default",
    class_: Annotated[str | None, typer.Option("--class", metavar="NAME", help="StorageClass. Default: NAME-sc.")] = None,
    pv: Annotated[str | None, typer.Option(metavar="NAME", help="PersistentVolume. Default: NAME-pv.")] = None,
    claim: Annotated[str | None, typer.Option(metavar="NAME", help="PersistentVolumeClaim. Default: NAME-pvc.")] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Size of the claim. Default: 5Gi for EFS, which has no limit; the capacity."),
    ] = None,
    subnet: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="A subnet of the nodes; may be repeated. Default: those that EKS knows."),
    ] = None,
    allow: Annotated[
        Literal["vpc", "cluster"],
        typer.Option(help="Who may mount it: all of the VPC, or nodes with the cluster's security group."),
    ] = "vpc",
    throughput: Annotated[Literal["elastic", "bursting"], typer.Option(help="EFS: throughput mode.")] = "elastic",
    deployment: Annotated[
        Literal["SCRATCH_2", "PERSISTENT_1", "PERSISTENT_2"], typer.Option(help="FSx: deployment type.")
    ] = "PERSISTENT_2",
    capacity: Annotated[int, typer.Option(metavar="GIB", help="FSx: 1200, 2400 or a multiple of 2400.")] = 1200,
    per_unit: Annotated[
        int | None, typer.Option(metavar="MBPS", help="FSx, persistent: MB/s for each TiB. Default: the least.")
    ] = None,
    s3: Annotated[
        str | None, typer.Option(metavar="URL", help="FSx: a place in S3 that it shows, and writes new files back to.")
    ] = None,
    dry_run: Dry = False,
    output: Annotated[
        Literal["yaml"] | None, typer.Option("-o", "--output", help="Print the Kubernetes objects instead of applying them.")
    ] = None,
    timeout: Wait = 1800.0,
    context: ContextOption = None,
) -> None:
    """Create a file system that all nodes of a cluster mount, and a claim for jobs.

    In AWS: a security group, the file system, for EFS a mount target in each zone and an access point, through which pods of any
    user can write. In the cluster: a StorageClass, a
    PersistentVolume (ReadWriteMany, Retain) and a PersistentVolumeClaim. Everything carries our tags. What exists is kept as
    it is: running this again changes nothing, and completes what was cut off.

    \b
    Examples:
      outlast volume create do-eks --dry-run
      outlast volume create do-eks --region us-west-2
      outlast volume create do-eks -n team-a --pv efs-pv-a
      outlast volume create do-eks --type fsx --capacity 2400 --s3 s3://my-bucket/data
      outlast volume create do-eks -o yaml > efs.yaml
    """
    from outlast.cloud import aws, filesystem, fsx
    from outlast.manifests import storage

    name = name or type
    wanted = filesystem.Wanted(
        cluster, aws.region(region), name, type, allow, throughput, deployment, capacity,
        per_unit or min(fsx.PER_UNIT[deployment], default=0), s3.rstrip("/") if s3 else "",
    )  # fmt: skip
    if type == "fsx":
        fsx.checked(wanted)
    elif s3:
        raise OutlastError("--s3 is for FSx; add --type fsx")
    size = size or ("5Gi" if type == "efs" else f"{capacity}Gi")
    shared = storage.Shared(
        type, "", name, which.checked(namespace) or "", class_ or f"{name}-sc", pv or f"{name}-pv", claim or f"{name}-pvc", size
    )
    net = eks.network_of(cluster, wanted.region, subnet)
    there = None if output else eks.connected(cluster, wanted.region, net.endpoint, context, namespace)
    try:
        _create(wanted, shared, net, there, dry_run=dry_run, timeout=timeout)
    finally:
        if there:
            there.close()


def _create(wanted: Wanted, shared: Shared, net: Network, there: kube.Cluster | None, *, dry_run: bool, timeout: float) -> None:
    """Make the file system, and then the objects in the cluster, or print these where there is no cluster to make them in."""
    from outlast.cli import render
    from outlast.cloud import aws, filesystem, volumes
    from outlast.cluster import shared_volumes
    from outlast.manifests import storage

    with aws.in_our_words(wanted.what):
        made = volumes.listed(wanted.region, wanted.cluster, wanted.name)
        shared = _of(shared, made[0] if made else None)
        if there:  # before anything is made
            shared_volumes.check(there, storage.documents(shared))
        steps = volumes.create(wanted, net, terminal.say, dry_run=dry_run, patience=volumes.Patience(timeout))
        for step in steps:
            if isinstance(step, filesystem.FileSystem):
                shared = _of(shared, step)
            elif there:
                print(step, flush=True)
            else:
                terminal.say(str(step))
    documents = storage.documents(shared)
    if there is None:
        print(render.text(documents), end="")
        return
    for done in shared_volumes.bring(there, documents, dry_run=dry_run):
        print(done, flush=True)
    if not shared_volumes.has_driver(there, wanted.type):
        terminal.say(
            f"the cluster has no driver {storage.DRIVERS[wanted.type]}: pods cannot mount the volume before it is there; aws eks "
            f"create-addon --cluster-name {wanted.cluster} --addon-name aws-{wanted.type}-csi-driver --region {wanted.region}"
        )
    if dry_run:
        terminal.say("this was a dry run: nothing was changed")


@app.command()
def status(
    cluster: ClusterArgument,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only this volume.")] = None,
    region: RegionOption = None,
    output: Annotated[show.Output, typer.Option("-o", "--output", help="Output format.")] = show.Output.TABLE,
    context: ContextOption = None,
) -> None:
    """Show the file systems of a cluster: state, size, where they can be mounted, and who uses them.

    \b
    Examples:
      outlast volume status do-eks
      outlast volume status do-eks --name efs -o json
    """
    from outlast.cloud import aws, volumes
    from outlast.cluster import shared_volumes

    region = aws.region(region)
    with aws.in_our_words(f"volumes of {cluster} in {region}"):
        found = volumes.listed(region, cluster, name or "")
    there = None
    try:
        there = eks.known(cluster, region, context) if found else None
    except OutlastError as error:  # what AWS says is of use without
        terminal.say(f"claims are not shown: {error}")
    try:
        known = [(each, shared_volumes.claims(there, each.id) if there else []) for each in found]
    finally:
        if there:
            there.close()
    if output is not show.Output.TABLE:
        show.data(
            [{**dataclasses.asdict(each), "claims": [dataclasses.asdict(c) for c in claims]} for each, claims in known], output
        )
    elif not known:
        print(f"{cluster} has no volume{f' {name}' if name else ''} in {region}; outlast volume create {cluster} makes one")
    else:
        print(show.table(("NAME", "TYPE", "ID", "STATE", "SIZE", "PLACES", "CLAIMS"), [_row(*each) for each in known]))


@app.command()
def delete(
    cluster: ClusterArgument,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Which volume. Default: the only one.")] = None,
    region: RegionOption = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    dry_run: Dry = False,
    timeout: Wait = 1800.0,
    context: ContextOption = None,
) -> None:
    """Delete a file system with all that is in it, and what was made for it.

    It is refused while a pod uses it. Only what carries our tags and labels is deleted; what is left is listed. When it was cut
    off, the same command goes on.

    \b
    Examples:
      outlast volume delete do-eks --dry-run
      outlast volume delete do-eks --name fsx --yes
    """
    from outlast.cloud import aws, filesystem, volumes

    region = aws.region(region)
    what = f"volumes of {cluster} in {region}"
    with aws.in_our_words(what):
        names = volumes.names(region, cluster)
    name = show.one_of("volume", name, names, none=f"{cluster} has no volume in {region}")
    wanted = filesystem.Wanted(cluster, region, name)
    there = eks.known(cluster, region, context)
    try:
        with aws.in_our_words(wanted.what):
            _delete(wanted, there, yes=yes, dry_run=dry_run, timeout=timeout)
    finally:
        if there:
            there.close()


def _delete(wanted: Wanted, there: kube.Cluster | None, *, yes: bool, dry_run: bool, timeout: float) -> None:
    """Ask, and delete the objects in the cluster and then what is in AWS."""
    from outlast.cloud import volumes
    from outlast.cluster import shared_volumes

    at, patience = (wanted.region, wanted.cluster), volumes.Patience(timeout)
    found = volumes.listed(*at, wanted.name)
    doomed = shared_volumes.ours(there, wanted.name) if there else []
    if there:
        for each in found:
            shared_volumes.check_unused(shared_volumes.claims(there, each.id), doomed, each.id)
    if not dry_run and not yes:
        listed = [f"{each['kind']} {each['metadata']['name']}" for each in doomed]
        listed += [f"file system {each.id} with all its files" for each in found]
        terminal.confirm(f"{wanted.what} would be deleted: {', '.join(listed) or 'its security group'}")
    if there:
        for done in shared_volumes.remove(there, doomed, dry_run=dry_run):
            print(done, flush=True)
    for each in found:
        for step in volumes.delete(each, *at, terminal.say, dry_run=dry_run, patience=patience):
            print(step, flush=True)
    for step in volumes.delete_groups(*at, wanted.name, terminal.say, dry_run=dry_run, patience=patience):
        print(step, flush=True)
    if dry_run:
        terminal.say("this was a dry run: nothing was changed")


def _of(shared: Shared, found: FileSystem | None) -> Shared:
    """The same, of a file system that exists, or of one that does not yet."""
    if found is None:
        return dataclasses.replace(shared, id=f"(the id of {shared.name})")
    return dataclasses.replace(shared, id=found.handle, attributes=found.attributes)


def _row(found: FileSystem, claims: list[Claim]) -> list[str]:
    """A line of the table."""
    from outlast import units

    places = ", ".join(f"{each.place} {each.state}" for each in found.parts)
    used = ", ".join(
        f"{each.namespace}/{each.name} {each.phase}" + (f" ({show.count(len(each.pods), 'pod')})" if each.pods else "")
        for each in claims
    )
    return [found.name, found.type, found.id, found.state, units.memory_text(found.size), places, used]
