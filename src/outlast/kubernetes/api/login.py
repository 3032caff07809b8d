"""Connects to a cluster with the kubeconfig or the account of this pod.

lightkube reads certificates and tokens, and runs the login programs of clouds. Only this module and `requests` import lightkube.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast.base.errors import NoCluster
from outlast.kubernetes.api import kubeconfig
from outlast.kubernetes.api.client import Cluster
from outlast.kubernetes.api.requests import CONNECT_S, READ_S, Clients, Connection

if TYPE_CHECKING:
    import httpx2
    from lightkube.config.kubeconfig import SingleConfig

_IDLE_S = 30.0
"""Idle timeout of connections: shorter than the API server's (90 s), longer than the interval between two renewals of a Lease."""


def not_installed(error: ImportError) -> NoCluster:
    """Return the error for a missing library that access to clusters requires."""
    library = (error.name or "").partition(".")[0]
    return NoCluster(f"{library} is not installed; for clusters: pip install 'outlast[kubernetes]'")


def connect(context: str | None = None, namespace: str | None = None, *, prefer_pod: bool = False) -> Cluster:
    """Return the cluster of a context of the kubeconfig (default: its current context), or the cluster in which this pod runs.

    With `prefer_pod`, a pod that has an account uses it and ignores `$KUBECONFIG`, which may be meant for the training script.
    Sends no request to the server. Raises NoCluster.
    """
    try:
        import httpx2
        from lightkube.config.client_adapter import ConnectionParams
        from lightkube.core.exceptions import ConfigError
    except ImportError as error:
        raise not_installed(error) from error

    paths = [] if prefer_pod and kubeconfig.in_pod(os.environ) else kubeconfig.files(os.environ)
    try:
        config, proxy, headers = _from_kubeconfig(paths, context) if paths else (_from_pod(context), None, [])
        # In a pod, $HTTPS_PROXY applies to addresses outside the cluster; the API server is inside.
        timeout = httpx2.Timeout(READ_S, connect=CONNECT_S, pool=None)
        params = ConnectionParams(timeout=timeout, proxy=proxy, trust_env=bool(paths))
        arguments = {**params.httpx_params(config), "headers": headers}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=_IDLE_S)
        clients = Clients(lambda: httpx2.Client(**arguments, limits=limits))
    except (ConfigError, OSError, ValueError, KeyError, TypeError) as error:
        place = ", ".join(map(str, paths)) or "the account of this pod"
        raise NoCluster(f"{place} cannot be used: {error or type(error).__name__}; log in to the cluster again") from error
    # A connection that becomes a websocket must not be reused for other requests. Refusals must be read before it closes.
    websocket_client = lambda: httpx2.Client(**arguments, event_hooks={"response": [_read_refusal]})  # noqa: E731
    connection = Connection(clients, websocket_client, config.cluster.server)
    return Cluster(connection, context=config.context_name, namespace=namespace or config.namespace)


def _from_kubeconfig(paths: list[Any], context: str | None) -> tuple[SingleConfig, str | None, list[tuple[str, str]]]:
    """Return the configuration of a context, its proxy, and its impersonation headers."""
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.config.models import User

    merged = kubeconfig.read(paths)
    name = kubeconfig.context_name(merged, context)
    config = KubeConfig.from_dict(_for_lightkube(merged), fname=paths[0]).get(name)
    assert config is not None
    servers = {entry["name"]: entry["cluster"] for entry in merged["clusters"]}
    proxy = servers[config.context.cluster].get("proxy-url")
    return config._replace(user=config.user or User()), proxy, kubeconfig.impersonation_headers(merged, name)


def _from_pod(context: str | None) -> SingleConfig:
    """Return the configuration for the account of this pod. Raises NoCluster outside of pods."""
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.config.models import User

    if not kubeconfig.in_pod(os.environ):
        raise NoCluster(
            "there is no kubeconfig (KUBECONFIG, ~/.kube/config) and this is no pod; log in to a cluster, "
            "or run it on this machine: outlast run FILE"
        )
    if context:
        raise NoCluster(f"there is no context {context}: this pod has an account and no kubeconfig; leave --context out")
    config = KubeConfig.from_service_account(kubeconfig.ACCOUNT).get()
    assert config is not None
    return config._replace(user=config.user or User())


def load() -> None:
    """Import the libraries that `connect` needs, for a process that forks before it connects. Raises ImportError."""
    import httpx2  # noqa: F401
    import lightkube.config.client_adapter
    import lightkube.config.kubeconfig
    import lightkube.core.exceptions  # noqa: F401


def _read_refusal(answer: httpx2.Response) -> None:
    if answer.status_code != 101:
        answer.read()


def _for_lightkube(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt the login programs of a kubeconfig to lightkube. lightkube sets no KUBERNETES_EXEC_INFO, and rejects version v1 of
    the programs' output, although v1 equals v1beta1."""

    def user(entry: Mapping[str, Any]) -> dict[str, Any]:
        program = entry["user"].get("exec")
        if not program:
            return dict(entry)
        version = program["apiVersion"]
        exec_info = json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}})
        env = [*(program.get("env") or []), {"name": "KUBERNETES_EXEC_INFO", "value": exec_info}]
        if version == "client.authentication.k8s.io/v1":
            version = "client.authentication.k8s.io/v1beta1"
        return {**entry, "user": {**entry["user"], "exec": {**program, "apiVersion": version, "env": env}}}

    return {**merged, "users": [user(entry) for entry in merged["users"]]}
