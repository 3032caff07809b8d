"""Synchronises a directory to a store (`push`), or a store to a directory (`pull`).

A push writes a manifest to the store, with the names, sizes, times and checksums of all objects. A local state file records the
manifest and the local files that match it, so an unchanged tree of any size costs one walk and one request. Objects are written
first, then the manifest, then the state. Therefore, whenever a process is killed, every object in the manifest exists, and every
file that matches the state has been transferred. Changes by other writers are noticed at once if the manifest changes too, and
otherwise once a day or with `check`.

    state           files and objects (`index.State`), replaced as a whole
    state.lock      held by the syncing process
    state.uploads/  journals of large uploads (`Store.upload`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from outlast.base import file_locks, files
from outlast.base.errors import AlreadyRunning, Changed, Denied, Missing, NoBucket, OutlastError, StoreError, Unreachable
from outlast.storage.store import Store
from outlast.storage.sync import index, thread_pool, transfer, tree
from outlast.storage.sync.index import GRANULARITY_NS, Object, Seen, Stat, State, Verdict
from outlast.storage.sync.transfer import Damaged, Download, Sent, receive, send

__all__ = ["MANIFEST", "Options", "Progress", "Report", "Sent", "pull", "push", "receive", "send"]

MANIFEST = ".outlast-manifest"
_PROGRESS_S = 0.2
_ABANDONED_S = 3600.0
"""A partial file that has not changed for this many seconds is removed."""
_HOPELESS = 3
"""Number of consecutive failed requests after which a sync gives up."""
_DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EROFS: "the file system is read-only"}


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a push or pull."""

    files: int
    bytes: int
    files_total: int
    bytes_total: int


@dataclasses.dataclass
class Report:
    """The result of a push or pull or, with `dry_run`, the expected result."""

    transferred: int = 0
    bytes: int = 0
    unchanged: int = 0
    deleted: int = 0
    failed: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Paths that could not be read, transferred or deleted, with reasons."""
    ignored: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Paths that are not files, with reasons."""
    changing: list[str] = dataclasses.field(default_factory=list)
    """Files that changed during every attempt to send them."""
    planned: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """In a `dry_run`, pairs of an action (send, receive or delete) and a path."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options common to push and pull."""

    manifest: str = MANIFEST
    skip: Callable[[str], bool] = lambda relative: False
    """Returns True for paths to ignore, both in the directory and in the store."""
    delete: bool = False
    """True to delete from the target what the source lacks, unless a transfer has failed."""
    check: bool = False
    """True to list the store instead of trusting its manifest."""
    dry_run: bool = False
    progress: Callable[[Progress], None] = lambda _: None
    stop: threading.Event | None = None


def push(
    source: Path,
    store: Store,
    state: Path,
    options: Options = Options(),
    *,
    leave: Callable[[str], bool] = lambda relative: False,
    expired: Callable[[str], bool] = lambda relative: False,
) -> Report:
    """Upload the files in `source` that are missing or different in `store`.

    `state` is the path of the local state file. Files for which `leave` returns True are not sent, but their objects are kept.
    Unless `delete` is set, an object without a file is deleted only if `expired` returns True for its path. Raises NotFound if
    `source` does not exist, AlreadyRunning if another process uses `state`, StoreError, and Stopped. Transfers that were
    completed before an error are recorded.
    """
    skip = options.skip
    with _opened(state, f"{store.url}/{options.manifest}") as file:
        began = time.time_ns()
        scan = tree.scan(str(source), skip=skip, own=options.manifest)
        if options.delete and not scan.files:
            raise OutlastError(
                f"{source} is empty: --delete would delete all of {store.url}; leave it out, or correct the directory"
            )
        run = _Run(str(source), store, file, options)
        report = run.report
        report.failed, report.ignored = list(scan.failed.items()), sorted(scan.ignored.items())
        run.load(options.check)
        todo = run.nameable(run.compared(scan.files, [path for path in scan.files if not leave(path)]))
        doomed = [
            path for path in file.state.objects if path not in scan.files and not skip(path) and (options.delete or expired(path))
        ]
        if options.dry_run:
            return run.planned("send", todo, scan.files, doomed)
        run.send(todo, scan.files)
        report.failed.sort()
        if report.failed:
            doomed = []
        if run.changed or file.state.fresh or doomed:
            run.write(began - GRANULARITY_NS, doomed)
        if doomed:
            with run.doubting():  # the manifest is incomplete until the objects are deleted
                store.delete(doomed)
            report.deleted = len(doomed)
        run.save()
        if not report.failed and file.uploads.is_dir():
            for journal in file.uploads.iterdir():  # journals of deleted files
                with contextlib.suppress(StoreError):
                    store.forget(journal)
        return report


