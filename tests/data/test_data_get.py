"""`outlast data get`: a dataset is complete and right, or there is a sentence, and never half a dataset that looks whole."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outlast.base.errors import OutlastError, Stopped
from outlast.data import dataset_directory, named_datasets, obtain, stdlib_text
from packages import tar
from servers import Place
from web import Fault, Web


def got(name: str, directory: Path, archive: Path | None = None) -> bool:
    """Get a dataset; whether anything was written."""
    dataset = named_datasets.of_url(name) if named_datasets.is_url(name) else named_datasets.named(name)
    return obtain.get(dataset, directory, obtain.How(print, archive=archive))[1]


def refusal(name: str, directory: Path, archive: Path | None = None) -> str:
    """Get a dataset that cannot be had; the sentence. Nothing is left, here or beside the directory."""
    beside = set(directory.parent.iterdir())
    with pytest.raises(OutlastError) as caught:
        got(name, directory, archive)
    assert not directory.exists()
    assert set(directory.parent.iterdir()) == beside
    return str(caught.value)


def tree(directory: Path) -> dict[str, bytes]:
    """The files of a dataset by name."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != dataset_directory.MARKER)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


FILES = {"set/a.txt": b"a" * 10_000, "set/deep/b.bin": bytes(range(256)) * 300, "set/empty": b""}


def packed(kind: str, files: dict[str, bytes] = FILES) -> bytes:
    """An archive."""
    if kind == "zip":
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return out.getvalue()
    return compressed(kind.removeprefix("tar").removeprefix("."), tar(files, "w"))


