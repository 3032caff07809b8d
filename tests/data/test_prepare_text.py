"""Text to tokens: nanoGPT's files; the same bytes for any number of processes and after any kill; a sentence for bad input."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.base.errors import OutlastError, Stopped
from outlast.data import shard_format
from outlast.data.prepare import source_files, text, tokenizer, work_units
from outlast.data.prepare.text import Settings
from texts import digests

WORDS = [
    "def", "return", "class", "self", "0", "42", "3.14", "naïve", "数据", "éa", "\u3000", "\x1c", "don't", "we'll", "", "\n\n\t(",
    ")", "==", "!=", "<|endoftext|>", "x_y",
]  # fmt: skip


def some_text(seed: int, words: int = 300) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS, k=words)) + "\n"


def a_source(directory: Path, files: int = 12) -> Path:
    for i in range(files):
        path = directory / f"{'ab'[i % 2]}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(some_text(i), newline="")
    (directory / ".hidden").write_bytes(b"\xff")
    return directory


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive the forks of other tests
    try:
        tokenizer.save(path, tokenizer.train([some_text(i) for i in range(50)], 320))
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
    return path


@pytest.fixture(scope="module")
def library(bpe: Path) -> Any:
    return tokenizer.load(bpe)


@pytest.fixture(scope="module")
def fast(bpe: Path) -> Any:
    made = tokenizer.encoder(bpe, "")
    assert isinstance(made, tokenizer._Words)
    return made


def prepare(source: Path, to: Path, settings: Settings, **request: Any) -> shard_format.Manifest:
    return text.prepare(work_units.Request(source, to, **{"unit": 1000, **request}), settings)


def tokens(directory: Path, part: str) -> np.ndarray:
    manifest = shard_format.read(directory)
    return np.concatenate([shard_format.tokens(directory / each.file, manifest.dtype) for each in manifest.parts[part].shards])


def decoded(directory: Path, part: str) -> str:
    lib = tokenizer.load(directory / shard_format.TOKENIZER)
    return str(lib.decode(tokens(directory, part).tolist(), skip_special_tokens=False))


def test_one_file_by_character_is_what_nanogpt_makes_of_it(tmp_path: Path) -> None:
    whole = "".join(some_text(i) for i in range(20))
    (tmp_path / "input.txt").write_text(whole, newline="")
    made = prepare(tmp_path / "input.txt", tmp_path / "out", Settings("char"))
    characters = sorted(set(whole))  # from here on as nanoGPT defines it
    ids = np.array([characters.index(c) for c in whole], np.uint16)
    n = int(len(whole) * 0.9)
    assert (tmp_path / "out" / "train.bin").read_bytes() == ids[:n].tobytes()
    assert (tmp_path / "out" / "val.bin").read_bytes() == ids[n:].tobytes()
    about = shard_format.vocabulary(tmp_path / "out" / "meta.pkl")
    assert about == shard_format.Vocabulary(
        len(characters), {c: i for i, c in enumerate(characters)}, dict(enumerate(characters))
    )
    assert (made.dtype, made.vocab_size, made.tokenizer) == ("uint16", len(characters), "tokenizer.json")
    assert decoded(tmp_path / "out", "val") == whole[n:]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json", "meta.pkl", "tokenizer.json", "train.bin", "val.bin",
    ]  # fmt: skip


def test_each_document_is_in_one_part_and_is_followed_by_the_separator(tmp_path: Path, bpe: Path) -> None:
    source = a_source(tmp_path / "source")
    made = prepare(source, tmp_path / "out", Settings(str(bpe), val=0.3))
    end = tokenizer.load(bpe).token_to_id("<|endoftext|>")
    assert end == 319 == (made.vocab_size or 0) - 1
    found = {}
    for part in ("train", "val"):
        ids = tokens(tmp_path / "out", part)
        assert ids[-1] == end
        documents = np.split(ids, np.flatnonzero(ids == end)[:-1] + 1)
        found[part] = [tokenizer.load(bpe).decode(each[:-1].tolist()) for each in documents]
        assert made.parts[part].samples == len(found[part]) > 0
    expected = {path.read_bytes().decode() for path in source.glob("*/*.txt")}
    assert sorted(found["train"] + found["val"]) == sorted(expected)
    assert made.source["files"] == 12


def test_shards_are_the_one_file_cut_in_pieces(tmp_path: Path) -> None:
    source = a_source(tmp_path / "source")
    prepare(source, tmp_path / "one", Settings("char"))
    made = prepare(source, tmp_path / "many", Settings("char", shard_size=1001))
    files = [shard.file for shard in made.parts["train"].shards]
    assert files[:2] == ["train-00000.bin", "train-00001.bin"]
    assert b"".join((tmp_path / "many" / file).read_bytes() for file in files) == (tmp_path / "one" / "train.bin").read_bytes()
    assert {(tmp_path / "many" / file).stat().st_size for file in files[:-1]} == {1000}


@given(st.text() | st.text("ab'sdmtlvre  \n\n\t!(19é\u00a0\u2003\x1c\x7f\x85٣") | st.text(st.characters(max_codepoint=127)))
@example("a\x1c b\u3000 \n it's 'S 'll\n\n  x")
@example("it's 's ''s 'll've're'd'l 'vx\n\n  'm   'sab  ")
def test_the_fast_encoder_is_the_library(library: Any, fast: Any, whole: str) -> None:
    expected = library.encode(whole, add_special_tokens=False).ids
    assert np.frombuffer(fast(whole), "<u2").tolist() == expected


@given(st.text("ab \n!'é\u2003", max_size=200), st.integers(1, 20))
def test_a_text_cut_between_words_has_the_tokens_of_the_whole(fast: Any, whole: str, size: int) -> None:
    pieces = list(tokenizer.pieces(whole, size))
    assert "".join(pieces) == whole
    assert b"".join(map(fast, pieces)) == fast(whole)


def test_a_large_document_in_many_units_has_the_tokens_of_the_whole(tmp_path: Path, bpe: Path) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / name).write_text(some_text(len(name), 3000), newline="")
    for unit in (500, 1 << 20):
        prepare(tmp_path / "source", tmp_path / str(unit), Settings(str(bpe)), unit=unit)
    assert digests(tmp_path / "500") == digests(tmp_path / str(1 << 20))


class Killed(Exception):
    """Stands for SIGKILL."""


def test_a_killed_command_continues_and_its_processes_end_with_it(tmp_path: Path) -> None:
    source = a_source(tmp_path / "source")
    settings = Settings("char")
    prepare(source, tmp_path / "whole", settings, unit=300)
    code = (
        "import sys; from pathlib import Path; from outlast.data.prepare import text, work_units\n"
        "if __name__ == '__main__':\n"
        "    text.prepare(work_units.Request(Path(sys.argv[1]), Path(sys.argv[2]), 2, unit=300), text.Settings('char'))\n"
    )
    (tmp_path / "run.py").write_text(code)
    process = subprocess.Popen([sys.executable, str(tmp_path / "run.py"), str(source), str(tmp_path / "out")])
    private = tmp_path / "out" / work_units.PRIVATE
    while not list(private.glob("*/*-000003.json")) and process.poll() is None:
        time.sleep(0.001)
    helpers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(helpers, timeout=60)[1] == []
    prepare(source, tmp_path / "out", settings, unit=300)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_an_unfinished_dataset_of_other_settings_is_begun_again(tmp_path: Path) -> None:
    source = a_source(tmp_path / "source")
    stop = work_units.Request(source, tmp_path).stop

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "put together":
            stop.set()
            raise Stopped("stopped")

    with pytest.raises(Stopped):
        prepare(source, tmp_path / "out", Settings("char", shard_size=500), progress=progress, stop=stop)
    prepare(source, tmp_path / "out", Settings("char"))
    prepare(source, tmp_path / "fresh", Settings("char"))
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


def test_two_runs_do_not_write_to_one_place(tmp_path: Path) -> None:
    source = a_source(tmp_path / "source")

    def progress(stage: str, done: int, total: int) -> None:
        with pytest.raises(OutlastError, match="another `outlast data prepare` writes to"):
            prepare(source, tmp_path / "out", Settings("char"))
        raise Killed

    with pytest.raises(Killed):
        prepare(source, tmp_path / "out", Settings("char"), progress=progress)


def test_what_another_run_has_just_finished_is_not_removed(tmp_path: Path) -> None:
    source = a_source(tmp_path / "source")
    prepare(source, tmp_path / "out", Settings("char"))
    before = digests(tmp_path / "out")
    late = work_units.opened(work_units.Request(source, tmp_path / "out"), {}, [])  # it saw no manifest a moment ago
    with pytest.raises(OutlastError, match=r"has just written .*; run the same command again"), late:
        pass
    shutil.rmtree(tmp_path / "out" / work_units.PRIVATE)
    assert digests(tmp_path / "out") == before


def test_what_is_written_inside_the_source_is_no_source(tmp_path: Path) -> None:
    source = a_source(tmp_path / "source")
    first = prepare(source, source / "out", Settings("char"))
    assert prepare(source, source / "out", Settings("char")) == first
    (source / "loop").symlink_to(source)
    with pytest.raises(OutlastError, match="loop links to a directory that it is in; remove it, or name another source"):
        prepare(source, tmp_path / "out", Settings("char"))


def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = a_source(tmp_path / "source")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shard_format.Writer, "write", full)
        with pytest.raises(OutlastError, match=r"the disk of .* is full; make room there and run the same command again"):
            prepare(source, tmp_path / "out", Settings("char"))
    prepare(source, tmp_path / "out", Settings("char"))
    prepare(source, tmp_path / "fresh", Settings("char"))
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


def test_named_parts_are_obeyed(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        (tmp_path / "source" / name).mkdir(parents=True)
        (tmp_path / "source" / name / "a.txt").write_text(name)
    prepare(tmp_path / "source", tmp_path / "out", Settings("char", val=0.5))
    assert (decoded(tmp_path / "out", "train"), decoded(tmp_path / "out", "val")) == ("testtrain", "val")


def test_a_document_stays_in_its_part_when_others_come() -> None:
    files = [source_files.File(f"{i}.txt", 10) for i in range(300)]
    few, many = source_files.parts(files[:200], 0.1), source_files.parts(files, 0.1)
    assert all(many[name] == part for name, part in few.items())
    assert 15 < sum(part == "val" for part in many.values()) < 45
    for n in range(2, 40):
        for share in (0.001, 0.5, 0.99):
            assert set(source_files.parts(files[:n], share).values()) == {"train", "val"}
    assert set(source_files.parts(files, 0).values()) == {"train"}


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 30))
def test_units_cover_every_byte_once_and_are_bounded(sizes: list[int], limit: int) -> None:
    documents = [source_files.Document(str(i), size, 0, size, "train") for i, size in enumerate(sizes)]
    units = source_files.units(documents, limit)
    assert [unit.number for unit in units] == list(range(len(units)))
    assert all(0 < unit.bytes <= limit for unit in units)
    covered = [(piece.document.file, at) for unit in units for piece in unit.pieces for at in range(piece.begin, piece.end)]
    assert covered == [(str(i), at) for i, size in enumerate(sizes) for at in range(size)]


def bad(tmp_path: Path, settings: Settings, **request: Any) -> str:
    with pytest.raises(OutlastError) as refused:
        prepare(tmp_path / "source", tmp_path / "out", settings, **request)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out" / "manifest.json").exists()
    return str(refused.value).replace(str(tmp_path), "TMP")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings("char", val=1.0), "--val 1.0 is no share of the text; give one from 0 to below 1, such as 0.1"),
        (Settings("bpe", vocab_size=256), "--vocab-size 256 is too small: 256 bytes and the separator need 257; give a larger"),
        (Settings("char", vocab_size=300), "--vocab-size is that of a tokenizer trained here, and --tokenizer is char; leave it"),
        (Settings("nowhere.json"), "there is no tokenizer nowhere.json; name a tokenizer.json, char, bpe or gpt2-like"),
        (Settings("char", separator="<end>"), "the tokenizer has no token <end> to separate documents; name one that it has, or"),
        (Settings("char", patterns=("*.py",)), "TMP/source has no files that match *.py; name another source"),
        (Settings("char", shard_size=1), "a shard of 1 bytes holds no token; give a larger --shard-size"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path: Path, settings: Settings, reason: str) -> None:
    a_source(tmp_path / "source")
    assert bad(tmp_path, settings).startswith(reason)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_not_utf_8_is_named(tmp_path: Path, processes: int) -> None:
    source = a_source(tmp_path / "source")
    (source / "a" / "latin.txt").write_bytes(b"caf\xe9 au lait")
    reason = "a/latin.txt is not UTF-8: byte 3 is 0xe9; name the files to read with --glob, convert it, or leave it out with"
    assert bad(tmp_path, Settings("char"), processes=processes).startswith(reason)
    assert prepare(source, tmp_path / "out", Settings("char", skip_damaged=True)).source["damaged"] == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a"', "r.jsonl, line 31 is not JSON: Expecting ',' delimiter"),
        ("[1]", "r.jsonl, line 31 is not a JSON object"),
        ("[" * 9_000, "r.jsonl, line 31 is not JSON: maximum recursion depth"),
        ('{"txt": "a"}', "r.jsonl, line 31 has no text; each record needs a text there"),
        ('{"text": 5}', "r.jsonl, line 31 has int as text; each record needs a text there"),
        ('{"text": "\\ud800"}', "r.jsonl, line 31 has half a surrogate pair in text"),
    ],
)
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "source").mkdir()
    good = [json.dumps({"text": some_text(i, 20)}) for i in range(60)]
    lines = [*good[:30], line, *good[30:]]
    (tmp_path / "source" / "r.jsonl").write_text("\n".join(lines))
    assert bad(tmp_path, Settings("char")).startswith(reason)
    made = prepare(tmp_path / "source", tmp_path / "out", Settings("char", skip_damaged=True))
    assert made.source["damaged"] == 1
    assert sum(part.samples for part in made.parts.values()) == 60


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "r.jsonl").write_text('{"text": "some"}\n' * 5)
    reasons = ("val would be empty: give more data or a larger --val, or --val 0 for none", "train would be empty")
    assert bad(tmp_path, Settings("char", val=0.5)).startswith(reasons)
    (tmp_path / "source" / "r.jsonl").write_text("")
    assert bad(tmp_path, Settings("char")) == "TMP/source has no text: its files are empty; name another source"


def test_a_source_that_is_missing_or_unfinished_is_refused(tmp_path: Path) -> None:
    assert bad(tmp_path, Settings("char")) == "TMP/source does not exist; name a file or a directory"
    a_source(tmp_path / "source")
    (tmp_path / "source" / ".outlast-get").mkdir()
    assert bad(tmp_path, Settings("char")).startswith("TMP/source is not complete: `outlast data get` has not finished there")


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    a_source(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    assert bad(tmp_path, Settings("char")) == "TMP/out holds other files; write to a new or an empty directory"
    assert os.listdir(tmp_path / "out") == ["thesis.tex"]


def test_a_large_vocabulary_is_written_as_uint32(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    many = [chr(i) for i in range(0x21, 0x12000) if not 0xD800 <= i < 0xE000]
    for i in range(2):
        (tmp_path / "source" / f"{i}.txt").write_text("".join(many), newline="")
    made = prepare(tmp_path / "source", tmp_path / "out", Settings("char"), unit=1 << 20)
    assert (made.dtype, made.vocab_size) == ("uint32", len(many))
    assert tokens(tmp_path / "out", "val").tolist() == list(range(len(many)))
    assert shard_format.verify(made, shard_format.Local(tmp_path / "out")) == []
