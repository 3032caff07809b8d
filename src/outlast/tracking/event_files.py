"""TensorBoard: an event file beside the metrics, `tensorboard/metrics/events.out.tfevents.outlast-<run>`.

One file for the whole run: a later follower cuts off a half-written record and appends. The file lies in a directory of its own,
since TensorBoard reads the files of a directory one after the other, and a script may write its own into `tensorboard/`. Needs
the package `tensorboard` (extra `tracking`) but neither torch nor TensorFlow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from outlast.errors import OutlastError
from outlast.tracking.lines import Point, Position, same
from outlast.tracking.sinks import Status, text

_HEADER, _CRC = 12, 4
"""Bytes of a record before its content (length, checksum of the length) and after it. The format is TFRecord's:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details"""
_VERIFIED = 1 << 20
"""Bytes at the end of a file whose records are verified."""
PREFIX = "events.out.tfevents.outlast"


class EventFile:
    """A sink that writes event files into `directory`."""

    pause_s = 3.0

    def __init__(self, directory: Path, run: str) -> None:
        self.title = f"TensorBoard ({directory})"
        self._directory = directory
        self.path = directory / f"{PREFIX}-{run[:16] or 'run'}"
        self._settings, self._step = "", 0

    def open(self) -> Position:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
            from tensorboard.summary.writer import record_writer
        except ImportError as error:
            raise OutlastError(f"{error}; pip install 'outlast[tracking]'") from error
        self._event, self._proto, self._tensor, self._record = (
            event_pb2.Event,
            summary_pb2,
            tensor_pb2,
            record_writer.RecordWriter,
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        for other in self._directory.glob(f"{PREFIX}-*"):  # a run that has begun again: two in one directory would be mixed
            if other != self.path:
                other.unlink()
        position: Position = {}
        self._settings = ""
        if self.path.exists():
            with self.path.open("r+b") as file:
                whole = 0
                for content, end in records(file.read(), masked_crc32c):
                    whole = end
                    event = self._event.FromString(content)
                    for value in event.summary.value:
                        if value.HasField("tensor"):  # a metric may have that name, too
                            self._settings = value.tensor.string_val[0].decode()
                        else:
                            position[value.tag] = max(position.get(value.tag, -1), event.step)
                file.truncate(whole)
        if not self.path.exists() or not self.path.stat().st_size:
            self._write([self._event(wall_time=0.0, file_version="brain.Event:2")])
        self._step = max(position.values(), default=0)
        return position

    rename = staticmethod(same)

    def send(self, points: Sequence[Point]) -> None:
        def event(step: int, time: float, values: Sequence[Point]) -> Any:
            tagged = [self._proto.Summary.Value(tag=point.name, simple_value=point.value) for point in values]
            return self._event(wall_time=time, step=step, summary=self._proto.Summary(value=tagged))

        self._write([event(*key, list(values)) for key, values in groupby(points, key=lambda point: (point.step, point.time))])
        self._step = max(self._step, *(point.step for point in points))

    def parameters(self, values: Mapping[str, Any]) -> None:
        rows = "".join(f"| {name} | {text(value)} |\n" for name, value in values.items())
        table = f"| parameter | value |\n|---|---|\n{rows}"
        if table == self._settings:
            return
        kind = self._proto.SummaryMetadata(plugin_data=self._proto.SummaryMetadata.PluginData(plugin_name="text"))
        tensor = self._tensor.TensorProto(dtype=7, string_val=[table.encode()])  # 7 is DT_STRING
        value = self._proto.Summary.Value(tag="parameters", metadata=kind, tensor=tensor)
        self._write([self._event(step=self._step, summary=self._proto.Summary(value=[value]))])
        self._settings = table

    def checkpoints(self, places: Mapping[str, str]) -> None:
        """Nothing: they are beside the event files."""

    def end(self, status: Status | None) -> None:
        """Nothing: event files know no end."""

    def _write(self, events: Sequence[Any]) -> None:
        with self.path.open("ab") as file:
            writer = self._record(file)
            for event in events:
                writer.write(event.SerializeToString())
            file.flush()


def records(found: bytes, checksum: Callable[[bytes], int]) -> Iterator[tuple[bytes, int]]:
    """The contents of whole records up to the first damaged one, each with the offset of its end.

    Contents are verified near the end of a file only, where a power loss does its damage: `checksum` is slow.
    """
    at = 0
    while len(found) >= at + _HEADER:
        size, head = struct.unpack_from("<QI", found, at)
        end = at + _HEADER + size + _CRC
        if end > len(found) or head != checksum(found[at : at + 8]):
            return
        content = found[at + _HEADER : end - _CRC]
        if len(found) - at < _VERIFIED and struct.unpack_from("<I", found, end - _CRC)[0] != checksum(content):
            return
        yield content, end
        at = end
