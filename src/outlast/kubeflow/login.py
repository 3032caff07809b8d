"""Whether the certificate and the user pool of `kubeflow.yaml` are such that a load balancer can ask for a login. Pure.

https://docs.aws.amazon.com/elasticloadbalancing/latest/application/listener-authenticate-users.html
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from outlast.cloud.logins import Certificate, Client, Pool
from outlast.kubeflow.model import Kubeflow

_SOON_S = 14 * 86_400
"""Certificates of ACM are renewed 60 days before they expire; one that expires so soon could not be."""


def findings(wanted: Kubeflow, certificate: Certificate | None, pool: Pool | None, now: float) -> list[str]:
    """Sentences about what must be corrected in AWS or in the file; none if all is well. `now`: seconds since 1970."""
    return [*_certificate(wanted, certificate, now), *_pool(wanted, pool)]


def valid_for(names: tuple[str, ...], host: str) -> bool:
    """Whether a certificate is valid for a host; `*.example.com` is for one more label, and no more."""
    return host in names or f"*.{host.partition('.')[2]}" in names


def _certificate(wanted: Kubeflow, found: Certificate | None, now: float) -> Iterator[str]:
    name = f"certificate {wanted.certificate.resource.partition('/')[2]}"
    if found is None:
        yield f"{name} is not in ACM in {wanted.region}; correct certificateArn, or request one there"
        return
    if found.status == "PENDING_VALIDATION":
        yield f"{name} is not validated yet; add the record to DNS that ACM shows for it"
    elif found.status != "ISSUED":
        yield f"{name} is {found.status} and not ISSUED; request another"
    elif found.expires is not None and found.expires - now < _SOON_S:
        day = datetime.datetime.fromtimestamp(found.expires, datetime.UTC).date()
        yield f"{name} expires on {day} and was not renewed; validate it again, or import a new one"
    if not valid_for(found.names, wanted.domain):
        yield f"{name} is for {', '.join(found.names)}, and not for {wanted.domain}; request one for it, or correct domain"


def _pool(wanted: Kubeflow, found: Pool | None) -> Iterator[str]:
    cognito = wanted.cognito
    if found is None:
        yield f"user pool {cognito.pool_id} is not there; correct cognitoUserPoolArn"
        return
    if not found.domains:
        yield f"user pool {cognito.pool_id} has no domain, and so no login page; give it one in Cognito"
    elif cognito.cognito_user_pool_domain not in found.domains:
        has, said = " and ".join(found.domains), cognito.cognito_user_pool_domain
        yield f"user pool {cognito.pool_id} has the domain {has}, and not {said}; correct cognitoUserPoolDomain"
    if found.client is None:
        yield f"user pool {cognito.pool_id} has no app client {cognito.cognito_app_client_id}; correct cognitoAppClientId"
    else:
        yield from _client(wanted, found.client)


def _client(wanted: Kubeflow, found: Client) -> Iterator[str]:
    name = f"app client {wanted.cognito.cognito_app_client_id}"
    if not found.secret:
        yield f"{name} has no secret, which a load balancer needs and which cannot be added; make another client"
    if wanted.callback not in found.callbacks:
        yield f"{name} does not allow the callback URL {wanted.callback}, so every login ends in an error; add it"
    if not found.enabled or "code" not in found.flows:
        yield f"{name} does not allow the OAuth flow of an authorization code; switch it on"
    if lacking := [scope for scope in ("openid", "email") if scope not in found.scopes]:
        yield f"{name} does not allow the scope {' and '.join(lacking)}; add it"
