"""A download that survives kills, broken connections and bad servers.

    path = Download(Remote(url, sha256=...), directory, ...).fetch()

While the file is incomplete, `directory` contains the received bytes, and `state.json` with their number and the file's version.
The missing bytes are requested only if the server still has this version (If-Range); otherwise the download restarts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from outlast.base import backoff, files, units, unpack
from outlast.base.errors import OutlastError, Stopped
from outlast.data import http
from outlast.data.dataset_directory import Say
from outlast.data.http import Address, OutOfRange, Response, Unavailable, Version

Progress = Callable[[int, int], None]
"""A callback with the bytes received and the total size in bytes, 0 if unknown."""

_BUFFER = 1 << 18
_READ = 1 << 20
_STOPPED = "the download was stopped; the same command goes on from here"
_WARN_S = 10.0
_LARGE = 1 << 30
"""Size in bytes above which a checksum takes seconds."""
_SAVE_S = 2.0
"""Seconds between writes of the state; a kill loses the bytes received since the last write."""
_BEGINNINGS = 4
"""Maximum number of times that a download starts from the first byte, because the file has changed or ranges are unsupported."""


@dataclasses.dataclass(frozen=True)
class Remote:
    """A file to download, with its published size and checksums."""

    url: str
    size: int = 0
    """Size in bytes; 0 if unknown."""
    sha256: str = ""
    md5: str = ""
    name: str = ""
    """The file's local name; if empty, the name in the URL."""

    @property
    def checked(self) -> bool:
        """True if a checksum is published."""
        return bool(self.sha256 or self.md5)

    @property
    def shown(self) -> str:
        """The URL to show in messages."""
        return Address.parse(self.url).shown

    @property
    def file(self) -> str:
        """The file's local name."""
        return self.name or Address.parse(self.url).name or "data"


@dataclasses.dataclass(frozen=True)
class Options:
    """Timeouts for a download, in seconds. The defaults are arbitrary."""

    patience_s: float = 300.0
    """Seconds without a received byte after which retries stop."""
    absent_s: float = 20.0
    """Seconds without any response after which retries stop: the host name may be wrong, or the network down."""
    timeout_s: float = 60.0
    """A connection's read timeout, in seconds."""


class _Changed(Exception):
    """Raised if the bytes on disk are from another version of the file than the server now has."""


