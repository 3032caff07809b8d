"""Downloads from a real HTTP server that misbehaves: the bytes are right, or one sentence says what is wrong."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.base.errors import OutlastError, Stopped
from outlast.data.download import Download, Options, Remote
from outlast.data.http import Address
from web import Fault, Request, Web

CONTENT = random.Random(7).randbytes(95_123)
OTHER = random.Random(8).randbytes(95_123)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Said(list[str]):
    """What a download says, and one to call."""

    patience_s, timeout_s = 30.0, 0.5

    def fetch(self, url: str, into: Path, **known: object) -> bytes:
        options = Options(patience_s=self.patience_s, absent_s=0.3, timeout_s=self.timeout_s)
        remote = Remote(url, **known)  # type: ignore[arg-type]
        return Download(remote, into, say=self.append, stop=threading.Event(), options=options).fetch().read_bytes()

    def refusal(self, url: str, into: Path, **known: object) -> str:
        self.patience_s, self.timeout_s = 0.4, 10.0  # no answer of the server's threads may come too late
        with pytest.raises(OutlastError) as caught:
            self.fetch(url, into, **known)
        self.patience_s, self.timeout_s = 30.0, 0.5
        assert "\n" not in str(caught.value)
        assert [path.name for path in into.iterdir() if path.stat().st_size == len(CONTENT) and path.name == "state.json"] == []
        return str(caught.value)


@pytest.fixture
def said() -> Said:
    return Said()


def cut(request: Request) -> Fault:
    """Of an answer that ends too early."""
    return Fault(cut=30_000)


def test_a_file_comes_in_as_many_answers_as_it_takes(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("a b.bin", CONTENT)
    web.fault = cut
    assert said.fetch(url.replace(" ", "%20"), tmp_path, sha256=SHA256, size=len(CONTENT)) == CONTENT
    assert [request.range and request.range[0] for request in web.requests] == [None, 30_000, 60_000, 90_000]
    assert all(request.headers.get("if-range") == '"1"' for request in web.requests[1:])


@pytest.mark.parametrize("size", [0, 1, 50_000])
def test_files_of_any_size_arrive(web: Web, said: Said, tmp_path: Path, size: int) -> None:
    assert said.fetch(web.put("a", CONTENT[:size]), tmp_path) == CONTENT[:size]


FAULTS: dict[str, Callable[[Request], Fault | None]] = {
    "cut at byte 9333 of each answer": lambda request: Fault(cut=9333),
    "cut before the first byte, sometimes": lambda request: Fault(cut=0) if request.number % 3 == 1 else None,
    "503 at first": lambda request: Fault(503) if request.number < 2 else None,
    "503 that asks for a moment": lambda request: Fault(503, {"Retry-After": "0"}) if request.number % 4 == 1 else None,
    "429": lambda request: Fault(429) if request.number == 2 else None,
    "no parts": lambda request: Fault(ranges=False),
    "no parts, cut once": lambda request: Fault(ranges=False, cut=50_000 if not request.number else None),
    "no parts, no length": lambda request: Fault(ranges=False, chunked=True),
    "no parts, no length, cut once": lambda request: Fault(
        ranges=False, chunked=True, cut=50_000 if not request.number else None
    ),
    "parts end after the first": lambda request: Fault(ranges=False, cut=None if request.number else 30_000),
    "no version": lambda request: Fault(headers={"ETag": ""}, cut=None if request.number else 30_000),
    "a weak version": lambda request: Fault(headers={"ETag": 'W/"1"'}, cut=30_000),
    "packed parts": lambda request: (
        Fault(headers={"Content-Encoding": "gzip"}) if request.number == 1 else cut(request) if not request.number else None
    ),
    "length of a part that is too long": lambda request: (
        Fault(headers={"Content-Length": "65200"}) if request.number == 1 else cut(request)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_fault_costs_time_but_no_byte(web: Web, said: Said, tmp_path: Path, fault: str) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = FAULTS[fault]
    assert said.fetch(url, tmp_path) == CONTENT


@pytest.mark.parametrize(
    ("fault", "known", "sentence"),
    [
        # ruff: noqa: E501
        (lambda r: Fault(404), {}, "{url}: 404 Not Found; there is no such file; correct the URL"),
        (lambda r: Fault(403), {}, "{url}: 403 Forbidden; the server does not allow it; check the URL, or use a browser and"),
        (lambda r: Fault(503), {}, "{url}: it answers 503 Service Unavailable, again and again; run the same command later"),
        (lambda r: Fault(503, {"Retry-After": "7200"}), {}, "{url}: it answers 503 Service Unavailable, and asks to come back in 2h00m"),
        (lambda r: Fault(cut=0), {}, "{url}: the connection ended at byte "),
        (lambda r: Fault(ranges=False, cut=999), {}, "{url}: the connection ended at byte 999 of 95,123, again and again"),
        (lambda r: Fault(ranges=False, headers={"Content-Length": "99999"}), {}, "{url}: the connection ended at byte 95,123 of 99,999"),
        (lambda r: Fault(ranges=False, headers={"Content-Length": "900"}), {"sha256": SHA256}, "{url} has the SHA-256 "),
        (lambda r: Fault(ranges=False, headers={"Content-Length": ""}), {}, "{url}: the server does not say how long the file is, so"),
        (lambda r: Fault(206, {"Content-Range": "bytes 0-9/*"}), {}, "{url}: the server sends a part of the file where all of it was"),
        (lambda r: Fault(headers={"Content-Encoding": "gzip"}), {}, "{url}: the server sends the file packed (gzip), although it was"),
        (lambda r: Fault(headers={"Content-Range": "bytes 5-9/95123"}) if r.number else cut(r), {}, "{url}: the server sends other parts than"),
        (lambda r: None, {"size": 95_124}, "{url} has 95,123 bytes and must have 95,124; it is not the file that is wanted"),
        (lambda r: None, {"sha256": "0" * 64}, f"{{url}} has the SHA-256 {SHA256}, and must have {'0' * 64}; it is not the file"),
        (lambda r: None, {"md5": "0" * 32}, f"{{url}} has the MD5 {hashlib.md5(CONTENT).hexdigest()}, and must have {'0' * 32}"),
        (lambda r: Fault(content=OTHER), {"sha256": SHA256}, "{url} has the SHA-256 "),
    ],
)  # fmt: skip
def test_what_cannot_be_had_right_is_one_sentence_and_no_file(
    web: Web, said: Said, tmp_path: Path, fault: Callable[[Request], Fault | None], known: dict[str, object], sentence: str
) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = fault
    found = said.refusal(url, tmp_path, **known)
    assert found.startswith(sentence.format(url=url)), found
    if known:
        assert list(tmp_path.iterdir()) == [], "a file that is not the right one is removed"


def test_a_server_that_cannot_be_reached_is_named(said: Said, tmp_path: Path) -> None:
    gone = Web()
    gone.close()
    found = said.refusal(f"{gone.url}/x", tmp_path)
    host = gone.url.removeprefix("http://")
    assert found == f"cannot reach {host}: Connection refused; check the network, or download the file elsewhere and give it with outlast data get --from FILE"  # fmt: skip
    assert said == [f"{host}: Connection refused; trying again"]


def test_a_silent_server_is_asked_again(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = lambda request: Fault(rate=1) if not request.number else None
    assert said.fetch(url, tmp_path) == CONTENT


@pytest.mark.parametrize("etags", ['"1" "2"', "- -", 'W/"1" W/"2"'])
def test_a_file_that_changes_between_requests_is_fetched_from_its_beginning(
    web: Web, said: Said, tmp_path: Path, etags: str
) -> None:
    first, second = (None if etag == "-" else etag for etag in etags.split())
    url = web.put("data.bin", CONTENT, etag=first)

    def replaced(request: Request) -> Fault | None:
        if request.number == 1:
            web.put("data.bin", OTHER, etag=second)
        return cut(request) if request.number < 3 else None

    web.fault = replaced
    content = said.fetch(url, tmp_path)
    assert content in (CONTENT, OTHER), "never parts of both"
    if first:
        assert content == OTHER
        assert said[-1] == f"{url} has changed on the server; beginning anew"


def test_a_file_that_changes_all_the_time_is_fetched_as_a_whole(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = lambda request: Fault(headers={"ETag": f'"{request.number}"'}, cut=30_000 if request.number < 3 else None)
    assert said.fetch(url, tmp_path) == CONTENT
    assert sum("has changed on the server" in sentence for sentence in said) == 3


def test_parts_without_a_strong_version_that_do_not_fit_are_no_file(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT, etag=None)
    web.fault = lambda request: Fault(content=OTHER) if request.number == 1 else cut(request) if not request.number else None
    assert "has the SHA-256" in said.refusal(url, tmp_path, sha256=SHA256)
    assert said.fetch(url, tmp_path, sha256=SHA256) == CONTENT, "the next command begins anew"


def test_a_download_that_was_stopped_goes_on_with_what_is_missing(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)
    stop = threading.Event()

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            stop.set()

    web.fault = lambda request: Fault(rate=100_000)
    with pytest.raises(Stopped):
        Download(Remote(url), tmp_path, say=said.append, progress=progress, stop=stop).fetch()
    web.fault = lambda request: None
    assert said.fetch(url, tmp_path) == CONTENT
    assert web.requests[-1].range
    assert web.requests[-1].range[0] > len(CONTENT) // 2
    assert said[0].startswith(f"going on with {url}: ")

    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "done": 90_000}))
    web.put("data.bin", OTHER, etag='"2"')
    assert said.fetch(url, tmp_path) == OTHER, "the server has another version by now"


def test_a_damaged_state_is_none(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)
    for text in ("", "{", "[]", '{"size": 95123}', '{"of": "x", "size": 95123, "etag": "", "modified": "", "done": 95123}'):
        (tmp_path / "state.json").write_text(text)
        (tmp_path / "content").write_bytes(bytes(len(CONTENT)))
        assert said.fetch(url, tmp_path) == CONTENT


def test_a_login_in_the_url_is_sent_and_never_said(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = lambda r: None if r.headers.get("authorization") == "Basic bWU6cEBzcw==" else Fault(401)
    assert said.refusal(f"{url}?signature=secret", tmp_path) == (
        f"{url}: 401 Unauthorized; the server wants a login; write machine HOST login USER password PASSWORD into ~/.netrc, "
        "or into OUTLAST_NETRC"
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


def test_redirects_are_followed_but_not_to_files_of_this_machine(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT)
    web.fault = lambda r: Fault(302, {"Location": "/data.bin"}) if r.path == "/other" else None
    assert said.fetch(f"{web.url}/other", tmp_path / "a") == CONTENT
    web.fault = lambda r: Fault(302, {"Location": "file:///etc/passwd"})
    assert said.refusal(url, tmp_path / "b").startswith(f"{url}: 302 ")
    web.fault = lambda r: Fault(302, {"Location": r.path})
    assert "would lead to an infinite loop; correct the URL" in said.refusal(url, tmp_path / "c")


@pytest.mark.parametrize("url", ["ftp://host/x", "https:///x", "https://[::1", "http://host:port/x"])
def test_what_is_no_url_is_said(url: str) -> None:
    with pytest.raises(OutlastError, match=r"is not (a|the) URL"):
        Address.parse(url)


def test_a_slow_server_is_waited_for(web: Web, said: Said, tmp_path: Path) -> None:
    url = web.put("data.bin", CONTENT[:3000])
    web.fault = lambda request: Fault(rate=5000)
    began = time.monotonic()
    assert said.fetch(url, tmp_path) == CONTENT[:3000]
    assert time.monotonic() - began > 0.5
    assert said == []
