"""The objects of an installation: namespace, CRDs, the operator and its rights, and optionally an etcd and the node watcher.

    files()   {"operator.yaml": [documents], ...}    as `deploy/` holds them, and `outlast install` applies them

The operator has exactly the rights that it uses: no wildcards, no Secrets. It may create Roles with rights that it has itself,
for the workers of a job, and none beyond (no `escalate`, no `bind`).
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast import contract
from outlast.contract import OPERATOR, OPERATOR_NAMESPACE, Pod
from outlast.kube import dropins
from outlast.manifests import crd, nodewatch, pods, rbac, scheduling, volumes
from outlast.manifests.request import Document

IMAGE = "ghcr.io/outlast/operator:0.1"
"""The operator's image: Outlast without torch."""
ETCD = "outlast-etcd"
"""The Service for clients, and the prefix of the members' names."""
ETCD_PEERS = "outlast-etcd-peers"
"""The headless Service for the members' DNS names."""
ETCD_IMAGE = "quay.io/coreos/etcd:v3.6.6"
ETCD_TLS = "outlast-etcd-tls"
"""The Secret with the members' certificate: tls.crt, tls.key and ca.crt."""
ETCD_ROLE = f"{contract.GROUP}/etcd"
"""Label: the purpose of a Secret (`etcdlogin`); `client` on a pod that is a client without being a worker."""
ENDS = f"{contract.GROUP}/certificate-ends"
"""Annotation: the day on which the certificate expires."""
_CLIENT, _PEER, _HEALTH = 2379, 2380, 2381
_TLS = "/etc/etcd/tls"
_FILES = {"cert-file": "tls.crt", "key-file": "tls.key", "trusted-ca-file": "ca.crt"}
_QUOTA_MIB = 256
"""Quota of etcd: a run takes some KiB. WAL and snapshots take about as much again each."""
_ETCD_DISK = "2Gi"
LABELS = {
    "app.kubernetes.io/name": "outlast",
    "app.kubernetes.io/part-of": "outlast",
}


@dataclass(frozen=True)
class Etcd:
    """Options of an etcd."""

    members: int = 3
    """3 tolerate the loss of one; with 1, worlds cannot change while it is down."""
    storage: str | None = None
    """StorageClass. Default: the cluster's. `none`: no volumes, so that data is lost with the pod; only for one member, as a
    cluster of three rejects a member that comes back empty."""
    tls: bool = True
    """False only for an etcd that an older version has created."""


def files(
    *, into: str = OPERATOR_NAMESPACE, image: str = IMAGE, wanted: Etcd = Etcd(), on_demand: bool = False
) -> dict[str, list[Document]]:
    """The objects by file name, as below `deploy/`; `into` is the operator's namespace.
    `on_demand`: the operator and etcd run on no spot machine."""
    base = {
        "namespace.yaml": [namespace(into)],
        "crd.yaml": [crd.definition(), *(each.functions.definition() for each in dropins.DROP_INS)],
        "rbac.yaml": rbac.operator(_meta(OPERATOR), into) + rbac.users(),
        "operator.yaml": [operator(into, image)],
    }
    optional = {
        "etcd/etcd.yaml": etcd(into, wanted),
        "node-watch/node-watch.yaml": nodewatch.documents(LABELS, image),
    }
    if on_demand:
        for document in (*base["operator.yaml"], *optional["etcd/etcd.yaml"]):
            if document["kind"] in ("Deployment", "StatefulSet"):
                template = document["spec"]["template"]["spec"]
                template["affinity"] = scheduling.off_spot(template.get("affinity") or {})
    kustomized = {
        "kustomization.yaml": [_kustomization(list(base), namespace=into)],
        "etcd/kustomization.yaml": [_kustomization(["etcd.yaml"], namespace=into)],
        "node-watch/kustomization.yaml": [_kustomization(["node-watch.yaml"], namespace=nodewatch.NAME)],
    }
    return {**base, **optional, **kustomized}


def namespace(name: str = OPERATOR_NAMESPACE) -> Document:
    """The operator's namespace, with the restricted Pod Security Standard."""
    restricted = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {**LABELS, **restricted}},
    }


