"""The values that AWS's distribution of Kubeflow and kfctl read, as files at the places where they look for them.

The paths are those of https://github.com/awslabs/kubeflow-manifests; `kfctl/` is for the installer of Kubeflow 1.0 to 1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from outlast.kubeflow.model import Kubeflow
from outlast.manifests.request import Document

NODE_GROUP = "alpha.eksctl.io/nodegroup-name"
"""Label that eksctl gives the nodes of a group, whether EKS manages it or not."""


def files(wanted: Kubeflow) -> dict[str, str | Document]:
    """Texts and documents by path below a copy of the distribution."""
    cognito = wanted.cognito
    common = "awsconfigs/common"
    found: dict[str, str | Document] = {
        f"{common}/istio-ingress/overlays/cognito/params.env": _env(
            {
                "CognitoUserPoolArn": cognito.cognito_user_pool_arn,
                "CognitoAppClientId": cognito.cognito_app_client_id,
                "CognitoUserPoolDomain": cognito.cognito_user_pool_domain,
                "certArn": wanted.certificate_arn,
            }
        ),
        f"{common}/istio-ingress/base/params.env": _env({"loadBalancerScheme": wanted.scheme}),
        f"{common}/aws-alb-ingress-controller/base/params.env": _env({"clusterName": wanted.cluster}),
        f"{common}/aws-authservice/base/params.env": _env({"LOGOUT_URL": logout(wanted)}),
        "charts/common/ingress/cognito/values.yaml": {
            "alb": {
                "certArn": wanted.certificate_arn,
                "cognito": {
                    "UserPoolArn": cognito.cognito_user_pool_arn,
                    "UserPoolDomain": cognito.cognito_user_pool_domain,
                    "appClientId": cognito.cognito_app_client_id,
                },
                "scheme": wanted.scheme,
            }
        },
        "charts/common/aws-authservice/values.yaml": {"LOGOUT_URL": logout(wanted)},
        "kfctl/kfctl_aws_cognito.plugin.yaml": {
            "kind": "KfAwsPlugin",
            "metadata": {"name": "aws"},
            "spec": {
                "auth": {
                    "cognito": {
                        "cognitoAppClientId": cognito.cognito_app_client_id,
                        "cognitoUserPoolArn": cognito.cognito_user_pool_arn,
                        "cognitoUserPoolDomain": cognito.cognito_user_pool_domain,
                        "certArn": wanted.certificate_arn,
                    }
                },
                "region": wanted.region,
            },
        },
    }
    if wanted.node_group:
        found["outlast/node-group/kustomization.yaml"] = _on_nodes(wanted.node_group)
    return found


def logout(wanted: Kubeflow) -> str:
    """The URL that ends the session at Cognito. The app client must allow `https://DOMAIN` as a sign-out URL."""
    query = urlencode({"client_id": wanted.cognito.cognito_app_client_id, "logout_uri": f"https://{wanted.domain}"}, safe=":/")
    return f"https://{wanted.cognito.host}/logout?{query}"


def _on_nodes(group: str) -> Document:
    """A component of kustomize by which all of Kubeflow's own pods run on the nodes of a group."""
    selected = f"  template:\n    spec:\n      nodeSelector:\n        {NODE_GROUP}: {group}\n"
    return {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "patches": [
            {"target": {"kind": kind}, "patch": f"apiVersion: apps/v1\nkind: {kind}\nmetadata:\n  name: each\nspec:\n{selected}"}
            for kind in ("Deployment", "StatefulSet")
        ],
    }


def _env(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())
