"""The format of a part, and what is wrong with one."""

from __future__ import annotations

import dataclasses
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.storage.snapshots import part_format
from outlast.storage.snapshots.part_format import Damaged, Item, Part


def a_part(**fields: object) -> Part:
    base = Part("r", 3, 120, world=4, rank=2, worker=1, local_rank=0, local_ranks=2, kind="unique", bytes=256)
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def an_index() -> list[Item]:
    return [
        Item("model.w", "float32", (8, 4), (4, 0), (4, 4), 0, 64),
        Item("rng/2", "bytes", (), (), (), 64, 100),
        Item("empty", "float32", (0,), (0,), (0,), 192, 0),
    ]


def finished() -> tuple[Part, bytes]:
    tail = part_format.tail(an_index(), part_format.checksums(an_index(), memoryview(bytes(range(256)))))
    return part_format.finished(a_part(), an_index(), tail), tail


def test_a_header_and_a_tail_are_read_as_they_were_written() -> None:
    part, tail = finished()
    assert part_format.read_header(part_format.header(part, len(tail))) == (part, len(tail))
    data = bytes(range(256))
    assert part_format.read_tail(part, tail) == (an_index(), [[zlib.crc32(data[:64])], [zlib.crc32(data[64:164])], []])


def test_an_item_has_a_checksum_for_each_block() -> None:
    item = Item("w", "uint8", (2 * part_format.BLOCK + 1,), (0,), (2 * part_format.BLOCK + 1,), 64, 2 * part_format.BLOCK + 1)
    assert item.blocks() == [
        (64, part_format.BLOCK),
        (64 + part_format.BLOCK, part_format.BLOCK),
        (64 + 2 * part_format.BLOCK, 1),
    ]


@given(st.lists(st.integers(0, 10_000)))
def test_places_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    places, total = part_format.laid_out(sizes)
    ends = [place + size for place, size in zip(places, sizes, strict=True)]
    assert all(place % part_format.ALIGNED == 0 for place in places)
    assert all(end <= place for end, place in zip(ends, [*places[1:], total], strict=False))


def test_memory_whose_writer_has_not_finished_has_no_header() -> None:
    for page in (b"", bytes(part_format.PAGE), part_format.header(*_ends())[:40].ljust(part_format.PAGE, b"\0")):
        with pytest.raises(Damaged, match="has no header"):
            part_format.read_header(page)


def _ends() -> tuple[Part, int]:
    part, tail = finished()
    return part, len(tail)


@given(st.integers(0, 199), st.integers(1, 255))
def test_a_changed_byte_in_header_or_tail_is_found(at: int, change: int) -> None:
    part, tail = finished()
    page = bytearray(part_format.header(part, len(tail)))
    page[at] ^= change
    with pytest.raises(Damaged):
        part_format.read_header(bytes(page))
    changed = bytearray(tail)
    changed[at % len(tail)] ^= change
    with pytest.raises(Damaged, match="has digest"):
        part_format.read_tail(part, bytes(changed))


def test_an_index_that_points_outside_of_its_data_is_refused() -> None:
    index = [Item("w", "float32", (4,), (0,), (4,), 250, 16)]
    tail = part_format.tail(index, [0])
    with pytest.raises(Damaged, match=r"w of the unique part of rank 2 of step 120 \(generation 3\) ends at byte 266 of 256"):
        part_format.read_tail(part_format.finished(a_part(), index, tail), tail)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(json_values, json_values, st.sampled_from([each.name for each in dataclasses.fields(Part)]))
def test_whatever_a_peer_sends_is_a_part_or_is_refused(anything: object, value: object, field: str) -> None:
    for said in (anything, a_part().json() | {field: value}):
        try:
            part = Part.of(said)
        except Damaged:
            continue
        assert Part.of(json.loads(json.dumps(part.json()))) == part


@given(json_values, st.lists(json_values, min_size=7, max_size=7))
def test_whatever_is_in_an_index_is_an_item_or_is_refused(anything: object, row: list[object]) -> None:
    for said in (anything, row):
        rows = json.dumps([said]).encode()
        tail = (0).to_bytes(4, "little") + rows
        part = part_format.finished(a_part(), an_index()[:1], tail)
        with pytest.raises(Damaged):
            part_format.read_tail(part, tail)


def test_fields_of_a_newer_version_are_ignored() -> None:
    assert Part.of(a_part().json() | {"colour": "red"}) == a_part()
