"""Certificates of ACM and user pools of Cognito: what a load balancer needs of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outlast.cloud import aws
from outlast.errors import OutlastError


@dataclass(frozen=True)
class Certificate:
    """A certificate of ACM."""

    status: str
    """ISSUED, PENDING_VALIDATION, EXPIRED ..."""
    names: tuple[str, ...]
    """Host names for which it is valid; `*.example.com` is one of any name there."""
    expires: float | None = None
    """Time since 1970, in seconds."""


@dataclass(frozen=True)
class Client:
    """An app client of a user pool."""

    secret: bool
    callbacks: tuple[str, ...] = ()
    sign_outs: tuple[str, ...] = ()
    flows: tuple[str, ...] = ()
    """OAuth flows: code, implicit, client_credentials."""
    scopes: tuple[str, ...] = ()
    enabled: bool = False
    """Whether the flows are switched on."""


@dataclass(frozen=True)
class Pool:
    """A user pool, and one of its app clients."""

    domains: tuple[str, ...]
    """Prefix of Cognito's own domain, and the own domain, as far as there are any."""
    client: Client | None
    """None: it has no such client."""


def certificate(arn: str, region: str) -> Certificate | None:
    """A certificate; None if there is none of this ARN."""
    found = _asked(f"certificate {arn}", "acm", region, "describe_certificate", CertificateArn=arn)
    if found is None:
        return None
    fields = found["Certificate"]
    names = dict.fromkeys([fields["DomainName"], *fields.get("SubjectAlternativeNames", ())])
    expires = fields.get("NotAfter")
    return Certificate(fields["Status"], tuple(names), expires.timestamp() if expires else None)


def pool(pool_id: str, client_id: str, region: str) -> Pool | None:
    """A user pool with one of its app clients; None if there is no such user pool."""
    found = _asked(f"user pool {pool_id}", "cognito-idp", region, "describe_user_pool", UserPoolId=pool_id)
    if found is None:
        return None
    domains = tuple(found["UserPool"][name] for name in ("Domain", "CustomDomain") if found["UserPool"].get(name))
    return Pool(domains, _client(pool_id, client_id, region))


def _client(pool_id: str, client_id: str, region: str) -> Client | None:
    names = {"UserPoolId": pool_id, "ClientId": client_id}
    found = _asked(f"app client {client_id}", "cognito-idp", region, "describe_user_pool_client", **names)
    if found is None:
        return None
    fields = found["UserPoolClient"]
    return Client(
        secret=bool(fields.get("ClientSecret")),
        callbacks=tuple(fields.get("CallbackURLs", ())),
        sign_outs=tuple(fields.get("LogoutURLs", ())),
        flows=tuple(fields.get("AllowedOAuthFlows", ())),
        scopes=tuple(fields.get("AllowedOAuthScopes", ())),
        enabled=bool(fields.get("AllowedOAuthFlowsUserPoolClient")),
    )


def _asked(what: str, service: str, region: str, call: str, **names: str) -> dict[str, Any] | None:
    """What a service answers; None if what was asked for does not exist."""
    try:
        with aws.in_our_words(what):
            answer: dict[str, Any] = getattr(aws.client(service, region), call)(**names)
            return answer
    except OutlastError as error:
        if error.__cause__ and aws.absent(error.__cause__):
            return None
        raise
