"""Who may use the etcd that `outlast install --etcd` brings: its certificates, its users, and the Secrets that hold them.

    outlast-etcd-ca      in etcd's namespace: the authority. No pod mounts it
    outlast-etcd-root    in etcd's namespace: the password of root. No pod mounts it
    outlast-etcd-tls     in etcd's namespace: the certificate of its members
    outlast-etcd         in each namespace whose jobs may use it: a certificate, a user and a password for its own keys

A client without a certificate of that authority cannot connect; one with it reads and writes the keys that begin with the name of
its namespace. `outlast install` creates and renews all of it; neither the operator nor a worker may read Secrets through the API
server.
Docs: docs/decisions/0020-who-may-use-the-rendezvous.md.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from outlast import etcd, foreign
from outlast.cluster import certificates
from outlast.cluster.certificates import Pair
from outlast.errors import ClusterError, EtcdRefused
from outlast.kube import kinds
from outlast.manifests import install
from outlast.manifests.rendezvous import LOGIN
from outlast.manifests.request import Document

if TYPE_CHECKING:
    from outlast.kube import Cluster

AUTHORITY, ROOT = f"{install.ETCD}-ca", f"{install.ETCD}-root"


@dataclass(frozen=True)
class User:
    """A user of etcd, who may read and write the keys with a prefix."""

    name: str
    prefix: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Access:
    """What is needed to use an etcd and to admit users."""

    authority: Pair
    bundle: bytes
    """Certificates that are trusted: that of the authority, and of the one before it."""
    root: str = field(repr=False)
    """Password of root."""
    documents: tuple[Document, ...] = ()
    """The Secrets of etcd's own namespace."""


def access(cluster: Cluster, namespace: str, members: int, now: datetime.datetime) -> Access:
    """What there is, and what is new or renewed of it; changes nothing. Raises ClusterError, OutlastError."""
    held = _data(cluster, AUTHORITY, namespace)
    authority = _pair(held)
    bundle = held.get("ca.crt", b"")
    if authority is None or certificates.worn(authority.certificate, now):
        before = authority
        authority = certificates.authority(install.ETCD, now)
        bundle = authority.certificate + (before.certificate if before else b"")
    root = _data(cluster, ROOT, namespace).get("password", b"").decode() or secrets.token_hex(24)
    server = _pair(_data(cluster, install.ETCD_TLS, namespace))
    hosts = install.etcd_hosts(namespace, members)
    if server is None or not held or bundle != held.get("ca.crt") or certificates.worn(server.certificate, now, hosts):
        server = certificates.signed(install.ETCD, hosts, authority, now)
    documents = (
        _secret(AUTHORITY, namespace, _files(authority, bundle), "authority"),
        _secret(ROOT, namespace, {"user": b"root", "password": root.encode()}, "root"),
        _secret(install.ETCD_TLS, namespace, _files(server, bundle), "members"),
    )
    return Access(authority, bundle, root, documents)


def admitted(cluster: Cluster) -> list[str]:
    """Namespaces whose jobs may use an etcd of ours."""
    found = cluster.list_(kinds.SECRET, labels=f"{install.ETCD_ROLE}=login", everywhere=True)
    return sorted(each["metadata"]["namespace"] for each in found)


def login(cluster: Cluster, access: Access, namespace: str, now: datetime.datetime) -> tuple[User, Document]:
    """The user of a namespace, and its Secret; changes nothing. Raises OutlastError when the name of the Secret is taken."""
    there = cluster.find(kinds.SECRET, LOGIN, namespace=namespace) or {}
    if there:
        foreign.check(there, {install.ETCD_ROLE: "login"}, instead="rename it, or let its jobs use another etcd")
    data = _decoded(there)
    password = data.get("password", b"").decode() or secrets.token_hex(24)
    user = User(f"namespace-{namespace}", f"{etcd.PREFIX}/{quote(f'{namespace}/', safe='')}", password)
    pair = _pair(data)
    if pair is None or data.get("ca.crt") != access.bundle or certificates.worn(pair.certificate, now):
        pair = certificates.signed(user.name, (), access.authority, now)
    said = {**_files(pair, access.bundle), "user": user.name.encode(), "password": password.encode()}
    return user, _secret(LOGIN, namespace, said, "login")


