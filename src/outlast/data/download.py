"""A download that a kill, a broken connection or a bad server can stop, but not spoil.

    path = Download(Remote(url, sha256=...), directory, ...).fetch()

In `directory` are, until the file is whole, the file itself with holes and `state.json`: which bytes of which version of it have
arrived. They are on the disk before the state says so. Missing bytes are asked for in pieces, over several connections, on
condition that the file is still of that version; one that has changed is fetched from its beginning. From a server that sends no
parts the file is fetched as a whole.

`fetch` returns when length and checksum are right, and raises otherwise. A download that was fetched in parts and has another
checksum than expected is fetched once more as a whole, since only a strong ETag proves that parts belong together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

from outlast import backoff, files, units, unpack
from outlast.data import http, intervals
from outlast.data.http import Address, Answer, Away, OutOfRange, Version
from outlast.data.intervals import Interval
from outlast.errors import OutlastError, Stopped

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Gets how many bytes have arrived, and of how many; 0 when that is not known."""

_BUFFER = 1 << 18
_READ = 1 << 20
_FIRST = 1 << 18
"""Bytes of the first request, after which several connections fetch the rest, and the state is saved."""
_SMALLEST = 1 << 20
"""Bytes for which another connection is worth its start."""
_STOPPED = "the download was stopped; the same command goes on from here"
_COMPLAIN_S = 10.0
_LARGE = 1 << 30
"""Bytes whose checksum takes seconds."""
_SAVE_S = 2.0
"""Interval at which the state is written: a kill loses what arrived since."""
_BEGINNINGS = 4
"""Attempts at a file that changes meanwhile, or that the server sends as a whole only."""


@dataclasses.dataclass(frozen=True)
class Remote:
    """A file to download, and what is known of it."""

    url: str
    size: int = 0
    """Bytes; 0 when unknown."""
    sha256: str = ""
    md5: str = ""
    name: str = ""
    """What the file is called here, if not as in the URL."""

    @property
    def checked(self) -> bool:
        """Whether there is a checksum to compare with."""
        return bool(self.sha256 or self.md5)

    @property
    def shown(self) -> str:
        """The URL for sentences."""
        return Address.parse(self.url).shown

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.name or Address.parse(self.url).name or "data"


@dataclasses.dataclass(frozen=True)
class Options:
    """How to download. The numbers are arbitrary, and right for most networks."""

    connections: int = 4
    piece: int = 16 << 20
    """Bytes of one request: long enough for a connection to reach its speed."""
    patience_s: float = 300.0
    """For so long it is tried again while nothing arrives."""
    absent_s: float = 20.0
    """The same while no server has answered at all: a wrong host name, no internet."""
    timeout_s: float = 60.0
    """For so long a connection may be silent."""


class _Changed(Exception):
    """The server has another version of the file than the one that was begun."""


class _Whole(Exception):
    """The server sends no parts, or wrong ones."""


