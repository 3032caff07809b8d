"""Rendezvous endpoints without an operator: an etcd, or worker 0.

Worker 0 has its full name here. The name of the headless Service resolves to every pod: each would take itself for the host of
the store, and wait for ever.
"""

from __future__ import annotations

from typing import Any

from outlast import contract
from outlast.contract import Env, Pod
from outlast.manifests.request import Request, wrong

LOGIN = "outlast-etcd"
"""The Secret of a namespace for the etcd of the same name, see `outlast.cluster.etcd_users`."""


def endpoint(request: Request, pod0: str, service: str) -> str:
    """`c10d://host:port`, `etcd://host:port,...` or `etcds://`, as in OUTLAST_RENDEZVOUS; see `etcd.address`.

    Raises InvalidJob.
    """
    wanted = request.spec.rendezvous
    if wanted.endpoint is None:
        return f"c10d://{fqdn(pod0, service)}:{Pod.RENDEZVOUS_PORT}"
    scheme, _, address = wanted.endpoint.rpartition("://")
    schemes = contract.SCHEMES[wanted.backend]
    if scheme not in schemes:
        known = " or ".join(f"{each}://" for each in schemes if each)
        raise wrong(request.job, f"rendezvous.endpoint ({wanted.endpoint}) begins with {scheme}://; write {address}, or {known}")
    host = address.rpartition(":")[0]
    if wanted.backend == "c10d" and host.split(".")[0] == service:
        remedy = "leave rendezvous out: it is pod 0 then"
        raise wrong(request.job, f"rendezvous.endpoint ({address}) is the Service of all pods, and each would be host; {remedy}")
    known = "etcds" if ours(request) else schemes[scheme]
    return f"{known}://{address.rstrip('/')}"


def ours(request: Request) -> bool:
    """Whether a job uses the etcd of `outlast install --etcd` without credentials of its own."""
    wanted = request.spec.rendezvous
    scheme, _, address = (wanted.endpoint or "").rpartition("://")
    named = any(name.startswith("OUTLAST_ETCD_") for name in request.spec.env)
    return wanted.backend == "etcd" and address.split(".")[0] == LOGIN and scheme in ("", "etcds", "https") and not named


def login(request: Request) -> dict[str, dict[str, Any]]:
    """The variables with a worker's credentials for that etcd."""
    if not ours(request):
        return {}
    files = {Env.ETCD_CACERT: "ca.crt", Env.ETCD_CERT: "tls.crt", Env.ETCD_KEY: "tls.key"}
    keys = {Env.ETCD_USER: "user", Env.ETCD_PASSWORD: "password"}
    return {
        **{name: {"value": f"{Pod.ETCD}/{file}"} for name, file in files.items()},
        **{name: {"valueFrom": {"secretKeyRef": {"name": LOGIN, "key": key}}} for name, key in keys.items()},
    }


def alone(request: Request) -> str:
    """The endpoint of a job of one worker."""
    if request.spec.rendezvous.endpoint is not None:
        return endpoint(request, "", "")
    return f"c10d://localhost:{Pod.RENDEZVOUS_PORT}"


def fqdn(pod: str, service: str) -> str:
    """The full name of a pod behind a headless Service, in the namespace that it is applied to.

    https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/
    """
    return f"{pod}.{service}.$({Env.NAMESPACE}).svc.{contract.CLUSTER_DOMAIN}"
