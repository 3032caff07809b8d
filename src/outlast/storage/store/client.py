"""A client for object stores. This is the only module that uses obstore, which it imports when a store is opened.

Transient errors are retried for about OUTLAST_STORE_TIMEOUT seconds (default 60). Then calls raise StoreError, whose `retry` is
True if a later attempt can succeed. Calls block, release the GIL and are thread-safe; in the main thread, signals interrupt them.
Do not use a store in a process that was forked after the store was opened.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from outlast.base import backoff
from outlast.base.errors import Changed, Denied, Exists, Missing, NoBucket, Stopped, StoreError, Unreachable
from outlast.storage.store import error_mapping, multipart, s3, urls
from outlast.storage.store.urls import normalised

STALLED_S = 30.0
"""Read timeout in seconds: a connection that receives nothing for this long is closed."""
SLOW_S = 300.0
"""Read timeout in seconds for large uploads on a slow network: long enough to send 8 MiB at 28 KiB/s."""
PAGE = 1000
"""Number of keys to list or delete per request. This is S3's maximum."""
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """An object in a store, without its content."""

    key: str
    """The object's name, relative to the store's URL."""
    size: int
    etag: str
    """The content's version. Each store computes it differently."""
    modified: float
    """Time of the last change in seconds since the epoch, by the store's clock."""


@dataclass
class _Root:
    scheme: str
    bucket: str
    raw: Any
    slow_raw: Any = None
    """The same client as `raw`, but with a longer read timeout."""
    access: s3.Access | None = None
    timeout_s: float = backoff.DEFAULT_S
    conditional: bool | None = None
    slow: bool = False
    odd_ranges: bool = False
    """True once obstore has rejected the server's response to a range request."""


