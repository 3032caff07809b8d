"""Downloads a file over HTTP, and goes on after kills and broken connections.

    path = fetch(Remote(url, sha256=...), directory, say=print, stop=threading.Event())

While the file is incomplete, `directory` contains the received bytes, and `state.json` with the file's version. The missing bytes
are requested only if the server still has this version (If-Range), or a checksum is known; otherwise the download starts again.

urllib follows redirects, and uses the environment's proxies (`HTTPS_PROXY`, `NO_PROXY`) and the system's certificates.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import os
import re
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outlast import __version__
from outlast.base import backoff, files, units, unpack
from outlast.base.errors import OutlastError, Stopped
from outlast.data.dataset_directory import Say
from outlast.job import url_logins

Progress = Callable[[int, int], None]
"""A callback with the bytes received and the total size in bytes, 0 if unknown."""

PATIENCE_S = 300.0
"""Seconds without a further byte after which retries stop."""
ABSENT_S = 20.0
"""The same without any response: the host name may be wrong, or the network down."""
TIMEOUT_S = 60.0
"""A connection's read timeout, in seconds."""
_BUFFER = 1 << 18
_AGAIN = (408, 416, 425, 429, 500, 502, 503, 504)
_BY_HAND = "or download the file by hand (outlast data get --from FILE)"


class _Unavailable(Exception):
    """The server is unreachable, or its response is unusable. A retry may help."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code
        """The HTTP status; 0 without a response."""


@dataclasses.dataclass(frozen=True)
class Remote:
    """A file to download, with its published size and checksums."""

    url: str
    size: int = 0
    """Size in bytes; 0 if unknown."""
    sha256: str = ""
    md5: str = ""

    @property
    def checked(self) -> bool:
        """True if a checksum is published."""
        return bool(self.sha256 or self.md5)

    @property
    def address(self) -> str:
        """The URL without a login or fragment."""
        parts = urllib.parse.urlsplit(self.url)
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2].lower(), path=parts.path or "/", fragment="")
        return urllib.parse.quote(parts.geturl(), safe="%/:?=&@!$'()*+,;~[]")

    @property
    def shown(self) -> str:
        """The URL for messages, without the query, which may contain a signature."""
        return self.address.partition("?")[0]

    @property
    def identity(self) -> str:
        """The URL that identifies the file, without a signed query because signatures differ each time."""
        return url_logins.hidden(self.address)

    @property
    def file(self) -> str:
        """The file's local name."""
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.url).path.rpartition("/")[2])
        return re.sub(r"[/\0]", "_", name) if name not in ("", ".", "..") else "data"


def check_url(url: str) -> None:
    """Raise OutlastError unless this is an http or https URL."""
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise OutlastError(f"{url_logins.hidden(url)} is not the URL of a file; write https://HOST/PATH")


def check(url: str, *, timeout_s: float) -> None:
    """Raise OutlastError if a server refuses to send the file; ignore an unreachable server."""
    check_url(url)
    with contextlib.suppress(_Unavailable), _response(Remote(url), timeout_s=timeout_s):
        pass


