"""`outlast data prepare` and `outlast data verify` on the command line: places, sentences, exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from outlast.base import machine_memory
from outlast.data import shard_format
from outlast.data.prepare import work_units

Outlast = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outlast(outlast: Outlast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outlast:
    """`outlast data ...`; its exit code, output and errors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*args: object) -> tuple[int, str, str]:
        code, out, err = outlast("data", *args)
        return code, out.replace(str(tmp_path), "TMP"), err.replace(str(tmp_path), "TMP")

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    for i in range(10):
        (tmp_path / "source" / f"{i}.txt").write_text(f"document {i}\n" * 20)
    return tmp_path / "source"


def test_text_is_prepared_verified_and_found_there(outlast: Outlast, source: Path, tmp_path: Path) -> None:
    command = ("prepare", "text", source, "--to", tmp_path / "out", "--tokenizer", "char", "--processes", 1)
    code, out, _ = outlast(*command, "--verify")
    assert code == 0
    first, second = out.splitlines()
    assert first.startswith("wrote train 1,980 tokens, val 220 tokens of 10 documents (vocabulary 20, uint16) in TMP/out (")
    assert second.startswith("verified 2 shards, 4.3 KiB in TMP/out")
    assert outlast(*command)[1].startswith("already there: train 1,980 tokens, val 220 tokens of 10 documents")
    code, _, err = outlast(*command, "--val", "0.2")
    assert (code, err) == (2, "Error: TMP/out holds another dataset, or one made with other settings; write to a new place\n")


@pytest.mark.parametrize(("kind", "option"), [("images", "--size"), ("video", "--size"), ("text", "--vocab-size")])
def test_a_number_that_no_memory_holds_is_refused(outlast: Outlast, source: Path, kind: str, option: str) -> None:
    code, _, err = outlast("prepare", kind, source, "--to", source / "out", option, 10**20)
    assert (code, f"Error: Invalid value for '{option}': Input should be less than or equal to 16" in err) == (2, True)


def test_a_dataset_is_made_in_a_store(outlast: Outlast, source: Path, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/store"
    command = ("prepare", "text", source, "--to", place, "--tokenizer", "char", "--shard-size", "1000", "--processes", 1)
    code, out, _ = outlast(*command, "--verify")
    assert code == 0
    assert out.splitlines()[1].startswith("verified 5 shards, 4.3 KiB in file://TMP/store")
    outlast("prepare", "text", source, "--to", tmp_path / "here", "--tokenizer", "char", "--shard-size", 1000, "--processes", 1)
    for path in (tmp_path / "here").iterdir():
        assert (tmp_path / "store" / path.name).read_bytes() == path.read_bytes()
    assert not list((tmp_path / "cache").rglob("*.bin")), "the work directory is removed"
    assert outlast(*command)[1].startswith("already there: ")
    (tmp_path / "store" / "val-00000.bin").unlink()
    code, _, err = outlast("verify", place)
    assert (code, err) == (78, "Error: file://TMP/store: val-00000.bin is missing; get or prepare the dataset again\n")


def test_an_upload_goes_on_where_it_was(outlast: Outlast, source: Path, tmp_path: Path) -> None:
    command = ["prepare", "text", source, "--tokenizer", "char", "--processes", 1, "--work", tmp_path / "work", "--to"]
    whole = f"file://{tmp_path}/whole"
    assert outlast(*command, whole)[0] == 0
    digest = hashlib.sha256((tmp_path / "whole" / "manifest.json").read_bytes()).hexdigest()
    (tmp_path / "store" / "manifest.json").mkdir(parents=True)  # so that the last write fails
    (tmp_path / "store" / "manifest.json" / "x").touch()
    (tmp_path / "store" / ".outlast-get").write_text(f"the dataset whose manifest has the SHA-256 {digest}")
    place = whole.replace("whole", "store")
    assert outlast(*command, place)[0] != 0
    for left in (".uploaded.json", ".train.bin.upload", "train-00000.bin"):  # by a version before, or an earlier run
        (tmp_path / "work" / left).touch()
    assert outlast(*command, place)[0] != 0
    sent = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir() if path.is_file()}
    assert sent.pop(".outlast-get"), "nobody takes it for a whole one"
    assert set(sent) == {"train.bin", "val.bin", "meta.pkl", "tokenizer.json", ".outlast-manifest"}
    (tmp_path / "store" / "manifest.json" / "x").unlink()
    (tmp_path / "store" / "manifest.json").rmdir()
    assert outlast(*command, place)[0] == 0
    del sent[".outlast-manifest"]
    assert {name: (tmp_path / "store" / name).stat().st_mtime_ns for name in sent} == sent
    assert outlast("verify", place)[0] == 0


