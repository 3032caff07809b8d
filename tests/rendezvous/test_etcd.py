"""Our client of etcd, against a real one: what it asks, and what it says when it gets no answer, or a refusal."""

from __future__ import annotations

import base64
import contextlib
import http.server
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ports
from etcds import Server, binary, serving
from outlast.base.errors import EtcdAway, EtcdRefused, OutlastError
from outlast.rendezvous.etcd import gateway
from outlast.rendezvous.etcd.gateway import Gone, KeyValue, created, delete, modified, put, range_


@pytest.fixture
def client(shared_etcd: Server) -> Iterator[gateway.Etcd]:
    with contextlib.closing(shared_etcd.client()) as client:
        yield client


# Addresses


def test_an_endpoint_names_hosts_ports_and_a_prefix() -> None:
    said = gateway.address("etcd://a:2379,b,[::1]:99/team/x/", environ={})
    assert said == gateway.Address((("a", 2379), ("b", 2379), ("::1", 99)), "/team/x")
    assert str(said) == "etcd at a:2379, b:2379, [::1]:99"
    assert gateway.address("etcds://a", environ={}).tls
    assert gateway.address("etcd://a", {"prefix": "mine"}, {}).prefix == "/mine"


def test_what_is_not_said_comes_from_the_environment_and_a_password_is_shown_to_nobody() -> None:
    environ = {"OUTLAST_ETCD_USER": "u", "OUTLAST_ETCD_PASSWORD": "secret", "OUTLAST_ETCD_CACERT": "/ca.pem"}
    said = gateway.address("etcd://a", {"user": "v"}, environ)
    assert (said.user, said.password, said.cacert, said.tls) == ("v", "secret", "/ca.pem", True)
    assert "secret" not in repr(said)


NO_ENDPOINT = "is not an etcd endpoint; expected etcd://host:2379, with commas between several"


