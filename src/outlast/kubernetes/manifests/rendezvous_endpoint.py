"""Endpoints where workers meet without an operator: either etcd or worker 0.

Worker 0 is addressed by its full DNS name. The name of the headless Service would not do, because it resolves to every pod, so
each pod would consider itself the store's host and wait forever.
"""

from __future__ import annotations

from outlast.job import contract
from outlast.job.contract import Env, Pod
from outlast.kubernetes.manifests.render_request import Request, invalid_job


def endpoint(request: Request, pod0: str, service: str) -> str:
    """Return the endpoint for OUTLAST_RENDEZVOUS, such as `c10d://host:port`; see `rendezvous.etcd.gateway.address`. Raises
    InvalidJob if the job's endpoint cannot be used."""
    rendezvous = request.spec.rendezvous
    if rendezvous.endpoint is None:
        return f"c10d://{fqdn(pod0, service)}:{Pod.RENDEZVOUS_PORT}"
    scheme, _, address = rendezvous.endpoint.rpartition("://")
    schemes = contract.SCHEMES[rendezvous.backend]
    if scheme not in schemes:
        allowed = " or ".join(f"{each}://" for each in schemes if each)
        raise invalid_job(
            request.job, f"rendezvous.endpoint ({rendezvous.endpoint}) begins with {scheme}://; write {address}, or {allowed}"
        )
    host = address.rpartition(":")[0]
    if rendezvous.backend == "c10d" and host.split(".")[0] == service:
        remedy = "leave rendezvous out: it is pod 0 then"
        raise invalid_job(
            request.job, f"rendezvous.endpoint ({address}) is the Service of all pods, and each would be host; {remedy}"
        )
    return f"{schemes[scheme]}://{address.rstrip('/')}"


def single_worker_endpoint(request: Request) -> str:
    """Return the endpoint for a job with one worker."""
    if request.spec.rendezvous.endpoint is not None:
        return endpoint(request, "", "")
    return f"c10d://localhost:{Pod.RENDEZVOUS_PORT}"


def fqdn(pod: str, service: str) -> str:
    """Return the full DNS name that a pod has through a headless Service in its namespace
    (https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/)."""
    return f"{pod}.{service}.$({Env.NAMESPACE}).svc.{contract.CLUSTER_DOMAIN}"
