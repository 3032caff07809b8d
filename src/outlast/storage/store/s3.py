"""Finds credentials, region and endpoint for S3. This is the only module that uses botocore.

`access` searches the same sources as the AWS command line: the environment, profiles and SSO in ~/.aws, a web identity (EKS,
GitHub), pod identity, ECS, and the instance's metadata. It imports botocore only if the environment is insufficient.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from importlib import import_module, util
from typing import Any
from urllib.parse import urlsplit

from outlast.base.errors import Denied, StoreError, Unreachable
from outlast.job.contract import S3_SECRET

LOOKED = (
    "neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor a profile in ~/.aws{profile}, nor a web identity, nor the role of a"
    " pod, container or instance"
)


@dataclass(frozen=True)
class Access:
    """Credentials, region and endpoint for S3."""

    region: str
    endpoint: str
    """URL of the service; empty for AWS."""
    style: str
    """Where URLs contain the bucket's name: `path`, `virtual` (in the host name), or `auto`."""
    keys: tuple[str, str, str] | None
    """Static access key, secret and session token (which may be empty); None for other credentials."""
    anonymous: bool
    session: Any = None
    credentials: Any = None
    timeout_s: float = 30

    def virtual(self, bucket: str) -> bool:
        """Return whether the bucket's name is part of the host name. Wildcard TLS certificates do not cover names with dots."""
        return self.style == "virtual" or (self.style == "auto" and not self.endpoint and "." not in bucket)

    def options(self, bucket: str) -> dict[str, Any]:
        """Return the arguments for obstore's S3Store."""
        endpoint = self.endpoint
        if not endpoint and self.region.startswith("cn-"):
            endpoint = f"https://{f'{bucket}.' if self.virtual(bucket) else ''}s3.{self.region}.amazonaws.com.cn"
        elif endpoint and self.virtual(bucket):
            parts = urlsplit(endpoint)
            endpoint = f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path}"
        options: dict[str, Any] = {"region": self.region, "virtual_hosted_style_request": self.virtual(bucket)}
        if endpoint:
            options["aws_endpoint_url_s3"] = endpoint  # takes precedence over what obstore finds in the environment
        if "AWS_UNSIGNED_PAYLOAD" not in os.environ:
            options["unsigned_payload"] = True  # TLS protects the content; hashing it costs more than sending it
        if self.anonymous:
            return {**options, "skip_signature": True}
        if not self.keys:
            return {**options, "credential_provider": self.fresh}
        key, secret, token = self.keys
        return {**options, "access_key_id": key, "secret_access_key": secret, **({"session_token": token} if token else {})}

    def fresh(self) -> dict[str, Any]:
        """Return credentials that stay valid for 10 minutes, because botocore renews them that long before they expire.

        obstore calls this again 5 minutes before the credentials expire.
        """
        with _mapped_errors("the credentials for S3"):
            frozen = self.credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=10),
        }

    @cached_property
    def client(self) -> Any:
        """botocore's client. It does not retry, because `store` does."""
        botocore = _botocore()
        config = import_module("botocore.config").Config(
            s3={
                "addressing_style": "path" if self.style == "auto" and self.endpoint else self.style,
                "payload_signing_enabled": False,
            },
            signature_version=botocore.UNSIGNED if self.anonymous else None,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"total_max_attempts": 1},
            connect_timeout=min(10, self.timeout_s),
            read_timeout=self.timeout_s,
            max_pool_connections=64,
        )
        key, secret, token = self.keys or (None, None, None)
        session = self.session or import_module("botocore.session").Session()
        return session.create_client(
            "s3",
            region_name=self.region,
            endpoint_url=self.endpoint or None,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            aws_session_token=token or None,
            config=config,
        )

    def range(self, bucket: str, key: str, start: int, end: int) -> bytes:
        """Read a range from a server whose range responses obstore rejects (rclone responds with 200 instead of 206)."""
        response = self.client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        with contextlib.closing(response["Body"]) as body:
            if not (response.get("ContentRange") or "").startswith(f"bytes {start}-"):
                raise StoreError(f"s3://{bucket}/{key}: the server knows no ranges")
            return bytes(body.read())