class Store:
    """The objects below a URL. Use `open_` to create a store."""

    def __init__(self, url: str, root: _Root, prefix: str) -> None:
        self.url = url
        self._root = root
        self._raw = root.raw
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"Store({self.url})"

    def child(self, key: str) -> Store:
        """Return the store below `key`."""
        key = key.strip("/")
        return Store(f"{self.url}/{key}", self._root, self._path(key)) if key else self

    def entries(self, below: str = "") -> Iterator[Entry]:
        """Yield all objects whose keys start with the path segments `below`, in UTF-8 order of the keys, as pages arrive."""
        held: Entry | None = None
        for entry in map(self._entry, chain.from_iterable(self._pages(below))):
            # Consoles mark a directory with an empty object `directory/`; obstore drops the slash.
            if held and not (held.size == 0 and entry.key.startswith(f"{held.key}/")):
                yield held
            held = None if entry.size == 0 and entry.key == below else entry
        if held:
            yield held

    def _pages(self, below: str) -> Iterator[list[Any]]:
        import obstore

        path = self._path(below) if below else self._prefix
        if self._root.scheme == "file":  # obstore lists a directory in the disk's order
            listing = self._do("list", below, lambda: obstore.list(self._raw, path).collect())
            yield sorted(listing, key=lambda meta: meta["path"].encode())
            return
        offset: str | None = None
        pages: Any = None

        def following() -> Any:
            nonlocal pages
            pages = pages or iter(obstore.list(self._raw, path, chunk_size=PAGE, offset=offset))
            try:
                return next(pages, None)
            except Exception:
                pages = None  # the next attempt continues after the last page
                raise

        while page := self._do("list", below, following):
            yield page
            offset = page[-1]["path"]

    def names(self, below: str = "") -> list[str]:
        """Return the sorted names of the objects and directories (first segments of longer keys) directly below `below`."""
        import obstore

        path = self._path(below) if below else self._prefix
        listing = self._do("list", below, lambda: obstore.list_with_delimiter(self._raw, path))
        paths = [*listing["common_prefixes"], *(meta["path"] for meta in listing["objects"])]
        return sorted({each.rstrip("/").rpartition("/")[2] for each in paths if each != path})

    def head(self, key: str) -> Entry:
        """Return an object's size, etag and modification time. Raises Missing."""
        import obstore

        path = self._path(key)
        try:
            return self._entry(self._do("read", key, lambda: obstore.head(self._raw, path)))
        except StoreError as error:
            if error.retry or isinstance(error, Missing):
                raise
        # An error response to HEAD has no body that could give a reason, but one to GET has.
        return self._entry(self._do("read", key, lambda: obstore.get(self._raw, path).meta))

    def get(self, key: str) -> bytes:
        return self.read(key)[0]

    def read(self, key: str) -> tuple[bytes, Entry]:
        """Return an object's content and version. Raises Missing."""
        import obstore

        path = self._path(key)

        def attempt() -> tuple[bytes, Entry]:
            response = obstore.get(self._raw, path)
            entry = self._entry(response.meta)
            data = response.bytes().to_bytes()
            if len(data) != entry.size:
                raise Unreachable(f"{self._name(key)} ended after {len(data)} of {entry.size} bytes")
            return data, entry

        return self._do("read", key, attempt)

    def range(self, key: str, start: int, end: int) -> memoryview:
        """Return bytes `start` to `end` (exclusive) of an object. Raises Missing, and Changed if the object is shorter."""
        import obstore

        root, path = self._root, self._path(key)

        def attempt() -> memoryview:
            if not root.odd_ranges:
                try:
                    return memoryview(obstore.get(self._raw, path, options={"range": (start, end)}).bytes())
                except Exception as error:
                    if root.access is None or "non-partial response" not in str(error):
                        raise
                    root.odd_ranges = True
            assert root.access
            return memoryview(root.access.range(root.bucket, path, start, end))

        data = self._do("read", key, attempt) if end > start else memoryview(b"")
        if len(data) != end - start:
            raise Changed(f"{self._name(key)} has no such bytes: it was replaced by a shorter one", retry=True)
        return data

    def put(self, key: str, data: bytes | bytearray | memoryview, mode: Any = "overwrite") -> str:
        """Write an object and return its etag. `mode` is passed to obstore; `create` and `replace` set it."""
        import obstore

        root, path = self._root, self._path(key)
        large = len(data) > multipart.PIECE and root.slow_raw is not None

        def attempt() -> str:
            sent = partial(obstore.put, path=path, file=data, mode=mode, use_multipart=False)
            if large and root.slow:
                return _tag(sent(root.slow_raw))
            try:
                return _tag(sent(self._raw))
            except Exception as error:
                if not large or "kind: Timeout" not in str(error):
                    raise
            # obstore does not distinguish a slow body from a missing response, but a store that answers HEAD is up.
            with contextlib.suppress(FileNotFoundError):
                obstore.head(self._raw, path)
            root.slow = True
            return _tag(sent(root.slow_raw))

        return self._do("write", key, attempt)

    def upload(
        self,
        path: Path,
        key: str,
        *,
        journal: Path | None = None,
        progress: Callable[[int], None] = lambda _: None,
        stop: threading.Event | None = None,
    ) -> str:
        """Upload a file, in parts if it is large, in bounded memory, and return the object's etag.

        `journal` is a file that makes uploads to S3 resumable: the next call with the same journal sends only the missing parts,
        or starts again if the file has changed. `progress` is called with the number of bytes sent since its last call, which
        includes bytes that an earlier attempt sent. Raises StoreError, Changed if the file changes during the upload, and Stopped
        soon after `stop` is set.
        """
        stop = stop or threading.Event()
        root = self._root
        with self._reading(path):
            stat = path.stat()
            if stat.st_size <= multipart.SMALL:
                with path.open("rb") as file:
                    content = file.read(multipart.SMALL + 1)
                etag = self.put(key, content)
                progress(len(content))
            elif root.access:
                etag = self._multipart(key, stop).send(path, journal, progress)
            else:
                etag = self._stream(path, key, stat.st_size, progress, stop)
            after = path.stat()
        if (after.st_size, after.st_mtime_ns, after.st_ino) != (stat.st_size, stat.st_mtime_ns, stat.st_ino):
            raise Changed(f"{path} changed while it was sent", retry=True)
        return etag

    def _stream(self, path: Path, key: str, size: int, progress: Callable[[int], None], stop: threading.Event) -> str:
        """Upload a file with obstore, which cannot resume an upload."""
        import obstore

        target, part = self._path(key), multipart.part_size(size) // 2

        def attempt() -> str:
            with path.open("rb") as file:

                def pieces() -> Iterator[bytes]:
                    while piece := file.read(part):
                        if stop.is_set():
                            raise Stopped(f"the upload of {self._name(key)} was stopped")
                        yield piece
                        progress(len(piece))

                raw = self._root.slow_raw or self._raw
                return _tag(obstore.put(raw, target, pieces(), use_multipart=True, chunk_size=part, max_concurrency=4))

        etag = self._do("write", key, attempt, once=True)
        if (stored := self.head(key).size) != size:
            raise Changed(f"{self._name(key)} has {stored} bytes, not {size}: it was changed while it was sent", retry=True)
        return etag

    def forget(self, journal: Path) -> None:
        """Abort the upload that is recorded in a journal, if any, and remove the journal."""
        if (note := multipart.read_journal(journal)) and self._root.access:
            bucket, _, path = note["key"].partition("/")
            key = path.removeprefix(f"{self._prefix}/" if self._prefix else "")
            if (bucket, self._path(key)) == (self._root.bucket, path):
                self._multipart(key).abort(note["upload"])
        journal.unlink(missing_ok=True)

    def create(self, key: str, data: bytes) -> str:
        """Write an object that must not exist yet, and return its etag. The store must be `conditional`.

        Raises Exists, unless the existing object has the same content, since an earlier attempt may have written it.
        """
        try:
            return self.put(key, data, "create")
        except Exists:
            if etag := self._etag_if_same(key, data):
                return etag
            raise

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """Write an object if it is still the version `etag`, and return its new etag. The store must be `conditional`.

        Raises Changed if the object has changed or is gone, unless it already has the same content.
        """
        import obstore

        condition: Any = {"e_tag": etag}
        try:
            if self._root.scheme == "gs":  # GCS's conditions use the generation, which listings lack
                now = self._do("read", key, lambda: obstore.head(self._raw, self._path(key)))
                if _tag(now) != etag:
                    raise Changed(f"{self._name(key)} is no longer what it was")
                condition = {"version": now["version"]}
            return self.put(key, data, condition)
        except (Changed, Missing, Exists) as error:
            if same := self._etag_if_same(key, data):
                return same
            if isinstance(error, Changed):
                raise
            raise Changed(f"{self._name(key)} is gone") from error

    def _etag_if_same(self, key: str, data: bytes) -> str:
        with contextlib.suppress(Missing):
            content, entry = self.read(key)
            return entry.etag if content == data else ""
        return ""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Missing ones are ignored."""
        import obstore

        rest = iter(keys)
        while some := list(islice(rest, PAGE)):
            paths = [self._path(key) for key in some]
            try:
                self._do("delete", some[0], partial(obstore.delete, self._raw, paths))
            except Missing:  # some stores report missing objects
                for key, path in zip(some, paths, strict=True):
                    with contextlib.suppress(Missing):
                        self._do("delete", key, partial(obstore.delete, self._raw, path))
            if self._root.scheme == "file":
                self._tidy(paths)

    def _tidy(self, paths: list[str]) -> None:
        """Remove directories that have become empty, because object stores have no directories."""
        top = Path("/") / self._prefix
        for path in paths:
            for directory in (Path("/") / path).parents:
                if top not in directory.parents:
                    break
                try:
                    directory.rmdir()
                except OSError:
                    break

    def copy(self, key: str, to: str) -> None:
        """Have the server copy an object to another key of this store."""
        import obstore

        path, target = self._path(key), self._path(to)
        try:
            return self._do("copy", key, lambda: obstore.copy(self._raw, path, target))
        except StoreError as error:
            if self._root.access is None or isinstance(error, (Missing, NoBucket, Denied, Unreachable)):
                raise
        entry = self.head(key)  # the object may be too large for one request: S3 copies up to 5 GiB
        self._multipart(to).copied(path, entry.size, entry.etag)

    def conditional(self) -> bool:
        """Return whether this store supports conditional writes. The first call writes and deletes an object. Raises Denied."""
        if self._root.conditional is None:
            self._root.conditional = self._probe(f".outlast-probe-{uuid.uuid4().hex[:16]}")
        return self._root.conditional

    def _probe(self, key: str) -> bool:
        first = self.put(key, b"1")
        try:
            with contextlib.suppress(Exists):
                self.put(key, b"2", "create")
                return False
            if self.replace(key, b"3", self.head(key).etag) == first:
                return False
            with contextlib.suppress(Changed):
                self.replace(key, b"4", first)
                return False
            return True
        except StoreError as error:
            if error.retry or isinstance(error, Denied):
                raise
            return False  # the store does not support conditional requests
        finally:
            with contextlib.suppress(StoreError):
                self.delete([key])

    def _do(self, verb: str, key: str, attempt: Callable[[], T], *, once: bool = False) -> T:
        seconds = 0 if once else self._root.timeout_s
        return backoff.retried(attempt, partial(self._mistake, verb, key), seconds)

    def _multipart(self, key: str, stop: threading.Event | None = None) -> multipart.Upload:
        def do(verb: str, attempt: Callable[[], Any]) -> Any:
            return self._do(verb, key, attempt)

        assert self._root.access
        return multipart.Upload(self._root.access, self._root.bucket, self._path(key), do, stop or threading.Event())

    def _mistake(self, verb: str, key: str, error: Exception) -> StoreError:
        endpoint = self._root.access.endpoint if self._root.access else ""
        return error if isinstance(error, StoreError) else error_mapping.mistake(error, verb, self._name(key), endpoint=endpoint)

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            other = error.filename not in (None, str(path), path)  # the journal
            raise StoreError(f"{path} cannot be {f'sent: {error}' if other else f'read: {error.strerror}'}") from error

    def impossible(self, key: str) -> str:
        """Return the reason that `key` cannot be an object's name, or an empty string if it can."""
        return urls.impossible(key, "") or urls.impossible(self._whole(key), self._root.scheme)

    def _path(self, key: str) -> str:
        if wrong := self.impossible(key):
            raise StoreError(f"{self._name(key)!r} cannot be the name of an object: {wrong}; rename it")
        return self._whole(key)

    def _whole(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _entry(self, meta: Any) -> Entry:
        key = meta["path"][len(self._prefix) + 1 :] if self._prefix else meta["path"]
        return Entry(key, meta["size"], _tag(meta), meta["last_modified"].timestamp())


def _tag(meta: Any) -> str:
    """Return the etag in quotes, even if the server omits them."""
    etag = meta["e_tag"] or ""
    return etag if not etag or etag.endswith('"') else f'"{etag}"'


_memories: dict[str, _Root] = {}
_memories_lock = threading.Lock()


def open_(url: str, *, timeout_s: float | None = None) -> Store:
    """Open a store: `s3://bucket/prefix`, `gs://`, `az://container/prefix`, `file:///directory` or `memory://name`.

    Credentials come from the environment, in each store's standard way. No request is sent. `timeout_s` limits retries; the
    default is OUTLAST_STORE_TIMEOUT or 60 seconds. Raises StoreError if the URL is invalid or there are no credentials.
    """
    url = normalised(url)
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    timeout_s = backoff.timeout_from_environment() if timeout_s is None else timeout_s
    try:
        from obstore import store as obstores
    except ImportError as error:
        raise StoreError(f"{url}: stores need obstore; pip install 'outlast[store]'") from error
    if scheme == "memory":
        with _memories_lock:
            return Store(url, _memories.setdefault(bucket, _Root(scheme, bucket, obstores.MemoryStore())), prefix)
    if scheme == "file":
        return Store(url, _Root(scheme, "", obstores.LocalStore(), timeout_s=timeout_s), rest.strip("/"))
    s3.find_certificates(os.environ)
    stalled_s = min(STALLED_S, timeout_s / 2)
    access = s3.access(timeout_s=stalled_s) if scheme == "s3" else None
    kind: Any = {"s3": obstores.S3Store, "gs": obstores.GCSStore, "az": obstores.AzureStore}[scheme]
    options: dict[str, Any] = access.options(bucket) if access else {}
    options["retry_config"] = {
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=timeout_s / 2),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=8), "base": 2},
    }
    client = {
        "allow_http": access is not None and access.endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=min(10, stalled_s)),
        "timeout": timedelta(days=1),  # for the whole request, which may be slow
        "read_timeout": timedelta(seconds=stalled_s),  # for the next byte of the response
    }
    slow = {**client, "read_timeout": timedelta(seconds=SLOW_S)}
    try:
        raws = [kind(bucket, client_options=each, **options) for each in (client, slow)]
    except Exception as error:  # any wrong setting from the environment
        raise error_mapping.mistake(error, "open", url) from error
    return Store(url, _Root(scheme, bucket, raws[0], raws[1], access, timeout_s), prefix)
