"""Downloads from a real HTTP server that misbehaves: the bytes are right, or one sentence says what is wrong."""

from __future__ import annotations

import contextlib
import hashlib
import random
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.base.errors import OutlastError, Stopped
from outlast.data import download
from outlast.data.download import Remote
from web import Fault, Request, Web

CONTENT = random.Random(7).randbytes(95_123)
OTHER = random.Random(8).randbytes(95_123)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Said(list[str]):
    """What a download says, and one to call."""

    def fetch(self, url: str, into: Path, **known: object) -> bytes:
        remote = Remote(url, **known)  # type: ignore[arg-type]
        return download.fetch(remote, into, say=self.append, stop=threading.Event()).read_bytes()

    def refusal(self, url: str, into: Path, **known: object) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(download, "PATIENCE_S", 0.3)
            with pytest.raises(OutlastError) as caught:
                self.fetch(url, into, **known)
        return str(caught.value)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setattr(download, "ABSENT_S", 0.3)
    monkeypatch.setattr(download, "TIMEOUT_S", 0.5)
    return Said()


def cut(request: Request) -> Fault:
    """Of an answer that ends too early."""
    return Fault(cut=30_000)


@pytest.mark.parametrize("tag", ['"1"', 'W/"1"', ""])
def test_a_file_comes_in_as_many_answers_as_it_takes(web: Web, said: Said, tmp_path: Path, tag: str) -> None:
    url = web.put("a b.bin", CONTENT)
    web.fault = lambda request: Fault(headers={"ETag": tag}, cut=30_000)
    assert said.fetch(url, tmp_path, sha256=SHA256, size=len(CONTENT)) == CONTENT
    assert [request.range and request.range[0] for request in web.requests] == [None, 30_000, 60_000, 90_000]
    assert {request.headers.get("if-range", "") for request in web.requests[1:]} == {tag if tag == '"1"' else ""}


def test_an_empty_file_arrives(web: Web, said: Said, tmp_path: Path) -> None:
    assert said.fetch(web.put("a", b""), tmp_path) == b""


