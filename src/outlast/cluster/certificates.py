"""Certificates of the etcd that Outlast installs: an authority of its own, and what it signs. The only module that knows the
library `cryptography` (`pip install 'outlast[install]'`); called by `outlast install --etcd` alone.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import OutlastError

if TYPE_CHECKING:
    from cryptography import x509

AUTHORITY_DAYS, DAYS = 10 * 365, 5 * 365
"""How long the authority, and what it signs, are good for. `outlast install` renews what has less than half of that left."""


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


def authority(name: str, now: datetime.datetime) -> Pair:
    """A new authority, which signs by its own key."""
    return _made(name, (), now, AUTHORITY_DAYS, signed_by=None)


def signed(name: str, hosts: Sequence[str], by: Pair, now: datetime.datetime) -> Pair:
    """A certificate for servers that answer to these names and addresses, or for a client, which has none."""
    return _made(name, hosts, now, DAYS, signed_by=by)


def ends(certificate: bytes) -> datetime.datetime:
    """When a certificate is no longer valid. Raises OutlastError for what is none."""
    return _read(certificate).not_valid_after_utc


def worn(certificate: bytes, now: datetime.datetime, hosts: Sequence[str] = ()) -> bool:
    """Whether a certificate has to be renewed: half of its time is over, or it lacks one of these names."""
    from cryptography import x509

    read = _read(certificate)
    half = (read.not_valid_after_utc - read.not_valid_before_utc) / 2
    try:
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        said = {str(each.value) for each in names}
    except x509.ExtensionNotFound:
        said = set()
    return now > read.not_valid_after_utc - half or not set(hosts) <= said


def _read(certificate: bytes) -> x509.Certificate:
    _library()
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(certificate)
    except ValueError as problem:
        raise OutlastError(f"a certificate cannot be read: {problem}; delete its Secret, and install again") from problem


def _made(name: str, hosts: Sequence[str], now: datetime.datetime, days: int, *, signed_by: Pair | None) -> Pair:
    _library()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    own = ec.generate_private_key(ec.SECP256R1())
    # A common name is what etcd would take for a user; its JSON gateway refuses who shows one, once users log in.
    title = NameOID.COMMON_NAME if signed_by is None else NameOID.ORGANIZATIONAL_UNIT_NAME
    subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "outlast"), x509.NameAttribute(title, name)])
    issuer, key = subject, own
    if signed_by:
        issuer = _read(signed_by.certificate).subject
        loaded = serialization.load_pem_private_key(signed_by.key, None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        key = loaded
    ca = signed_by is None
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(_usage(ca), critical=True)
    )
    if not ca:  # servers are also clients: members of each other, and etcd's JSON gateway of itself
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        made = made.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName([_named(host) for host in hosts]), critical=False)
    pem = serialization.Encoding.PEM
    return Pair(
        made.sign(key, hashes.SHA256()).public_bytes(pem),
        own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _usage(ca: bool) -> x509.KeyUsage:
    from cryptography import x509

    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only")
    return x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **dict.fromkeys(others, False))


def _named(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _library() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as problem:
        raise OutlastError(
            "certificates are made with `cryptography`, which is not here: pip install 'outlast[install]'"
        ) from problem
