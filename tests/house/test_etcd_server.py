"""The etcd of `examples/kubernetes/etcd-server.yaml`: what Kubernetes takes, and who is let in by the commands of its head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import etcds
from etcds import DOCUMENTS, certificates
from outlast.base.errors import EtcdError
from published_schemas import validate

MEMBERS = DOCUMENTS[-1]["spec"]
(CONTAINER,) = MEMBERS["template"]["spec"]["containers"]
FLAGS = dict(flag.removeprefix("--").partition("=")[::2] for flag in CONTAINER["command"][1:])
AUTH = ("cert-file", "key-file", "trusted-ca-file", "client-cert-auth")


def test_it_is_what_kubernetes_takes_and_lets_in_workers_clients_and_members_alone() -> None:
    kinds = [each["kind"] for each in DOCUMENTS]
    assert kinds == ["Service", "Service", "PodDisruptionBudget", "NetworkPolicy", "StatefulSet"]
    for document in DOCUMENTS:
        validate(document)
    members, clients = DOCUMENTS[3]["spec"]["ingress"]
    assert members["from"] == [{"podSelector": MEMBERS["selector"]}]
    assert [each["port"] for each in clients["ports"]] == [2379]
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert MEMBERS["template"]["spec"]["securityContext"]["runAsNonRoot"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    certificates(directory)
    return directory


@pytest.fixture
def server(made: Path, tmp_path: Path) -> Iterator[etcds.Server]:
    """One member, with the options of the file that say who is let in."""
    paths = {"tls.crt": "server.crt", "tls.key": "server.key", "ca.crt": "ca.crt"}
    files = {name: str(made / paths[Path(FLAGS[name]).name]) for name in AUTH[:3]}
    options = (*(part for name, path in files.items() for part in (f"--{name}", path)), "--client-cert-auth")
    found = etcds.Server(tmp_path, scheme="https", options=options)
    try:
        found.start(**of(made, "client"))
        yield found
    finally:
        found.stop()


def of(made: Path, who: str) -> dict[str, str]:
    return {"cacert": str(made / "ca.crt"), "cert": str(made / f"{who}.crt"), "key": str(made / f"{who}.key")}


def test_who_has_the_certificate_is_let_in_and_nobody_else(server: etcds.Server, made: Path) -> None:
    assert set(AUTH) <= FLAGS.keys()
    client = server.client(**of(made, "client"))
    assert client.range("x").kvs == ()
    client.close()
    stranger = server.client(cacert=str(made / "ca.crt"))
    with pytest.raises(EtcdError, match="certificate"):
        stranger.range("x")
    stranger.close()