def pull(store: Store, target: Path, state: Path, options: Options = Options(), *, only_missing: bool = False) -> Report:
    """Download the objects in `store` that are missing or different in `target`. Raises the same errors as `push`.

    With `only_missing`, existing files are left unchanged. Nothing is written outside `target`, because a link to a file is
    replaced and not followed.
    """
    skip = options.skip
    with _opened(state, f"{store.url}/{options.manifest}") as file:
        scan = tree.scan(str(target), skip=skip, own=options.manifest) if os.path.lexists(target) else tree.Scan()
        run = _Run(str(target), store, file, options)
        report, objects = run.report, run.load(options.check)
        if options.delete and not objects:
            raise OutlastError(
                f"there is nothing in {store.url}: --delete would delete all of {target}; leave it out, or correct the URL"
            )
        report.failed = list(scan.failed.items()) if options.delete else []
        paths: Iterable[str] = [path for path in objects if not skip(path)]
        if only_missing:
            report.unchanged = len(scan.files.keys() & objects.keys())
            paths = [path for path in paths if path not in scan.files]
        todo = run.possible(run.compared(scan.files, paths))
        doomed = [path for path in scan.files if path not in objects] if options.delete else []
        inside = tree.Inside(str(target))
        # A file reached through a link may be an object under its other name.
        doomed = [path for path in doomed if not inside.through_link(path)]
        if options.dry_run:
            return run.planned("receive", todo, objects, doomed)
        run.receive(todo)
        report.failed.sort()
        if not report.failed:
            outcomes = list(tree.remove(str(target), doomed))
            report.failed = [(path, reason) for path, reason in outcomes if reason]
            report.deleted = len(outcomes) - len(report.failed)
        run.save()
        tree.sweep(str(target), scan.partials, time.time() - _ABANDONED_S)
        return report