def admit(client: etcd.Etcd, root: str, users: Sequence[User]) -> bool:
    """Let these users log in, and require a login of every client; returns whether that changed anything. `client` is root.

    An etcd that asks for no login has lost its data, or its users were not made by us: they are deleted. Raises EtcdError.
    """
    enabled = bool(client.ask("auth/status", {}).get("enabled"))
    if not enabled:
        for name in client.ask("auth/user/list", {}).get("users", ()):
            client.ask("auth/user/delete", {"name": name})
        for role in client.ask("auth/role/list", {}).get("roles", ()):
            client.ask("auth/role/delete", {"role": role})
    there = set(client.ask("auth/user/list", {}).get("users", ())), set(client.ask("auth/role/list", {}).get("roles", ()))
    changed = [_let_in(client, user, *there) for user in users]
    if not enabled:
        client.ask("auth/role/add", {"name": "root"})
        client.ask("auth/user/add", {"name": "root", "password": root})
        client.ask("auth/user/grant", {"user": "root", "role": "root"})
        client.ask("auth/enable", {})
    return any(changed) or not enabled


def _let_in(client: etcd.Etcd, user: User, users: set[str], roles: set[str]) -> bool:
    if user.name not in roles:
        client.ask("auth/role/add", {"name": user.name})
    keys = etcd.range_(user.prefix, prefix=True)["request_range"]
    client.ask("auth/role/grant", {"name": user.name, "perm": {"permType": "READWRITE", **keys}})
    if user.name in users:
        with contextlib.suppress(EtcdRefused):
            client.ask("auth/authenticate", {"name": user.name, "password": user.password})
            return False
        client.ask("auth/user/changepw", {"name": user.name, "password": user.password})
        return True
    client.ask("auth/user/add", {"name": user.name, "password": user.password})
    client.ask("auth/user/grant", {"user": user.name, "role": user.name})
    return True


@contextlib.contextmanager
def as_root(cluster: Cluster, namespace: str, access: Access, now: datetime.datetime) -> Iterator[etcd.Etcd]:
    """A connection as root, by way of the API server, with a certificate that is made for it. Raises ClusterError."""
    pair = certificates.signed("root", (), access.authority, now)
    with tempfile.TemporaryDirectory(prefix="outlast-etcd-") as directory, _forwarded(cluster, namespace) as port:
        files = {}
        for name, content in (("cacert", access.bundle), ("cert", pair.certificate), ("key", pair.key)):
            path = Path(directory, name)
            path.touch(mode=0o600)
            path.write_bytes(content)
            files[name] = str(path)
        where = etcd.address(f"etcds://127.0.0.1:{port}", {**files, "user": "root", "password": access.root}, {})
        with contextlib.closing(etcd.Etcd(where, answer_s=10.0)) as client:
            yield client


@contextlib.contextmanager
def _forwarded(cluster: Cluster, namespace: str) -> Iterator[int]:
    """A port of this machine that leads to a member."""
    pod = f"{install.ETCD}-0"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry(connection: socket.socket) -> None:
            with connection, contextlib.suppress(ClusterError, OSError):  # the client reports that it has no answer
                cluster.forward(pod, etcd.PORT, connection, namespace=namespace)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=carry, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


# Secrets


def _secret(name: str, namespace: str, data: dict[str, bytes], role: str) -> Document:
    meta: Document = {"name": name, "namespace": namespace, "labels": {**install.LABELS, install.ETCD_ROLE: role}}
    if "tls.crt" in data:
        meta["annotations"] = {install.ENDS: f"{certificates.ends(data['tls.crt']):%Y-%m-%d}"}
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": encoded}


def _files(pair: Pair, bundle: bytes) -> dict[str, bytes]:
    return {"ca.crt": bundle, "tls.crt": pair.certificate, "tls.key": pair.key}


def _data(cluster: Cluster, name: str, namespace: str) -> dict[str, bytes]:
    there = cluster.find(kinds.SECRET, name, namespace=namespace)
    foreign.check(there, instead="rename it, or install into another --namespace")
    return _decoded(there or {})


def _pair(data: dict[str, bytes]) -> Pair | None:
    return Pair(data["tls.crt"], data["tls.key"]) if "tls.crt" in data else None


def _decoded(secret: dict[str, Any]) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
