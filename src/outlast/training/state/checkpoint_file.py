"""Writes the file with one rank's part of a checkpoint, faster than torch.distributed.checkpoint's own writer.

Each byte is read once: blocks of 4 MiB are checksummed, and written while they are in the CPU's cache, without the GIL. Unless a
caller waits for the save, the writer uses a core for only an eighth of the time, which leaves memory bandwidth to training. A
tensor is stored as by `torch.save`, in a ZIP archive (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT): torch writes
the bytes around the data (`torch.serialization.skip_data`).
"""

from __future__ import annotations

import ctypes
import io
import os
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from outlast.base import crc32

_BLOCK = 4 << 20
_PAUSE = 7
"""Seconds of pause after each second of work, for files of several blocks."""
UNHURRIED = 1 + _PAUSE
"""Maximum factor by which pauses prolong a save."""
_SMALL = 64 << 10
"""Tensors of fewer bytes are saved by torch itself, since the archive around the data costs more than the data."""


class Writer(FileSystemWriter):
    """Writes one rank's part into `file`, by default a new file in `directory`, without pauses while `hurry` is set."""

    def __init__(self, directory: Path, hurry: threading.Event, file: Path | None = None) -> None:
        super().__init__(directory, sync_files=True)
        self._directory, self._hurry, self._file = directory, hurry, file
        self.files: Mapping[str, Mapping[str, int]] = {}
        """The written file, as `{name: {size, crc32}}`."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix: _StoragePrefix = plan.storage_data
        name, results = f"{prefix.prefix}0.distcp", []
        with _File(self._file or self._directory / name, self._hurry) as file:
            for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                data, start = planner.resolve_data(item), file.size
                if isinstance(data, io.BytesIO):
                    file.write(data.getbuffer())
                else:
                    file.save(data)
                place = _StorageInfo(name, start, file.size - start)
                results.append(WriteResult(index=item.index, size_in_bytes=place.length, storage_data=place))
            file.sync()
        self.files = {name: {"size": file.size, "crc32": file.crc32}}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _File:
    def __init__(self, path: Path, hurry: threading.Event) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._hurry = hurry
        self.size = self.crc32 = 0

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def sync(self) -> None:
        os.fsync(self._fd)

    def write(self, data: memoryview | bytes) -> int:
        """Append bytes and return their crc32."""
        view, crc = memoryview(data), 0
        for start in range(0, len(view), _BLOCK):
            block, used = view[start : start + _BLOCK], time.thread_time()
            crc = crc32.update(block, crc)
            while block:
                block = block[os.write(self._fd, block) :]
            if len(view) > _BLOCK:
                self._hurry.wait(_PAUSE * (time.thread_time() - used))
        if len(view) > _BLOCK:
            self.crc32 = crc32.combine(self.crc32, crc, len(view))
        else:
            self.crc32 = crc32.update(view, self.crc32)
        self.size += len(view)
        return crc

    def save(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.cpu().clone()
        around = _around(tensor) if tensor.nbytes >= _SMALL else None
        if around is None:
            whole = io.BytesIO()
            torch.save(tensor, whole)
            self.write(whole.getbuffer())
            return
        before, after, places = around
        self.write(bytes(before))
        crc = self.write(memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B"))
        for place in places:
            after[place : place + 4] = crc.to_bytes(4, "little")
        self.write(bytes(after))


class _Gap(io.RawIOBase):
    """Collects the bytes that `torch.save` writes before and after the skipped data."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self.gaps: list[int] = []
        """Number of bytes skipped in each gap; -1 for an unknown seek."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        (self.after if self.gaps else self.before).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.gaps.append(offset if whence == os.SEEK_CUR else -1)
        return len(self.before) + offset


def _around(tensor: torch.Tensor) -> tuple[bytearray, bytearray, list[int]] | None:
    """Return the bytes that `torch.save` writes before and after the data, and the offsets of the data's checksum in the bytes
    after it, or None if this version of torch writes an unknown format."""
    gap = _Gap()
    with torch.serialization.skip_data():
        torch.save(tensor, cast(IO[bytes], gap))
    places = _checksums(bytes(gap.after), tensor.nbytes)
    return (gap.before, gap.after, places) if gap.gaps == [tensor.nbytes] and places else None


def _checksums(after: bytes, size: int) -> list[int]:
    """Return the checksum's offsets after the data: in the data descriptor and in the directory entry."""
    wide = size >= 0xFFFFFFFF  # then sizes have 8 bytes, in another field of the entry
    at = after.find(b"PK\x01\x02")
    while at >= 0 and after.startswith(b"PK\x01\x02", at):
        crc, _, length, name, extra, comment = struct.unpack_from("<IIIHHH", after, at + 16)
        if after[at + 46 : at + 46 + name].endswith(b"/data/0"):
            same = after[:8] == b"PK\x07\x08" + crc.to_bytes(4, "little") and (wide or length == size)
            return [4, at + 16] if same else []
        at += 46 + name + extra + comment
    return []