class _Run:
    def __init__(self, root: str, store: Store, file: _StateFile, options: Options) -> None:
        self._root, self._store = root, store
        self._key, self._skip, self._progress, self._stop = options.manifest, options.skip, options.progress, options.stop
        self._file, self._state = file, file.state
        self.report = Report()
        self.changed = False
        """True if the manifest in the store is out of date."""
        self._listed = False
        self._dirty = False
        """True if the state on disk is out of date."""
        self._done = "read"
        self._refused = 0
        self._refusal: StoreError = StoreError("")

    def load(self, check: bool) -> dict[str, Object]:
        """Load the store's objects from the manifest, or from a listing if `check` is set or the manifest is too old."""
        state, store = self._state, self._store
        try:
            if not state.etag or store.head(self._key).etag != state.etag:
                data, entry = store.read(self._key)
                state.objects, state.clean_before = index.decode(data)
                state.etag = entry.etag
                state.fresh.clear()  # another writer may have replaced these objects
                self._dirty = True
        except (Missing, ValueError):  # treat an unreadable manifest as a missing one
            state.etag, state.clean_before = "", 0
            check = self.changed = True
        if check or state.stale(time.time()):
            entries = ((e.key, e.size, e.etag, e.modified) for e in store.entries() if not self._skip(e.key))
            objects = index.listed(entries, state.objects, self._key)
            self.changed |= objects != state.objects
            state.objects, state.checked = objects, time.time()
            self._listed = self._dirty = True
        return state.objects

    def compared(self, scanned: Mapping[str, Stat], paths: Iterable[str]) -> list[str]:
        seen, objects, clean_before = self._state.seen, self._state.objects, self._state.clean_before
        todo, doubtful = [], []
        for path in paths:
            file, object = scanned.get(path), objects.get(path)
            if file is None or object is None:
                todo.append(path)
                continue
            verdict = index.compare(file, seen.get(path), object, clean_before)
            if verdict is Verdict.SAME:
                self.report.unchanged += 1
                if path not in seen and object.crc32 >= 0:
                    seen[path] = Seen(*file, object.crc32)
                    self._dirty = True
            elif verdict is Verdict.UNKNOWN:
                doubtful.append(path)
            else:
                todo.append(path)
        jobs = (thread_pool.Job(path, 0, partial(tree.checksum, os.path.join(self._root, path))) for path in doubtful)
        with contextlib.closing(thread_pool.work(jobs, threading.Event(), stop=self._stop)) as outcomes:
            for path, result, _ in outcomes:
                if result is not None and result.crc32 == objects[path].crc32 and result.size == objects[path].size:
                    seen[path] = result
                    self._dirty = True
                    self.report.unchanged += 1
                else:  # the transfer reports an unreadable file
                    todo.append(path)
        return todo

    def nameable(self, paths: list[str]) -> list[str]:
        wrong = {path: reason for path in paths if (reason := self._store.impossible(path))}
        self.report.failed += [
            (path, f"it cannot be the name of an object: {reason}; rename it") for path, reason in wrong.items()
        ]
        return [path for path in paths if path not in wrong]

    def possible(self, paths: list[str]) -> list[str]:
        directories, inside = index.directories(self._state.objects), tree.Inside(self._root)
        possible = []
        for path in paths:
            reason = index.unsafe(path)
            if not reason and path in directories:
                reason = "the store has a directory of this name as well; rename one of them"
            if reason := reason or inside.obstacle(path):
                self.report.failed.append((path, reason))
            else:
                possible.append(path)
        return possible

    def planned(self, verb: str, todo: list[str], sizes: Mapping[str, Stat | Object], gone: list[str]) -> Report:
        report = self.report
        report.transferred, report.bytes = len(todo), sum(sizes[path].size for path in todo)
        gone = [] if report.failed else gone
        report.deleted = len(gone)
        report.planned = [*((verb, path) for path in sorted(todo)), *(("delete", path) for path in sorted(gone))]
        return report

    def send(self, paths: list[str], scanned: Mapping[str, Stat]) -> None:
        meter = _Meter(self._progress, len(paths), sum(scanned[path].size for path in paths))
        outcomes = transfer.uploads(
            self._store,
            ((Path(self._root, path), path) for path in sorted(paths, key=lambda path: scanned[path].size)),
            journals=self._file.uploads,
            snapshots=True,
            progress=meter.moved,
            stop=self._stop,
            tick=meter.tick,
        )
        with contextlib.closing(outcomes):
            for (place, path), uploaded, error in outcomes:
                if uploaded is None:
                    if not tree.gone(place):  # a file deleted after the walk is not a failure
                        self._failed(path, error)
                    continue
                sent, stat, read, steady = uploaded
                seen = index.seen(stat, sent.crc32, read)
                if not steady:
                    seen = seen._replace(ctime=0)
                    self.report.changing.append(path)
                self._moved(path, Object(sent.size, stat.mtime, sent.crc32, index.etag_hash(sent.etag)), seen)
                meter.files += 1
        self._settle()
        meter.tick(last=True)

    def receive(self, paths: list[str]) -> None:
        """Download objects and record them. An object that is replaced during its download is downloaded once more."""
        self._done, objects = "written", self._state.objects
        meter = _Meter(self._progress, len(paths), sum(objects[path].size for path in paths))
        replaced = self._receive(paths, meter)
        if replaced:
            jobs = (thread_pool.Job(path, 0, partial(self._store.head, path)) for path in replaced)
            again = []
            with contextlib.closing(thread_pool.work(jobs, threading.Event(), stop=self._stop)) as outcomes:
                for path, entry, error in outcomes:
                    if isinstance(error, Missing) and objects[path].size == 0:
                        del objects[path]  # `directory/`, a console's marker: the listing drops the slash
                    elif entry is None:
                        self._failed(path, error)
                    elif index.as_left(objects[path], entry.size, entry.etag):
                        self._failed(path, replaced[path])
                    else:
                        again.append(path)
                        objects[path] = index.unknown(entry.size, entry.etag, entry.modified)
            for path, error in self._receive(again, meter).items():
                self._failed(path, error)
        self._settle()
        meter.tick(last=True)

    def _receive(self, paths: list[str], meter: _Meter) -> dict[str, StoreError]:
        objects = self._state.objects
        replaced: dict[str, StoreError] = {}
        downloads = (
            Download(path, objects[path].size, os.path.join(self._root, path), objects[path].crc32, objects[path].mtime)
            for path in sorted(paths, key=lambda path: objects[path].size)
        )
        outcomes = transfer.downloads(self._store, downloads, progress=meter.moved, stop=self._stop, tick=meter.tick)
        with contextlib.closing(outcomes):
            for one, downloaded, error in outcomes:
                path = one.key
                if downloaded is not None:
                    object = objects[path]._replace(crc32=downloaded.crc32)
                    self._moved(path, object, index.seen(downloaded.stat, downloaded.crc32, time.time_ns()))
                    meter.files += 1
                elif isinstance(error, Missing | Changed | Damaged):
                    replaced[path] = error
                else:
                    self._failed(path, error)
        return replaced

    def _moved(self, path: str, object: Object, seen: Seen) -> None:
        self._file.add(path, object, seen)
        self._dirty = True
        self._refused = 0
        self.report.transferred += 1
        self.report.bytes += object.size

    def _failed(self, path: str, error: BaseException | None) -> None:
        """Record the failure of one file in the report. Raises errors that would affect every file."""
        match error:
            case NoBucket():
                raise error
            case Denied() | Unreachable():
                self._refused, self._refusal = self._refused + 1, error
                if self._refused >= _HOPELESS:
                    raise error
                self.report.failed.append((path, str(error)))
            case OSError(errno=number) if number in _DISK:
                raise OutlastError(f"{self._root} cannot be written: {_DISK[number]}") from error
            case OSError():
                self.report.failed.append((path, f"it cannot be {self._done}: {error.strerror}"))
            case OutlastError():
                self.report.failed.append((path, str(error)))
            case None:
                raise AssertionError
            case _:
                raise error

    def _settle(self) -> None:
        """Raise the store's last error if no file was transferred."""
        if self._refused and not self.report.transferred:
            raise self._refusal

    def write(self, clean_before: int, doomed: list[str]) -> None:
        state, store = self._state, self._store
        try:  # merge with the manifest if another push has written one meanwhile
            if store.head(self._key).etag != state.etag:
                theirs, _ = index.decode(store.get(self._key))
                own = {path: state.objects[path] for path in state.fresh if path in state.objects}
                state.objects = {**(state.objects if self._listed else {}), **theirs, **own}
        except (Missing, ValueError):
            pass
        for path in doomed:
            state.objects.pop(path, None)
        state.etag, state.clean_before = store.put(self._key, index.encode(state.objects, clean_before)), clean_before
        self._dirty = True

    @contextlib.contextmanager
    def doubting(self) -> Iterator[None]:
        """Make the next sync list the store, unless the block completes."""
        checked, self._state.checked = self._state.checked, 0.0
        self.save()
        yield
        self._state.checked = checked

    def save(self) -> None:
        if self._dirty:
            objects = self._state.objects
            self._state.seen = {path: seen for path, seen in self._state.seen.items() if path in objects}
            self._file.save()


