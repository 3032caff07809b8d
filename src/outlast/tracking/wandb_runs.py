"""Weights & Biases: one run, resumed by its id, configured by its own variables (WANDB_API_KEY, WANDB_MODE, WANDB_PROJECT ...).

Its client has a process and a buffer of its own, of which a kill may take some. Offline, the position is in the client's files on
this disk. Online, it is in a file of ours, `.tracking/wandb.json`, written once the client has accepted the values, but no
further than the last step that the server has.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from outlast import contract, files
from outlast.errors import OutlastError
from outlast.tracking.lines import Point, Position, advanced, same
from outlast.tracking.sinks import Run, Status

_LOG_BLOCK = 32768
"""Bytes of a block in the client's files."""


class WandB:
    """A sink that writes into Weights & Biases."""

    title = "Weights & Biases"
    pause_s = 3.0

    def __init__(self, project: str, run: Run) -> None:
        self._project, self._run = project or run.name, run
        self._path = run.output / contract.TRACKING / "wandb.json"
        self._there: Any = None
        self._position: Position = {}

    def open(self) -> Position:
        if self._there is None:
            try:
                import wandb
            except ImportError as error:
                raise OutlastError(f"{error}; pip install wandb") from error
            environ = os.environ
            self._there = wandb.init(
                id=environ.get("WANDB_RUN_ID") or self._run.id,
                resume="allow",
                project=self._project,
                name=environ.get("WANDB_NAME") or self._run.name,
                dir=environ.get("WANDB_DIR") or str(self._run.output),
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True),
            )
            self._position = _written(self._offline()) if self._there.offline else self._arrived()
        return dict(self._position)

    def _arrived(self) -> Position:
        """What the client has accepted, and the server has. Steps that come again it skips itself."""
        try:
            accepted: Position = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return {name: min(step, self._there.starting_step - 1) for name, step in accepted.items()}

    def _offline(self) -> list[Path]:
        """The files of this run that earlier clients have written; they wait for `wandb sync`."""
        directory = Path(self._there.settings.wandb_dir)
        return sorted(directory.glob(f"offline-run-*-{self._there.id}/run-{self._there.id}.wandb"))

    rename = staticmethod(same)

    def send(self, points: Sequence[Point]) -> None:
        for (step, time), values in groupby(points, key=lambda point: (point.step, point.time)):
            self._there.log({**{point.name: point.value for point in values}, "_timestamp": time}, step=step)
        self._position = advanced(self._position, points)
        files.replace(self._path, json.dumps(self._position))

    def parameters(self, values: Mapping[str, Any]) -> None:
        self._there.config.update(dict(values), allow_val_change=True)

    def checkpoints(self, places: Mapping[str, str]) -> None:
        self._there.summary["checkpoints"] = dict(places)

    def end(self, status: Status | None) -> None:
        if status is None:
            self._there.mark_preempting()  # with an exit code, its state becomes "preempted", until it is resumed
        self._there.finish(exit_code=0 if status is Status.FINISHED else 1)
        self._there = None


def _written(paths: Iterable[Path]) -> Position:
    """The last step of each name in files of the client."""
    from wandb.proto import wandb_internal_pb2

    read: Any = wandb_internal_pb2  # its types know nothing of this class
    position: Position = {}
    for path in paths:
        for content in _records(path.read_bytes()):
            record = read.Record.FromString(content)
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    name = item.key or ".".join(item.nested_key)
                    position[name] = max(position.get(name, -1), record.history.step.num)
    return position


def _records(found: bytes) -> Iterator[bytes]:
    """The whole records of a file in LevelDB's log format, after a header of 7 bytes
    (https://github.com/google/leveldb/blob/main/doc/log_format.md)."""
    at, begun = 7, b""
    while at + 7 <= len(found):
        if (left := _LOG_BLOCK - at % _LOG_BLOCK) < 7:  # no room for a header
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", found, at)
        piece, at = found[at + 7 : at + 7 + size], at + 7 + size
        if len(piece) < size or kind == 0:  # a killed client has left this
            return
        begun = piece if kind in (1, 2) else begun + piece
        if kind in (1, 4):
            yield begun
