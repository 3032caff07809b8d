"""Transfers and verifies one checkpoint's files in a store, where COMMIT is written last and deleted first."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from outlast.base import crc32
from outlast.base.errors import Changed, Exists, Missing, OutlastError, Stopped
from outlast.job import contract
from outlast.storage.checkpoints import on_disk
from outlast.storage.checkpoints.register_rules import Place
from outlast.storage.store import Store

_BLOCK = 8 << 20
_AT_ONCE = 8
WITHDRAWN = "WITHDRAWN"
"""The name to which a withdrawn checkpoint's COMMIT is renamed."""

Progress = Callable[[int], None]
"""A callback. Many threads call it with the number of bytes transferred since its last call."""


class Damaged(OutlastError):
    """A checkpoint in the store differs from its COMMIT. Another checkpoint may be valid."""


class DamagedHere(OutlastError):
    """A checkpoint on this machine differs from its COMMIT."""


@dataclass(frozen=True)
class Parts:
    """The objects of one checkpoint in the store."""

    store: Store
    run: str
    place: Place

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.key('').rstrip('/')}"

    def key(self, name: str) -> str:
        return f"{contract.CHECKPOINTS}/{self.place.key}/{name}"

    def sizes(self) -> dict[str, int]:
        entries = self.store.entries(f"{contract.CHECKPOINTS}/{self.place.key}")
        return {entry.key.removeprefix(self.key("")): entry.size for entry in entries}

    def read_commit(self) -> on_disk.Commit:
        """Read COMMIT. Raises Damaged."""
        try:
            commit = on_disk.Commit.parse(self.store.get(self.key(contract.COMMIT)))
            if (commit.run, commit.step, commit.generation) != (self.run, self.place.step, self.place.generation):
                raise ValueError(f"it is that of step {commit.step} of generation {commit.generation} of run {commit.run}")
        except (ValueError, Missing) as error:
            why = "it is gone" if isinstance(error, Missing) else error
            raise Damaged(f"{contract.COMMIT} cannot be read: {why}") from error
        return commit

    def commit(self, commit: on_disk.Commit) -> None:
        """Write COMMIT unless a valid one exists already, for example because an earlier response was lost."""
        key, text = self.key(contract.COMMIT), commit.text().encode()
        if not self.store.conditional():
            try:
                self.read_commit()
            except Damaged:  # or missing
                self.store.put(key, text)
            return
        try:
            self.store.create(key, text)
        except Exists:
            existing, entry = self.store.read(key)
            with contextlib.suppress(ValueError):
                on_disk.Commit.parse(existing)
                return
            with contextlib.suppress(Changed):  # another writer has just repaired it
                self.store.replace(key, text, entry.etag)

    def problem(self, *, deep: bool, progress: Progress = lambda _: None, stop: threading.Event | None = None) -> str | None:
        """Return the checkpoint's first problem, or None. With `deep`, all files are read and their checksums verified."""
        try:
            files = self.read_commit().files
        except Damaged as damage:
            return str(damage)
        if (wrong := _wrong_sizes(files, self.sizes())) or not deep:
            return wrong
        check = functools.partial(self._checksum, progress=progress, stop=stop or threading.Event())
        with ThreadPoolExecutor(_AT_ONCE, "outlast-verify") as pool:
            try:
                crcs = list(pool.map(check, files, [file["size"] for file in files.values()]))
            except (Missing, Changed) as error:
                return f"it was removed meanwhile ({error})"
        return min(filter(None, map(on_disk.wrong_crc, files, crcs, files.values())), default=None)

    def _checksum(self, name: str, size: int, *, progress: Progress, stop: threading.Event) -> int:
        crc = 0
        for start in range(0, size, _BLOCK):
            if stop.is_set():
                raise Stopped(f"the check of {self.url} was stopped")
            block = self.store.range(self.key(name), start, min(size, start + _BLOCK))
            crc = crc32.update(block, crc)
            progress(len(block))
        return crc

    def send(
        self, path: Path, commit: on_disk.Commit, *, journals: Path, progress: Progress, stop: threading.Event | None
    ) -> tuple[str, ...]:
        """Send the files that the store lacks. Returns the names of those that this machine lacks as well. Raises DamagedHere."""
        from outlast.storage.sync import push_and_pull

        sizes = self.sizes()
        absent = [name for name, file in commit.files.items() if sizes.get(name) != file["size"]]
        local = [name for name in commit.files if (path / name).is_file()]
        for name in local:
            if problem := on_disk.verify_file(path, name, commit.files[name], deep=name not in absent):
                raise DamagedHere(f"{path.name} is damaged here: {problem}")
        files = [(path / name, self.key(name)) for name in local if name in absent]
        sent = push_and_pull.send(self.store, files, journals=journals, progress=progress, stop=stop)
        for file, key in files:
            name = str(file.relative_to(path))
            if problem := on_disk.wrong_crc(name, sent[key].crc32, commit.files[name]):
                self.store.delete([key])
                raise DamagedHere(f"{path.name} is damaged here: {problem}")
        return tuple(name for name in absent if name not in local)

    def receive(self, into: Path, commit: on_disk.Commit, *, progress: Progress, stop: threading.Event | None) -> None:
        """Fetch the files that `into` lacks, durably, after deleting damaged and foreign files from it. Raises Damaged."""
        from outlast.storage.sync import push_and_pull

        if problem := _wrong_sizes(commit.files, self.sizes()):
            raise Damaged(problem)
        for path in into.rglob("*"):
            name = str(path.relative_to(into))
            if path.is_file() and (name not in commit.files or on_disk.verify_file(into, name, commit.files[name])):
                path.unlink()
        absent = [name for name in commit.files if not (into / name).exists()]
        for name in absent:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
        objects = [(self.key(name), commit.files[name]["size"], into / name) for name in absent]
        try:
            received = push_and_pull.receive(self.store, objects, durable=True, progress=progress, stop=stop)
        except (Missing, Changed) as error:
            raise Damaged(f"it was removed meanwhile ({error})") from error
        for name in absent:
            if problem := on_disk.wrong_crc(name, received[self.key(name)], commit.files[name]):
                (into / name).unlink()
                raise Damaged(problem)

    def withdraw(self) -> None:
        """Rename COMMIT, so that the checkpoint no longer counts. The other files are kept."""
        with contextlib.suppress(Missing):
            self.store.put(self.key(WITHDRAWN), self.store.get(self.key(contract.COMMIT)))
            self.store.delete([self.key(contract.COMMIT)])

    def delete(self, keys: list[str]) -> None:
        self.store.delete([self.key(contract.COMMIT)])
        self.store.delete(keys)


def _wrong_sizes(files: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]) -> str | None:
    for name, file in sorted(files.items()):
        if name not in sizes:
            return f"{name} is missing"
        if problem := on_disk.wrong_size(name, sizes[name], file):
            return problem
    return None
