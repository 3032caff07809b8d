"""Archives of code: what is in them arrives; what could do harm, or is damaged, is refused in one sentence."""

from __future__ import annotations

import gzip
import io
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.base.errors import OutlastError
from outlast.job.shipping import archives


def a_tar(path: Path, *members: tarfile.TarInfo | tuple[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
            else:
                archive.addfile(member)
    return path


def an_entry(name: str, kind: bytes = tarfile.REGTYPE, *, to: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, to, mode
    return info


def a_zip(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def a_zip_entry(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, (2024, 1, 2, 3, 4, 6))
    info.create_system, info.external_attr = 3, mode << 16
    return info


@pytest.fixture
def unpack(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Unpacks an archive; what is there then, by name: contents, and `-> target` for links."""

    def unpack(archive: Path) -> dict[str, str]:
        into = tmp_path / "into"
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        archives.extract(archive, into, name="code (x)")
        found = {}
        for path in sorted(into.rglob("*")):
            name = str(path.relative_to(into))
            if path.is_symlink():
                found[name] = f"-> {path.readlink()}"
            elif path.is_file():
                found[name] = path.read_text()
            else:
                found[f"{name}/"] = ""
        return found

    return unpack


@pytest.fixture
def refused(unpack: Callable[..., dict[str, str]], tmp_path: Path) -> Callable[..., str]:
    """Unpacks an archive that is refused; the sentence. Nothing may lie beside the directory afterwards."""

    def refused(archive: Path) -> str:
        before = {path.name for path in tmp_path.iterdir()} | {"into"}
        with pytest.raises(OutlastError) as caught:
            unpack(archive)
        assert {path.name for path in tmp_path.iterdir()} <= before
        return str(caught.value)

    return refused


@pytest.mark.parametrize(("name", "mode"), [("a.tar.gz", "w:gz"), ("a.tgz", "w:gz"), ("a.tar", "w"), ("zipped.tar", "w:gz")])
def test_a_tar_archive_arrives_whole(tmp_path: Path, unpack, name: str, mode: str):
    program = an_entry("./run.sh", mode=0o4777)
    archive = a_tar(
        tmp_path / name,
        an_entry("./", tarfile.DIRTYPE),
        ("./train.py", b"print()"),
        ("lib/deep/ä b#%.py", b"x"),
        program,
        an_entry("empty", tarfile.DIRTYPE),
        an_entry("same.py", tarfile.LNKTYPE, to="train.py"),
        an_entry("./train.py", tarfile.LNKTYPE, to="train.py"),  # as GNU tar writes a file that it is given twice
        an_entry("lib/link", tarfile.SYMTYPE, to="../train.py"),
        an_entry("here", tarfile.SYMTYPE, to="."),
        an_entry("dangling", tarfile.SYMTYPE, to="lib/nothing"),
        mode=mode,
    )
    assert unpack(archive) == {
        "dangling": "-> lib/nothing",
        "empty/": "",
        "here": "-> .",
        "lib/": "",
        "lib/deep/": "",
        "lib/deep/ä b#%.py": "x",
        "lib/link": "-> ../train.py",
        "run.sh": "",
        "same.py": "print()",
        "train.py": "print()",
    }
    into = tmp_path / "into"
    assert (into / "run.sh").stat().st_mode & 0o7777 == 0o755, "may be executed, but not as its owner"
    assert (into / "train.py").stat().st_mode & 0o7777 == 0o644
    assert (into / "train.py").stat().st_mtime == 0.0, "times are kept"


def test_a_zip_archive_arrives_whole(tmp_path: Path, unpack):
    archive = a_zip(
        tmp_path / "a.zip",
        ("train.py", b"print()"),
        (a_zip_entry("bin/run", 0o100755), b"#!"),
        (a_zip_entry("bin/link", 0o120777), b"../train.py"),
        ("empty/", b""),
    )
    assert unpack(archive) == {"bin/": "", "bin/link": "-> ../train.py", "bin/run": "#!", "empty/": "", "train.py": "print()"}
    assert (tmp_path / "into" / "bin" / "run").stat().st_mode & 0o777 == 0o755


def test_of_several_entries_with_one_name_the_last_counts(tmp_path: Path, unpack):
    link = an_entry("b", tarfile.SYMTYPE, to="a")
    archive = a_tar(tmp_path / "a.tar", ("a", b"1"), link, ("a", b"2"), ("b", b"3"), mode="w")
    assert unpack(archive) == {"a": "2", "b": "3"}


@pytest.mark.parametrize(
    ("build", "member", "what"),
    [
        (a_tar, ("/etc/passwd", b""), "'/etc/passwd', a path outside of it"),
        (a_tar, ("../up.py", b""), "'../up.py', a path outside of it"),
        (a_tar, ("a/../../up.py", b""), "'a/../../up.py', a path outside of it"),
        (a_tar, an_entry("l", tarfile.SYMTYPE, to="/etc"), "'l', a link to /etc, outside of it"),
        (a_tar, an_entry("a/l", tarfile.SYMTYPE, to="../../x"), "'a/l', a link to ../../x, outside of it"),
        (a_tar, an_entry("a/l", tarfile.SYMTYPE, to="../../into/x"), "'a/l', a link to ../../into/x, outside of it"),
        (a_tar, an_entry("l", tarfile.LNKTYPE, to="/etc/passwd"), "'/etc/passwd', a path outside of it"),
        (a_tar, an_entry("l", tarfile.LNKTYPE, to="nothing"), "'l', a link to nothing, which is no file of it"),
        (a_tar, an_entry("l", tarfile.LNKTYPE, to="."), "'l', a link to ., which is no file of it"),
        (a_tar, an_entry("null", tarfile.CHRTYPE), "'null', a device or pipe"),
        (a_tar, an_entry("pipe", tarfile.FIFOTYPE), "'pipe', a device or pipe"),
        (a_zip, (a_zip_entry("/etc/passwd", 0o100644), b""), "'/etc/passwd', a path outside of it"),
        (a_zip, (a_zip_entry("../up.py", 0o100644), b""), "'../up.py', a path outside of it"),
        (a_zip, (a_zip_entry("l", 0o120777), b"/etc"), "'l', a link to /etc, outside of it"),
        (a_zip, (a_zip_entry("dev", 0o020666), b""), "'dev', a device or pipe"),
    ],
)
def test_an_archive_that_reaches_outside_is_refused(tmp_path: Path, refused, build: Callable[..., Path], member, what: str):
    archive = build(tmp_path / ("a.tar.gz" if build is a_tar else "a.zip"), member)
    assert refused(archive) == f"code (x) holds {what}; an archive may hold only files, directories and links inside it"


def test_a_link_through_another_that_ends_outside_is_refused(tmp_path: Path, refused):
    archive = a_tar(
        tmp_path / "a.tar",
        an_entry("x/y/up", tarfile.SYMTYPE, to="../.."),  # the root itself
        an_entry("x/z/w/out", tarfile.SYMTYPE, to="../../y/up/../secret"),  # by name x/y/secret
        mode="w",
    )
    assert refused(archive).startswith("code (x) holds 'x/z/w/out', a link to ../../y/up/../secret, outside of it; ")


def test_nothing_is_written_through_a_link(tmp_path: Path, refused):
    archive = a_tar(tmp_path / "a.tar", an_entry("l", tarfile.SYMTYPE, to="d"), ("l/file", b"x"), mode="w")
    assert refused(archive).startswith("code (x) is no tar archive, or is damaged")


def test_bombs_are_refused_by_what_they_unpack_to(tmp_path: Path, refused, unpack, monkeypatch):
    zeros = bytes(1 << 20)
    for archive in (a_tar(tmp_path / "b.tgz", ("zeros", zeros)), a_zip(tmp_path / "b.zip", ("zeros", zeros))):
        assert archive.stat().st_size < 10_000
        monkeypatch.setattr(archives, "MAX_BYTES", (1 << 20) - 1)
        sentence = refused(archive)
        assert sentence == (
            "code (x) holds more than 1.0 MiB or 100,000 entries, the limit here; unpack it yourself and use the directory"
        )
        monkeypatch.setattr(archives, "MAX_BYTES", 1 << 20)
        assert unpack(archive).keys() == {"zeros"}
        monkeypatch.setattr(archives, "MAX_ENTRIES", 0)
        assert refused(archive).startswith("code (x) holds more than 1.0 MiB or 0 entries, the limit here; ")
        monkeypatch.undo()


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_says_it_is_endless_is_not_read(tmp_path: Path, refused, kind: bytes):
    header = an_entry("long", kind)
    header.size = 1 << 40
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(10240)))
    assert "is no tar archive, or is damaged: it has a header of 1099511627776 bytes; make" in refused(archive)


def test_what_follows_the_end_is_read_within_the_limit(tmp_path: Path, refused, monkeypatch):
    monkeypatch.setattr(archives, "MAX_BYTES", 1 << 20)
    whole = gzip.decompress(a_tar(tmp_path / "a.tgz", ("a.py", b"")).read_bytes())
    (archive := tmp_path / "b.tgz").write_bytes(gzip.compress(whole + bytes(2 << 20)))
    assert refused(archive).startswith("code (x) holds more than 1.0 MiB or 100,000 entries, the limit here; ")


def test_an_encrypted_zip_archive_is_refused(tmp_path: Path, refused):
    archive = a_zip(tmp_path / "a.zip", ("a", b"secret"))
    content = bytearray(archive.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1
    archive.write_bytes(content)
    assert "is encrypted, password required" in refused(archive)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar", "a.zip"])
@pytest.mark.parametrize("content", [b"", b"PK", b"<html>not found</html>" * 100, bytes(100), b"\x1f\x8b" + bytes(100)])
def test_what_is_no_archive_is_said_to_be_none(tmp_path: Path, refused, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    kind = "zip" if name.endswith("zip") else "tar"
    assert refused(tmp_path / name).startswith(f"code (x) is no {kind} archive, or is damaged: ")


def of_random_bytes(path: Path) -> bytes:
    """An archive of the kind that its name says; its bytes."""
    rng = random.Random(1)
    members = [(f"d{i}/file-{i}", rng.randbytes(700)) for i in range(4)]
    archive = (
        a_zip(path, *members) if path.suffix == ".zip" else a_tar(path, *members, mode="w:gz" if path.suffix == ".gz" else "w")
    )
    return archive.read_bytes()


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar", "a.zip"])
def test_an_archive_cut_short_anywhere_is_refused(tmp_path: Path, refused, name: str):
    whole = of_random_bytes(tmp_path / name)
    end = len(whole.rstrip(b"\0")) if name == "a.tar" else len(whole)
    for length in sorted({0, 1, 511, 512, 513, 1024, 1536, 2048, end // 2, end - 9, end - 1}):
        (tmp_path / name).write_bytes(whole[:length])
        assert "or is damaged" in refused(tmp_path / name), length


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar", "a.zip"])
def test_a_damaged_archive_is_one_sentence_or_what_it_was(tmp_path: Path, name: str):
    """Bytes changed at random: no other exception, nothing outside, in bounded time."""
    rng = random.Random(1)
    whole = of_random_bytes(tmp_path / name)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / name).write_bytes(damaged)
        (tmp_path / "into").mkdir(exist_ok=True)
        try:
            archives.extract(tmp_path / name, tmp_path / "into", name="code (x)")
        except OutlastError:
            refused += 1
        shutil.rmtree(tmp_path / "into")
    assert refused > 40
    assert {path.name for path in tmp_path.iterdir()} == {name}


def test_a_checksum_is_that_of_sha256sum(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abc")
    assert archives.checksum(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