FAULTS: dict[str, Callable[[Request], Fault | None]] = {
    "cut before the first byte, sometimes": lambda request: Fault(cut=0) if request.number % 3 == 1 else None,
    "503 at first": lambda request: Fault(503) if request.number < 2 else None,
    "silent at first": lambda request: Fault(rate=1) if not request.number else None,
    "no parts, cut once": lambda request: Fault(ranges=False, cut=50_000 if not request.number else None),
    "no length, cut once": lambda request: Fault(ranges=False, chunked=True, cut=50_000 if not request.number else None),
    "no version": lambda request: Fault(headers={"ETag": ""}, cut=None if request.number else 30_000),
    "other parts than requested": lambda request: (
        Fault(headers={"Content-Range": "bytes 5-9/95123"}) if request.number == 1 else cut(request)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_fault_costs_time_but_no_byte(web: Web, said: Said, tmp_path: Path, fault: str) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = FAULTS[fault]
    assert said.fetch(url, tmp_path) == CONTENT


AGAIN = "; check the URL and the network, run the same command later, or download the file by hand (outlast data get --from FILE)"
BY_HAND = ", or download the file by hand (outlast data get --from FILE)"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (Fault(404), f"404 Not Found; check the URL{BY_HAND}"),
        (Fault(302, {"Location": "file:///etc/passwd"}), "302 "),
        (Fault(302, {"Location": "/data.bin"}), "302 The HTTP server returned a redirect error that would"),
        (Fault(503), f"503 Service Unavailable{AGAIN}"),
        (Fault(ranges=False, cut=999), f"the connection ended at byte 999 of 95,123{AGAIN}"),
        (Fault(ranges=False, headers={"Content-Length": "99999"}), f"the connection ended at byte 95,123 of 99,999{AGAIN}"),
        (Fault(206, {"Content-Range": "bytes 0-9/*"}), "the server answers 206, which is not the whole file; check the URL, or"),
        (Fault(204), "the server answers 204, which is not the whole file; check the URL, or"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_sentence(web: Web, said: Said, tmp_path: Path, fault: Fault, sentence: str) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = lambda request: fault
    found = said.refusal(url, tmp_path)
    assert found.startswith(f"cannot download {url}: {sentence}"), found
    assert "\n" not in found
    assert len(web.requests) == 1 or fault.status not in (204, 206, 404), "it is not asked for again"


def test_a_file_that_is_sent_packed_needs_a_checksum(web: Web, said: Said, tmp_path: Path) -> None:
    web.fault = lambda request: Fault(headers={"Content-Encoding": "gzip"})
    url = web.put("data.bin", CONTENT)
    assert said.refusal(url, tmp_path).startswith(f"{url}: the server sends the file packed (gzip), although it was asked not to")
    assert said.fetch(url, tmp_path, sha256=SHA256) == CONTENT
    assert said.fetch(web.put("data.tar.gz", CONTENT), tmp_path) == CONTENT, "an archive, which some servers describe like this"


def test_a_certificate_that_is_not_valid_is_said_at_once(said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, name = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")], ["-subj", "/CN=127.0.0.1"]
    name += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *name], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with contextlib.closing(Web(context)) as web:
        url = web.put("data.bin", CONTENT)
        expected = (
            f"cannot download {url}: the server's certificate is not valid: self-signed certificate; let SSL_CERT_FILE name"
        )
        assert said.refusal(url, tmp_path / "to").startswith(expected)
        with pytest.raises(OutlastError) as caught:
            download.check(url, timeout_s=5)
        assert str(caught.value).startswith(expected)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
        assert said.fetch(url, tmp_path / "to") == CONTENT
    assert said == []


def test_a_file_whose_end_cannot_be_seen_needs_a_checksum(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = lambda request: Fault(ranges=False, headers={"Content-Length": ""})
    assert said.refusal(url, tmp_path).startswith(f"{url}: the server does not say how long the file is, so a part of it would")
    assert said.fetch(url, tmp_path, sha256=SHA256) == CONTENT


@pytest.mark.parametrize(
    ("known", "difference"),
    [
        ({"size": 95_124}, "size 95123, and must have 95124"),
        ({"sha256": "0" * 64}, f"sha256 {SHA256}, and must have {'0' * 64}"),
        ({"md5": "0" * 32}, f"md5 {hashlib.md5(CONTENT).hexdigest()}, and must have {'0' * 32}"),
    ],
)
def test_a_file_that_is_not_the_right_one_is_removed(
    web: Web, said: Said, tmp_path: Path, known: dict[str, object], difference: str
) -> None:
    url = web.put("data.bin", CONTENT)
    wrong = "it is not the file that is wanted, or it is damaged"
    assert said.refusal(url, tmp_path, **known) == f"{url} has the {difference}; {wrong}"
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_cannot_be_reached_is_named(said: Said, tmp_path: Path) -> None:
    gone = Web()
    gone.close()
    problem = f"{gone.url}/x: [Errno 111] Connection refused"
    assert said.refusal(f"{gone.url}/x", tmp_path) == f"cannot download {problem}{AGAIN}"
    assert said == [f"{problem}; trying again"]


def test_a_file_that_changes_between_requests_is_fetched_from_its_beginning(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)

    def replaced(request: Request) -> Fault | None:
        if request.number == 1:
            web.put("data.bin", OTHER, etag='"2"')
        return cut(request) if request.number < 3 else None

    web.fault = replaced
    assert said.fetch(url, tmp_path) == OTHER


def test_a_download_that_was_stopped_goes_on_with_what_is_missing(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)
    stop = threading.Event()

    def stopped() -> None:
        def progress(done: int, total: int) -> None:
            if done > total // 2:
                stop.set()

        with pytest.raises(Stopped):
            download.fetch(Remote(url), tmp_path, say=said.append, progress=progress, stop=stop)

    web.fault = lambda request: Fault(rate=100_000)
    stopped()
    web.fault = lambda request: None
    assert said.fetch(url, tmp_path) == CONTENT
    assert web.requests[-1].range
    assert web.requests[-1].range[0] > len(CONTENT) // 2
    assert said[0].startswith(f"going on with {url}: ")

    (tmp_path / "content").write_bytes(CONTENT[:90_000])
    web.put("data.bin", OTHER, etag='"2"')
    assert said.fetch(url, tmp_path) == OTHER, "the server has another version by now"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"size": 95123}', '{"of": "x", "size": 95123, "version": "1"}'])
def test_a_damaged_state_is_none(web: Web, said: Said, tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    (tmp_path / "content").write_bytes(bytes(len(CONTENT)))
    assert said.fetch(web.put("data.bin", CONTENT), tmp_path) == CONTENT


def test_a_login_in_the_url_is_sent_and_never_said(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = lambda r: None if r.headers.get("authorization") == "Basic bWU6cEBzcw==" else Fault(401)
    assert said.refusal(f"{url}?signature=secret", tmp_path) == (
        f"cannot download {url}: 401 Unauthorized; write machine HOST login USER password PASSWORD into ~/.netrc, "
        f"or into OUTLAST_NETRC{BY_HAND}"
    )
    assert said.fetch(url.replace("://", "://me:p%40ss@"), tmp_path) == CONTENT
    assert "secret" not in str(said)


@pytest.mark.parametrize("given", ["~/.netrc", "OUTLAST_NETRC"])
def test_a_login_comes_from_where_logins_belong(
    web: Web, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = lambda r: None if r.headers.get("authorization") == "Basic bWU6cEBzcw==" else Fault(401)
    monkeypatch.setenv("HOME", str(tmp_path))
    said_there = "machine elsewhere login you password no\nmachine 127.0.0.1 login me password {}"
    for password in ("p@ss", "p@ss word"):
        if given == "~/.netrc":
            (tmp_path / ".netrc").touch(0o600)
            (tmp_path / ".netrc").write_text(said_there.format(password))
        else:
            monkeypatch.setenv(given, said_there.format(password))
        if password == "p@ss":
            assert said.fetch(url, tmp_path / "to") == CONTENT
        else:
            sentence = said.refusal(url, tmp_path / "other")
            assert sentence.startswith(f"{given} cannot be read; write lines like machine HOST login USER"), sentence
            assert "word" not in sentence.replace("PASSWORD", "").replace("password", ""), "Python's own message has it"


@pytest.mark.parametrize("url", ["ftp://host/x", "https:///x", "https://[::1", "http://host:port/x"])
def test_what_is_no_url_is_said(url: str) -> None:
    with pytest.raises(OutlastError, match=r"is not the URL"):
        download.check_url(url)
