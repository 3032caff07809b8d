"""Connects to a cluster, with a kubeconfig or with this pod's service account.

lightkube reads kubeconfigs and runs cloud providers' login programs. Only this module imports it, and never for a service
account: its compiled parts are built for one Python version, but torchrun may run our handler with another one, that of the
image.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.base.errors import NoCluster, Unauthorized
from outlast.kubernetes.api import kubeconfig
from outlast.kubernetes.api.client import Cluster
from outlast.kubernetes.api.requests import CONNECT_S, READ_S, Clients, Connection

if TYPE_CHECKING:
    import httpx2

_IDLE_S = 30.0
"""Idle timeout for connections: less than the API server's (90 s), more than the interval between Lease renewals."""


class _Login(NamedTuple):
    server: str
    context: str
    namespace: str
    arguments: dict[str, Any]


def not_installed(error: ImportError) -> NoCluster:
    """Return the error for a missing library."""
    library = (error.name or "").partition(".")[0]
    return NoCluster(f"{library} is not installed; for clusters: pip install 'outlast[kubernetes]'")


def connect(context: str | None = None, namespace: str | None = None, *, prefer_pod: bool = False) -> Cluster:
    """Return the cluster of a kubeconfig context (default: the current one) or, without a kubeconfig, the cluster that this pod
    runs in.

    With `prefer_pod`, a pod with a service account ignores `$KUBECONFIG`, which may be meant for the training script. Sends no
    request. Raises NoCluster.
    """
    paths = [] if prefer_pod and kubeconfig.in_pod(os.environ) else kubeconfig.files(os.environ)
    try:
        import httpx2

        login = _from_kubeconfig(paths, context) if paths else _from_pod(context)
        # In a pod, $HTTPS_PROXY applies to addresses outside the cluster; the API server is inside.
        timeout = httpx2.Timeout(READ_S, connect=CONNECT_S, pool=None)
        arguments = {**login.arguments, "base_url": login.server, "timeout": timeout, "trust_env": bool(paths)}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=_IDLE_S)
        clients = Clients(lambda: httpx2.Client(**arguments, limits=limits))
    except ImportError as error:
        raise not_installed(error) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        place = ", ".join(map(str, paths)) or "the account of this pod"
        raise NoCluster(f"{place} cannot be used: {error or type(error).__name__}; log in to the cluster again") from error
    # A connection that becomes a websocket must not be reused for other requests. Refusals must be read before it is closed.
    websocket_client = lambda: httpx2.Client(**arguments, event_hooks={"response": [_read_refusal]})  # noqa: E731
    connection = Connection(clients, websocket_client, login.server)
    return Cluster(connection, context=login.context, namespace=namespace or login.namespace)


def _from_kubeconfig(paths: list[Any], context: str | None) -> _Login:
    from lightkube.config.client_adapter import ConnectionParams
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.config.models import User
    from lightkube.core.exceptions import ConfigError

    merged = kubeconfig.read(paths)
    name = kubeconfig.context_name(merged, context)
    try:
        config = KubeConfig.from_dict(_for_lightkube(merged), fname=paths[0]).get(name)
        assert config is not None
        servers = {entry["name"]: entry["cluster"] for entry in merged["clusters"]}
        params = ConnectionParams(proxy=servers[config.context.cluster].get("proxy-url"))
        arguments = params.httpx_params(config._replace(user=config.user or User()))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    arguments["headers"] = kubeconfig.impersonation_headers(merged, name)
    return _Login(config.cluster.server, config.context_name, config.namespace, arguments)


def _from_pod(context: str | None) -> _Login:
    """Return the login for this pod's service account. Raises NoCluster if there is none.

    https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
    """
    if not kubeconfig.in_pod(os.environ):
        raise NoCluster(
            "there is no kubeconfig (KUBECONFIG, ~/.kube/config) and this is no pod; log in to a cluster, "
            "or run it on this machine: outlast run FILE"
        )
    if context:
        raise NoCluster(f"there is no context {context}: this pod has an account and no kubeconfig; leave --context out")
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    verify = ssl.create_default_context(cafile=kubeconfig.ACCOUNT / "ca.crt")
    namespace = (kubeconfig.ACCOUNT / "namespace").read_text()
    server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    return _Login(server, "default", namespace, {"verify": verify, "auth": _authorized})


def _authorized(request: httpx2.Request) -> httpx2.Request:
    """Add the service account's token to a request. It is read for each request, as the kubelet renews it every hour."""
    try:
        request.headers["Authorization"] = f"Bearer {(kubeconfig.ACCOUNT / 'token').read_text().strip()}"
    except OSError as error:
        raise Unauthorized(f"the token of this pod's account cannot be read: {error}; start the pod anew") from error
    return request


def load() -> None:
    """Import the library that `connect` needs in a pod. Meant for processes that fork before they connect. Raises ImportError."""
    import httpx2  # noqa: F401


def _read_refusal(answer: httpx2.Response) -> None:
    if answer.status_code != 101:
        answer.read()


def _for_lightkube(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt credential plugins (`exec`) to lightkube, which sets no KUBERNETES_EXEC_INFO, and rejects version v1 of their output
    although it equals v1beta1."""

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