class Download:
    """Downloads one file to a directory of its own."""

    def __init__(
        self,
        remote: Remote,
        directory: Path,
        *,
        say: Say,
        progress: Progress = lambda done, total: None,
        stop: threading.Event,
        options: Options = Options(),
    ) -> None:
        self._remote, self._address = remote, Address.parse(remote.url)
        self._directory, self.path = directory, directory / "content"
        self._state = directory / "state.json"
        self._say, self._progress, self._stop, self._options = say, progress, stop, options
        self._done = self._size = 0
        """Bytes on disk, and size of the whole file in bytes (0 if unknown)."""
        self._version = Version()
        self._beginnings = 0
        self._answered = False
        self._host = self._address.shown.split("/")[2]
        self._arrived = time.monotonic()
        self._warned = self._saved = -_WARN_S

    def fetch(self) -> Path:
        """Download and verify the file, and return its path. Raises OutlastError, Stopped and OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._resume()
        for _ in range(_BEGINNINGS):
            try:
                self._fetch()
            except _Changed:
                self._say(f"{self._address.shown} has changed on the server; beginning anew")
                self._discard()
                continue
            if self._remote.checked and self._size > _LARGE:
                self._say(f"checking {self._remote.file}")
            if problem := mismatch(self.path, self._remote, self._address.shown, self._stop):
                self._discard()
                raise OutlastError(problem)
            return self.path
        raise OutlastError(f"{self._address.shown} changes faster than it can be fetched; try later, or ask who provides it")

    # The state

    def _resume(self) -> None:
        try:
            state = json.loads(self._state.read_text())
            self._done, self._size, self._version = state["done"], state["size"], Version(state["etag"], state["modified"])
            usable = state["of"] == self._identity and 0 <= self._done <= min(self._size, self.path.stat().st_size)
        except (OSError, ValueError, KeyError, TypeError):
            usable = False
        if not usable or not (self._version.given or self._remote.checked):
            return self._discard()
        if left := self._size - self._done:
            self._say(f"going on with {self._address.shown}: {units.human_bytes(left)} are missing")

    @property
    def _identity(self) -> str:
        return self._remote.sha256 or self._address.identity

    def _save(self, fd: int) -> None:
        os.fdatasync(fd)
        state = {"of": self._identity, "size": self._size, "etag": self._version.etag, "modified": self._version.modified}
        files.replace(self._state, json.dumps({**state, "done": self._done}), durable=True)
        self._saved = time.monotonic()

    def _discard(self) -> None:
        for path in (self._state, self.path):
            path.unlink(missing_ok=True)
        self._done, self._size, self._version = 0, 0, Version()

    # The file

    def _fetch(self) -> None:
        self._arrived = time.monotonic()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                self._retry(lambda: self._fetch_missing(fd))
            finally:
                if self._resumable:
                    self._save(fd)
            os.fsync(fd)
        except BaseException:
            if not self._state.exists():
                self._discard()  # there is nothing to resume
            raise
        finally:
            os.close(fd)

    @property
    def _resumable(self) -> bool:
        return bool(self._size and (self._version.given or self._remote.checked))

    def _fetch_missing(self, fd: int) -> None:
        """Fetch the missing bytes with one request. Raises Unavailable if the response ends too early."""
        first = self._done if self._resumable else 0
        if first and first == self._size:
            return
        try:
            with http.request(self._address, first=first, version=self._version, timeout_s=self._options.timeout_s) as response:
                if response.part:
                    self._check_part(response, first)
                else:
                    self._begin(fd, response, first)
                self._copy(fd, response)
        except OutOfRange as shorter:
            if first:
                raise _Changed from shorter
            self._set_size(shorter.total)

    def _check_part(self, response: Response, first: int) -> None:
        if response.first != first:
            raise OutlastError(
                f"{self._address.shown}: the server sends other parts than it is asked for; "
                "download it by hand (outlast data get --from FILE)"
            )
        if (response.total, response.version) != (self._size, self._version):
            raise _Changed

    def _begin(self, fd: int, response: Response, first: int) -> None:
        """Truncate the file for a response with the whole file. Raises OutlastError if the content could not be verified."""
        if not response.bounded and not (self._remote.checked or self._remote.size):
            raise OutlastError(
                f"{self._address.shown}: the server does not say how long the file is, so a part of it would look like the "
                "whole; give its checksum (URL#sha256=...)"
            )
        if response.encoding and not (self._remote.checked or unpack.kind(self._remote.file)):
            raise OutlastError(
                f"{self._address.shown}: the server sends the file packed ({response.encoding}), although it was asked not to; "
                "download it by hand (outlast data get --from FILE)"
            )
        if first and self._version.condition and response.version != self._version:
            self._say(f"{self._address.shown} has changed on the server; beginning anew")
        os.ftruncate(fd, 0)
        self._state.unlink(missing_ok=True)
        self._done, self._version = 0, response.version
        self._beginnings += 1
        self._size = response.total or 0
        if response.total is not None:
            self._set_size(response.total)

    def _set_size(self, size: int) -> None:
        """Check the size of the whole file. Raises OutlastError if the size is wrong or the disk has too little space."""
        if self._remote.size not in (0, size):
            self._discard()
            raise OutlastError(
                f"{self._address.shown} has {size:,} bytes and must have {self._remote.size:,}; "
                "it is not the file that is wanted, or the server is broken"
            )
        needed, free = size - self._done, shutil.disk_usage(self._directory).free
        if needed > free:
            sizes = f"{units.human_bytes(needed)}, and its disk has {units.human_bytes(free)} left"
            raise OutlastError(f"{self._address.shown} needs {sizes}; make room there, or choose another directory")

    def _copy(self, fd: int, response: Response) -> None:
        """Append the body of a response to the file. Raises Unavailable if the body ends too early."""
        while response.total is None or self._done < response.total:
            if self._stop.is_set():
                raise Stopped(_STOPPED)
            data = response.read(_BUFFER if response.total is None else min(_BUFFER, response.total - self._done))
            if not data:
                break
            left = memoryview(data)
            while left:
                written = os.pwrite(fd, left, self._done)
                left, self._done = left[written:], self._done + written
            self._answered, self._arrived = True, time.monotonic()
            self._progress(self._done, self._size)
            if self._resumable and time.monotonic() - self._saved > _SAVE_S:
                self._save(fd)
        if response.total is not None and self._done < response.total:
            raise Unavailable(f"the connection ended at byte {self._done:,} of {response.total:,}")

    def _retry(self, attempt: Callable[[], None]) -> None:
        """Retry `attempt` until it succeeds. Raises OutlastError after too long without a byte, or too many restarts."""
        number = self._beginnings = 0
        while True:
            last = self._arrived
            try:
                return attempt()
            except Unavailable as problem:
                self._answered |= problem.answered
                progressed = self._arrived != last
                pause = max(problem.after_s, 0.05 if progressed else backoff.jittered(backoff.exponential(number, 0.25, 15.0)))
                number = 0 if progressed else number + 1
                patience = self._options.patience_s if self._answered else self._options.absent_s
                if time.monotonic() + pause - self._arrived > patience or self._beginnings >= _BEGINNINGS:
                    raise OutlastError(self._failure(problem)) from problem
                if time.monotonic() - self._warned >= _WARN_S:
                    self._warned = time.monotonic()
                    self._say(f"{self._host}: {problem}; trying again")
            if self._stop.wait(pause):
                raise Stopped(_STOPPED)

    def _failure(self, problem: Unavailable) -> str:
        if not self._answered:
            remedy = "check the network, or download the file elsewhere and give it with outlast data get --from FILE"
            return f"cannot reach {self._host}: {problem}; {remedy}"
        if problem.after_s > self._options.patience_s:
            pause = units.human_seconds(problem.after_s)
            return f"{self._address.shown}: {problem}, and asks to come back in {pause}; run the same command then"
        later = "run the same command later" + (", which goes on from here" if self._resumable else "")
        return f"{self._address.shown}: {problem}, again and again; {later}"


def mismatch(path: Path, remote: Remote, name: str, stop: threading.Event) -> str:
    """Return a message if a file differs from its published size or checksum, else "". Raises Stopped."""
    size = path.stat().st_size
    if remote.size not in (0, size):
        return f"{name} has {size:,} bytes and must have {remote.size:,}; it is not the file that is wanted, or it is damaged"
    for algorithm, expected in (("sha256", remote.sha256), ("md5", remote.md5)):
        if not expected:
            continue
        digest = hashlib.new(algorithm, usedforsecurity=False)
        with open(path, "rb") as file:
            while data := file.read(_READ):
                digest.update(data)
                if stop.is_set():
                    raise Stopped(_STOPPED)
        if (actual := digest.hexdigest()) != expected:
            kind = {"sha256": "SHA-256", "md5": "MD5"}[algorithm]
            return (
                f"{name} has the {kind} {actual}, and must have {expected}; it is not the file that is wanted, or it is damaged"
            )
    return ""