def operator(into: str = OPERATOR_NAMESPACE, image: str = IMAGE) -> Document:
    """The operator's Deployment: one replica leads, holding a Lease, the other is a standby."""
    labels = _selected("operator")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**_meta(OPERATOR), "namespace": into},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": _pods(
                labels,
                {
                    "serviceAccountName": OPERATOR,
                    "terminationGracePeriodSeconds": 15,
                    "containers": [
                        {
                            "name": "operator",
                            "image": image,
                            "command": ["outlast", "operator"],
                            "env": [
                                _field(contract.Env.NAMESPACE, "metadata.namespace"),
                                _field(contract.Env.POD, "metadata.name"),
                                {"name": contract.Env.PROBE_PORT, "value": str(Pod.PROBE_PORT)},
                            ],
                            "ports": [{"name": "probes", "containerPort": Pod.PROBE_PORT}],
                            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
                            **pods.probes(start=30, live=3),
                            "securityContext": volumes.confined(),
                            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                        }
                    ],
                    "volumes": [{"name": "tmp", "emptyDir": {}}],
                },
            ),
        },
    }


def etcd(into: str = OPERATOR_NAMESPACE, wanted: Etcd = Etcd()) -> list[Document]:
    """An etcd for `rendezvous: {backend: etcd}`, and for any torchrun.

    Clients need a certificate of its authority; the Secrets, and users with passwords, come from `outlast.cluster.etcd_users`.
    Members advertise their full names, not 0.0.0.0, which clients would look for in their own pod. Their claims are deleted with
    the StatefulSet: they hold the state of current runs only, whose agents publish it again.
    """
    labels = _selected("etcd")
    return [
        _etcd_service(ETCD, labels, into),
        _etcd_service(ETCD_PEERS, labels, into),
        _etcd_budget(labels, into),
        _etcd_network(labels, into),
        _etcd_members(labels, into, wanted),
    ]


def etcd_hosts(namespace: str, members: int) -> list[str]:
    """All names and addresses of the members, for their certificate. The names of peers come first: etcd verifies a peer by a
    lookup of the names."""
    peers = [f"{ETCD}-{n}.{ETCD_PEERS}.{namespace}.svc.{contract.CLUSTER_DOMAIN}" for n in range(members)]
    short = [ETCD, f"{ETCD}.{namespace}", f"{ETCD}.{namespace}.svc"]
    return [*peers, *short, f"{ETCD}.{namespace}.svc.{contract.CLUSTER_DOMAIN}", "localhost", "127.0.0.1"]


def made(statefulset: Document) -> Etcd:
    """The options of the etcd of this StatefulSet."""
    claims = statefulset["spec"].get("volumeClaimTemplates")
    storage = claims[0]["spec"].get("storageClassName") if claims else "none"
    (container,) = statefulset["spec"]["template"]["spec"]["containers"]
    tls = any(option.startswith("--cert-file") for option in container.get("command", ()))
    return Etcd(statefulset["spec"]["replicas"], storage, tls)


# ----------------------------------------------------------------------------------------------------------------------- etcd


def _etcd_host(member: str) -> str:
    """The full name of a member, in the namespace that it is applied to."""
    return f"{member}.{ETCD_PEERS}.$({contract.Env.NAMESPACE}).svc.{contract.CLUSTER_DOMAIN}"


def _etcd_service(name: str, labels: dict[str, str], into: str) -> Document:
    # Members must find each other before they are ready.
    peers = {"clusterIP": "None", "publishNotReadyAddresses": True} if name == ETCD_PEERS else {}
    ports = [{"name": "client", "port": _CLIENT}, *([{"name": "peer", "port": _PEER}] if peers else [])]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**_meta(name), "namespace": into},
        "spec": {**peers, "selector": labels, "ports": ports},
    }


def _etcd_budget(labels: dict[str, str], into: str) -> Document:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {**_meta(ETCD), "namespace": into},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }


def _etcd_network(labels: dict[str, str], into: str) -> Document:
    """Only workers of any namespace, pods labelled as clients, and members reach etcd. Probes come from the node, which is always
    allowed."""
    clients = [
        {"matchExpressions": [{"key": contract.Label.JOB, "operator": "Exists"}]},
        {"matchLabels": {ETCD_ROLE: "client"}},
    ]
    members = {"from": [{"podSelector": {"matchLabels": labels}}], "ports": [{"port": _CLIENT}, {"port": _PEER}]}
    everywhere = [{"namespaceSelector": {}, "podSelector": each} for each in clients]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {**_meta(ETCD), "namespace": into},
        "spec": {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress"],
            "ingress": [members, {"from": everywhere, "ports": [{"port": _CLIENT}]}],
        },
    }


