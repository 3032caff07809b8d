"""Durations, quantities and how often: exact both ways, and readable."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.base import units
from outlast.base.units import Every

DURATIONS = st.timedeltas(min_value=timedelta(0), max_value=timedelta.max)


@pytest.mark.parametrize(("text", "seconds"), [
    ("90s", 90), ("5m", 300), ("1h30m", 5400), ("1h 30m", 5400), ("2d", 172_800), ("0.5s", 0.5), ("1.5h", 5400), ("90", 90),
    (90, 90), (0.25, 0.25), (0, 0),
])  # fmt: skip
def test_durations_are_read(text: str | float, seconds: float) -> None:
    assert units.duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "wrong", ["", "5 min", "1h30", "-5s", -5, "s", "1e3s", "٣s", True, None, [5], float("nan"), float("inf")]
)
def test_what_is_not_a_duration_is_refused_with_examples(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^is not a duration; write 90s, 5m, 1h30m or 2d$"):
        units.duration(wrong)


def test_a_duration_that_no_timedelta_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^is too long a duration; the longest is 999999999d$"):
        units.duration("1000000000d")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (90, "1m30s"), (5400, "1h30m"), (172_800, "2d"), (0.5, "0.5s")])
def test_durations_are_written_shortly(seconds: float, text: str) -> None:
    assert units.duration_text(timedelta(seconds=seconds)) == text


@given(DURATIONS)
def test_a_duration_survives_being_written_and_read(value: timedelta) -> None:
    text = units.duration_text(value)
    assert units.duration(text) == value
    assert re.search(units.DURATION_PATTERN, text)


@pytest.mark.parametrize(("text", "size"), [
    ("16Gi", 16 * 2**30), ("1.5Gi", 3 * 2**29), ("2G", 2 * 10**9), ("1k", 1000), (1024, 1024), ("1e3", 1000), ("0.1", 1),
    ("1500m", 2),
])  # fmt: skip
def test_memory_is_read_as_kubernetes_reads_it(text: str | int, size: int) -> None:
    assert units.memory(text) == size


@pytest.mark.parametrize("wrong", ["", "16GB", "16gi", "16 Gi", "Gi", "-1Gi", -1, "1e", "1e400", True, None, {}])
def test_what_is_not_a_quantity_is_refused_with_an_example(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^is not a quantity; write 16Gi$"):
        units.memory(wrong)


@given(st.integers(0, 2**70))
def test_memory_survives_being_written_and_read(size: int) -> None:
    text = units.memory_text(size)
    assert units.memory(text) == size
    assert re.search(units.QUANTITY_PATTERN, text)


def test_memory_is_written_with_the_largest_suffix_that_is_exact() -> None:
    assert [units.memory_text(size) for size in (0, 1, 1024, 2**30, 3 * 2**29)] == ["0", "1", "1Ki", "1Gi", "1536Mi"]


@pytest.mark.parametrize(("text", "cores"), [("500m", 0.5), ("2", 2), (2, 2), (0.5, 0.5), ("0.0001", 0.001)])
def test_cores_are_read_in_thousandths(text: str | float, cores: float) -> None:
    assert units.cores(text) == cores


@given(st.integers(0, 10**9))
def test_cores_survive_being_written_and_read(thousandths: int) -> None:
    text = units.cores_text(thousandths / 1000)
    assert units.cores(text) == thousandths / 1000
    assert re.search(units.QUANTITY_PATTERN, text)


def test_how_often_is_by_the_clock_or_by_steps() -> None:
    assert Every.parse("5m") == Every(duration=timedelta(minutes=5))
    assert Every.parse(300) == Every(duration=timedelta(minutes=5))
    assert Every.parse("200 steps") == Every.parse("200steps") == Every(steps=200)
    assert [str(Every.parse(text)) for text in ("5m", "0.5s", "200 steps", "1 step")] == ["300s", "0.5s", "200 steps", "1 step"]


@pytest.mark.parametrize("wrong", ["often", "steps", "-5 steps", "1.5 steps", True, None, ["5m"]])
def test_how_often_must_be_one_of_the_two(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r'^is neither a duration nor a number of steps; write 5m or "200 steps"$'):
        Every.parse(wrong)


@pytest.mark.parametrize("never", [0, "0s", "0 steps"])
def test_how_often_cannot_be_never(never: Any) -> None:
    with pytest.raises(ValueError, match=r"^must be more than 0; "):
        Every.parse(never)


@given(st.builds(Every, duration=DURATIONS.filter(bool)) | st.builds(Every, steps=st.integers(1, 10**18 - 1)))
def test_how_often_survives_being_written_and_read(every: Every) -> None:
    assert Every.parse(str(every)) == every
    assert re.search(units.EVERY_PATTERN, str(every))


def test_bytes_are_shown_in_three_digits_at_most() -> None:
    sizes = (0, 512, 1023, 1024, 1536, 10 * 2**10, 1023.6 * 2**10, 139 * 2**30, 2**50)
    shown = ["0 B", "512 B", "1023 B", "1.0 KiB", "1.5 KiB", "10 KiB", "1.0 MiB", "139 GiB", "1.0 PiB"]
    assert [units.human_bytes(size) for size in sizes] == shown


def test_times_are_shown_in_at_most_two_units() -> None:
    times = (-1, 0.0074, 0.9996, 3.24, 9.96, 42, 59.6, 65, 3599.7, 7380, 4 * 86_400 + 3700)
    shown = ["0ms", "7ms", "1.0s", "3.2s", "10s", "42s", "1m00s", "1m05s", "1h00m", "2h03m", "4d01h"]
    assert [units.human_seconds(time) for time in times] == shown


@given(st.floats(0, 1e9))
def test_a_time_never_shows_sixty_seconds_or_minutes(seconds: float) -> None:
    assert not re.search(r"(^|\D)60[sm]", units.human_seconds(seconds))


@pytest.mark.parametrize(
    ("text", "number"), [("500m", 0.5), ("16Gi", 16 * 2**30), ("1e3", 1e3), ("12345678n", 0.012345678), ("-1k", -1e3)]
)
def test_a_quantity_of_the_api_server_is_a_number(text: str, number: float) -> None:
    assert units.quantity(text) == number
    with pytest.raises(ValueError, match="is not a quantity"):
        units.quantity(f"{text} apples")