class Download:
    """The download of one file to a directory that is used for nothing else."""

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
        self._lock = threading.Lock()
        self._done: list[Interval] = []
        self._size = 0
        self._version = Version()
        self._answered = False
        self._host = self._address.shown.split("/")[2]
        self._moved = time.monotonic()
        """When bytes last arrived."""
        self._complained = -_COMPLAIN_S

    def fetch(self) -> Path:
        """The whole file, checked. Raises OutlastError, Stopped, OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        resumed, whole = self._resume(), False
        for beginning in range(_BEGINNINGS):
            try:
                self._all(whole=whole)
            except _Changed:
                self._say(f"{self._address.shown} has changed on the server; beginning anew")
                self._forget()
                resumed, whole = False, beginning == _BEGINNINGS - 2  # parts of several servers that disagree
                continue
            except _Whole as reason:
                if whole:
                    raise OutlastError(
                        f"{self._address.shown}: {reason}; download it by hand (outlast data get --from FILE)"
                    ) from reason
                self._forget()
                resumed, whole = False, True
                continue
            if self._remote.checked and self._size > _LARGE:
                self._say(f"checking {self._remote.file}")
            problem = mismatch(self.path, self._remote, self._address.shown, self._stop)
            if not problem:
                return self.path
            proven = whole or (self._version.strong and not resumed)
            self._forget()
            if proven or beginning == _BEGINNINGS - 1:
                raise OutlastError(problem)
            self._say(f"{problem}; fetching it once more, as a whole")
            resumed, whole = False, True
        raise OutlastError(f"{self._address.shown} changes faster than it can be fetched; try later, or ask who provides it")

    # The state

    def _resume(self) -> bool:
        """Take up what an earlier download has left; False when it has left nothing that can be used."""
        try:
            state = json.loads(self._state.read_text())
            self._size, self._version = state["size"], Version(state["etag"], state["modified"])
            self._done = intervals.merged((first, end) for first, end in state["done"])
            usable = state["of"] == self._of() and self.path.stat().st_size == self._size
        except (OSError, ValueError, KeyError, TypeError):
            usable = False
        if usable and (self._version.known or self._remote.checked):
            if left := self._size - intervals.count(self._done):
                self._say(f"going on with {self._address.shown}: {units.human_bytes(left)} are missing")
            return True
        self._forget()
        return False

    def _of(self) -> str:
        """What must be equal for an earlier download to be of use."""
        return self._remote.sha256 or self._address.same

    def _save(self, fd: int) -> None:
        """Note what has arrived, once it is on the disk."""
        with self._lock:
            self._done = intervals.merged(self._done)
            done = list(self._done)
        os.fdatasync(fd)
        version = {"etag": self._version.etag, "modified": self._version.modified}
        files.replace(self._state, json.dumps({"of": self._of(), "size": self._size, **version, "done": done}), durable=True)

    def _forget(self) -> None:
        """Begin again with nothing."""
        for path in (self._state, self.path):
            path.unlink(missing_ok=True)
        self._done, self._size, self._version = [], 0, Version()

    # The file

    def _all(self, *, whole: bool) -> None:
        """Fetch what is missing. Raises _Changed, _Whole, OutlastError, Stopped, OSError."""
        self._moved = time.monotonic()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if whole:
                self._retried(lambda: self._take_whole(fd), whole=True)
            elif not self._state.exists():
                self._retried(lambda: self._begin(fd))
            if self._state.exists():
                self._parts(fd)
            os.fsync(fd)
        except BaseException:
            if not self._state.exists():
                self._forget()  # what cannot be resumed
            raise
        finally:
            os.close(fd)

    def _begin(self, fd: int) -> None:
        """The first request: how long the file is, which version, whether the server sends parts; and the first part."""
        last = min(_FIRST, self._options.piece) - 1
        try:
            with self._asked(0, last) as answer:
                if not answer.part:
                    try:
                        self._whole(fd, answer)
                    except Away as cut:
                        raise _Whole(str(cut)) from cut
                elif answer.first:
                    raise _Whole("the server sends other parts than it is asked for")
                elif answer.encoding:
                    raise _Whole(f"the server packs parts ({answer.encoding})")
                elif answer.total is None or not (answer.version.known or self._remote.checked):
                    raise _Whole("its length or its version is not known, so parts may not belong together")
                else:
                    self._sized(answer.total)
                    self._size, self._version = answer.total, answer.version
                    os.ftruncate(fd, self._size)
                    self._save(fd)
                    with contextlib.suppress(Away):  # the rest comes with the other parts
                        self._copy(fd, answer, 0, min(last + 1, self._size))
        except OutOfRange as empty:
            self._sized(empty.total)
            if empty.total:
                raise _Whole("the server does not send its first bytes") from empty

    def _take_whole(self, fd: int) -> None:
        with self._asked(0, None) as answer:
            self._whole(fd, answer)

    def _whole(self, fd: int, answer: Answer) -> None:
        """Fetch the file from an answer that sends all of it."""
        if not answer.bounded and not (self._remote.checked or self._remote.size):
            raise OutlastError(
                f"{self._address.shown}: the server does not say how long the file is, so a part of it would look like the "
                "whole; give its checksum (URL#sha256=...)"
            )
        if answer.encoding and not (self._remote.checked or unpack.kind(self._remote.file)):
            raise OutlastError(
                f"{self._address.shown}: the server sends the file packed ({answer.encoding}), although it was asked not to; "
                "download it by hand (outlast data get --from FILE)"
            )
        if answer.total is not None:
            self._sized(answer.total)
        os.ftruncate(fd, 0)
        self._done, self._size, self._version = [], answer.total or 0, answer.version
        self._copy(fd, answer, 0, answer.total)

    def _sized(self, size: int) -> None:
        """Raise OutlastError when the file has another length than expected, or no room here."""
        if self._remote.size not in (0, size):
            self._forget()
            raise OutlastError(
                f"{self._address.shown} has {size:,} bytes and must have {self._remote.size:,}; "
                "it is not the file that is wanted, or the server is broken"
            )
        needed, free = size - intervals.count(self._done), shutil.disk_usage(self._directory).free
        if needed > free:
            sizes = f"{units.human_bytes(needed)}, and its disk has {units.human_bytes(free)} left"
            raise OutlastError(f"{self._address.shown} needs {sizes}; make room there, or choose another directory")

    def _parts(self, fd: int) -> None:
        """Fetch the missing parts over several connections."""
        self._save(fd)
        missing = intervals.missing(intervals.merged(self._done), self._size)
        share = -(-intervals.count(missing) // self._options.connections)  # a small file, too, is for all connections
        waiting = deque(intervals.pieces(missing, min(self._options.piece, max(share, _SMALLEST))))
        failed = threading.Event()

        def work() -> None:
            while not failed.is_set():
                try:
                    first, end = waiting.popleft()
                except IndexError:
                    return
                try:
                    self._part(fd, first, end, failed)
                except BaseException:
                    failed.set()
                    raise

        crew = min(self._options.connections, len(waiting))
        with ThreadPoolExecutor(max(1, crew)) as pool:
            running = [pool.submit(work) for _ in range(crew)]
            try:
                self._watched(fd, running)
            except BaseException:
                failed.set()
                raise
            finally:
                wait(running)
                self._save(fd)
        for each in running:
            each.result()

    def _watched(self, fd: int, running: list[Future[None]]) -> None:
        """Save the state now and then until all parts are here, or one has failed."""
        pending = set(running)
        saved = time.monotonic()
        while pending:
            over, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
            for each in over:
                each.result()
            if self._stop.is_set():
                raise Stopped(_STOPPED)
            if time.monotonic() - saved > _SAVE_S:
                self._save(fd)
                saved = time.monotonic()

    def _part(self, fd: int, first: int, end: int, failed: threading.Event) -> None:
        """Fetch one part; what has arrived when a connection breaks is kept."""
        position = first

        def moved(to: int) -> bool:
            nonlocal position
            position = to
            return not failed.is_set()

        def attempt() -> None:
            try:
                with self._asked(position, end - 1) as answer:
                    if not answer.part:
                        raise _Changed if self._version.condition else _Whole("the server sends no parts any more")
                    if (answer.total, answer.version) != (self._size, self._version):
                        raise _Changed
                    if answer.first != position:
                        raise _Whole("the server sends other parts than it is asked for")
                    self._copy(fd, answer, position, end, moved)
            except OutOfRange as shorter:
                raise _Changed from shorter

        self._retried(attempt, failed=failed)

    def _asked(self, first: int, last: int | None) -> contextlib.AbstractContextManager[Answer]:
        return http.request(self._address, first=first, last=last, version=self._version, timeout_s=self._options.timeout_s)

    def _copy(
        self, fd: int, answer: Answer, first: int, end: int | None, moved: Callable[[int], bool] = lambda position: True
    ) -> None:
        """Write an answer's bytes to their place, while `moved`, which gets the position, returns True.

        Raises Away when it ends too early.
        """
        position = first
        while end is None or position < end:
            if self._stop.is_set():
                raise Stopped(_STOPPED)
            data = answer.read(_BUFFER if end is None else min(_BUFFER, end - position))
            if not data:
                break
            left = memoryview(data)
            while left:
                left = left[os.pwrite(fd, left, position + len(data) - len(left)) :]
            with self._lock:
                self._done.append((position, position + len(data)))
                if len(self._done) > 100:
                    self._done = intervals.merged(self._done)
                arrived = intervals.count(self._done)
            position += len(data)
            self._answered, self._moved = True, time.monotonic()
            self._progress(arrived, self._size)
            if not moved(position):
                return
        if end is not None and position < end:
            raise Away(f"the connection ended at byte {position:,} of {self._size or end:,}")

    def _retried(self, attempt: Callable[[], None], *, failed: threading.Event | None = None, whole: bool = False) -> None:
        """Do it until it succeeds, or nothing has arrived for too long; `whole`: it begins from the start each time."""
        number = restarts = 0
        while not (failed and failed.is_set()):
            before = self._moved
            try:
                attempt()
                return
            except Away as problem:
                self._answered |= problem.answered
                moved = self._moved != before
                pause = max(problem.after_s, backoff.jittered(backoff.exponential(0 if moved else number, 0.25, 15.0)))
                number, restarts = 0 if moved else number + 1, restarts + moved
                patience = self._options.patience_s if self._answered else self._options.absent_s
                late = time.monotonic() + pause - self._moved > patience
                if late or (whole and restarts >= _BEGINNINGS):
                    raise OutlastError(self._given_up(problem)) from problem
                self._complain(problem)
            (failed or self._stop).wait(pause)
            if self._stop.is_set():
                raise Stopped(_STOPPED)

    def _complain(self, problem: Away) -> None:
        """Say why nothing comes, now and then."""
        with self._lock:
            if time.monotonic() - self._complained < _COMPLAIN_S:
                return
            self._complained = time.monotonic()
        self._say(f"{self._host}: {problem}; trying again")

    def _given_up(self, problem: Away) -> str:
        if not self._answered:
            remedy = "check the network, or download the file elsewhere and give it with outlast data get --from FILE"
            return f"cannot reach {self._host}: {problem}; {remedy}"
        if problem.after_s > self._options.patience_s:
            wish = units.human_seconds(problem.after_s)
            return f"{self._address.shown}: {problem}, and asks to come back in {wish}; run the same command then"
        return f"{self._address.shown}: {problem}, again and again; run the same command later, which goes on from here"


def mismatch(path: Path, remote: Remote, name: str, stop: threading.Event) -> str:
    """The sentence for a file that is not the one that is wanted; empty when it is, as far as can be known.

    Raises Stopped soon after `stop` is set.
    """
    size = path.stat().st_size
    if remote.size not in (0, size):
        return f"{name} has {size:,} bytes and must have {remote.size:,}; it is not the file that is wanted, or it is damaged"
    for algorithm, wanted in (("sha256", remote.sha256), ("md5", remote.md5)):
        if not wanted:
            continue
        digest = hashlib.new(algorithm, usedforsecurity=False)
        with open(path, "rb") as file:
            while data := file.read(_READ):
                digest.update(data)
                if stop.is_set():
                    raise Stopped(_STOPPED)
        if (found := digest.hexdigest()) != wanted:
            kind = {"sha256": "SHA-256", "md5": "MD5"}[algorithm]
            return f"{name} has the {kind} {found}, and must have {wanted}; it is not the file that is wanted, or it is damaged"
    return ""
