"""`outlast data prepare` makes shards from raw files; `outlast data verify` checks every byte of a dataset. A dataset for a store
is made in a work directory. Then its shards are uploaded, and finally the manifest."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outlast.base import units
from outlast.base.errors import Missing, OutlastError
from outlast.cli import terminal, transfer_progress
from outlast.cli.groups import Commands

if TYPE_CHECKING:
    from outlast.data.prepare.work_units import Engine, Request
    from outlast.data.shard_format import Files, Manifest
    from outlast.storage.store import Store

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, help="Make shards for training out of raw files.")


ValOption = Annotated[float, typer.Option(min=0.0, max=0.99, help="Share of the data that goes into val; 0 for none.")]
VocabularyOption = Annotated[
    int | None, typer.Option(metavar="N", max=1 << 24, help="Vocabulary size of a BPE trained here. Default: 4096.")
]
SeparatorOption = Annotated[
    str | None, typer.Option(metavar="TOKEN", help="Token after each document, '' for none. Default: <|endoftext|>.")
]


@dataclass(frozen=True)
class How:
    """Command-line options shared by all kinds of datasets."""

    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A directory, or one file.")]
    to: Annotated[str, typer.Option(metavar="PLACE", help="Directory, or URL of a place in a store, to write to.")]
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of processes. Default: one per core, as far as memory allows.")
    ] = None
    verify: Annotated[bool, typer.Option("--verify", help="Read everything again at the end and compare checksums.")] = False
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Skip and count what cannot be read.")] = False
    work: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Work directory of a dataset for a store. Default: ~/.cache/outlast/prepare."),
    ] = None
    engine: Annotated[Literal["local", "spark"], typer.Option(help="Processes of this machine, or Spark.")] = "local"
    master: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Spark's master: local[8], spark://HOST:7077, k8s://https://HOST:443. "
            "Default: local[*], all cores of this machine.",
        ),
    ] = None
    partitions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Spark's tasks per stage. Default: one per unit of work.")
    ] = None
    conf: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Spark's configuration: spark.executor.memory=4g. May be repeated."),
    ] = None

    @contextlib.contextmanager
    def engine_opened(self) -> Iterator[Engine | None]:
        """Yield the engine for the work, or None for local processes. Raises OutlastError for options of the other engine."""
        if self.engine == "local":
            given = {"--master": self.master, "--partitions": self.partitions, "--conf": self.conf}
            if wrong := [name for name, value in given.items() if value]:
                raise OutlastError(f"{wrong[0]} is for Spark; add --engine spark, or leave it out")
            yield None
            return
        from outlast.data.prepare import spark

        if self.processes is not None:
            raise OutlastError("--processes is for --engine local; leave it out, and say how many cores with --master local[8]")
        settings = spark.settings(self.master, self.partitions, self.conf or ())
        with spark.opened(settings, terminal.say) as opened:
            yield opened


def _kind(made: Callable[..., None]) -> None:
    """Add the command for a kind of dataset. Its help shows the kind's own options after --to, before the shared options."""
    source, to, *others = inspect.signature(How, eval_str=True).parameters.values()
    _, *own = inspect.signature(made, eval_str=True).parameters.values()

    @functools.wraps(made)
    def command(**given: Any) -> None:
        options = {each.name: given.pop(each.name) for each in own}
        made(How(**given), **options)

    command.__signature__ = inspect.Signature([source, to, *own, *others])  # type: ignore[attr-defined]  # which typer reads
    app.command()(command)


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return units.memory(text)
    except ValueError as error:
        raise OutlastError(f"--shard-size {text} {error}") from error


