"""On a bad day, what is done is right, what is not done is said, and neither takes for ever: real servers behind a proxy with
faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import faults
from faults import Proxy, Request, always, first
from outlast.base.errors import Changed, Denied, Exists, NoBucket, StoreError, Unreachable
from outlast.storage import store
from outlast.storage.store import client, error_mapping, multipart
from servers import PAGE

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("small_parts")
OLD, NEW = os.urandom(100_000), os.urandom(120_000)
Operation = Callable[[store.Store, Path], object]


def uploaded(place: store.Store, file: Path) -> bool:
    place.upload(file, "large")
    return place.get("large") == file.read_bytes()


def created(place: store.Store, _: Path) -> bytes:
    etag = place.create("new", NEW)
    assert place.head("new").etag == etag
    return place.get("new")


def replaced(place: store.Store, _: Path) -> bytes:
    place.replace("b/x", NEW, place.head("b/x").etag)
    return place.get("b/x")


def written(place: store.Store, _: Path) -> bytes:
    place.put("new", NEW)
    return place.get("new")


def copied(place: store.Store, _: Path) -> bytes:
    place.copy("b/x", "new")
    return place.get("new")


def deleted(place: store.Store, _: Path) -> list[str]:
    place.delete(["a", "gone", "b/x"])
    return [entry.key for entry in place.entries()]


READ, LIST, WRITE = "b/x cannot be read", " cannot be listed", "new cannot be written"
OPERATIONS: dict[str, tuple[Operation, object, str]] = {
    "head": (lambda place, _: place.head("b/x").size, len(OLD), READ),
    "get": (lambda place, _: place.get("b/x"), OLD, READ),
    "range": (lambda place, _: bytes(place.range("b/x", 10, 90_000)), OLD[10:90_000], READ),
    "entries": (lambda place, _: [entry.key for entry in place.entries()], ["a", "b/x"], LIST),
    "names": (lambda place, _: place.names(), ["a", "b"], LIST),
    "put": (written, NEW, WRITE),
    "create": (created, NEW, WRITE),
    "replace": (replaced, NEW, READ),  # of its first step here
    "copy": (copied, OLD, "b/x cannot be copied"),
    "delete": (deleted, [], "a cannot be deleted"),
    "upload": (uploaded, True, "large cannot be written"),
}
"""What is done, what it returns, and how an error says that it could not be done."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of two parts."""
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(multipart.PART + MIB))
    return path


def filled(proxy: Proxy, timeout_s: float = 20) -> store.Store:
    """A store with two objects, and no faults or counts so far; it is filled without hurry."""
    place = store.open_(f"{proxy.url}/p", timeout_s=60)
    place.put("a", b"")
    place.put("b/x", OLD)
    proxy.forget()
    return store.open_(place.url, timeout_s=timeout_s)


@pytest.fixture
def place(moto_proxy: Proxy) -> store.Store:
    return filled(moto_proxy)


def bodies(proxy: Proxy, path: str = "partNumber") -> int:
    """How many parts were sent."""
    return sum(request.method == "PUT" and path in request.path for request in proxy.requests)


# What passes


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("get", fault) for fault in (faults.unavailable, faults.broken, faults.reset, faults.lost)),
        *((name, faults.lost) for name in ("put", "create", "replace", "copy", "delete", "upload")),
        ("upload", faults.unavailable),
    ],
)
def test_what_passes_is_not_even_noticed(
    moto_proxy: Proxy, place: store.Store, file: Path, name: str, fault: faults.Fault
) -> None:
    operation, expected, _ = OPERATIONS[name]
    moto_proxy.fault = first(2, fault)
    assert operation(place, file) == expected
    assert len(moto_proxy.requests) <= 14


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, faults.truncated) for name in ("get", "range", "entries", "names", "upload")),
        *(("get", fault) for fault in (faults.stalled, faults.hang)),
    ],
)
def test_half_an_answer_is_no_answer(moto_proxy: Proxy, file: Path, name: str, fault: faults.Fault) -> None:
    place = filled(moto_proxy, timeout_s=20 if fault is faults.truncated else 4)  # 2 s without a byte are too long, then
    operation, expected, _ = OPERATIONS[name]
    moto_proxy.fault = first(1, fault)
    assert operation(place, file) == expected


def test_a_conflict_of_writers_is_tried_again(moto_proxy: Proxy, place: store.Store) -> None:
    for write in (replaced, created):
        moto_proxy.fault = first(2, faults.refused("ConditionalRequestConflict", 409), method="PUT")
        assert write(place, Path()) == NEW