def access(environ: Mapping[str, str] = os.environ, *, timeout_s: float = 30) -> Access:
    """Find credentials, region and endpoint. Raises Denied if there are no credentials."""
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    style = environ.get("AWS_S3_ADDRESSING_STYLE")
    anonymous = environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on")
    key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    keys = (key, secret, environ.get("AWS_SESSION_TOKEN", "")) if key and secret else None
    sufficient = anonymous or keys is not None
    session = credentials = None
    if not (sufficient and endpoint and region):
        session = _session(needed=not sufficient)
    if session:
        with _mapped_errors("the AWS configuration"):
            region = region or session.get_config_variable("region")
            endpoint = endpoint or _endpoint(session)
            style = style or (session.get_scoped_config().get("s3") or {}).get("addressing_style")
        if not sufficient:
            with _mapped_errors("the credentials for S3"):
                credentials = session.get_credentials()
            if credentials is None:
                profile = f" (AWS_PROFILE={environ['AWS_PROFILE']})" if environ.get("AWS_PROFILE") else ""
                here = f"; {S3_SECRET}" if "KUBERNETES_SERVICE_HOST" in environ else ""
                raise Denied(
                    f"no credentials for S3: {LOOKED.format(profile=profile)}; AWS_SKIP_SIGNATURE=true reads public buckets{here}"
                )
    if style not in (None, "", "auto", "path", "virtual"):
        raise StoreError(f"AWS_S3_ADDRESSING_STYLE is {style}; it must be path, virtual or auto")
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise StoreError(f"AWS_ENDPOINT_URL is {endpoint}; it must begin with https:// (or http://)")
    return Access(
        region or "us-east-1", (endpoint or "").rstrip("/"), style or "auto", keys, anonymous, session, credentials, timeout_s
    )


def answer(error: BaseException) -> tuple[int, str, str] | None:
    """Return a botocore exception's status, code and message, or None for any other exception. Without a response, the status is
    0 and the others are empty."""
    response = getattr(error, "response", None)
    if isinstance(response, dict) and "Error" in response:
        details, status = response["Error"], response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return int(status), details.get("Code", ""), str(details.get("Message", "")).rstrip(".")
    return (0, "", "") if type(error).__module__.startswith("botocore.") else None


def _botocore() -> Any:
    try:
        return import_module("botocore")
    except ImportError as error:
        raise StoreError("this needs botocore; pip install 'outlast[store]'") from error


def _session(*, needed: bool) -> Any:
    try:
        return import_module("botocore.session").Session()
    except ImportError as error:
        if not needed:
            return None
        raise Denied(
            "no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; profiles and roles need botocore: pip install 'outlast[store]'"
        ) from error


def _endpoint(session: Any) -> str:
    provider = import_module("botocore.configprovider").ConfiguredEndpointProvider(
        session.full_config, session.get_scoped_config(), "s3"
    )
    return str(provider.provide() or "")


@contextlib.contextmanager
def _mapped_errors(what: str) -> Iterator[None]:
    errors = import_module("botocore.exceptions")
    try:
        yield
    except (errors.ConnectionError, errors.HTTPClientError) as error:
        raise Unreachable(f"{what} cannot be obtained: {error}") from error
    except (errors.BotoCoreError, errors.ClientError) as error:
        raise Denied(f"{what} cannot be used: {error}") from error


def find_certificates(environ: MutableMapping[str, str]) -> None:
    """Use botocore's CA certificates if this machine has none, because obstore needs certificates to create a client."""
    given = environ.get("SSL_CERT_FILE") or environ.get("SSL_CERT_DIR")
    if given or any(os.path.exists(path) for path in _CERTIFICATES):
        return
    spec = util.find_spec("botocore")
    for directory in (spec.submodule_search_locations if spec else None) or ():
        environ["SSL_CERT_FILE"] = os.path.join(directory, "cacert.pem")


_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/ssl/cert.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
)
