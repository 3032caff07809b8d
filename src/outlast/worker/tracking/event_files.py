"""Writes TensorBoard event files beside the metrics: `tensorboard/metrics/events.out.tfevents.outlast-<run>.<time>`.

Each follower begins a new file with the resumed step, so TensorBoard drops later steps from earlier files. The directory contains
no other files, since TensorBoard reads a directory's files in sequence. Needs only the `tensorboard` package (extra `tracking`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from outlast.base.errors import importing
from outlast.worker.tracking.missing_points import Point, Position, PositionFile, same
from outlast.worker.tracking.tracker_interface import Status

PREFIX = "events.out.tfevents.outlast"


class EventFile:
    """A sink that writes event files to `directory`, and stores its position in the file `position`."""

    pause_s = 3.0

    def __init__(self, directory: Path, run: str, position: Path) -> None:
        self.title = f"TensorBoard ({directory})"
        self._directory, self._position = directory, PositionFile(position)
        self._name = f"{PREFIX}-{run[:16] or 'run'}"
        self._step = 0

    def open(self) -> Position:
        with importing("an event file", "tracking"):
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer import record_writer
        self._event, self._proto, self._tensor = event_pb2.Event, summary_pb2, tensor_pb2
        self._record = record_writer.RecordWriter
        self._directory.mkdir(parents=True, exist_ok=True)
        earlier = list(self._directory.glob(f"{self._name}.*"))
        for other in self._directory.glob(f"{PREFIX}-*"):
            if other not in earlier:  # from an earlier run, which TensorBoard would mix with ours
                other.unlink()
        position = self._position.read() if earlier else {}
        self._step = max(position.values(), default=0)
        self._path = self._directory / f"{self._name}.{time.time_ns()}"
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        version = self._event(wall_time=0.0, file_version="brain.Event:2")
        self._write([version, self._event(wall_time=time.time(), step=self._step + 1 if position else 0, session_log=start)])
        return position

    rename = staticmethod(same)

    def send(self, points: Sequence[Point]) -> None:
        def event(step: int, at: float, values: Sequence[Point]) -> Any:
            tagged = [self._proto.Summary.Value(tag=point.name, simple_value=point.value) for point in values]
            return self._event(wall_time=at, step=step, summary=self._proto.Summary(value=tagged))

        self._write([event(*key, list(values)) for key, values in groupby(points, key=lambda point: (point.step, point.time))])
        self._step = max(self._step, *(point.step for point in points))
        self._position.advance(points)

    def parameters(self, values: Mapping[str, Any]) -> None:
        rows = "".join(f"| {name} | {json.dumps(value)} |\n" for name, value in values.items())
        table = f"| parameter | value |\n|---|---|\n{rows}"
        kind = self._proto.SummaryMetadata(plugin_data=self._proto.SummaryMetadata.PluginData(plugin_name="text"))
        tensor = self._tensor.TensorProto(dtype=7, string_val=[table.encode()])  # 7 is DT_STRING
        value = self._proto.Summary.Value(tag="parameters", metadata=kind, tensor=tensor)
        self._write([self._event(step=self._step, summary=self._proto.Summary(value=[value]))])

    def end(self, status: Status | None) -> None:
        """Do nothing, since event files have no record of a run's end."""

    def _write(self, events: Sequence[Any]) -> None:
        with self._path.open("ab") as file:
            writer = self._record(file)
            for event in events:
                writer.write(event.SerializeToString())
            file.flush()
            os.fsync(file.fileno())  # before the position is advanced