@_kind
def text(
    how: How,
    tokenizer: Annotated[
        str, typer.Option(metavar="WHICH", help="char, bpe (trained here), gpt2-like (50,257 tokens), or a tokenizer.json.")
    ] = "bpe",
    vocab_size: VocabularyOption = None,
    val: ValOption = 0.1,
    separator: SeparatorOption = None,
    glob: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Files to take: '*.py'. May be repeated. Default: all.")
    ] = None,
    field: Annotated[str, typer.Option(metavar="NAME", help="Field of .jsonl records that holds the text.")] = "text",
    shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes per shard: 64Mi. Default: one file per part, as nanoGPT.")
    ] = None,
) -> None:
    """Tokenize text into the files that nanoGPT reads.

    Writes train.bin, val.bin, meta.pkl, tokenizer.json and a manifest. SOURCE contains UTF-8 files, each a document, or .jsonl
    files, each line a document. Files or directories named train and val become the parts train and val. A single file is split
    as in nanoGPT: its last 10 % becomes val. Otherwise, a hash of each document's name or text assigns the document to a part.
    The same source always gives the same bytes, with any number of processes. If the command was killed, running it again
    continues where it stopped.

    \b
    Examples:
      outlast data prepare text data/python-stdlib --to data/python --vocab-size 2048
      outlast data prepare text input.txt --to data/shakespeare --tokenizer char
      outlast data prepare text docs --glob '*.jsonl' --to s3://bucket/docs --shard-size 64Mi
    """
    from outlast.data.prepare import text as texts

    settings = texts.Settings(
        tokenizer, vocab_size, val, separator, tuple(glob or ()), field, _size(shard_size), skip_damaged=how.skip_damaged
    )
    _made(lambda request: texts.prepare(request, settings), how)


@_kind
def jsonl(
    how: How,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="WHICH", help="bpe (trained here), gpt2-like (50,257 tokens), a tokenizer.json, or a model of Hugging Face."
        ),
    ] = "bpe",
    vocab_size: VocabularyOption = None,
    val: ValOption = 0.1,
    separator: SeparatorOption = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Cut samples to N tokens. Default: keep all.")
    ] = None,
    glob: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Files to take. Default: '*.jsonl'.")] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of records per shard.")] = "8Mi",
) -> None:
    """Tokenize records for fine-tuning.

    Writes the columns input_ids and labels. Tokens with the label -100 do not count toward the loss. Each line of SOURCE's .jsonl
    files is {"prompt": ..., "completion": ...}, {"text": ...}, or {"messages": [{"role": ..., "content": ...}]}. The model learns
    completions, texts, and the assistant's messages. Files named train and val become the parts train and val; otherwise, a hash
    assigns each record to a part.

    \b
    Examples:
      outlast data prepare jsonl dialogues.jsonl --to data/dialogues --vocab-size 8192
      outlast data prepare jsonl data/raw --to s3://bucket/sft --tokenizer tokenizer.json --max-length 2048
    """
    from outlast.data.prepare import jsonl as records

    settings = records.Settings(
        tokenizer, vocab_size, val, separator, max_length, tuple(glob or ("*.jsonl",)), _size(shard_size) or 1, how.skip_damaged
    )
    _made(lambda request: records.prepare(request, settings), how)


@_kind
def images(
    how: How,
    size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=1 << 14, help="Resize the shorter side to N pixels and cut out the centre."),
    ] = None,
    stretch: Annotated[
        bool, typer.Option("--stretch", help="Resize all of the image to N x N, and keep its width / height as column aspect.")
    ] = False,
    encoded: Annotated[bool, typer.Option("--encoded", help="Keep the files' bytes instead of pixels.")] = False,
    val: ValOption = 0.1,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of samples per shard.")] = "64Mi",
) -> None:
    """Decode images that are sorted into classes.

    Writes the columns image (uint8, of shape (height, width, 3)) and label. SOURCE has a directory per class, or train/CLASS and
    val/CLASS (ImageNet, tiny-imagenet-200), or CIFAR-10's batches. If SOURCE has no train and val, a hash of each image's name
    assigns the image to a part. Classes are numbered in the order of their names; the manifest lists them. Samples are shuffled,
    so that each shard has some of every class.

    \b
    Examples:
      outlast data prepare images data/cifar10 --to data/cifar10-shards
      outlast data prepare images tiny-imagenet-200 --to s3://bucket/tiny --size 64
      outlast data prepare images imagenet --to /data/imagenet-256 --size 256 --stretch
      outlast data prepare images photos --to data/photos --encoded --skip-damaged
    """
    from outlast.data.prepare import images as pictures

    settings = pictures.Settings(size, encoded, val, _size(shard_size) or 1, how.skip_damaged, stretch)
    _made(lambda request: pictures.prepare(request, settings), how)


