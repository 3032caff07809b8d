"""Which EKS cluster a command means: its network, and the API server that the kubeconfig leads to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import terminal
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast import kube
    from outlast.cloud.network import Network

ClusterArgument = Annotated[str, typer.Argument(metavar="CLUSTER", help="Name of the EKS cluster.", show_default=False)]
RegionOption = Annotated[
    str | None, typer.Option("--region", metavar="NAME", help="Region of AWS. Default: that of the environment or the profile.")
]
Dry = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Wait = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, help="How long to wait for AWS.")]


def network_of(cluster: str, region: str, subnets: list[str] | None) -> Network:
    """Where the nodes are, as EKS says, or these subnets."""
    from outlast.cloud import aws, network

    with aws.in_our_words(f"cluster {cluster} in {region}"):
        return network.of_subnets(region, subnets) if subnets else network.of_cluster(region, cluster)


def endpoint(cluster: str, region: str) -> str:
    """The address of a cluster's API server, as EKS says."""
    from outlast.cloud import aws, network

    with aws.in_our_words(f"cluster {cluster} in {region}"):
        return network.endpoint(region, cluster)


def known(cluster: str, region: str, context: str | None) -> kube.Cluster | None:
    """The API server of a cluster, for what is in it; None when EKS knows no such cluster (any more) and no context is given."""
    from outlast import kube
    from outlast.cloud import aws, network

    with aws.in_our_words(f"cluster {cluster} in {region}"):
        try:
            endpoint = network.endpoint(region, cluster)
        except Exception as error:
            if not aws.absent(error):
                raise
            if context:
                return kube.connect(context)
            terminal.say(
                f"EKS in {region} knows no cluster {cluster}: only AWS is asked; --context names a cluster of another kind"
            )
            return None
    return connected(cluster, region, endpoint, context, None)


def connected(cluster: str, region: str, endpoint: str, context: str | None, namespace: str | None) -> kube.Cluster:
    """The API server that the kubeconfig leads to. Raises OutlastError if that is another cluster's: a volume that is made for
    one and claimed in another cannot be mounted."""
    from outlast import kube

    there = kube.connect(context, namespace)
    if endpoint and endpoint.lower().rstrip("/") != there.server.lower().rstrip("/").removesuffix(":443"):
        there.close()
        raise OutlastError(
            f"the kubeconfig leads to {there.server}, and cluster {cluster} is at {endpoint}; run aws eks update-kubeconfig "
            f"--name {cluster} --region {region}, or choose another --context"
        )
    return there