def test_a_wrong_option_is_one_sentence(outlast: Outlast, source: Path, tmp_path: Path) -> None:
    said = outlast("prepare", "text", source, "--to", tmp_path / "out", "--shard-size", "many")
    assert said == (2, "", "Error: --shard-size many is not a quantity; write 16Gi\n")


def test_other_kinds_are_prepared(outlast: Outlast, tmp_path: Path) -> None:
    from PIL import Image

    for i in range(4):
        path = tmp_path / "pictures" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 8)).save(path)
    code, out, _ = outlast("prepare", "images", tmp_path / "pictures", "--to", tmp_path / "out", "--size", 4, "--processes", 1)
    assert (code, out.split(" (")[0]) == (0, "wrote train 3 samples, val 1 samples in TMP/out")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    code, out, err = outlast(
        "prepare", "jsonl", tmp_path / "a.jsonl", "--to", tmp_path / "records", "--val", 0, "--vocab-size", 260, "--processes", 1
    )
    assert (code, out.split(" (")[0]) == (0, "wrote train 9 samples in TMP/records")
    assert err == "outlast | train the tokenizer\n"
    code, _, err = outlast("prepare", "video", tmp_path / "pictures", "--to", tmp_path / "video")
    assert (code, err.split(" (")[0]) == (2, "Error: TMP/pictures has no videos")


@pytest.mark.parametrize(
    ("free_mib", "each_mib", "processes"), [(10_000, 64, 16), (300, 64, 2), (300, 0, 4), (60, 64, 1), (None, 64, 16)]
)
def test_processes_are_as_many_as_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int | None, each_mib: int, processes: int
) -> None:
    if free_mib is not None:
        (tmp_path / "meminfo").write_text(f"MemTotal: 0 kB\nMemAvailable: {free_mib << 10} kB\n")
    monkeypatch.setattr(machine_memory, "Machine", lambda machine=machine_memory.Machine: machine(tmp_path, tmp_path))
    monkeypatch.setattr(work_units, "cores", lambda: 16)
    wanted = work_units.Request(tmp_path, tmp_path, 0)
    assert work_units.fitting(wanted, each_mib << 20).processes == processes
    assert work_units.fitting(work_units.Request(tmp_path, tmp_path, 7), each_mib << 20).processes == 7, "as asked"


def peak(command: list[str]) -> int:
    """Bytes that a process of a command has at most."""
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        for each in [process, *process.children(recursive=True)]:
            try:
                most = max(most, each.memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    assert process.returncode == 0
    return most


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one.txt", "one.jsonl"])
def test_memory_does_not_grow_with_the_source(tmp_path: Path, name: str) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 9))) for _ in range(5000)]
    piece = " ".join(rng.choices(words, k=20_000)) + "\n"
    tokenizer = tmp_path / "small" / shard_format.TOKENIZER
    outlast = str(Path(sys.executable).with_name("outlast"))
    peaks = []
    for size, pieces in (("small", 50), ("large", 1000)):
        (tmp_path / f"{size}-source").mkdir()
        source = tmp_path / f"{size}-source" / name
        with source.open("w") as file:
            for i in range(pieces):
                file.write(json.dumps({"text": f"{i} {piece}"}) + "\n" if name.endswith("l") else piece)
        which = ["--vocab-size", "1000"] if size == "small" else ["--tokenizer", str(tokenizer)]
        command = [outlast, "data", "prepare", "text", str(source), "--to", str(tmp_path / size), "--processes", "2", *which]
        peaks.append(peak(command))
        if size == "small":
            again = [*command[:6], str(tmp_path / "again"), "--processes", "2", "--tokenizer", str(tokenizer)]
            peaks[-1] = peak(again)
    assert os.path.getsize(tmp_path / "large-source" / name) > 100 << 20
    assert peaks[1] < peaks[0] + (24 << 20), peaks
    assert peaks[1] < 200 << 20, peaks
