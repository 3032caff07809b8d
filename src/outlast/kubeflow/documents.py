"""The Kubernetes documents that Outlast adds to a Kubeflow: the way in, profiles, their namespaces, PodDefaults, rights.

The Ingress has Cognito's login on every path and no other port than 443, to which port 80 redirects. The AWS Load Balancer
Controller reads its annotations: https://kubernetes-sigs.github.io/aws-load-balancer-controller/latest/guide/ingress/annotations/
"""

from __future__ import annotations

import json

from outlast.kubeflow.model import POD_SECURITY, Kubeflow, PodDefault, Profile
from outlast.manifests import rbac, spark
from outlast.manifests.request import Document

NAMESPACE, GATEWAY_NAMESPACE, GATEWAY, DASHBOARD = "kubeflow", "istio-system", "istio-ingressgateway", "centraldashboard"
"""Names in Kubeflow's own manifests and in AWS's distribution."""
INGRESS = "outlast-kubeflow"
EDITOR = "default-editor"
"""Account of each profile's notebooks."""
ALB = "alb.ingress.kubernetes.io"
ROLE_ARN = "eks.amazonaws.com/role-arn"
_LABELS = {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/managed-by": "outlast", "app.kubernetes.io/part-of": "outlast"}


def render(wanted: Kubeflow) -> list[Document]:
    """All documents, in the order in which they are applied."""
    documents = [ingress(wanted), *rbac.kubeflow_users()]
    for each in wanted.profiles:
        documents += [profile(each), namespace(each), *spark.account(each.name)]
        for default in wanted.pod_defaults:
            documents += [*_account(default, each.name), pod_default(default, each.name)]
    return documents


def ingress(wanted: Kubeflow) -> Document:
    """The way in: a load balancer that asks Cognito before it forwards anything to Istio's gateway.

    Nodes are not opened: the load balancer reaches the gateway's pods (`target-type: ip`), so its Service stays a ClusterIP.
    """
    cognito = wanted.cognito
    idp = {
        "userPoolARN": cognito.cognito_user_pool_arn,
        "userPoolClientID": cognito.cognito_app_client_id,
        "userPoolDomain": cognito.cognito_user_pool_domain,
    }
    annotations = {
        "scheme": wanted.scheme,
        "target-type": "ip",
        "listen-ports": json.dumps([{"HTTP": 80}, {"HTTPS": 443}]),
        "ssl-redirect": "443",
        "certificate-arn": wanted.certificate_arn,
        "auth-type": "cognito",
        "auth-idp-cognito": json.dumps(idp, separators=(",", ":")),
        "auth-scope": "openid email",
        "auth-on-unauthenticated-request": "authenticate",
        "load-balancer-attributes": "routing.http.drop_invalid_header_fields.enabled=true",
        "healthcheck-port": "15021",
        "healthcheck-path": "/healthz/ready",
    }
    backend = {"service": {"name": GATEWAY, "port": {"number": 80}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": {
            "name": INGRESS,
            "namespace": GATEWAY_NAMESPACE,
            "labels": dict(_LABELS),
            "annotations": {f"{ALB}/{name}": value for name, value in annotations.items()},
        },
        "spec": {
            "ingressClassName": "alb",
            "rules": [{"host": wanted.domain, "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}],
        },
    }


def profile(wanted: Profile) -> Document:
    """The profile; Kubeflow's controller makes its quota, accounts and rights."""
    plugin = {"kind": "AwsIamForServiceAccount", "spec": {"awsIamRole": wanted.role_arn, "annotateOnly": True}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "Profile",
        "metadata": {"name": wanted.name, "labels": dict(_LABELS)},
        "spec": {
            "owner": {"kind": "User", "name": wanted.owner},
            "resourceQuotaSpec": {"hard": {name: str(value) for name, value in wanted.quota.items()}},
            **({"plugins": [plugin]} if wanted.role_arn else {}),
        },
    }


def namespace(wanted: Profile) -> Document:
    """The profile's namespace. Kubeflow's controller takes one that is there, if its annotation names the owner."""
    security = {POD_SECURITY: wanted.pod_security} if wanted.pod_security else {}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": wanted.name,
            "labels": {"istio-injection": "enabled", **security, **wanted.labels},
            "annotations": {**wanted.annotations, "owner": wanted.owner},
        },
    }


def pod_default(wanted: PodDefault, profile: str) -> Document:
    """The PodDefault. A pod asks for it by a label of its name, which the form for notebooks sets."""
    variables = [{"name": name, "value": value} for name, value in wanted.env.items()]
    return {
        "apiVersion": "kubeflow.org/v1alpha1",
        "kind": "PodDefault",
        "metadata": {"name": wanted.name, "namespace": profile, "labels": dict(_LABELS)},
        "spec": {
            "desc": wanted.desc,
            "selector": {"matchLabels": {wanted.name: "true"}},
            **({"env": variables} if variables else {}),
            **({"envFrom": [{"secretRef": {"name": wanted.secret}}]} if wanted.secret else {}),
            **({"serviceAccountName": wanted.name} if wanted.role_arn else {}),
        },
    }


def _account(wanted: PodDefault, profile: str) -> list[Document]:
    """The account that has the role of IAM, with the rights that a notebook has anyway; none without a role."""
    if not wanted.role_arn:
        return []
    meta = {"name": wanted.name, "namespace": profile, "labels": dict(_LABELS)}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**meta, "annotations": {ROLE_ARN: wanted.role_arn}}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kubeflow-edit"},
            "subjects": [{"kind": "ServiceAccount", "name": wanted.name, "namespace": profile}],
        },
    ]