@_kind
def video(
    how: How,
    frames: Annotated[int, typer.Option(metavar="N", min=1, help="Frames of a clip, at 25 per second.")] = 16,
    size: Annotated[int, typer.Option(metavar="N", min=1, max=1 << 14, help="Width and height of a frame in pixels.")] = 224,
    clips: Annotated[int, typer.Option(metavar="N", min=1, help="Clips per video, evenly spaced.")] = 1,
    labels: Annotated[
        Path | None, typer.Option(metavar="CSV", help="List of labels: Kinetics', or file,label. Default: directories.")
    ] = None,
    val: ValOption = 0.1,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of samples per shard.")] = "256Mi",
) -> None:
    """Cut clips out of videos.

    Writes the columns video (uint8, of shape (16, 224, 224, 3)), audio (int16, of shape (30720,)) and label. A clip lasts 0.64 s:
    16 frames at 25 per second, with mono audio at 48 kHz, as Perceiver IO expects. Labels are the names of the directories
    (CLASS/, train/CLASS/, val/CLASS/), or come from the list given with --labels.

    \b
    Examples:
      outlast data prepare video data/kinetics --to s3://bucket/kinetics --labels train.csv
      outlast data prepare video recordings --to data/clips --size 112 --clips 4
    """
    from outlast.data.prepare import video as videos

    settings = videos.Settings(frames, size, clips, str(labels or ""), val, _size(shard_size) or 1, how.skip_damaged)
    _made(lambda request: videos.prepare(request, settings), how)


def verify(place: Annotated[str, typer.Argument(metavar="PLACE", help="A directory, or the URL of a place in a store.")]) -> None:
    """Check a prepared dataset against its manifest.

    Reads the whole dataset, and compares sizes, checksums, counts and tokens. The exit code is 78 if something is wrong.

    \b
    Examples:
      outlast data verify data/python
      outlast data verify s3://bucket/docs
    """
    from outlast.data import shard_format

    if "://" not in place:
        _verified(shard_format.read(Path(place)), shard_format.Local(Path(place)), place)
        return
    from outlast.storage import store

    stored = _Stored(store.open_(place))
    _verified(stored.manifest(), stored, place)


def _made(prepare: Callable[[Request], Manifest], how: How) -> None:
    from outlast.data import shard_format
    from outlast.data.prepare import work_units

    source, to = how.source, how.to
    stored, directory = None, Path(to)
    there = shard_format.read(directory) if (directory / shard_format.MANIFEST).exists() else None
    if "://" in to:
        from outlast.storage import store

        stored = _Stored(store.open_(to))
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outlast" / "prepare"
        directory = how.work or home / hashlib.sha256(stored.store.url.encode()).hexdigest()[:32]
        with contextlib.suppress(Missing):
            there = stored.manifest()
        if there is None:
            check_place(stored.store)
    began = time.monotonic()
    with transfer_progress.interruptible() as stop:
        with transfer_progress.shown("done") as tell, how.engine_opened() as engine:
            if engine:  # its processes have other working directories
                source, directory = source.absolute(), directory.absolute()

            def progress(stage: str, done: int, total: int) -> None:
                if total:
                    tell(done, total, stage)
                else:  # a stage that does not say how far it is
                    terminal.say(stage)

            known = there if stored else None
            made = prepare(work_units.Request(source, directory, how.processes or 0, progress, known, stop, engine=engine))
        verb = "already there:" if there else "wrote"
        if stored and not there:
            note = f"the dataset whose manifest has the SHA-256 {hashlib.sha256(made.text.encode()).hexdigest()}"
            check_place(stored.store, note)
            names = {shard.file for part in made.parts.values() for shard in part.shards}
            names |= {shard_format.TOKENIZER, shard_format.META}
            state = directory / work_units.PRIVATE / "upload"
            upload(directory, stored.store, note, shard_format.MANIFEST, state, names.__contains__, stop)
            shutil.rmtree(directory)
    damaged = made.source.get("damaged")
    left_out = f", {damaged:,} damaged left out" if damaged else ""
    print(f"{verb} {summary(made)} in {to}{left_out} ({units.human_seconds(time.monotonic() - began)})")
    if how.verify:
        _verified(made, stored or shard_format.Local(directory), to)


