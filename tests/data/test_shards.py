"""Prepared datasets: what is written is read back, nanoGPT's directories are read as they are, and damage is one sentence."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from outlast.data import shard_format

TOKENS = np.arange(1000, dtype="<u2") % 300


def a_text(directory: Path, *, limit: int | None = None, val: int = 100, vocab_size: int = 300) -> shard_format.Manifest:
    directory.mkdir(parents=True, exist_ok=True)
    parts = {}
    for name, ids in (("train", TOKENS), ("val", TOKENS[:val])):
        writer = shard_format.Writer(directory, name, 2, limit)
        for start in range(0, len(ids), 70):
            writer.write(ids[start : start + 70].tobytes(), samples=1)
        parts[name] = writer.close()
    (directory / shard_format.TOKENIZER).write_text("{}")
    made = shard_format.Manifest("text", parts, dtype="uint16", vocab_size=vocab_size, tokenizer=shard_format.TOKENIZER)
    shard_format.write(directory, made)
    return made


def a_table(directory: Path) -> shard_format.Manifest:
    rows = [np.arange(n, dtype=np.int32) for n in (3, 0, 5)]
    flat, offsets = shard_format.ragged(rows, "int32")
    table = {"image": np.arange(3 * 4 * 4 * 3, dtype=np.uint8).reshape(3, 4, 4, 3), "ids": flat, "ids.offsets": offsets}
    shard = shard_format.write_columns(directory / "train-00000.safetensors", table)
    made = shard_format.Manifest("images", {"train": shard_format.Part((shard,))}, settings={"size": 4})
    shard_format.write(directory, made)
    return made


def refusal(directory: Path) -> str:
    with pytest.raises(shard_format.BadDataset) as refused:
        shard_format.read(directory).part("val")
    assert refused.value.exit_code == 78
    assert "\n" not in str(refused.value)
    return str(refused.value).replace(str(directory), "DIR")


@pytest.mark.parametrize(("limit", "files"), [(None, 1), (1 << 20, 1), (501, 4), (500, 4), (50, 40)])
def test_shards_of_any_size_are_the_same_tokens(tmp_path: Path, limit: int | None, files: int) -> None:
    made = a_text(tmp_path, limit=limit)
    read = shard_format.read(tmp_path)
    assert read == made
    train = read.part("train")
    assert (len(train.shards), train.tokens, train.samples) == (files, 1000, 15)
    assert train.shards[0].file == ("train.bin" if limit is None else "train-00000.bin")
    ids = np.concatenate([shard_format.tokens(tmp_path / shard.file, read.dtype) for shard in train.shards])
    np.testing.assert_array_equal(ids, TOKENS)
    assert shard_format.verify(read, shard_format.Local(tmp_path)) == []
    assert not list(tmp_path.glob(".*"))


def test_the_manifest_is_the_one_that_was_agreed(tmp_path: Path) -> None:
    a_text(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert list(content) == ["version", "kind", "settings", "source", "dtype", "vocab_size", "tokenizer", "parts"]
    assert list(content["parts"]["train"]) == ["samples", "tokens", "shards"]
    assert list(content["parts"]["train"]["shards"][0]) == ["file", "samples", "bytes", "sha256"]


def test_columns_are_read_back_and_are_what_safetensors_reads_and_writes(tmp_path: Path) -> None:
    made = a_table(tmp_path)
    path = tmp_path / "train-00000.safetensors"
    assert shard_format.read(tmp_path) == made
    assert made.part("train").samples == 3
    table = shard_format.columns(path)
    theirs = safetensors.numpy.load_file(path)
    assert table.keys() == theirs.keys()
    for name in table:
        np.testing.assert_array_equal(table[name], theirs[name])
    begin, end = table[f"ids{shard_format.OFFSETS}"][[2, 3]]
    assert table["ids"][begin:end].tolist() == [0, 1, 2, 3, 4]
    assert table["image"].shape == (3, 4, 4, 3)

    safetensors.numpy.save_file({name: np.array(column) for name, column in table.items()}, tmp_path / "theirs")
    for name, column in shard_format.columns(tmp_path / "theirs").items():
        np.testing.assert_array_equal(column, table[name])
    assert shard_format.verify(made, shard_format.Local(tmp_path)) == []


def test_a_directory_of_nanogpt_is_read_as_it_is(tmp_path: Path) -> None:
    TOKENS[:900].tofile(tmp_path / "train.bin")
    TOKENS[900:].tofile(tmp_path / "val.bin")
    plain = shard_format.read(tmp_path)
    assert (plain.kind, plain.dtype, plain.vocab_size, plain.tokenizer) == ("text", "uint16", None, "")
    assert (plain.part("train").tokens, plain.part("val").tokens) == (900, 100)
    assert shard_format.verify(plain, shard_format.Local(tmp_path)) == []

    texts = {i: chr(i + 32) for i in range(300)}
    (tmp_path / "meta.pkl").write_bytes(
        pickle.dumps({"vocab_size": 300, "itos": texts, "stoi": {c: i for i, c in texts.items()}})
    )
    assert (shard_format.read(tmp_path).vocab_size, shard_format.read(tmp_path).tokenizer) == (300, "meta.pkl")
    shard_format.write_vocabulary(tmp_path / "meta.pkl", 300, texts)
    assert shard_format.vocabulary(tmp_path / "meta.pkl").stoi["A"] == 33


class Calls:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"vocab_size": Calls()}, "is damaged or not nanoGPT's vocabulary (it would run"),
        ([1], "is damaged or not nanoGPT's vocabulary ("),
        ({"vocab_size": "5"}, "is damaged or not nanoGPT's vocabulary ("),
        ({"vocab_size": 65_537}, "has a vocabulary of 65537 tokens in uint16, whose largest token is 65535"),
    ],
)
def test_a_vocabulary_of_the_wrong_form_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    TOKENS.tofile(tmp_path / "train.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    assert reason in refusal(tmp_path)
    assert not Path("ran").exists()


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        content = json.loads((directory / "manifest.json").read_text())
        change(content)
        (directory / "manifest.json").write_text(json.dumps(content))

    return edit


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda d: (d / "val.bin").unlink(), "DIR: val.bin is missing; get or prepare the dataset again"),
    (lambda d: (d / "train.bin").write_bytes(b"12"), "DIR: train.bin has 2 bytes, not 2000; get or prepare the dataset again"),
    (lambda d: (d / "manifest.json").write_text("{"), "DIR/manifest.json is not JSON (Expecting property name"),
    (lambda d: (d / "manifest.json").write_text("[1]"), "DIR/manifest.json is not the manifest of a dataset: it has no version"),
    (edited(lambda m: m.update(version=2)), "DIR/manifest.json has version 2, and this Outlast reads up to 1; upgrade Outlast"),
    (edited(lambda m: m.update(kind="poems")), "DIR/manifest.json is damaged: kind of a manifest cannot be 'poems'"),
    (edited(lambda m: m.pop("parts")), "DIR/manifest.json is damaged: parts of a manifest is missing"),
    (edited(lambda m: m.update(dtype="int8")), "DIR/manifest.json is damaged: dtype of a manifest cannot be 'int8'"),
    (edited(lambda m: m.update(vocab_size=70_000)), "DIR has a vocabulary of 70000 tokens in uint16, whose largest token is"),
    (edited(lambda m: m.pop("dtype")), "DIR/manifest.json is damaged: "),
    (edited(lambda m: m["parts"]["val"].update(tokens=7)), "is damaged: its shards have 100 tokens, and it says 7"),
    (edited(lambda m: m["parts"]["val"]["shards"][0].update(bytes=3)), "DIR/val.bin has 3 bytes, which is no whole number of"),
    (edited(lambda m: m["parts"]["val"]["shards"][0].update(file="../val.bin")), "file of a manifest cannot be '../val.bin'"),
    (edited(lambda m: m["parts"].pop("val")), "DIR has no part val, it has train; prepare it again with one"),
    (lambda d: a_text(d, val=0), "DIR has no token in val; prepare it again with more data or another --val"),
    (lambda d: [p.unlink() for p in d.iterdir()], "DIR is not a prepared dataset: it has neither manifest.json, which is"),
    (
        lambda d: [(d / "manifest.json").unlink(), (d / "train.bin").write_bytes(b"123")],
        "DIR/train.bin has 3 bytes, which is no whole number of uint16 tokens; it is cut off",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_dataset_is_refused_in_one_sentence(tmp_path: Path, damage: Callable[[Path], Any], reason: str) -> None:
    a_text(tmp_path)
    damage(tmp_path)
    assert reason in refusal(tmp_path)


def test_verify_finds_a_flipped_bit_in_every_byte_of_every_file(tmp_path: Path) -> None:
    made, table = a_text(tmp_path / "text", limit=900), a_table(tmp_path)
    for manifest, directory in ((made, tmp_path / "text"), (table, tmp_path)):
        shard = manifest.parts["train"].shards[0]
        content = (directory / shard.file).read_bytes()
        for at in range(0, len(content), 97):
            damaged = bytearray(content)
            damaged[at] ^= 1 << at % 8
            (directory / shard.file).write_bytes(damaged)
            (problem,) = shard_format.verify(manifest, shard_format.Local(directory))
            assert problem.startswith(f"{shard.file} is damaged: its sha256 is ")
        (directory / shard.file).write_bytes(content)
    (tmp_path / "text" / shard_format.TOKENIZER).unlink()
    assert shard_format.verify(made, shard_format.Local(tmp_path / "text")) == ["tokenizer.json is missing"]


def test_a_token_beyond_the_vocabulary_is_found(tmp_path: Path) -> None:
    made = a_text(tmp_path, vocab_size=299)
    assert shard_format.verify(made, shard_format.Local(tmp_path)) == [
        "train.bin has the token 299 at position 299, and the vocabulary has 299"
    ]


def test_a_wrong_count_of_samples_is_found(tmp_path: Path) -> None:
    made = a_table(tmp_path)
    (shard,) = made.parts["train"].shards
    wrong = dataclasses.replace(made, parts={"train": shard_format.Part((dataclasses.replace(shard, samples=4),))})
    assert shard_format.verify(wrong, shard_format.Local(tmp_path)) == ["train-00000.safetensors has 3 samples, not 4"]


@pytest.mark.parametrize("cut", [0, 4, 20, 200, -1])
def test_a_torn_safetensors_file_is_refused(tmp_path: Path, cut: int) -> None:
    a_table(tmp_path)
    path = tmp_path / "train-00000.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(shard_format.BadDataset, match="is not a whole safetensors file"):
        shard_format.columns(path)