def _etcd_command(members: int) -> list[str]:
    me = _etcd_host("$(OUTLAST_POD)")
    all_ = ",".join(f"{ETCD}-{n}=https://{_etcd_host(f'{ETCD}-{n}')}:{_PEER}" for n in range(members))
    return [
        "etcd",
        "--name=$(OUTLAST_POD)",
        "--data-dir=/var/lib/etcd/data",
        f"--listen-client-urls=https://0.0.0.0:{_CLIENT}",
        f"--advertise-client-urls=https://{me}:{_CLIENT}",
        f"--listen-peer-urls=https://0.0.0.0:{_PEER}",
        f"--initial-advertise-peer-urls=https://{me}:{_PEER}",
        f"--listen-metrics-urls=http://0.0.0.0:{_HEALTH}",  # for probes, which have no certificate
        *[f"--{side}{name}={_TLS}/{file}" for side in ("", "peer-") for name, file in _FILES.items()],
        "--client-cert-auth",
        "--peer-client-cert-auth",
        f"--initial-cluster={all_}",
        f"--initial-cluster-token={ETCD}",
        f"--quota-backend-bytes={_QUOTA_MIB << 20}",
        "--auto-compaction-mode=periodic",  # old revisions are of no use: a client that has missed some reads everything again
        "--auto-compaction-retention=10m",
    ]


def _etcd_members(labels: dict[str, str], into: str, wanted: Etcd) -> Document:
    container = {
        "name": "etcd",
        "image": ETCD_IMAGE,
        "command": _etcd_command(wanted.members),
        "env": [_field(contract.Env.POD, "metadata.name"), _field(contract.Env.NAMESPACE, "metadata.namespace")],
        "ports": [
            {"name": "client", "containerPort": _CLIENT},
            {"name": "peer", "containerPort": _PEER},
            {"name": "health", "containerPort": _HEALTH},
        ],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        # Without quorum it is alive, but not ready: a restart would not bring the others back.
        "startupProbe": pods.probe("/livez", port="health", every=2, tries=150),
        "livenessProbe": pods.probe("/livez", port="health", every=10, tries=6),
        "readinessProbe": pods.probe("/readyz", port="health", every=5, tries=2),
        "securityContext": volumes.confined(),
        "volumeMounts": [
            {"name": "data", "mountPath": "/var/lib/etcd"},
            {"name": "tls", "mountPath": _TLS, "readOnly": True},
        ],
    }
    tls = {"name": "tls", "secret": {"secretName": ETCD_TLS, "defaultMode": 0o440}}  # etcd reads it for each connection
    spec: Document = {"automountServiceAccountToken": False, "containers": [container], "volumes": [tls]}
    stored: Document = {}
    if wanted.storage == "none":
        spec["volumes"].append({"name": "data", "emptyDir": {"sizeLimit": _ETCD_DISK}})
    else:
        claim: Document = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": _ETCD_DISK}}}
        if wanted.storage:
            claim["storageClassName"] = wanted.storage
        stored = {
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
            "volumeClaimTemplates": [{"metadata": {"name": "data", "labels": dict(LABELS)}, "spec": claim}],
        }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {**_meta(ETCD), "namespace": into},
        "spec": {
            "serviceName": ETCD_PEERS,
            "replicas": wanted.members,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": _pods(labels, spec),
            **stored,
        },
    }


# ---------------------------------------------------------------------------------------------------------------------- parts


def _kustomization(resources: list[str], *, namespace: str) -> Document:
    found: Document = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return {**found, "namespace": namespace, "resources": resources}


def _meta(name: str) -> Document:
    return {"name": name, "labels": dict(LABELS)}


def _selected(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/component": component}


def _pods(labels: dict[str, str], spec: Document) -> Document:
    """A pod template: restricted, spread over nodes, without variables of Services: one called outlast-... would set
    OUTLAST_..._PORT."""
    ours: Document = {
        "enableServiceLinks": False,
        "securityContext": volumes.security(),
        "topologySpreadConstraints": [scheduling.spread(labels)],
    }
    return {"metadata": {"labels": {**LABELS, **labels}}, "spec": {**ours, **spec}}


def _field(name: str, path: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