class _Meter:
    """Counts transfers, and reports progress at most five times a second."""

    def __init__(self, progress: Callable[[Progress], None], files: int, size: int) -> None:
        self._progress, self._files_total, self._bytes_total = progress, files, size
        self._lock = threading.Lock()
        self._bytes = 0
        self._reported = 0.0
        self.files = 0

    def moved(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    def tick(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self._reported > _PROGRESS_S:
            self._reported = now
            self._progress(Progress(self.files, self._bytes, self._files_total, max(self._bytes, self._bytes_total)))


_SAVE_S = 1.0
"""Minimum seconds between saves during a sync. If the process is killed, transfers since the last save are repeated."""
_SHARE = 20
"""A save may take this fraction of the time: a large state is saved less often."""


class _StateFile:
    """The local state of a sync between one tree and one store. This process holds its lock."""

    def __init__(self, path: Path, place: str) -> None:
        self._path = path
        self.uploads = path.with_name(f"{path.name}.uploads")
        self.state = State(place)
        with contextlib.suppress(FileNotFoundError, ValueError):
            state = State.decode(path.read_bytes())
            if state.place == place:
                self.state = state
        self._unsaved = False
        self._due = time.monotonic() + _SAVE_S

    def add(self, path: str, object: Object, seen: Seen) -> None:
        """Record that a file and an object have the same content."""
        self.state.objects[path], self.state.seen[path] = object, seen
        self.state.fresh.add(path)
        self._unsaved = True
        if time.monotonic() > self._due:
            self._write()

    def save(self) -> None:
        """Write the state of a sync that is complete."""
        self.state.fresh.clear()
        self._write()

    def close(self) -> None:
        if self._unsaved:
            self._write()

    def _write(self) -> None:
        begun = time.monotonic()
        files.replace(self._path, self.state.encode())
        now = time.monotonic()
        self._unsaved, self._due = False, now + max(_SAVE_S, _SHARE * (now - begun))


@contextlib.contextmanager
def _opened(path: Path, place: str) -> Iterator[_StateFile]:
    """Open and lock the state at `path`. Raises AlreadyRunning if another process holds the lock."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise OutlastError(f"the notes of a sync cannot be kept in {path.parent}: {error.strerror}") from error
    with file_locks.attempted(lock) as locked:
        if not locked:
            raise AlreadyRunning(f"another process syncs this with {place.rpartition('/')[0]} now ({lock}); wait for it")
        with contextlib.closing(_StateFile(path, place)) as file:
            yield file