def compressed(kind: str, content: bytes) -> bytes:
    if kind == "zst":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        return zstd.compress(content)
    return {"": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[kind](content)


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst", "zip"])
def test_an_archive_is_downloaded_checked_unpacked_and_marked(web: Web, tmp_path: Path, kind: str) -> None:
    content = packed(kind)
    url, checksum = web.put(f"set.{kind}", content), hashlib.sha256(content).hexdigest()
    assert got(f"{url}#sha256={checksum}", tmp_path / "to")
    assert tree(tmp_path / "to") == FILES
    found = dataset_directory.marker(tmp_path / "to")
    assert found == dataset_directory.Marker(url, url, checksum, True, 3, sum(map(len, FILES.values())), ("set",))
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [dataset_directory.MARKER, "set"]
    before = len(web.requests)
    assert not got(f"{url}#sha256={checksum}", tmp_path / "to")
    assert len(web.requests) == before, "what is complete costs no request"


@pytest.mark.parametrize("kind", ["", "gz", "bz2", "xz", "zst"])
def test_a_single_file_is_taken_as_it_is_or_decompressed(web: Web, tmp_path: Path, kind: str) -> None:
    url = web.put("corpus.txt" + f".{kind}" * bool(kind), compressed(kind, b"text\n" * 999))
    assert got(url, tmp_path / "to")
    assert tree(tmp_path / "to") == {"corpus.txt": b"text\n" * 999}
    found = dataset_directory.marker(tmp_path / "to")
    assert found is not None
    assert (found.checked, len(found.sha256)) == (False, 64)


def test_a_file_that_is_here_already_needs_no_server_and_is_checked_as_well(tmp_path: Path) -> None:
    archive = tmp_path / "downloaded (1)"
    archive.write_bytes(packed("tar.gz"))
    url, checksum = "https://example.org/set.tar.gz", hashlib.sha256(archive.read_bytes()).hexdigest()
    assert got(f"{url}#sha256={checksum}", tmp_path / "to", archive)
    assert tree(tmp_path / "to") == FILES
    assert archive.is_file()
    said = refusal(f"{url}#sha256={'0' * 64}", tmp_path / "other", archive)
    assert said.startswith(f"{archive} has the sha256 {checksum}, and must have 0000")
    assert refusal("cifar10", tmp_path / "other", archive).startswith(
        f"{archive} has the size {archive.stat().st_size}, and must have 170498071; it is not the file that is wanted"
    )
    assert "needs no download; leave out --from" in refusal("python-stdlib", tmp_path / "other", archive)


def test_several_files_make_one_dataset(tmp_path: Path) -> None:
    names = [remote.file for remote in named_datasets.named("kinetics700-2020").remotes]
    assert len(set(names)) == 6
    (tmp_path / "lists").mkdir()
    for name in names[:-1]:
        (tmp_path / "lists" / name).write_text(name)
    assert refusal("kinetics700-2020", tmp_path / "to", tmp_path / "lists").startswith(
        f"{tmp_path}/lists/k700_2020_test_path.txt does not exist; download https://s3.amazonaws.com/kinetics/700_2020/test/"
    )
    (tmp_path / "lists" / names[-1]).write_text(names[-1])
    assert got("kinetics700-2020", tmp_path / "to", tmp_path / "lists")
    assert tree(tmp_path / "to") == {name: name.encode() for name in names}


@pytest.mark.parametrize(
    ("kind", "content", "sentence"),
    [
        ("tar", packed("tar", {"../up": b"x"}), "holds '../up', a path outside of it; "),
        ("tar.gz", b"<html>not found</html>", "is no tar archive, or is damaged: "),
        ("tar.zst", packed("tar.zst")[:-20], "is no tar archive, or is damaged: "),
        ("tar.bz2", b"BZh9" + bytes(99), "is no tar archive, or is damaged: "),
        ("gz", b"text", "is not compressed as its name says, or is damaged: "),
    ],
)
def test_an_archive_that_may_not_be_unpacked_leaves_nothing(
    web: Web, tmp_path: Path, kind: str, content: bytes, sentence: str
) -> None:
    url = web.put(f"set.{kind}", content)
    found = refusal(url, tmp_path / "to")
    assert found.startswith(f"{url} {sentence}"), found
    web.put(f"set.{kind}", packed(kind) if kind != "gz" else gzip.compress(b"right"), etag='"2"')
    assert got(url, tmp_path / "to"), "once the server has a right one, the same command gets it"


@pytest.mark.parametrize("kind", ["tar.zst", "gz"])
def test_a_bomb_is_refused_by_what_it_unpacks_to(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(obtain, "MAX_BYTES", 1 << 20)
    zeros = bytes(3 << 20)
    url = web.put(f"bomb.{kind}", gzip.compress(zeros) if kind == "gz" else packed(kind, {"zeros": zeros}))
    assert refusal(url, tmp_path / "to").startswith(f"{url} holds more than 1.0 MiB or 20,000,000 entries, the limit here; ")


def test_what_was_downloaded_before_the_disk_was_full_is_used_again(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = web.put("set.tar", packed("tar"))

    def out_of_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(obtain.unpack, "extract", out_of_space)
        with pytest.raises(OutlastError, match=r"^the disk of .*/to is full; make room there and run the same command again"):
            got(url, tmp_path / "to")
    assert dataset_directory.incomplete(tmp_path / "to")
    before = len(web.requests)
    assert got(url, tmp_path / "to")
    assert len(web.requests) == before
    assert tree(tmp_path / "to") == FILES


def test_two_that_get_the_same_wait_for_each_other(web: Web, tmp_path: Path) -> None:
    url = web.put("set.tar", packed("tar"))
    web.fault = lambda request: Fault(rate=300_000)
    with ThreadPoolExecutor(3) as pool:
        written = list(pool.map(lambda _: got(url, tmp_path / "to"), range(3)))
    assert sorted(written) == [False, False, True]
    assert tree(tmp_path / "to") == FILES
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [dataset_directory.MARKER, "set"]


def test_an_archive_cannot_bring_a_marker_of_its_own(web: Web, tmp_path: Path) -> None:
    forged = dataset_directory.Marker("cifar10", "https://example.org").text().encode()
    url = web.put(
        "set.tar",
        packed("tar", {**FILES, dataset_directory.MARKER: forged, f"{dataset_directory.COMING}/name": b"x", "state.json": b"{}"}),
    )
    assert got(url, tmp_path / "to")
    assert tree(tmp_path / "to") == {**FILES, "state.json": b"{}"}
    found = dataset_directory.marker(tmp_path / "to")
    assert found is not None
    assert (found.name, found.entries) == (url, ("set", "state.json"))
    assert got(web.put("state.json", b"{}"), tmp_path / "other")


def test_another_version_of_a_dataset_is_not_taken_for_it(web: Web, tmp_path: Path) -> None:
    url = web.put("set.tar", packed("tar"))
    assert got(url, tmp_path / "to")
    with pytest.raises(OutlastError, match=rf"holds another version of {url}, with the SHA-256 [0-9a-f]{{64}}; choose another"):
        got(f"{url}#sha256={'0' * 64}", tmp_path / "to")


@pytest.mark.parametrize("pin", ["sha256=12", "md5=c58f30108f718f92721af3b95e74349a", "x"])
def test_a_checksum_that_is_none_is_refused(pin: str) -> None:
    with pytest.raises(OutlastError, match=rf"^#{pin} is no checksum; append #sha256= and the 64 digits that sha256sum prints"):
        named_datasets.of_url(f"https://example.org/x#{pin}")


def test_the_directory_of_a_url_is_no_other_directory() -> None:
    names = {"set.tar.gz": "set", "...zip": "data", "..tar": "data", ".gz": "data", "%2e%2e": "data", "a%2Fb.zip": "a_b"}
    assert {name: named_datasets.of_url(f"https://host/{name}").directory for name in names} == names


def test_the_registry_is_sorted_and_every_url_is_one() -> None:
    assert list(named_datasets.NAMES) == sorted(named_datasets.NAMES)
    for name in named_datasets.NAMES:
        dataset = named_datasets.named(name)
        assert bool(dataset.module) != bool(dataset.remotes)
        assert all(remote.file and remote.shown == remote.url for remote in dataset.remotes)
    assert named_datasets.of_url("https://h/a/corpus.tar.zst?x=1").directory == "corpus"


def test_the_standard_library_is_the_same_text_each_time_without_tests_and_packages(tmp_path: Path) -> None:
    assert got("python-stdlib", tmp_path / "a")
    stdlib_text.write(tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    names = {path.relative_to(tmp_path / "a").as_posix() for path in (tmp_path / "a").rglob("*.*")}
    assert {"argparse.py", "json/decoder.py"} < names
    assert not {name for name in names if name.startswith(("test/", "site-packages/", "_sysconfigdata_"))}
    assert {path.suffix for path in (tmp_path / "a").rglob("*") if path.is_file()} == {".py", ".json"}
    found = dataset_directory.marker(tmp_path / "a")
    assert found is not None
    assert (found.name, found.files, found.source) == ("python-stdlib", len(names) - 1, f"Python {sys.version.split()[0]}")


def test_a_dataset_without_its_marker_or_one_of_its_files_is_completed(web: Web, tmp_path: Path) -> None:
    url = web.put("set.tar", packed("tar"))
    assert got(url, tmp_path)
    shutil.rmtree(tmp_path / "set")
    assert got(url, tmp_path)
    assert tree(tmp_path) == FILES
    (tmp_path / dataset_directory.MARKER).unlink()
    (tmp_path / "set" / "a.txt").unlink()
    (tmp_path / dataset_directory.COMING).mkdir()
    assert dataset_directory.incomplete(tmp_path)
    assert got(url, tmp_path)
    assert tree(tmp_path) == FILES
    assert not dataset_directory.incomplete(tmp_path)


def test_a_dataset_is_not_complete_while_its_files_are_replaced(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = web.put("set.tar", packed("tar", {"a/x": b"x", "b/y": b"y"}))
    assert got(url, tmp_path)
    shutil.rmtree(tmp_path / "a")
    removed = dataset_directory._removed

    def killed(path: Path) -> None:
        removed(path)
        if path == tmp_path / "b":
            path.mkdir()  # half of what was there
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(dataset_directory, "_removed", killed)
        with pytest.raises(KeyboardInterrupt):
            got(url, tmp_path)
    assert dataset_directory.marker(tmp_path) is None
    assert dataset_directory.incomplete(tmp_path)
    assert got(url, tmp_path)
    assert tree(tmp_path) == {"a/x": b"x", "b/y": b"y"}


@pytest.mark.parametrize("kind", ["tar.gz", "zip", "gz"])
def test_unpacking_can_be_stopped_and_the_download_is_kept(web: Web, tmp_path: Path, kind: str) -> None:
    content = gzip.compress(bytes(100)) if kind == "gz" else packed(kind)
    url = web.put(f"set.{kind}", content)
    stop = threading.Event()

    def say(sentence: str) -> None:
        if sentence.startswith("unpacking"):
            stop.set()

    with pytest.raises(Stopped):
        obtain.get(named_datasets.of_url(url), tmp_path, obtain.How(say, stop=stop))
    assert dataset_directory.incomplete(tmp_path)
    asked = len(web.requests)
    assert got(url, tmp_path)
    assert len(web.requests) == asked


def test_a_directory_with_other_files_or_another_dataset_is_refused(tmp_path: Path) -> None:
    mine, there, coming = tmp_path / "mine", tmp_path / "there", tmp_path / "begun" / dataset_directory.COMING
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    there.mkdir()
    (there / dataset_directory.MARKER).write_text(dataset_directory.Marker("cifar10", "https://x").text())
    coming.mkdir(parents=True)
    (coming / "name").write_text("cifar10")
    for place, reason in (
        (mine, r"holds other files \(thesis.tex\); choose a new or an empty directory"),
        (there, "there holds cifar10; choose another place for python-stdlib"),
        (coming.parent, "begun holds a part of cifar10; complete that with the same command as before"),
        (mine / "thesis.tex", "thesis.tex is a file; choose a directory"),
        (Path("/proc/nothing"), "cannot write python-stdlib to /proc/nothing: .*; correct that, or choose another"),
    ):
        with pytest.raises(OutlastError, match=reason):
            got("python-stdlib", place)
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]


def test_getting_and_reading_import_no_torch() -> None:
    code = (
        "import sys; from outlast.data import obtain, stdlib_text; print({'torch', 'numpy', 'sklearn'} & set(sys.modules))\n"
        "from outlast.data import cifar, digits, shard_format\n"
        "print({'torch', 'sklearn', 'safetensors', 'tokenizers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n" * 2


# As a process

MANY = {f"set/{i:03}.bin": random.Random(i).randbytes(5_000) for i in range(300)}


ARCHIVE = tar(MANY)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the command in a directory of its own."""

    def start(*words: str | Path) -> subprocess.Popen[str]:
        environ = {**os.environ, "OUTLAST_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "outlast", "data", "get", *map(str, words)]
        return subprocess.Popen(command, env=environ, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def looks_whole(directory: Path) -> bool:
    """Whether somebody who looks for the marker or for the files would take it for complete."""
    return (directory / dataset_directory.MARKER).exists()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_download_that_was_killed_or_interrupted_goes_on_where_it_was(
    web: Web, start: Start, tmp_path: Path, by: signal.Signals
) -> None:
    url = f"{web.put('set.tar.gz', ARCHIVE)}#sha256={hashlib.sha256(ARCHIVE).hexdigest()}"
    web.fault = lambda request: Fault(rate=100_000)
    process = start(url, "--to", "to")
    content = tmp_path / "to" / dataset_directory.COMING / "0" / "content"
    while not (content.exists() and content.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(by)
    code, _, err = ended(process)
    if by == signal.SIGINT:
        assert code == 130
        assert err.endswith("stopped; the same command goes on from here\n")
    assert dataset_directory.incomplete(tmp_path / "to")
    web.fault = lambda request: None
    code, out, err = ended(start(url, "--to", "to"))
    assert (code, out) == (0, f"got {url.partition('#')[0]}: 300 files, 1.4 MiB in to\n"), err
    assert "outlast | going on with " in err
    assert tree(tmp_path / "to") == MANY
    assert web.requests[-1].range
    assert web.requests[-1].range[0] > 0


def test_a_dataset_goes_to_a_store_with_its_marker_last(
    web: Web, outlast: Callable[..., tuple[int, str, str]], rclone: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path / "cache"))
    url = web.put("set.tar.gz", tar({"set/a.txt": b"a", "set/b.txt": b"b"}))
    code, out, err = outlast("data", "get", url, "--to", f"{rclone.url}/set")
    assert (code, out) == (0, f"got {url}: 2 files, 2 B in {rclone.url}/set\n"), err
    assert "the download was not compared with any checksum; for a comparison, append #sha256=" in err
    there = tree(rclone.directory / "set")
    assert {name: content for name, content in there.items() if not name.startswith(".")} == {
        "set/a.txt": b"a",
        "set/b.txt": b"b",
    }
    assert dataset_directory.COMING not in there
    assert list((tmp_path / "cache" / "get").iterdir()) == [], "nothing stays on this machine"
    before = len(web.requests)
    assert outlast("data", "get", url, "--to", f"{rclone.url}/set")[1].startswith("already there: ")
    assert len(web.requests) == before


@pytest.mark.slow
@pytest.mark.parametrize("target", ["to", "store"])
def test_killed_at_random_moments_and_run_again_it_is_complete(
    web: Web, start: Start, rclone: Place, tmp_path: Path, target: str
) -> None:
    url = f"{web.put('set.tar.gz', ARCHIVE)}#sha256={hashlib.sha256(ARCHIVE).hexdigest()}"
    web.fault = lambda request: Fault(rate=2_000_000)
    chance = random.Random(int(os.environ.get("SEED", "0")))
    for attempt in range(20):
        to, directory = (f"{rclone.url}/{attempt}", rclone.directory / f"{attempt}") if target == "store" else (f"to-{attempt}", tmp_path / f"to-{attempt}")  # fmt: skip  # noqa: E501
        for _ in range(2):
            process = start(url, "--to", to)
            time.sleep(chance.uniform(0.1, 2.5))
            process.kill()
            process.communicate()
            if looks_whole(directory):
                assert {k: v for k, v in tree(directory).items() if k in MANY} == MANY
        code, _, err = ended(start(url, "--to", to))
        assert code == 0, err
        assert {k: v for k, v in tree(directory).items() if k in MANY} == MANY
        assert looks_whole(directory)
        if target == "to":
            assert sorted(path.name for path in directory.iterdir()) == [dataset_directory.MARKER, "set"]
