"""Runs multipart uploads to S3, and resumes them if the process was killed. Used by `store.Store.upload`.

Before the first part is sent, a journal records the upload: {key, upload, size, mtime_ns, inode, part}. If the file is unchanged,
a later call with the same journal sends only the missing parts; otherwise it aborts the upload and starts another. `etag` is
added to the journal once all parts have arrived, to recognise a completed upload whose response was lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outlast.base import files
from outlast.base.errors import Changed, Missing, Stopped, StoreError
from outlast.storage.store.s3 import Access

SMALL = 8 << 20
"""Maximum size of a file sent in one request, in bytes."""
PART = 16 << 20
"""Bytes per part. Parts are larger if a file would otherwise need more than MAX_PARTS of them."""
MAX_PARTS = 9_500  # S3 allows 10,000
AT_ONCE = 8
COPIED = 1 << 30
PIECE = 256 << 10
"""Number of bytes read and sent at a time, which a slow network must be able to send within one timeout."""
_ENCRYPTION = {
    "ServerSideEncryption": "AWS_SERVER_SIDE_ENCRYPTION",
    "SSEKMSKeyId": "AWS_SSE_KMS_KEY_ID",
    "BucketKeyEnabled": "AWS_SSE_BUCKET_KEY_ENABLED",
}


def part_size(size: int) -> int:
    """Return the bytes per part of a file, in whole MiB."""
    return max(PART, -(-size // (MAX_PARTS << 20)) << 20)


def read_journal(journal: Path | None) -> dict[str, Any] | None:
    """Return the upload in a journal, or None if the journal is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(journal.read_text()) if journal else None
        if isinstance(note, dict) and {"key", "upload", "size", "mtime_ns", "inode", "part"} <= note.keys():
            return note
    return None


class Slice:
    """A range of an open file, as the body of a request. `stop` cancels the request."""

    def __init__(self, file: int, start: int, length: int, stop: threading.Event) -> None:
        self._file, self._start, self._length, self._stop, self._at = file, start, length, stop, 0

    def read(self, _: int = -1) -> bytes:
        """Read up to PIECE bytes, whatever size is requested."""
        if self._stop.is_set():
            raise Stopped("the upload was stopped")
        size = min(PIECE, self._length - self._at)
        data = os.pread(self._file, size, self._start + self._at) if size else b""
        if len(data) != size:
            raise Changed("the file became shorter while it was sent", retry=True)
        self._at += size
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def __len__(self) -> int:
        return self._length


