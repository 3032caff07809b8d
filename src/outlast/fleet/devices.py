"""Device plugins: each on exactly the nodes whose machines have such devices, by the instance types of the file.

Labels of other tools are not needed, and no plugin waits on nodes that it has no use for. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.fleet import machines
from outlast.fleet.model import Cluster, Document

_PLUGINS = "/var/lib/kubelet/device-plugins"


@dataclass(frozen=True)
class Plugin:
    """One device plugin: a DaemonSet in kube-system."""

    field: str
    """Its field in `addons`."""
    name: str
    resource: str
    image: str
    """Without tag, `{region}` for the cluster's."""
    version: str
    mounts: tuple[str, ...]
    """Directories of the node that it needs, besides the kubelet's socket."""
    host_network: bool = False
    rights: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Resources of the core API and what it may do with them."""


PLUGINS = (
    Plugin("nvidia", "nvidia-device-plugin", machines.NVIDIA, "nvcr.io/nvidia/k8s-device-plugin", "v0.18.2", ()),
    Plugin(
        "neuron",
        "neuron-device-plugin",
        machines.NEURON,
        "public.ecr.aws/neuron/neuron-device-plugin",
        "2.23.30.0",
        ("/run", "/opt/aws"),
        rights=(
            ("nodes", ("get", "list", "watch")),
            ("nodes/status", ("patch", "update")),
            ("pods", ("get", "list", "watch", "patch", "update")),
            ("events", ("create", "patch")),
        ),
    ),
    Plugin(
        "efa",
        "efa-device-plugin",
        machines.EFA,
        "602401143452.dkr.ecr.{region}.amazonaws.com/eks/aws-efa-k8s-device-plugin",
        "v0.5.4",
        ("/dev/infiniband",),
        host_network=True,
    ),
)


def needed(cluster: Cluster) -> list[tuple[Plugin, list[str]]]:
    """The plugins that the cluster needs, each with the instance types whose nodes it runs on."""
    found = []
    for plugin in PLUGINS:
        types = instance_types(cluster, plugin.resource)
        # eksctl installs that for EFA, for all types, when it makes a group that has it.
        theirs = plugin.resource == machines.EFA and any(group.efa for group in cluster.node_groups)
        if types and getattr(cluster.addons, plugin.field) and not theirs:
            found.append((plugin, types))
    return found


def instance_types(cluster: Cluster, resource: str) -> list[str]:
    """The instance types of the cluster that have this resource, in the order of the file."""
    found: dict[str, None] = {}
    for nodes in cluster.nodes:
        for each in nodes.instance_types:
            machine = cluster.machine(each)
            if (nodes.efa and machine.efa) if resource == machines.EFA else machine.accelerator == resource:
                found[each] = None
    return list(found)


def documents(cluster: Cluster, plugin: Plugin, types: list[str]) -> list[Document]:
    """A plugin for nodes of these types."""
    found = [_daemon_set(cluster, plugin, types)]
    return [*_rights(plugin), *found] if plugin.rights else found


def _daemon_set(cluster: Cluster, plugin: Plugin, types: list[str]) -> Document:
    """It tolerates every taint: its nodes are chosen by their type."""
    labels = {"app.kubernetes.io/name": plugin.name}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {**_meta(plugin), "namespace": "kube-system"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "priorityClassName": "system-node-critical",
                    **({"serviceAccountName": plugin.name} if plugin.rights else {}),
                    **({"hostNetwork": True} if plugin.host_network else {}),
                    "tolerations": [{"operator": "Exists"}],
                    "affinity": {"nodeAffinity": affinity(types)},
                    **_container(cluster, plugin),
                },
            },
        },
    }


def affinity(types: list[str]) -> Document:
    """Node affinity to machines of these types."""
    of_type = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": types}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [of_type]}]}}


def _container(cluster: Cluster, plugin: Plugin) -> Document:
    """The plugin's container and the directories of the node that it sees."""
    paths = (_PLUGINS, *plugin.mounts)
    names = [path.strip("/").replace("/", "-") for path in paths]
    version = getattr(cluster.addons, plugin.field).version or plugin.version
    container = {
        "name": "plugin",
        "image": f"{plugin.image.format(region=cluster.region)}:{version}",
        "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in zip(names, paths, strict=True)],
    }
    return {
        "containers": [container],
        "volumes": [{"name": name, "hostPath": {"path": path}} for name, path in zip(names, paths, strict=True)],
    }


def _rights(plugin: Plugin) -> list[Document]:
    rbac = "rbac.authorization.k8s.io"
    account = {"kind": "ServiceAccount", "name": plugin.name, "namespace": "kube-system"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**_meta(plugin), "namespace": "kube-system"}},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": _meta(plugin),
            "rules": [{"apiGroups": [""], "resources": [on], "verbs": list(verbs)} for on, verbs in plugin.rights],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": _meta(plugin),
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": plugin.name},
            "subjects": [account],
        },
    ]


def _meta(plugin: Plugin) -> Document:
    return {
        "name": plugin.name,
        "labels": {"app.kubernetes.io/name": plugin.name, "app.kubernetes.io/managed-by": "outlast"},
    }
