"""Objects come back as they went in, from every kind of store, and what cannot be is said in one sentence."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from outlast.base.errors import Changed, Denied, Exists, Missing, NoBucket, Stopped, StoreError
from outlast.storage import store
from outlast.storage.store import client, multipart, s3, urls
from servers import KEY, PAGE, REGION, SECRET, Place

MIB = 1 << 20
NAMES = [
    "a b", "ü€漢/ñ", "e\u0301", "a#b", "#", "a%b", "a%20b", "%2F", "a+b", "a&b=c", "a?b", "q\"'b", ".leading", "..two", "...",
    "~t", "a\\b", "a*b", "<a>|b", "{x}^`[y]", "a=b/c:d;e,f@g!$(h)", " edge ", "x.", "deep/er/and/deeper", "ends#x", "#1 in front",
]  # fmt: skip


@pytest.fixture(params=["memory", "moto"])
def conditional(request: pytest.FixtureRequest) -> store.Store:
    """A place that knows conditional writes."""
    return store.open_(request.getfixturevalue("moto").url if request.param == "moto" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def file(tmp_path: Path, small_parts: None) -> Path:
    """A file of several parts."""
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(multipart.PART + 2 * MIB + 1))
    return path


def contents(place: store.Store, below: str = "") -> dict[str, bytes]:
    return {entry.key: place.get(entry.key) for entry in place.entries(below)}


def keys(place: store.Store, below: str = "") -> list[str]:
    return [entry.key for entry in place.entries(below)]


def refusal(attempt: Callable[[], object], kind: type[StoreError] = StoreError) -> str:
    """The sentence of an error that another attempt does not mend."""
    with pytest.raises(kind) as caught:
        attempt()
    assert not caught.value.retry
    return str(caught.value)


# Names


def test_every_name_comes_back(url: str) -> None:
    place = store.open_(f"{url}/some prefix%20/é#")
    for n, name in enumerate(NAMES):
        place.put(name, str(n).encode())
    assert contents(place) == {name: str(n).encode() for n, name in enumerate(NAMES)}
    assert keys(place) == sorted(NAMES, key=str.encode)
    assert place.names() == sorted({name.split("/")[0] for name in NAMES})
    for name in NAMES:
        assert place.head(name).key == name
        assert bytes(place.range(name, 0, 1)) == place.get(name)[:1]
        place.copy(name, "copies/" + name)
    assert set(keys(place.child("copies"))) == set(NAMES)
    place.delete(NAMES)
    assert set(keys(place)) == {"copies/" + name for name in NAMES}
    assert place.names() == ["copies"]
    place.delete(entry.key for entry in place.entries("copies"))
    assert keys(place) == []
    assert place.names() == []


@pytest.mark.parametrize(
    ("key", "scheme", "why"),
    [
        ("", "", "it is empty"),
        *((key, "", "a segment is empty") for key in ("/a", "a/", "a//b")),
        *((key, "", "a segment is `.` or `..`") for key in ("a/../b", "./a")),
        ("a\nb", "", "it has the control character '\\n'"),
        ("a\x7f", "", "it has the control character '\\x7f'"),
        ("\udcff", "", "it is not valid Unicode"),
        ("plot#1", "file", "file:// keeps names that end in # and digits"),
        ("x" * 256, "file", "a segment is longer than 255 bytes"),
        ("a\\b", "az", "Azure takes a backslash for a slash"),
        *(("p/" + "ü" * 512, scheme, "it has 1,026 bytes, and 1,024 are allowed") for scheme in ("s3", "gs", "az")),
        *((name, scheme, "") for name in (*NAMES, "plot#1") for scheme in ("s3", "gs")),
    ],
)  # fmt: skip
def test_what_cannot_be_a_name_is_said(key: str, scheme: str, why: str) -> None:
    found = urls.impossible(key, scheme)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_no_operation_takes_what_cannot_be_a_name(memory: store.Store) -> None:
    for attempt in (
        memory.head,
        memory.get,
        partial(memory.put, data=b""),
        partial(memory.copy, to="x"),
        partial(memory.copy, "x"),
    ):
        said = f"'{memory.url}/./a' cannot be the name of an object: a segment is `.` or `..`; rename it"
        assert refusal(partial(attempt, "./a")) == said


# URLs


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket//a/", "s3://bucket/a"),
        ("s3://bucket/./a/.//b///", "s3://bucket/a/b"),
        ("s3://bucket/a b/%20#?+", "s3://bucket/a b/%20#?+"),
        ("s3://My_Old.Bucket/x", "s3://My_Old.Bucket/x"),
        ("gs://b-1_c.d/x", "gs://b-1_c.d/x"),
        ("az://$root/x", "az://$root/x"),
        ("memory://any name/y", "memory://any name/y"),
        ("file:///a//b/../c/", "file:///a/c"),
        ("file:///", "file:///"),
        ("file://./runs", f"file://{os.getcwd()}/runs"),
        ("file://runs", f"file://{os.getcwd()}/runs"),
        ("file://../runs", f"file://{os.path.dirname(os.getcwd())}/runs"),
    ],
)
def test_urls_lose_what_has_no_meaning(url: str, expected: str) -> None:
    assert store.normalised(url) == expected
    assert store.normalised(expected) == expected


KNOWN = "s3://, gs://, az://, file://, memory://"
NO_BUCKET = "cannot be the name of a bucket; that is 3 to 63 of a-z, 0-9, `-` and `.`"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("", f"'' is no URL of a store; those begin with {KNOWN}"),
        ("s3:bucket/x", "s3:bucket/x is no URL of a store; write s3://bucket/x"),
        ("ftp://host/x", f"ftp://host/x: there is no store ftp:// here; use one of {KNOWN}"),
        ("S3://bucket", f"S3://bucket: there is no store S3:// here; use one of {KNOWN}"),
        ("s3:///a", "s3:///a names no bucket; write s3://bucket/prefix"),
        ("az:///a", "az:///a names no container; write az://container/prefix"),
        ("memory://", "memory:// names no name; write memory://name/prefix"),
        ("s3://b/x", f"s3://b/x: 'b' {NO_BUCKET}"),
        ("s3://user:key@host/x", f"s3://user:key@host/x: 'user:key@host' {NO_BUCKET}"),
        ("gs://Bucket", "gs://Bucket: 'Bucket' cannot be the name of a bucket; that is 3 to 63 of a-z, 0-9, `-`, `_` and `.`"),
        ("az://a--b", "az://a--b: 'a--b' cannot be the name of a container; that is 3 to 63 of a-z, 0-9 and single `-`"),
        ("s3://bucket/a/../b", "'s3://bucket/a/../b' cannot be a place in a store: a segment is `.` or `..`"),
        ("s3://bucket/a\n", "'s3://bucket/a\\n' cannot be a place in a store: it has the control character '\\n'"),
    ],
)  # fmt: skip
def test_urls_that_name_no_place_are_said(url: str, expected: str) -> None:
    assert refusal(lambda: store.open_(url)) == expected


def test_children_are_places(url: str) -> None:
    place = store.open_(f"{url}//runs/")
    assert place.url == f"{url}/runs"
    child = place.child("digits").child("logs/")
    assert child.url == f"{url}/runs/digits/logs"
    child.put("worker-0.log", b"hello")
    assert place.get("digits/logs/worker-0.log") == b"hello"
    assert keys(store.open_(f"{url}/runs/digits")) == ["logs/worker-0.log"]
    assert place.child("") is place


# Contents


def test_what_is_written_is_read(url: str) -> None:
    place, versions = store.open_(url), set()
    for data in (b"", b"x", bytearray(b"array"), memoryview(b"view" * 1000), os.urandom(3 * MIB)):
        versions.add(etag := place.put("x", data))
        expected = bytes(data)
        assert place.get("x") == expected
        content, entry = place.read("x")
        assert (content, entry.key, entry.size, entry.etag) == (expected, "x", len(expected), etag)
        assert place.head("x") == entry
        assert next(iter(place.entries())).etag == etag
    assert len(versions) == 5, "an etag changes with the content"


def test_a_range_is_exactly_that(url: str) -> None:
    place = store.open_(url)
    place.put("x", b"0123456789")
    for start, end in ((0, 10), (3, 7), (9, 10), (4, 4)):
        assert bytes(place.range("x", start, end)) == b"0123456789"[start:end]
    for start, end in ((5, 11), (10, 12), (30, 40)):
        with pytest.raises(Changed, match="has no such bytes") as caught:
            place.range("x", start, end)
        assert caught.value.retry
    with pytest.raises(Missing):
        place.range("y", 0, 1)


def test_what_is_missing_is_missing(url: str) -> None:
    place = store.open_(url)
    for attempt in (place.head, place.get, place.read, partial(place.copy, to="y")):
        assert refusal(partial(attempt, "no/thing"), Missing) == f"{url}/no/thing does not exist"
    place.delete(["no/thing", "nothing"])
    assert keys(place) == keys(place, "no/thing") == place.names() == place.names("no") == []


def test_a_listing_is_of_whole_segments(url: str) -> None:
    place = store.open_(url)
    for key in ("a/x", "a/y/z", "ab/c", "a.b", "b", *(["ab"] if url.startswith("memory") else [])):
        place.put(key, b"1")
    assert keys(place, "a") == ["a/x", "a/y/z"]
    assert keys(place.child("a")) == ["x", "y/z"]
    assert place.names("a") == ["x", "y"]
    assert place.names() == ["a", "a.b", "ab", "b"]


@pytest.mark.parametrize(
    "url", ["memory", "moto", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("file", "rclone"))], indirect=True
)
def test_long_listings_come_in_pages(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = store.open_(url)
    monkeypatch.setattr(client, "PAGE", PAGE)
    names = [f"d{n % 3}/{n:05}" for n in range(1_150 if url.startswith("s3://rclone") else 250)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: place.put(name, b"x"), names))
    assert keys(place) == sorted(names)
    assert len(place.names("d1")) == len(keys(place, "d1"))
    place.delete(names)
    assert keys(place) == []


def test_directories_that_consoles_make_are_no_objects_and_an_object_that_cannot_be_a_file_is_named(moto: Place) -> None:
    for key in ("p/", "p/dir/", "p/dir/x", "p/empty", "p/dirx"):
        moto.server.client.put_object(Bucket=moto.bucket, Key=key, Body=b"")
    place = store.open_(f"{moto.url}/p")
    assert keys(place) == ["dir/x", "dirx", "empty"]
    assert keys(store.open_(moto.url), "p/dir") == ["p/dir/x"]
    assert place.names() == ["dir", "dirx", "empty"]
    assert place.names("dir") == ["x"]
    moto.server.client.put_object(Bucket=moto.bucket, Key="out//log", Body=b"")
    assert "out//log" in refusal(lambda: keys(store.open_(moto.url)))


def test_a_local_store_leaves_no_empty_directories(tmp_path: Path) -> None:
    place = store.open_(f"file://{tmp_path}/out")
    place.put("a/b/c", b"1")
    place.put("a/d", b"1")
    place.delete(["a/b/c"])
    assert [path.name for path in (tmp_path / "out" / "a").iterdir()] == ["d"]
    place.delete(["a/d"])
    assert list((tmp_path / "out").iterdir()) == []


def test_a_local_store_says_what_the_disk_says(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refusal(lambda: store.open_(f"file://{tmp_path}/file").put("x", b""))
    assert "/file/x cannot be written: Not a directory" in said
    said = refusal(lambda: store.open_("file:///sys").put("x", b""), Denied)
    assert "/sys/x cannot be written: Permission denied" in said


# Conditions


def test_whether_writes_can_be_conditional_is_found_out(url: str, request: pytest.FixtureRequest) -> None:
    place = store.open_(f"{url}/runs")
    assert place.conditional() == (request.node.callspec.params["url"] in ("memory", "moto"))
    assert place.child("digits").conditional() == place.conditional()
    assert keys(store.open_(url)) == []


def test_what_exists_is_not_created(conditional: store.Store) -> None:
    etag = conditional.create("x", b"1")
    assert conditional.head("x").etag == etag
    assert refusal(lambda: conditional.create("x", b"2"), Exists) == f"{conditional.url}/x exists already"
    assert conditional.get("x") == b"1"


def test_only_the_version_that_is_known_is_replaced(conditional: store.Store) -> None:
    first = conditional.put("x", b"1")
    second = conditional.replace("x", b"2", first)
    assert conditional.get("x") == b"2"
    with pytest.raises(Changed):
        conditional.replace("x", b"3", first)
    conditional.delete(["x"])
    with pytest.raises(Changed):
        conditional.replace("x", b"3", second)
    with pytest.raises(Missing):
        conditional.head("x")


# Large files


@pytest.mark.usefixtures("small_parts")
def test_a_file_of_any_size_and_name_arrives_unless_it_is_stopped(url: str, tmp_path: Path) -> None:
    place, journal, file, stop = store.open_(url), tmp_path / "journal", tmp_path / "file", threading.Event()
    stop.set()
    sizes = (0, 1, multipart.SMALL, multipart.SMALL + 1, 2 * multipart.PART, multipart.PART + 2 * MIB + 1)
    for name, size in zip(("0", "1", "2", "dir/a b/ü#%+&?'\"", "%2F", "x"), sizes, strict=True):
        seen: list[int] = []
        file.write_bytes(os.urandom(size))
        if size > multipart.SMALL:
            with pytest.raises(Stopped):
                place.upload(file, name, journal=journal, stop=stop)
            assert name not in keys(place)
        etag = place.upload(file, name, journal=journal, progress=seen.append)
        assert place.read(name) == (file.read_bytes(), place.head(name))
        assert (place.head(name).etag, place.head(name).size, sum(seen)) == (etag, size, size)
        assert not journal.exists()


def test_a_file_that_cannot_be_read_is_said(memory: store.Store, tmp_path: Path) -> None:
    said = refusal(lambda: memory.upload(tmp_path / "gone", "x"))
    assert said == f"{tmp_path}/gone cannot be read: No such file or directory"


def test_a_file_that_changes_meanwhile_is_noticed(url: str, file: Path, tmp_path: Path) -> None:
    place = store.open_(url)

    def touch(_: int) -> None:
        with file.open("r+b") as other:
            other.write(os.urandom(8))

    with pytest.raises(Changed, match="changed while it was sent") as caught:
        place.upload(file, "x", journal=tmp_path / "journal", progress=touch)
    assert caught.value.retry
    assert not (tmp_path / "journal").exists()
    place.upload(file, "x", journal=tmp_path / "journal")
    assert place.get("x") == file.read_bytes()


@pytest.mark.parametrize("size", [multipart.SMALL + 1, 100 << 30, 150 << 30, 1 << 40, 5 << 40])
def test_parts_are_few_and_large_enough(size: int) -> None:
    part = multipart.part_size(size)
    assert part >= 8 * MIB
    assert part % MIB == 0
    assert -(-size // part) < 10_000
    assert part == multipart.PART or -(-size // part) > 9_000


# Who we are


@pytest.fixture
def nobody(rclone: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A bucket of a server that checks signatures, and no credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return rclone


def test_nobody_is_told_where_we_looked(nobody: Place) -> None:
    assert refusal(lambda: store.open_(nobody.url), Denied) == (
        "no credentials for S3: neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor a profile in ~/.aws, nor a web"
        " identity, nor the role of a pod, container or instance; AWS_SKIP_SIGNATURE=true reads public buckets"
    )


def test_a_profile_says_who_and_where(nobody: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = {REGION}\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\nservices = here\n"
        f"[services here]\ns3 =\n  endpoint_url = {nobody.server.endpoint}\n"
    )
    there = store.open_(nobody.url)
    there.put("x", b"1")
    assert there._root.access is not None
    client_of_botocore = there._root.access.client
    assert client_of_botocore.get_object(Bucket=nobody.bucket, Key="x")["Body"].read() == b"1"


def test_a_profile_that_is_not_there_is_said(nobody: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "lab")
    said = refusal(lambda: store.open_(nobody.url), Denied)
    assert "cannot be used: The config profile (lab) could not be found" in said


def test_a_bucket_that_does_not_exist_is_said(s3: Place, file: Path) -> None:
    place = store.open_("s3://no-such-bucket/runs")
    attempts: list[Callable[[], object]] = [
        lambda: keys(place), place.names, place.conditional, lambda: place.get("x"), lambda: place.put("x", b""),
        lambda: place.create("x", b""), lambda: place.delete(["x"]), lambda: place.upload(file, "x"),
        lambda: place.range("x", 0, 1),
    ]  # fmt: skip
    for attempt in attempts:
        assert refusal(attempt, NoBucket) == (
            f"there is no bucket s3://no-such-bucket at {s3.server.endpoint};"
            " create it, or correct its name, the region or the endpoint"
        )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AWS_ENDPOINT_URL", "minio:9000", "AWS_ENDPOINT_URL is minio:9000; it must begin with https:// (or http://)"),
        ("AWS_S3_ADDRESSING_STYLE", "dns", "AWS_S3_ADDRESSING_STYLE is dns; it must be path, virtual or auto"),
        *(
            ("OUTLAST_STORE_TIMEOUT", value, f"OUTLAST_STORE_TIMEOUT is {value}; it must be a number of seconds, above 0")
            for value in ("1m", "-1", "inf")
        ),
    ],
)
def test_wrong_settings_are_said(moto: Place, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv(name, value)
    assert refusal(lambda: store.open_(moto.url)) == said


def test_addresses_are_where_the_bucket_is() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "eu-west-1"}
    keys["AWS_EC2_METADATA_DISABLED"] = "true"

    def address(bucket: str, **more: str) -> tuple[object, object]:
        options = s3.access({**keys, **more}).options(bucket)
        return options["virtual_hosted_style_request"], options.get("aws_endpoint_url_s3")

    assert address("b") == (True, None)
    assert address("dotted.b") == (False, None)
    assert address("b", AWS_REGION="cn-north-1") == (True, "https://b.s3.cn-north-1.amazonaws.com.cn")
    assert address("b", AWS_ENDPOINT_URL="http://minio:9000/") == (False, "http://minio:9000")
    assert address("b", AWS_ENDPOINT_URL="https://all", AWS_ENDPOINT_URL_S3="https://s3") == (False, "https://s3")
    assert address("b", AWS_ENDPOINT_URL="https://h:1", AWS_S3_ADDRESSING_STYLE="virtual") == (True, "https://b.h:1")
    assert address("b", AWS_S3_ADDRESSING_STYLE="path") == (False, None)


def test_what_is_public_needs_no_credentials(moto: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    moto.server.client.put_object(Bucket=moto.bucket, Key="x", Body=b"1", ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    place = store.open_(moto.url)
    assert place.get("x") == b"1"


def test_without_its_libraries_a_store_says_what_to_install(nobody: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    assert refusal(lambda: store.open_(nobody.url), Denied) == (
        "no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; profiles and roles need botocore: pip install 'outlast[store]'"
    )
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert refusal(lambda: store.open_(nobody.url)) == f"{nobody.url}: stores need obstore; pip install 'outlast[store]'"


def test_what_the_environment_says_completely_needs_no_botocore(moto: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    place = store.open_(moto.url)
    place.put("x", b"1")
    assert place.get("x") == b"1"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("az://container", "az://container cannot be opened: no account for Azure; set AZURE_STORAGE_ACCOUNT_NAME"),
        ("gs://bucket", "gs://bucket cannot be opened: Generic GCS error: Unable to open service account file from /gone.json"),
    ],
)
def test_other_stores_say_what_they_lack(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/gone.json")
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    assert refusal(lambda: store.open_(url)).startswith(said)


def test_azure_knows_no_backslash() -> None:
    assert [name for name in NAMES if urls.impossible(name, "s3") or urls.impossible(name, "gs")] == []
    assert [name for name in NAMES if urls.impossible(name, "az")] == ["a\\b"]


def test_a_machine_without_certificates_uses_those_that_botocore_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(s3, "_CERTIFICATES", ("/nowhere",))
    s3.find_certificates(environ)
    assert environ["SSL_CERT_FILE"].endswith("botocore/cacert.pem")
    assert "BEGIN CERTIFICATE" in Path(environ["SSL_CERT_FILE"]).read_text()
    given = {"SSL_CERT_FILE": "/mine"}
    s3.find_certificates(given)
    assert given == {"SSL_CERT_FILE": "/mine"}