@dataclass(frozen=True)
class Upload:
    """Multipart uploads to one object."""

    access: Access
    bucket: str
    key: str
    do: Callable[[str, Callable[[], Any]], Any]
    """Runs a request with retries and error mapping. The first argument names the request in messages, such as `write`."""
    stop: threading.Event

    def send(self, path: Path, journal: Path | None, progress: Callable[[int], None]) -> str:
        """Send a file, or its missing parts, and return the object's etag. Raises StoreError, Stopped, OSError, and Changed."""
        reported = 0
        for again in (False, True):
            arrived = 0

            def report(count: int) -> None:
                nonlocal reported, arrived
                arrived += count
                progress(max(0, arrived - reported))
                reported = max(reported, arrived)

            try:
                return self._send(path, journal, report)
            except StoreError as error:
                if again or type(error) is not StoreError:
                    raise
                # Some servers (rclone) cannot receive an incomplete part again, so start over.
                if note := read_journal(journal):
                    self.abort(note["upload"])
                self._end(journal)
        raise AssertionError

    def _send(self, path: Path, journal: Path | None, progress: Callable[[int], None]) -> str:
        with path.open("rb") as file:
            identity = _identity(os.fstat(file.fileno()))
            if not identity["size"]:
                raise Changed(f"{path} was emptied before it was sent", retry=True)
            note, arrived = self._resumable(identity, read_journal(journal))
            if note and arrived is None and (etag := self._completed(note)):
                progress(identity["size"])
                self._end(journal)
                return etag
            if note is None or arrived is None:
                note, arrived = self._begun(identity), {}
                if journal:
                    files.replace(journal, json.dumps(note))
            try:
                etags = self._parts(file.fileno(), note, arrived, progress)
                if _identity(os.fstat(file.fileno())) != identity or _identity(path.stat()) != identity:
                    raise Changed(f"{path} changed while it was sent", retry=True)
                note["etag"] = _etag(etags)
                if journal:
                    files.replace(journal, json.dumps(note))
                etag = self._complete(note, etags)
            except BaseException as error:
                if journal is None or isinstance(error, Changed):
                    with contextlib.suppress(StoreError):
                        self.abort(note["upload"])
                    self._end(journal)
                raise
        self._end(journal)
        return etag

    def abort(self, upload: str) -> None:
        """Abort an upload, and delete its parts in the store."""
        with contextlib.suppress(Missing):
            self.do("write", lambda: self._request("abort_multipart_upload", UploadId=upload))

    def copied(self, source: str, size: int, etag: str) -> None:
        """Have the server copy an object that is too large for one copy request."""
        note = self._begun({"size": size})
        try:
            etags = []
            for number, start in enumerate(range(0, size, COPIED), 1):
                arguments = {
                    "CopySource": {"Bucket": self.bucket, "Key": source},
                    "CopySourceIfMatch": etag,
                    "CopySourceRange": f"bytes={start}-{min(size, start + COPIED) - 1}",
                    "PartNumber": number,
                    "UploadId": note["upload"],
                }
                response = self.do("copy", partial(self._request, "upload_part_copy", **arguments))
                if not response.get("CopyPartResult", {}).get("ETag"):
                    raise StoreError(f"the server cannot copy parts of {source}")
                etags.append(response["CopyPartResult"]["ETag"])
            note["etag"] = _etag(etags)
            self._complete(note, etags)
        except BaseException:
            with contextlib.suppress(StoreError):
                self.abort(note["upload"])
            raise

    def _request(self, operation: str, **arguments: Any) -> Any:
        return getattr(self.access.client, operation)(Bucket=self.bucket, Key=self.key, **arguments)

    def _resumable(
        self, identity: dict[str, int], note: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, dict[int, tuple[str, int]] | None]:
        """Return the upload in the journal `note`, and its parts that have arrived.

        The parts are None if the store no longer has the upload. Both are None if there is no journal for this object, or if the
        file has changed, in which case the upload is aborted.
        """
        if note is None or note["key"] != f"{self.bucket}/{self.key}":
            return None, None
        if identity.items() <= note.items():
            return note, self._arrived(note["upload"])
        self.abort(note["upload"])
        return None, None

    def _begun(self, identity: dict[str, int]) -> dict[str, Any]:
        encryption: dict[str, Any] = {name: os.environ[env] for name, env in _ENCRYPTION.items() if os.environ.get(env)}
        if "BucketKeyEnabled" in encryption:
            encryption["BucketKeyEnabled"] = encryption["BucketKeyEnabled"].lower() in ("1", "true")
        upload = self.do("write", lambda: self._request("create_multipart_upload", **encryption))["UploadId"]
        return {"key": f"{self.bucket}/{self.key}", "upload": upload, **identity, "part": part_size(identity["size"])}

    def _arrived(self, upload: str) -> dict[int, tuple[str, int]] | None:
        arrived: dict[int, tuple[str, int]] = {}
        marker = 0

        def page() -> Any:
            return self._request("list_parts", UploadId=upload, PartNumberMarker=marker)

        while True:
            try:
                listing = self.do("write", page)
            except Missing:
                return None
            arrived.update({part["PartNumber"]: (part["ETag"], part["Size"]) for part in listing.get("Parts", ())})
            if not listing.get("IsTruncated") or (following := int(listing.get("NextPartNumberMarker") or 0)) <= marker:
                return arrived
            marker = following

    def _parts(
        self, file: int, note: Mapping[str, Any], arrived: Mapping[int, tuple[str, int]], progress: Callable[[int], None]
    ) -> list[str]:
        size, part = note["size"], note["part"]
        lengths = {number: min(part, size - start) for number, start in enumerate(range(0, size, part), 1)}
        etags = {number: arrived[number][0] for number, length in lengths.items() if arrived.get(number, ("", -1))[1] == length}
        progress(sum(lengths[number] for number in etags))
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in lengths.keys() - etags.keys():
            waiting.put(number)
        done: queue.SimpleQueue[tuple[int, str] | BaseException] = queue.SimpleQueue()
        enough = threading.Event()

        def work(own: int) -> None:
            try:
                while not enough.is_set():
                    number = waiting.get_nowait()

                    def request(number: int = number) -> Any:
                        body = Slice(own, (number - 1) * part, lengths[number], enough)
                        return self._request("upload_part", PartNumber=number, UploadId=note["upload"], Body=body)

                    done.put((number, self.do("write", request)["ETag"]))
            except queue.Empty:
                pass
            except BaseException as error:
                done.put(error)
            finally:
                os.close(own)

        threads: list[threading.Thread] = []
        try:
            for _ in range(min(AT_ONCE, waiting.qsize())):
                # A daemon thread with a separate descriptor, because it may still be stalled when this process or call ends.
                threads.append(threading.Thread(target=work, args=(os.dup(file),), name=f"part of {self.key}", daemon=True))
                threads[-1].start()
            while len(etags) < len(lengths):
                if self.stop.is_set():
                    raise Stopped(f"the upload of {self.key} was stopped")
                with contextlib.suppress(queue.Empty):
                    result = done.get(timeout=0.1)
                    if isinstance(result, BaseException):
                        raise result
                    number, etags[number] = result
                    progress(lengths[number])
        finally:
            enough.set()
            deadline = time.monotonic() + (0 if self.stop.is_set() else 5)
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return [etags[number] for number in sorted(etags)]

    def _complete(self, note: Mapping[str, Any], etags: list[str]) -> str:
        parts = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]}
        try:
            self.do("write", lambda: self._request("complete_multipart_upload", UploadId=note["upload"], MultipartUpload=parts))
        except Missing:  # an attempt whose response was lost may have completed the upload
            if etag := self._completed(note):
                return etag
            raise Changed(f"the store no longer has the upload of {self.key}", retry=True) from None
        head = self.do("read", lambda: self._request("head_object"))
        if head["ContentLength"] != note["size"]:
            raise Changed(f"{self.key} has {head['ContentLength']} bytes in the store, not {note['size']}", retry=True)
        return str(head["ETag"])

    def _completed(self, note: Mapping[str, Any]) -> str:
        """Return the object's etag if this upload created the object, otherwise an empty string."""
        with contextlib.suppress(Missing):
            head = self.do("read", lambda: self._request("head_object"))
            if note.get("etag") and head["ContentLength"] == note["size"] and head["ETag"].strip('"') == note["etag"]:
                return str(head["ETag"])
        return ""

    def _end(self, journal: Path | None) -> None:
        if journal:
            journal.unlink(missing_ok=True)


def _identity(stat: os.stat_result) -> dict[str, int]:
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}


def _etag(parts: list[str]) -> str:
    """Return the etag of an object made of these parts; empty if their etags are not MD5 sums, as with KMS encryption."""
    with contextlib.suppress(ValueError):
        whole = hashlib.md5(b"".join(bytes.fromhex(etag.strip('"')) for etag in parts), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(parts)}"
    return ""