def fetch(
    remote: Remote,
    directory: Path,
    *,
    say: Say,
    stop: threading.Event,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Download and verify a file to `directory`, and return its path. Raises OutlastError, Stopped and OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    download = _Download(remote, directory, progress, stop)
    if 0 < download.done < download.size:
        say(f"going on with {remote.shown}: {units.human_bytes(download.size - download.done)} are missing")
    furthest, failures, reached_at = download.done, 0, time.monotonic()
    while True:
        try:
            download.receive()
            break
        except _Unavailable as problem:
            failures += 1
            if download.done > furthest:
                furthest, failures, reached_at = download.done, 0, time.monotonic()
            patience_s = PATIENCE_S if problem.code or download.done else ABSENT_S
            if problem.code in (206, 416):
                download.discard()
            pause = backoff.jittered(backoff.exponential(failures, 0.05, 15.0))
            if time.monotonic() + pause - reached_at > patience_s:
                raise OutlastError(
                    f"cannot download {remote.shown}: {problem}; check the URL and the network, run the same command later, "
                    f"{_BY_HAND}"
                ) from problem
            if failures == 1:
                say(f"{remote.shown}: {problem}; trying again")
        if stop.wait(pause):
            raise Stopped("the download was stopped; the same command goes on from here")
    if difference := mismatch(download.path, remote, remote.shown):
        download.discard()
        raise OutlastError(difference)
    return download.path


class _Download:
    """The part of a file that has arrived."""

    def __init__(self, remote: Remote, directory: Path, progress: Progress, stop: threading.Event) -> None:
        self.path, self._state = directory / "content", directory / "state.json"
        self._remote, self._progress, self._stop = remote, progress, stop
        state = files.mapping(self._state)
        self.size: int = state.get("size", 0)
        """Size of the whole file in bytes; 0 if unknown."""
        self._version: str = state.get("version", "")
        self.done = self.path.stat().st_size if self.path.exists() else 0
        if state.get("of") != self._identity or self.done > self.size or not self._resumable:
            self.discard()

    @property
    def _identity(self) -> str:
        return self._remote.sha256 or self._remote.identity

    @property
    def _resumable(self) -> bool:
        return bool(self.size and (self._version or self._remote.checked))

    def discard(self) -> None:
        for path in (self._state, self.path):
            path.unlink(missing_ok=True)
        self.done, self.size, self._version = 0, 0, ""

    def receive(self) -> None:
        """Receive the missing bytes with one request. Raises _Unavailable if the response ends too early."""
        if self.done and not self._resumable:
            self.discard()
        if self.done and self.done == self.size:
            return
        with _response(self._remote, first=self.done, version=self._version, timeout_s=TIMEOUT_S) as response:
            if response.status == 200:
                self._begin(response)
            elif not self._goes_on(response):
                raise _Unavailable("the file has changed, or the server sends another part than requested", 206)
            self._append(response)

    def _begin(self, response: Any) -> None:
        if response.length is None and not (response.chunked or self._remote.checked):
            raise OutlastError(
                f"{self._remote.shown}: the server does not say how long the file is, so a part of it would look like the whole; "
                "give its checksum (URL#sha256=...)"
            )
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity" and not (self._remote.checked or unpack.kind(self._remote.file)):
            raise OutlastError(
                f"{self._remote.shown}: the server sends the file packed ({encoding}), although it was asked not to; "
                f"give its checksum (URL#sha256=...), {_BY_HAND}"
            )
        self.discard()
        self.size, self._version = response.length or 0, _version(response)
        if self._resumable:
            files.replace(self._state, json.dumps({"of": self._identity, "size": self.size, "version": self._version}))

    def _goes_on(self, response: Any) -> bool:
        part = response.headers.get("Content-Range", "")
        return self.done > 0 and part == f"bytes {self.done}-{self.size - 1}/{self.size}" and _version(response) == self._version

    def _append(self, response: Any) -> None:
        with open(self.path, "ab") as file:
            while not self.size or self.done < self.size:
                if self._stop.is_set():
                    raise Stopped("the download was stopped; the same command goes on from here")
                with _reported(self._remote):
                    data = response.read1(_BUFFER)
                if not data:
                    break
                file.write(data)
                self.done += len(data)
                self._progress(self.done, self.size)
            file.flush()
            os.fsync(file.fileno())
        if self.done < self.size:
            raise _Unavailable(f"the connection ended at byte {self.done:,} of {self.size:,}")


def mismatch(path: Path, remote: Remote, name: str) -> str:
    """Return a message if a file differs from its published size or checksum, else ""."""
    checks = [("size", str(remote.size or ""), str(path.stat().st_size))]
    checks += [(kind, given, unpack.checksum(path, kind)) for kind in ("sha256", "md5") if (given := getattr(remote, kind))]
    for kind, expected, actual in checks:
        if expected and actual != expected:
            return (
                f"{name} has the {kind} {actual}, and must have {expected}; it is not the file that is wanted, or it is damaged"
            )
    return ""


def _version(response: Any) -> str:
    """Return what `If-Range` accepts: a strong ETag (RFC 9110, section 8.8.3) or a date; empty if there is neither."""
    tag = response.headers.get("ETag", "")
    return str("" if tag.startswith("W/") else tag or response.headers.get("Last-Modified", ""))


@contextlib.contextmanager
def _response(remote: Remote, *, first: int = 0, version: str = "", timeout_s: float) -> Iterator[Any]:
    """Request a file from offset `first` if it still has this version, otherwise the whole file."""
    headers = {"User-Agent": f"outlast/{__version__}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(remote.address, headers=headers)
    parts = urllib.parse.urlsplit(remote.url)
    if parts.username is None:
        login = url_logins.of(parts.hostname or "")
    else:
        login = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
    if login:  # not for the targets of redirects
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(':'.join(login).encode()).decode()}")
    if first:
        request.add_header("Range", f"bytes={first}-")
        if version:
            request.add_header("If-Range", version)
    with _reported(remote):
        response = urllib.request.urlopen(request, timeout=timeout_s)
    with contextlib.closing(response):
        if response.status not in (200, 206 if first else 200):
            answer = f"the server answers {response.status}, which is not the whole file"
            raise OutlastError(f"cannot download {remote.shown}: {answer}; check the URL, {_BY_HAND}")
        yield response


@contextlib.contextmanager
def _reported(remote: Remote) -> Iterator[None]:
    """Map network errors to _Unavailable, and refusals to OutlastError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        reason = f"{error.code} {error.reason}".partition("\n")[0].rstrip(".")  # for endless redirects, urllib adds more lines
        if error.code in _AGAIN:
            raise _Unavailable(reason, error.code) from error
        remedy = "check the URL"
        if error.code == 401:
            remedy = "write machine HOST login USER password PASSWORD into ~/.netrc, or into OUTLAST_NETRC"
        raise OutlastError(f"cannot download {remote.shown}: {reason}; {remedy}, {_BY_HAND}") from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        if isinstance(invalid := getattr(error, "reason", error), ssl.SSLCertVerificationError):
            reason = f"the server's certificate is not valid: {invalid.verify_message}"
            remedy = "let SSL_CERT_FILE name the certificates to trust"
            raise OutlastError(f"cannot download {remote.shown}: {reason}; {remedy}, {_BY_HAND}") from error
        raise _Unavailable(str(getattr(error, "reason", error)) or type(error).__name__) from error