def check_place(store: Store, note: str | None = None) -> None:
    """Raise OutlastError if a place in a store contains other files, or parts of a dataset with a different `note`."""
    from outlast.data import dataset_directory as place
    from outlast.job import ownership, url_logins

    names = store.names()
    there = url_logins.hidden(store.get(place.COMING).decode()) if place.COMING in names else None
    ownership.check_place(store.url, names, there, there or "" if note is None else note)


def upload(
    directory: Path, store: Store, note: str, marker: str, state: Path, own: Callable[[str], bool], stop: threading.Event
) -> None:
    """Upload a dataset's `own` files, and its file `marker` last. An earlier upload with the same `state` is continued."""
    from outlast.data import dataset_directory as place
    from outlast.storage.sync import push_and_pull

    store.put(place.COMING, note.encode())  # marks an incomplete dataset until the marker exists
    with transfer_progress.shown("sent") as tell:

        def progress(now: push_and_pull.Progress) -> None:
            tell(now.bytes, now.bytes_total, f"{now.files:,}/{now.files_total:,} files")

        options = push_and_pull.Options(skip=lambda path: not own(path), progress=progress, stop=stop)
        report = push_and_pull.push(directory, store, state, options)
    for path, reason in report.failed[:1]:
        raise OutlastError(f"{len(report.failed):,} files could not be sent to {store.url}, the first of them {path}: {reason}")
    store.put(marker, (directory / marker).read_bytes())
    store.delete([place.COMING])


def summary(made: Manifest) -> str:
    """Return a summary such as `train 2,975,840 tokens, val 494,212 tokens of 729 documents (vocabulary 4,096, uint16)`."""
    if made.kind == "text":
        parts = ", ".join(f"{name} {part.tokens or 0:,} tokens" for name, part in made.parts.items())
        documents = sum(part.samples for part in made.parts.values())
        return f"{parts} of {units.count(documents, 'document')} (vocabulary {made.vocab_size:,}, {made.dtype})"
    return ", ".join(f"{name} {part.samples:,} samples" for name, part in made.parts.items())


def _verified(manifest: Manifest, place: Files, name: str) -> None:
    from outlast.data import shard_format

    problems = shard_format.verify(manifest, place)
    if problems:
        raise shard_format.BadDataset(f"{name}: {'; '.join(problems)}; get or prepare the dataset again")
    files = sum(len(part.shards) for part in manifest.parts.values())
    size = sum(shard.bytes for part in manifest.parts.values() for shard in part.shards)
    print(f"verified {units.count(files, 'shard')}, {units.human_bytes(size)} in {name}")


class _Stored:
    def __init__(self, store: Store) -> None:
        self.store = store

    def manifest(self) -> Manifest:
        """Read the dataset's manifest. Raises Missing."""
        from outlast.data import shard_format

        return shard_format.parse(self.store.get(shard_format.MANIFEST), self.store.url)

    def size(self, name: str) -> int | None:
        try:
            return self.store.head(name).size
        except Missing:
            return None

    def chunks(self, name: str) -> Iterator[bytes]:
        from outlast.data import shard_format

        size = self.store.head(name).size
        for begin in range(0, size, shard_format.CHUNK):
            yield bytes(self.store.range(name, begin, min(begin + shard_format.CHUNK, size)))
