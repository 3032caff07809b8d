"""The plan of a cluster: which files are written and which commands make it, in order. Pure.

Every step can be asked whether it is done, and either changes nothing when it is repeated or is only run when it is not done:
who was cut off goes on with the first step that is not done.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator

from outlast.fleet import autoscaler, capacity, charts, devices, eksctl, karpenter
from outlast.fleet.model import Cluster, Document, NodeGroup, Nodes
from outlast.fleet.prices import CONTROL_PLANE, Prices
from outlast.fleet.steps import KUBECONFIG, Check, Command, Cost, Plan, Step

CONFIG = "eksctl.yaml"


def plan(cluster: Cluster, prices: Prices | None = None) -> Plan:
    """The plan of a valid cluster."""
    made: list[tuple[Step, dict[str, tuple[Document, ...]]]] = [
        *((step, {}) for step in _eksctl(cluster, prices)),
        *_manifests(cluster, prices),
    ]
    files: dict[str, tuple[Document, ...]] = {CONFIG: (eksctl.config(cluster),)}
    for _, written in made:
        files |= written
    steps = (*(step for step, _ in made), *_outlast(cluster))
    grows = bool(cluster.addons.autoscaler or cluster.addons.karpenter)
    return Plan(cluster.name, cluster.region, capacity.order(cluster), grows, steps, files)


# --------------------------------------------------------------------------------------------------------------------- eksctl


def _eksctl(cluster: Cluster, prices: Prices | None) -> Iterator[Step]:
    where = ("--cluster", cluster.name, "--region", cluster.region)
    control = Cost(*2 * [prices.of(CONTROL_PLANE, "on-demand")]) if prices else None
    yield Step(
        "cluster",
        "eksctl",
        f"make the cluster {cluster.name} with Kubernetes {cluster.version} in {cluster.region}: control plane and network; "
        "10 to 25 minutes",
        ("eksctl", "create", "cluster", "-f", CONFIG, "--without-nodegroup", "--kubeconfig", KUBECONFIG),
        (CONFIG,),
        Check(
            ("eksctl", "get", "cluster", "--name", cluster.name, "--region", cluster.region, "-o", "json"),
            (_json("Name", cluster.name), _json("Status", "ACTIVE")),
        ),
        repeatable=False,
        paid=True,
        cost=control,
    )
    yield Step(
        "kubeconfig",
        "eksctl",
        f"write how to reach it into the file {KUBECONFIG}, which the other commands use",
        ("eksctl", "utils", "write-kubeconfig", *where, "--kubeconfig", KUBECONFIG),
    )
    for group in cluster.node_groups:
        yield _group(cluster, group, prices)
    names = [*eksctl.ALWAYS, *eksctl.addons(cluster).values()]
    yield Step(
        "addons",
        "eksctl",
        f"add EKS's own add-ons: {', '.join(names)}",
        ("eksctl", "create", "addon", "-f", CONFIG),
        (CONFIG,),
        Check(
            ("eksctl", "get", "addon", *where, "-o", "json"),
            tuple(rf'{_json("Name", name)}[^{{}}]*"Status":\s*"(?!CREATE_FAILED)' for name in names),
        ),
    )
    yield from _rights(cluster, where)


def _rights(cluster: Cluster, where: Command) -> Iterator[Step]:
    """Rights of pods in AWS."""
    config = eksctl.config(cluster)["iam"]
    if associations := config.get("podIdentityAssociations"):
        accounts = [each["serviceAccountName"] for each in associations]
        yield Step(
            "pod-identities",
            "eksctl",
            f"give rights in AWS to the pods of {_accounts(accounts)}",
            ("eksctl", "create", "podidentityassociation", "-f", CONFIG),
            (CONFIG,),
            Check(
                ("eksctl", "get", "podidentityassociation", *where, "-o", "json"),
                tuple(_json("ServiceAccountName", each) for each in accounts),
            ),
        )
    if accounts := [each["metadata"]["name"] for each in config.get("serviceAccounts", ())]:
        yield Step(
            "service-accounts",
            "eksctl",
            f"give IAM roles to the pods of {_accounts(accounts)}",
            ("eksctl", "create", "iamserviceaccount", "-f", CONFIG, "--approve"),
            (CONFIG,),
            Check(
                ("eksctl", "get", "iamserviceaccount", *where, "-o", "json"),
                tuple(rf'"name":\s*"{re.escape(each)}"' for each in accounts),
            ),
        )


def _accounts(names: list[str]) -> str:
    return f"the ServiceAccount{'' if len(names) == 1 else 's'} {', '.join(names)}"


def _group(cluster: Cluster, group: NodeGroup, prices: Prices | None) -> Step:
    where = ("--cluster", cluster.name, "--region", cluster.region, "--name", group.name)
    return Step(
        f"group/{group.name}",
        "eksctl",
        f"make the node group {group.name}: {_machines(group)}, {group.first} to begin with, from {group.min} to {group.max}",
        (
            *("eksctl", "create", "nodegroup", "-f", CONFIG, f"--include={group.name}"),
            *("--install-nvidia-plugin=false", "--install-neuron-plugin=false"),
        ),
        (CONFIG,),
        Check(
            ("eksctl", "get", "nodegroup", *where, "-o", "json"),
            (_json("Name", group.name), r'"Status":\s*"(ACTIVE|CREATE_COMPLETE|UPDATE_COMPLETE)"'),
        ),
        paid=True,
        cost=_cost(group, group.first, prices),
    )


def _machines(nodes: Nodes) -> str:
    return f"{' or '.join(nodes.instance_types)}, {nodes.capacity}"


def _cost(nodes: Nodes, first: int, prices: Prices | None) -> Cost | None:
    """Of several types the dearest counts; None for an unknown price."""
    if prices is None:
        return None
    found = [prices.of(each, nodes.capacity) for each in nodes.instance_types]
    known = [each for each in found if each is not None]
    dearest = max(known) if known and len(known) == len(found) else None
    return Cost(*(None if dearest is None else dearest * count for count in (first, nodes.max)))


# --------------------------------------------------------------------------------------------------- what runs in the cluster

Made = tuple[Step, dict[str, tuple[Document, ...]]]
"""A step and the files that it needs."""


def _manifests(cluster: Cluster, prices: Prices | None) -> Iterator[Made]:
    for plugin, types in devices.needed(cluster):
        documents = devices.documents(cluster, plugin, types)
        sentence = f"install the device plugin for {plugin.resource}, on nodes of type {', '.join(types)}"
        yield _apply(f"devices/{plugin.field}", plugin.name, sentence, documents)
    if cluster.addons.autoscaler:
        sentence = "tell cluster-autoscaler the order of the node groups"
        yield _apply("expander", "priority-expander", sentence, [autoscaler.expander(cluster)])
    for chart, version in charts.wanted(cluster):
        yield _chart(cluster, chart, version)
    if cluster.node_pools:
        yield _node_pools(cluster, prices)
    volcano = cluster.addons.volcano
    if volcano and volcano.queues:
        names = ", ".join(queue.name for queue in volcano.queues)
        yield _apply("queues", "queues", f"make the queues of Volcano: {names}", charts.queues(volcano))


def _node_pools(cluster: Cluster, prices: Prices | None) -> Made:
    documents = karpenter.documents(cluster, eksctl.made_by(cluster))
    sentence = f"make the NodePools of Karpenter: {', '.join(capacity.priorities(cluster))}"
    costs = [_cost(pool, 0, prices) for pool in cluster.node_pools]
    known = [each.most for each in costs if each and each.most is not None]
    cost = Cost(0, sum(known) if len(known) == len(costs) else None) if prices else None
    return _apply("node-pools", "node-pools", sentence, documents, cost=cost, paid=True)


def _apply(
    key: str, name: str, sentence: str, documents: Iterable[Document], *, paid: bool = False, cost: Cost | None = None
) -> Made:
    path = f"manifests/{name}.yaml"
    apply = ("kubectl", "apply", "--server-side", "--field-manager=outlast", "-f", path)
    check = Check(("kubectl", "diff", "--server-side", "--field-manager=outlast", "-f", path))
    return Step(key, "kubectl", sentence, apply, (path,), check, paid=paid, cost=cost), {path: tuple(documents)}


def _chart(cluster: Cluster, chart: charts.Chart, version: str) -> Made:
    path = f"values/{chart.name}.yaml"
    values = chart.values(cluster)
    described = f"outlast {_digest([chart.chart, version, values])}"
    command: Command = (
        *("helm", "upgrade", "--install", chart.name, chart.chart),
        *(("--repo", chart.repository) if chart.repository else ()),
        *("--version", version, "--namespace", chart.namespace, "--create-namespace", "-f", path),
        *("--description", described, "--wait", "--timeout", "10m"),
    )
    check = Check(
        ("helm", "history", chart.name, "--namespace", chart.namespace, "--max", "1", "-o", "json"),
        (r'"status":\s*"deployed"', rf'"description":\s*"{re.escape(described)}"'),
    )
    sentence = f"install {chart.name} {version}: {chart.sentence}"
    return Step(f"chart/{chart.name}", "helm", sentence, command, (path,), check), {path: (values,)}


def _outlast(cluster: Cluster) -> Iterator[Step]:
    addon = cluster.addons.outlast
    if not addon:
        return
    command = ["outlast", "install", "--wait"]
    if image := addon.image or (addon.version and f"ghcr.io/outlast/operator:{addon.version}"):
        command += ["--image", image]
    if addon.etcd:
        command += ["--etcd", "--etcd-members", str(addon.etcd_members), "--etcd-storage", addon.etcd_storage]
        command += [word for namespace in addon.etcd_for for word in ("--etcd-for", namespace)]
    if {each.capacity for each in cluster.nodes} == {"spot", "on-demand"}:  # what must outlive spot machines, if it can
        command.append("--on-demand")
    if cluster.watched:
        command += ["--node-watch", *(("--node-watch-queue", addon.node_watch_queue) if addon.node_watch_queue else ())]
    what = ["Outlast's operator", *["an etcd"] * addon.etcd, *["a watcher on each node"] * cluster.watched]
    said = f"{', '.join(what[:-1])} and {what[-1]}" if len(what) > 1 else what[0]
    yield Step("outlast", "outlast", f"install {said}", tuple(command))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _json(name: str, value: str) -> str:
    """A pattern of a field in JSON, however it is spaced."""
    return rf'"(?i:{name})":\s*"{re.escape(value)}"'
