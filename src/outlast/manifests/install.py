"""What is installed in a cluster: the namespace, the API, the operator and what it may do, and an etcd for who wants one.

    files()   {"operator.yaml": [documents], ...}    as `deploy/` holds them, and `outlast install` applies them

The operator has the right to everything it does and to nothing else: no wildcard, no Secrets. It may make roles of what it may
itself, for the workers of a job, and may not go beyond that (`escalate`, `bind`).
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast import contract
from outlast.contract import OPERATOR, OPERATOR_NAMESPACE, Pod
from outlast.kube import dropins
from outlast.manifests import crd, pods, rbac, scheduling, volumes
from outlast.manifests.request import Document

IMAGE = "ghcr.io/outlast/operator:0.1"
"""The operator's image: Outlast without torch."""
ETCD = "outlast-etcd"
"""The Service by which clients find whichever members answer, and what the members begin with."""
ETCD_PEERS = "outlast-etcd-peers"
"""The headless Service that gives members their names."""
ETCD_IMAGE = "quay.io/coreos/etcd:v3.6.6"
ETCD_TLS = "outlast-etcd-tls"
"""The Secret with the certificate of the members: tls.crt, tls.key and ca.crt."""
ETCD_ROLE = f"{contract.GROUP}/etcd"
"""Label: of a Secret, what it is for (`etcdlogin`); of a pod, that it is a client, where it is no worker of a job."""
ENDS = f"{contract.GROUP}/certificate-ends"
"""Annotation: the day on which the certificate in it is no longer valid."""
_CLIENT, _PEER, _HEALTH = 2379, 2380, 2381
_TLS = "/etc/etcd/tls"
_FILES = {"cert-file": "tls.crt", "key-file": "tls.key", "trusted-ca-file": "ca.crt"}
_QUOTA_MIB = 256
"""What etcd may hold: a run has some KiB in it. Its log and its snapshots take about as much again each."""
_ETCD_DISK = "2Gi"
LABELS = {
    "app.kubernetes.io/name": "outlast",
    "app.kubernetes.io/part-of": "outlast",
}


@dataclass(frozen=True)
class Etcd:
    """How an etcd is to be made."""

    members: int = 3
    """3 go on when one is lost; with 1, worlds cannot change while it is away."""
    storage: str | None = None
    """Class of its volumes. Default: the cluster's. `none`: no volumes; what a pod knows ends with it, which only one member can
    live with: of three, one that comes back empty is refused by the others."""
    tls: bool = True
    """False only of what an older version has made."""


def files(*, into: str = OPERATOR_NAMESPACE, image: str = IMAGE, wanted: Etcd = Etcd()) -> dict[str, list[Document]]:
    """The documents by the file that holds them, below `deploy/`; `into` is the operator's namespace."""
    base = {
        "namespace.yaml": [namespace(into)],
        "crd.yaml": [crd.definition(), *(each.functions.definition() for each in dropins.DROP_INS)],
        "rbac.yaml": rbac.operator(_meta(OPERATOR), into) + rbac.users(),
        "operator.yaml": [operator(into, image)],
    }
    optional = {"etcd/etcd.yaml": etcd(into, wanted)}
    kustomized = {
        "kustomization.yaml": [_kustomization(list(base), namespace=into)],
        "etcd/kustomization.yaml": [_kustomization(["etcd.yaml"], namespace=into)],
    }
    return {**base, **optional, **kustomized}


def namespace(name: str = OPERATOR_NAMESPACE) -> Document:
    """The operator's namespace; nothing that is not restricted may run in it."""
    restricted = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {**LABELS, **restricted}},
    }


def operator(into: str = OPERATOR_NAMESPACE, image: str = IMAGE) -> Document:
    """The operator's Deployment: one replica acts, holding a Lease, the other takes over when its node is lost."""
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
                            "startupProbe": pods.probe("/healthz", every=2, tries=30),
                            "livenessProbe": pods.probe("/healthz", every=10, tries=3),
                            "readinessProbe": pods.probe("/readyz", every=5, tries=1),
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

    Whoever connects shows a certificate of its authority; the Secrets, and users with passwords, come from
    `outlast.cluster.etcd_users`.
    Members tell others their own full names: who is told an address such as 0.0.0.0 looks for etcd in its own pod.
    What they know is on claims, which go when the StatefulSet does: it is about runs that train now, and those tell it again.
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
    """All names and addresses by which members are reached, for their certificate. Those that members have among themselves come
    first: each looks up by what name another comes."""
    peers = [f"{ETCD}-{n}.{ETCD_PEERS}.{namespace}.svc.{contract.CLUSTER_DOMAIN}" for n in range(members)]
    short = [ETCD, f"{ETCD}.{namespace}", f"{ETCD}.{namespace}.svc"]
    return [*peers, *short, f"{ETCD}.{namespace}.svc.{contract.CLUSTER_DOMAIN}", "localhost", "127.0.0.1"]


def made(statefulset: Document) -> Etcd:
    """How the etcd of this StatefulSet was made."""
    claims = statefulset["spec"].get("volumeClaimTemplates")
    storage = claims[0]["spec"].get("storageClassName") if claims else "none"
    (container,) = statefulset["spec"]["template"]["spec"]["containers"]
    tls = any(option.startswith("--cert-file") for option in container.get("command", ()))
    return Etcd(statefulset["spec"]["replicas"], storage, tls)


# ----------------------------------------------------------------------------------------------------------------------- etcd


def _etcd_host(member: str) -> str:
    """The full name of a member, in whichever namespace it is applied to."""
    return f"{member}.{ETCD_PEERS}.$({contract.Env.NAMESPACE}).svc.{contract.CLUSTER_DOMAIN}"


def _etcd_service(name: str, labels: dict[str, str], into: str) -> Document:
    # Members are ready only after they have found each other; clients are led to those that are.
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
    """Workers of any namespace, and who is labelled as a client, reach etcd; members reach each other; nobody else does. Probes
    come from the node, which is always let in."""
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
        "--auto-compaction-mode=periodic",  # old revisions are of no use to anybody: who has missed some reads all anew
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
        # Alone it is alive, but not ready: being started again would not bring the others back.
        "startupProbe": pods.probe("/livez", port="health", every=2, tries=150),
        "livenessProbe": pods.probe("/livez", port="health", every=10, tries=6),
        "readinessProbe": pods.probe("/readyz", port="health", every=5, tries=2),
        "securityContext": volumes.confined(),
        "volumeMounts": [
            {"name": "data", "mountPath": "/var/lib/etcd"},
            {"name": "tls", "mountPath": _TLS, "readOnly": True},
        ],
    }
    tls = {"name": "tls", "secret": {"secretName": ETCD_TLS, "defaultMode": 0o440}}  # read anew with each connection
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
    """The template of pods that keep apart, are restricted, and see no Services in their environment: one called outlast-...
    would set OUTLAST_..._PORT."""
    ours: Document = {
        "enableServiceLinks": False,
        "securityContext": volumes.security(),
        "topologySpreadConstraints": [scheduling.spread(labels)],
    }
    return {"metadata": {"labels": {**LABELS, **labels}}, "spec": {**ours, **spec}}


def _field(name: str, path: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