@pytest.mark.parametrize(
    ("endpoint", "options", "sentence"),
    [
        *((f"etcd://{hosts}", {}, NO_ENDPOINT) for hosts in ("", "a:b", "a:99999", "a,,b", "user@a", "a:0")),
        ("etcd://a", {"user": "u"}, "of user and password for the etcd one is missing"),
        ("etcd://a", {"cert": "c"}, r"of cert \('c'\) and key \(''\) one is missing"),
    ],
)
def test_what_is_no_endpoint_and_halves_of_options_are_refused(endpoint: str, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(OutlastError, match=sentence):
        gateway.address(endpoint, options, {})


# Keys, leases, watches


def test_a_transaction_compares_writes_and_reads(client: gateway.Etcd) -> None:
    key = "/txn/é key"
    made = client.txn([created(key, 0)], [put(key, "1 ✓")], [range_(key)])
    assert made.succeeded
    again = client.txn([created(key, 0)], [put(key, "2")], [range_(key)])
    assert (again.succeeded, again.kvs) == (False, (KeyValue(key, "1 ✓", made.revision, made.revision),))
    assert client.txn([modified(key, made.revision)], [put(key, "3"), delete("/txn/none")]).succeeded
    assert [kv.value for kv in client.range("/txn/", prefix=True).kvs] == ["3"]


def test_keys_end_with_their_lease(client: gateway.Etcd) -> None:
    lease = client.grant(30)
    client.txn([], [put("/lease/a", "1", lease)])
    assert client.left(lease) in (29, 30)
    client.keep(lease)
    client.revoke(lease)
    client.revoke(lease)
    assert (client.left(lease), client.range("/lease/a").kvs) == (None, ())
    with pytest.raises(gateway.LeaseGone):
        client.keep(lease)
    with pytest.raises(gateway.LeaseGone):
        client.txn([], [put("/lease/a", "1", lease)])


def test_a_watch_tells_what_has_happened_since_in_order(client: gateway.Etcd) -> None:
    before = client.range("/watch/", prefix=True).revision
    first = client.txn([], [put("/watch/a", "1")]).revision
    client.txn([], [put("/elsewhere", "1")])
    second = client.txn([], [delete("/watch/a")]).revision
    heard = []
    with contextlib.closing(client.watch("/watch/", before)) as watch:
        for events in watch:
            heard += events
            if len(heard) == 2:
                break
    assert heard == [KeyValue("/watch/a", "1", first, first), Gone("/watch/a", second)]


def test_a_watch_ends_when_it_is_interrupted_or_when_it_is_ahead_of_what_etcd_has(client: gateway.Etcd) -> None:
    watch = client.watch("/watch/", client.range("x").revision)
    assert next(watch) == []
    client.interrupt()
    with pytest.raises(EtcdAway, match="ended a watch"):
        next(watch)
    with pytest.raises(gateway.Behind, match="does not have revision 1000001"):
        list(client.watch("/watch/", 1_000_000))


def test_an_idle_connection_that_was_closed_is_opened_again(own_etcd: Server) -> None:
    with contextlib.closing(own_etcd.client()) as client:
        client.txn([], [put("/a", "1")])
        own_etcd.stop()
        own_etcd.start()
        assert client.range("/a").kvs[0].value == "1"


# What goes wrong


def test_nobody_there_is_said() -> None:
    port = ports.free()
    with pytest.raises(EtcdAway, match=rf"^etcd at 127.0.0.1:{port} cannot be reached: Connection refused$"):
        _at(port).range("x")


def test_another_endpoint_is_asked(shared_etcd: Server) -> None:
    both = f"etcd://127.0.0.1:{ports.free()},127.0.0.1:{shared_etcd.port}"
    with contextlib.closing(gateway.Etcd(gateway.address(both, environ={}))) as client:
        client.range("x")
        assert next(iter(client.watch("/x", 0))) == []


@pytest.mark.parametrize("down", [False, True], ids=["at once", "which is away at first"])
def test_one_that_does_not_answer_is_left_for_another(own_etcd: Server, shared_etcd: Server, down: bool) -> None:
    both = gateway.address(f"etcd://127.0.0.1:{own_etcd.port},127.0.0.1:{shared_etcd.port}", environ={})
    with contextlib.closing(gateway.Etcd(both, answer_s=60)) as client:
        watch = client.watch("x", client.range("x").revision)
        assert next(watch) == []
        assert (client._at, own_etcd.process is not None) == (0, True)
        client._answer_s = 1  # only now: a busy machine is no reason to leave the first
        client._hang_up()
        os.kill(own_etcd.process.pid, signal.SIGSTOP)
        os.waitpid(own_etcd.process.pid, os.WUNTRACED)  # its threads stop one after another, and may answer until then
        if down:
            client.address = replace(both, hosts=(both.hosts[0], gateway.Host("127.0.0.1", ports.free())))
            with pytest.raises(EtcdAway, match=r"does not answer within 1 s; .* cannot be reached"):
                client.range("x")
            client.address = both
        client.range("x")
        client.range("x")
        with pytest.raises(EtcdAway, match="ended a watch"):
            next(watch)


def test_one_that_is_of_no_use_is_left_for_another(shared_etcd: Server) -> None:
    with answering(Stub) as port:
        first = f"127.0.0.1:{port}"
        both = gateway.address(f"etcd://{first},127.0.0.1:{shared_etcd.port}", environ={})
        with contextlib.closing(gateway.Etcd(both)) as client:
            client.range("x")
            assert next(iter(client.watch("/x", 0))) == []
            assert client._at == 1
        away = gateway.address(f"etcd://{first},127.0.0.1:{ports.free()}", environ={})
        with contextlib.closing(gateway.Etcd(away)) as client:  # trying again can help: both may be there then
            for _ in range(2):
                with pytest.raises(EtcdAway, match=r"HTTP 404.*cannot be reached|cannot be reached.*HTTP 404"):
                    client.range("x")


class Stub(http.server.BaseHTTPRequestHandler):
    """Answers everything alike."""

    status, body = 404, b"404 page not found\n"

    def do_POST(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None: ...


@contextlib.contextmanager
def answering(handler: type[Stub]) -> Iterator[int]:
    """Run a server with this handler; its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "kind", "sentence"),
    [
        (
            404,
            b"404 page not found\n",
            EtcdRefused,
            r"HTTP 404: b'404 page not found\n'; expected etcd 3.4 or newer",
        ),
        (200, b"<html>welcome</html>", EtcdRefused, "is not an etcd: it answers b'<html>welcome</html>'"),
        (200, b"{}", EtcdRefused, "is not an etcd: it answers b'{}'"),
        (503, b"<html>", EtcdAway, "is not well: HTTP 503"),
        (503, b'{"code": 14, "message": "etcdserver: request timed out"}', EtcdAway, "is not well: request timed out"),
        (
            429,
            b'{"code": 8, "message": "etcdserver: mvcc: database space exceeded"}',
            EtcdRefused,
            "has reached its space quota and accepts no writes (mvcc: database space exceeded); compact and defragment it, or",
        ),
    ],
)
def test_what_answers_wrongly_is_said(status: int, body: bytes, kind: type[Exception], sentence: str) -> None:
    with answering(type("Handler", (Stub,), {"status": status, "body": body})) as port, contextlib.closing(_at(port)) as client:
        with pytest.raises(kind) as caught:
            client.range("x")
        assert sentence in str(caught.value)


def _at(port: int) -> gateway.Etcd:
    return gateway.Etcd(gateway.address(f"etcd://127.0.0.1:{port}", environ={}))


# Hanging up


def test_what_is_asked_after_hanging_up_opens_no_connection(shared_etcd: Server) -> None:
    client = shared_etcd.client()
    client.range("/x")
    client.close()
    for ask in (lambda: client.range("/x"), lambda: next(iter(client.watch("/x", 0)))):
        with pytest.raises(EtcdAway, match="the connection was closed"):
            ask()
    assert client._connection is None


def test_who_is_answered_after_the_others_hung_up_hangs_up_too() -> None:
    asked, may = threading.Event(), threading.Event()

    class Late(Stub):
        protocol_version, status, body = "HTTP/1.1", 200, b'{"header": 1}'

        def do_POST(self) -> None:
            asked.set()
            may.wait()
            super().do_POST()

    with answering(Late) as port:
        client = _at(port)
        asker = threading.Thread(target=client.ask, args=("kv/range", {}))
        asker.start()
        asked.wait()
        client._answer_s = 0.1  # only of who hangs up: the connection has its timeout
        client.close()
        assert client._connection is not None
        may.set()
        asker.join()
        assert client._connection is None


# Who asks


def test_users_passwords_and_rights(own_etcd: Server) -> None:
    b64 = lambda text: base64.b64encode(text.encode()).decode()  # noqa: E731
    own_etcd.auth("role/add", name="trains")
    permission = {"permType": "READWRITE", "key": b64("/outlast/"), "range_end": b64("/outlast0")}
    own_etcd.auth("role/grant", name="trains", perm=permission)
    own_etcd.auth("user/add", name="worker", password="worker's")
    own_etcd.auth("user/grant", user="worker", role="trains")
    own_etcd.require_users()

    def ask(key: str, **options: str) -> gateway.Outcome:
        with contextlib.closing(own_etcd.client(**options)) as client:
            lease = client.grant(5)
            client.txn([], [put(key, "1", lease)])
            client.keep(lease)
            assert next(iter(client.watch(key, 0)), None) is not None
            client.revoke(lease)
            return client.range(key)

    ask("/outlast/a", user="worker", password="worker's")
    with pytest.raises(EtcdRefused, match=r"refuses user 'worker': permission denied; .* below /outlast/"):
        ask("/else", user="worker", password="worker's")
    with pytest.raises(EtcdRefused, match=r"refuses user 'worker': authentication failed, invalid user ID or password"):
        ask("/outlast/a", user="worker", password="wrong")
    with pytest.raises(EtcdRefused, match=r"refuses user '': user name is empty; set a user \(OUTLAST_ETCD_USER, ...\)"):
        ask("/outlast/a")


def test_a_token_that_has_expired_is_asked_for_anew(own_etcd: Server) -> None:
    own_etcd.require_users()
    with contextlib.closing(own_etcd.client(user="root", password="r")) as client:
        client.range("x")
        own_etcd.stop()
        own_etcd.start(user="root", password="r")  # simple tokens are kept in memory
        client.range("x")
        client._token = "expired.1"
        client.range("x")
        assert client._connection
        client._connection.sock.shutdown(socket.SHUT_RDWR)
        client._token = "expired.1"
        client.range("x")


def test_a_token_is_not_shown_for_ever_to_an_etcd_that_has_lost_its_data(own_etcd: Server) -> None:
    for n in range(20):  # a token says what its etcd had done by then, and one that has done less waits
        own_etcd.auth("role/add", name=f"role-{n}")
    own_etcd.require_users()
    address = gateway.address(own_etcd.endpoint, {"user": "root", "password": "r"}, {})
    with contextlib.closing(gateway.Etcd(address, answer_s=2)) as client:
        client.range("x")
        own_etcd.lose_data()
        with pytest.raises(EtcdAway, match="does not answer"):
            client.txn([], [put("x", "1")])
        client.txn([], [put("x", "1")])
        assert client.range("x").kvs[0].value == "1"


def test_users_that_are_made_and_changed_meanwhile_are_no_obstacle(tmp_path: Path) -> None:
    if not binary():
        pytest.skip("there is no etcd here")
    subprocess.run(["openssl", "genrsa", "-out", tmp_path / "private", "2048"], check=True, capture_output=True)
    public = ["openssl", "rsa", "-in", tmp_path / "private", "-pubout", "-out", tmp_path / "public"]
    subprocess.run(public, check=True, capture_output=True)
    token = f"jwt,priv-key={tmp_path}/private,pub-key={tmp_path}/public,sign-method=RS256,ttl=1h"
    with (
        serving(tmp_path / "etcd", options=("--auth-token", token)) as server,
        contextlib.closing(server.client(user="root", password="r")) as client,
    ):
        client.range("x")
        server.require_users()
        client.range("x")
        first = client._token
        client.ask("auth/role/add", {"name": "another"})
        client.range("x")
        assert client._token != first


def test_a_login_for_an_etcd_without_users_does_no_harm(shared_etcd: Server) -> None:
    with contextlib.closing(shared_etcd.client(user="u", password="p")) as client:
        client.range("x")


class Slow(Stub):
    """Takes its time for a login, and none for anything else."""

    protocol_version, status = "HTTP/1.1", 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        login = self.path.endswith("/authenticate")
        time.sleep(1.1 if login else 0)
        self.body = b'{"token": "t"}' if login else b'{"header": {"revision": "1"}}'
        super().do_POST()


def test_a_login_may_take_longer_than_anything_else_for_many_may_come_at_once() -> None:
    with answering(Slow) as port:
        where = gateway.address(f"etcd://127.0.0.1:{port}", {"user": "u", "password": "p"}, {})
        with contextlib.closing(gateway.Etcd(where, answer_s=1)) as client:
            assert client.range("x").revision == 1
            assert client._connection
            assert client._connection.sock.gettimeout() == 1


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with cert.pem for 127.0.0.1, its own authority, and other.pem, with their keys."""
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("cert", "other"):
        files = ["-keyout", directory / f"{name}.key", "-out", directory / f"{name}.pem"]
        subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *subject]
        subprocess.run(command, check=True, capture_output=True)
    return directory


def test_tls_with_certificates_of_both_sides(tmp_path: Path, certificates: Path) -> None:
    if not binary():
        pytest.skip("there is no etcd here")
    ca = cert = str(certificates / "cert.pem")
    key = str(certificates / "cert.key")
    options = ("--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth")
    server = Server(tmp_path, scheme="https", options=options)
    server.start(cacert=ca, cert=cert, key=key)
    try:
        with contextlib.closing(server.client(cacert=ca, cert=cert, key=key)) as client:
            lease = client.grant(5)
            client.txn([], [put("/a", "1", lease)])
            assert next(iter(client.watch("/a", 0))) == []
        with pytest.raises(EtcdRefused, match=r"CERTIFICATE_VERIFY_FAILED.*; check .*cacert, cert and key"):
            server.client().range("x")
        with pytest.raises((EtcdRefused, EtcdAway), match="etcds"):
            _at(server.port).range("x")
        for login in ({}, {"user": "u", "password": "p"}):
            with pytest.raises((EtcdRefused, EtcdAway), match="cert and key"):
                server.client(cacert=ca, **login).range("x")
        with pytest.raises(EtcdRefused, match=r"/none.pem: No such file or directory; expected files in PEM format"):
            server.client(cacert="/none.pem").range("x")
        renewed = tmp_path / "ca.pem"
        shutil.copy(certificates / "other.pem", renewed)
        with contextlib.closing(server.client(cacert=str(renewed), cert=cert, key=key)) as client:
            with pytest.raises(EtcdRefused, match="CERTIFICATE_VERIFY_FAILED"):
                client.range("x")
            shutil.copy(ca, renewed)
            client.range("x")
    finally:
        server.stop()


def test_tls_to_a_plain_etcd_says_so(shared_etcd: Server) -> None:
    client = gateway.Etcd(gateway.address(f"etcds://127.0.0.1:{shared_etcd.port}", environ={}))
    with pytest.raises(EtcdAway, match=r"cannot be reached: .*; check etcd:// or etcds:// \(TLS\)"):
        client.range("x")
