"""The file of a rank's part is what torch.distributed.checkpoint would have written, and copies by several threads are copies."""

from __future__ import annotations

import io
import threading
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader, state_dict_saver

from outlast.training.state import checkpoint_file, memory_copies

SHAPES = [(1,), (300, 1000), (2, 3_000_000), (0, 5), ()]


def a_state() -> dict[str, object]:
    made = torch.Generator().manual_seed(1)
    tensors: dict[str, object] = {f"t{number}": torch.randn(shape, generator=made) for number, shape in enumerate(SHAPES)}
    image = torch.randn(4, 3, 64, 64, generator=made)
    views = {"last": image.to(memory_format=torch.channels_last), "part": torch.randn(9, 40_000, generator=made)[3:5]}
    kinds = {"half": torch.randn(300_000, generator=made).bfloat16(), "flags": torch.rand(100_000, generator=made) > 0.5}
    return {**tensors, **views, **kinds, "bytes": b"x" * 100_000}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_written_is_read_back_to_the_bit_and_all_its_checksums_hold(tmp_path: Path) -> None:
    hurry = threading.Event()
    hurry.set()
    writer = checkpoint_file.Writer(tmp_path, hurry)
    state_dict_saver.save(a_state(), storage_writer=writer, no_dist=True)
    [(name, file)] = writer.files.items()
    data = (tmp_path / name).read_bytes()
    assert (file["size"], file["crc32"]) == (len(data), zlib.crc32(data))
    state = a_state()
    found = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else b"" for key, value in state.items()}
    state_dict_loader.load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, found[key]), key
            assert value.stride() == found[key].stride() or key == "part"
        else:
            assert value == found[key]
    places = FileSystemReader(tmp_path).read_metadata().storage_data.values()
    archives = [zipfile.ZipFile(io.BytesIO(data[place.offset : place.offset + place.length])) for place in places]
    assert [archive.testzip() for archive in archives] == [None] * len(a_state())
    for archive in archives:
        archive.close()


def test_this_version_of_torch_writes_an_archive_that_we_know() -> None:
    found = checkpoint_file._around(torch.ones(100_000))
    before, after, places = found
    assert len(places) == 2
    whole = io.BytesIO()
    torch.save(torch.ones(100_000), whole)
    assert len(before) + 400_000 + len(after) == len(whole.getvalue())


@pytest.mark.parametrize("after", [b"", b"PK\x01\x02" + b"\0" * 42, b"something else" * 9])
def test_an_archive_of_another_kind_is_left_to_torch(after: bytes) -> None:
    assert checkpoint_file._checksums(after, 100) == []


@pytest.mark.parametrize("cores", [1, 3])
def test_copies_by_several_threads_are_copies(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    state = [value for value in a_state().values() if isinstance(value, torch.Tensor)]
    state += [torch.randn(500, 400).t(), torch.randn(100, dtype=torch.complex64).conj()]
    copies = [torch.zeros_like(value) for value in state]
    memory_copies.copy(zip(copies, state, strict=True))
    assert all(torch.equal(copy, value) for copy, value in zip(copies, state, strict=True))