def test_a_listing_goes_on_where_it_was(moto_proxy: Proxy, place: store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", PAGE)
    names = [f"many/{n:05}" for n in range(2 * PAGE + 20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: place.put(name, b""), names))
    seen = []
    moto_proxy.forget()
    for entry in place.entries("many"):
        seen.append(entry.key)
        if len(seen) == 10:
            moto_proxy.fault = first(1, faults.truncated)
        if len(seen) == PAGE + 10:
            assert len(moto_proxy.requests) == 3, "the second page came at the second attempt"
            moto_proxy.down()
            threading.Timer(0.5, moto_proxy.up).start()
    assert seen == names


# Writes whose answers are lost


def test_a_creation_that_another_makes_meanwhile_is_not(moto_proxy: Proxy, place: store.Store) -> None:
    other = store.open_(place.url)

    def overtaken(exchange: faults.Exchange) -> None:
        moto_proxy.fault = lambda _: None
        other.put("new", b"the other's")
        exchange.reset()

    moto_proxy.fault = first(1, overtaken, method="PUT")
    with pytest.raises(Exists):
        place.create("new", NEW)
    assert place.get("new") == b"the other's"


def test_a_replacement_whose_answer_is_lost_is_ours(moto_proxy: Proxy, place: store.Store) -> None:
    etag = place.head("b/x").etag
    moto_proxy.fault = first(1, faults.lost, method="PUT")
    assert place.replace("b/x", NEW, etag) == place.head("b/x").etag
    assert place.get("b/x") == NEW
    with pytest.raises(Changed):
        place.replace("b/x", b"another", etag)


# What does not pass


@pytest.mark.parametrize(
    ("name", "fault", "why"),
    [
        ("get", faults.unavailable, "is not well (HTTP 503: SlowDown: Please reduce your request rate)"),
        ("upload", faults.unavailable, "is not well (HTTP 503: SlowDown: Please reduce your request rate)"),
        ("get", faults.broken, "is not well (HTTP 500: InternalError: We encountered an internal error. Please try again)"),
        ("get", faults.reset, ": the connection was lost"),
        ("get", faults.hang, ": it does not answer in time"),
        ("get", None, ": the connection was refused"),
    ],
    ids=["unavailable", "unavailable-upload", "broken", "reset", "hang", "down"],
)
def test_what_lasts_is_said_after_a_while(moto_proxy: Proxy, file: Path, name: str, fault: faults.Fault | None, why: str) -> None:
    place = filled(moto_proxy, timeout_s=1)
    if fault:
        moto_proxy.fault = always(fault)
    else:
        moto_proxy.down()
    with pytest.raises(Unreachable) as caught:
        OPERATIONS[name][0](place, file)
    assert caught.value.retry
    for part in (f"{OPERATIONS[name][2]}:", place.url, why, moto_proxy.endpoint):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(moto_proxy.requests) < 40


REFUSED = [("AccessDenied", 403), ("InvalidAccessKeyId", 403), ("ExpiredToken", 400), ("RequestTimeTooSkewed", 403)]


@pytest.mark.parametrize(
    ("name", "code", "status"), [*((name, *REFUSED[0]) for name in OPERATIONS), *(("upload", *each) for each in REFUSED[1:])]
)
def test_a_refusal_quotes_the_store(moto_proxy: Proxy, place: store.Store, file: Path, name: str, code: str, status: int) -> None:
    moto_proxy.fault = always(faults.refused(code, status))
    with pytest.raises(Denied) as caught:
        OPERATIONS[name][0](place, file)
    assert not caught.value.retry
    assert f"{OPERATIONS[name][2]}: access is denied (HTTP {status}: {code}" in str(caught.value)
    assert len(moto_proxy.requests) <= 2


def test_a_bucket_in_another_region_is_said(moto_proxy: Proxy, place: store.Store) -> None:
    region = lambda exchange: exchange.refuse(400, "AuthorizationHeaderMalformed", "it is wrong", "<Region>eu-west-1</Region>")  # noqa: E731
    moto_proxy.fault = always(region)
    with pytest.raises(Denied, match=f"{moto_proxy.url} is in the region eu-west-1; set AWS_REGION to it"):
        place.get("a")


AZURE = """The answer: Error performing PUT http://127.0.0.1/box/x in 2ms - Server returned non-2xx status code: {status}: \
<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<Error>
  <Code>{code}</Code>
  <Message>The words.
RequestId:b9ac1655-ad59-49f7-8a96-c5351bcaf2b9
Time:2026-11-21T11:03:09.419Z</Message>
</Error>

Debug source:
"""


@pytest.mark.parametrize(
    ("kind", "status", "code", "expected", "said"),
    [
        ("AlreadyExists", "409 Conflict", "BlobAlreadyExists", Exists, "az://box/x exists already"),
        ("Precondition", "412 Precondition Failed", "ConditionNotMet", Changed, "az://box/x is no longer what it was"),
        ("Generic", "404 Not Found", "ContainerNotFound", NoBucket, "there is no container az://box; create it, or correct"),
        ("PermissionDenied", "403 Forbidden", "AuthorizationPermissionMismatch", Denied,
         "az://box/x cannot be written: access is denied (HTTP 403: AuthorizationPermissionMismatch: The words); correct"),
        ("Generic", "503 Service Unavailable", "ServerBusy", Unreachable,
         "az://box/x cannot be written: the store is not well (HTTP 503: ServerBusy: The words)"),
    ],
)  # fmt: skip
def test_azure_is_understood(kind: str, status: str, code: str, expected: type[StoreError], said: str) -> None:
    """These are the texts of obstore for the answers of Azurite, Azure's emulator."""
    import obstore.exceptions

    error = getattr(obstore.exceptions, f"{kind}Error")(AZURE.format(status=status, code=code))
    mistake = error_mapping.mistake(error, "write", "az://box/x")
    assert type(mistake) is expected
    assert str(mistake).startswith(said)


TOKEN = "Generic GCS error: Error performing token request: Error performing GET http://169.254.169.254/x in 2ms - {}"


@pytest.mark.parametrize(
    ("answer", "retry"),
    [("Server returned non-2xx status code: 404 Not Found: ", False), ("HTTP error: error sending request", True)],
)
def test_google_without_credentials_says_what_to_do(answer: str, retry: bool) -> None:
    import obstore.exceptions

    mistake = error_mapping.mistake(obstore.exceptions.GenericError(TOKEN.format(answer)), "read", "gs://bucket/x")
    assert (type(mistake), mistake.retry) == (Denied, retry)
    assert str(mistake).startswith("gs://bucket/x cannot be read: there are no usable credentials (GCS error: ")
    assert str(mistake).endswith("; set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login")


def test_a_store_that_knows_no_conditions_may_say_so(moto_proxy: Proxy) -> None:
    place = filled(moto_proxy, timeout_s=4)  # half of which obstore tries again
    moto_proxy.fault = lambda request: faults.refused("NotImplemented", 501) if "if-none-match" in request.headers else None
    assert place.conditional() is False
    assert [entry.key for entry in place.entries()] == ["a", "b/x"]


def test_a_place_where_nobody_may_write_is_found_out_in_time(moto_proxy: Proxy, place: store.Store) -> None:
    moto_proxy.fault = always(faults.denied, method="PUT")
    with pytest.raises(Denied, match="access is denied"):
        place.conditional()
    moto_proxy.fault = always(faults.unavailable)
    with pytest.raises(Unreachable):
        store.open_(place.url, timeout_s=1).conditional()


# Slow lines


def test_a_slow_answer_goes_on(moto_proxy: Proxy) -> None:
    place = filled(moto_proxy, timeout_s=1)  # 0.5 s without a byte are too long
    moto_proxy.fault = always(faults.slow(80_000))
    assert place.get("b/x") == OLD  # 1.25 s


# Uploads that are interrupted


def large(tmp_path: Path, parts: int = 6) -> Path:
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(parts * multipart.PART - 5))
    return path


def uploads(proxy: Proxy) -> list[str]:
    """Keys of what the server holds unfinished."""
    found = proxy.place.server.client.list_multipart_uploads(Bucket=proxy.place.bucket)
    return [each["Key"] for each in found.get("Uploads", ())]


@pytest.fixture(params=["moto", pytest.param("rclone", marks=pytest.mark.slow)])
def proxy(request: pytest.FixtureRequest) -> Proxy:
    """Each of the two servers, behind a proxy."""
    found: Proxy = request.getfixturevalue(f"{request.param}_proxy")
    return found


def begun(proxy: Proxy, path: Path, journal: Path | None) -> store.Store:
    """A store that has some parts of a file, and has refused another; from now on it takes all."""
    place = filled(proxy)
    proxy.fault = lambda request: faults.denied if "partNumber=4" in request.path else None
    with pytest.raises(Denied):
        place.upload(path, "x", journal=journal)
    assert any("partNumber=4" in request.path for request in proxy.requests)
    assert uploads(proxy) == ["p/x"] * (journal is not None), "without a journal nothing is left"
    proxy.fault = lambda _: None
    proxy.forget()
    return place


def unfinished(proxy: Proxy, journal: Path) -> dict[str, Any]:
    """How the server's client names the upload in a journal."""
    note = multipart.read_journal(journal)
    return {"Bucket": proxy.place.bucket, "Key": "p/x", "UploadId": note["upload"]}


def test_an_upload_that_failed_goes_on(proxy: Proxy, tmp_path: Path) -> None:
    path, journal = large(tmp_path), tmp_path / "journal"
    place = begun(proxy, path, journal)
    arrived = proxy.place.server.client.list_parts(**unfinished(proxy, journal)).get("Parts", ())  # type: ignore[union-attr]
    seen: list[int] = []
    place.upload(path, "x", journal=journal, progress=seen.append)
    assert bodies(proxy) == 6 - len(arrived)
    assert sum(seen) == path.stat().st_size
    assert place.get("x") == path.read_bytes()
    assert uploads(proxy) == []
    assert not journal.exists()


@pytest.mark.parametrize("changed", [True, False])
def test_an_upload_of_what_has_changed_or_that_the_store_has_forgotten_begins_anew(
    proxy: Proxy, tmp_path: Path, changed: bool
) -> None:
    path, journal = large(tmp_path), tmp_path / "journal"
    place = begun(proxy, path, journal)
    if changed:
        path.write_bytes(os.urandom(path.stat().st_size))
    else:
        proxy.place.server.client.abort_multipart_upload(**unfinished(proxy, journal))  # type: ignore[union-attr]
    place.upload(path, "x", journal=journal)
    assert bodies(proxy) == 6
    assert place.get("x") == path.read_bytes()
    assert uploads(proxy) == []


def test_a_journal_that_makes_no_sense_is_none(moto_proxy: Proxy, file: Path, tmp_path: Path) -> None:
    place, journal = filled(moto_proxy), tmp_path / "journal"
    for text in ("", "{", "[]", '{"key": "p/x"}', "\0"):
        journal.write_text(text)
        assert multipart.read_journal(journal) is None
    place.upload(file, "x", journal=journal)
    assert place.get("x") == file.read_bytes()


def test_a_completion_whose_answer_is_lost_is_recognised(
    moto_proxy: Proxy, place: store.Store, file: Path, tmp_path: Path
) -> None:
    moto_proxy.fault = first(1, faults.lost, method="POST", path="uploadId")
    place.upload(file, "x", journal=tmp_path / "journal")
    assert bodies(moto_proxy) == 2
    assert place.get("x") == file.read_bytes()


def test_a_completion_before_the_kill_is_recognised(moto_proxy: Proxy, file: Path, tmp_path: Path) -> None:
    place, journal, kept = filled(moto_proxy), tmp_path / "journal", b""

    def keep(request: Request) -> None:
        nonlocal kept
        if request.method == "HEAD":  # after the completion
            kept = journal.read_bytes()

    moto_proxy.fault = keep
    etag = place.upload(file, "x", journal=journal)
    journal.write_bytes(kept)
    moto_proxy.forget()
    assert place.upload(file, "x", journal=journal) == etag
    assert bodies(moto_proxy) == 0
    assert not journal.exists()


def test_a_forgotten_journal_leaves_nothing_in_the_store(proxy: Proxy, tmp_path: Path) -> None:
    path, journal = large(tmp_path), tmp_path / "journal"
    place = begun(proxy, path, journal)
    place.forget(journal)
    place.forget(journal)
    assert uploads(proxy) == []
    assert not journal.exists()
    begun(proxy, path, None)


def test_a_copy_too_large_for_one_request_is_made_of_parts(
    moto_proxy: Proxy, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rclone cannot copy parts, which is an error that says so."""
    monkeypatch.setattr(multipart, "COPIED", multipart.PART)
    place = filled(moto_proxy)
    place.upload(file, "x")
    moto_proxy.forget()
    moto_proxy.fault = lambda request: (
        faults.refused("InvalidRequest", 400) if "x-amz-copy-source" in request.headers and "?" not in request.path else None
    )
    place.copy("x", "y")
    assert place.get("y") == file.read_bytes()
    assert uploads(moto_proxy) == []


# Signals

HANGING = {
    "get": 'place.get("x")',
    "upload": 'place.upload(Path(sys.argv[2]), "x")',
    "thread": 'threading.Thread(target=place.get, args=("x",), daemon=True).start(); time.sleep(60)',
}


@pytest.mark.parametrize("what", HANGING)
def test_a_signal_ends_what_hangs(moto_proxy: Proxy, file: Path, what: str) -> None:
    asked = threading.Event()

    def hang(exchange: faults.Exchange) -> None:
        asked.set()
        faults.hang(exchange)

    moto_proxy.fault = always(hang)
    program = f"""
import sys, threading, time
from pathlib import Path
from outlast.storage import store
place = store.open_(sys.argv[1])
{HANGING[what]}
"""
    with subprocess.Popen([sys.executable, "-c", program, moto_proxy.url, file], stderr=subprocess.PIPE) as process:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)  # what hangs would do so for longer
    assert process.returncode == -signal.SIGINT
