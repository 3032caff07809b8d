"""Slow ranks are named within a minute, and nobody is in an hour of a busy machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from outlast.job import slow_ranks
from outlast.job.slow_ranks import WINDOWS, judged

WINDOW_S, SAMPLES = 15, 60
HOUR = 3600 // WINDOW_S
OwnTime = Callable[[random.Random, int, float], float]
"""The own time of a rank at a time of the run, both in seconds."""


def noisy(draw: random.Random, rank: int, at: float) -> float:
    """Uneven ranks (up to 6 %), a spread of 20 %, and each 25th step takes up to twenty times as long."""
    return 0.016 * (1 + 0.02 * rank) * draw.lognormvariate(0, 0.2) * (draw.uniform(2, 20) if draw.random() < 0.04 else 1)


def bursts(draw: random.Random, rank: int, at: float) -> float:
    """Every two minutes another program doubles the time of one rank for half a minute."""
    busy = at % 120 < 30 and int(at // 120) % 4 == rank
    return noisy(draw, rank, at) * (2 if busy else 1)


def warming(draw: random.Random, rank: int, at: float) -> float:
    """All ranks become slower and faster, each a little later than the one before."""
    return noisy(draw, rank, at) * (1.5 if (at + 3 * rank) % 200 < 100 else 1)


def windows(own: OwnTime, count: int, seed: int, ranks: int = 4) -> list[slow_ranks.Window]:
    draw, times = random.Random(seed), [number * WINDOW_S for number in range(count)]
    samples = [WINDOW_S / SAMPLES * number for number in range(SAMPLES)]
    return [[slow_ranks.measured([own(draw, rank, begin + at) for at in samples]) for rank in range(ranks)] for begin in times]


def named(seen: Sequence[slow_ranks.Window], work: Sequence[float] = (1, 1, 1, 1)) -> list[dict[int, float]]:
    """Return the slow ranks after each window."""
    found: list[dict[int, float]] = [{}]
    for end in range(1, len(seen) + 1):
        found.append(judged(seen[max(0, end - WINDOWS) : end], work, found[-1]))
    return found[1:]


@pytest.mark.parametrize(
    ("own", "seed"),
    [
        pytest.param(own, seed, marks=[] if seed == number else pytest.mark.slow)
        for number, own in enumerate((noisy, bursts, warming))
        for seed in range(3)
    ],
)
def test_nobody_is_named_in_an_hour_of_an_uneven_and_busy_machine(own: OwnTime, seed: int) -> None:
    assert not any(named(windows(own, HOUR, seed)))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 10))])
def test_a_rank_slowed_by_a_fifth_in_the_middle_of_a_window_is_named_within_a_minute_until_it_is_not(seed: int) -> None:
    def own(draw: random.Random, rank: int, at: float) -> float:
        slowed = rank == 1 and 67 <= at < 307
        return 0.016 * (1.2 if slowed else 1) * draw.lognormvariate(0, 0.08)

    found = named(windows(own, 30, seed))
    first = next(number for number, slow in enumerate(found) if slow)
    assert (first + 1) * WINDOW_S - 67 <= 60
    assert list(found[first]) == [1]
    assert found[first][1] == pytest.approx(0.2, abs=0.06)
    last = max(number for number, slow in enumerate(found) if slow)
    assert all(slow == found[first] for slow in found[first : last + 1]), "its share stays, since it is part of a sentence"
    assert 307 <= (last + 1) * WINDOW_S <= 307 + 60


def even(*own_s: float) -> list[slow_ranks.Window]:
    return [[(each, 0.0) for each in own_s]] * WINDOWS


NAMED = {
    "two": (even(0.010, 0.013), (1, 1), {1: 0.3}),
    "two of five": (even(0.013, 0.010, 0.014, 0.010, 0.010), (1, 1, 1, 1, 1), {0: 0.3, 2: 0.4}),
    "unknown": (even(0.010, 0.010, 0.0), (1, 1, 1), {}),
    "all unknown": (even(0.0, 0.0), (1, 1), {}),
    "below 1 ms": (even(0.001, 0.0015), (1, 1), {}),
    "more work": (even(0.010, 0.010, 0.020), (1, 1, 2), {}),
    "more work, slow": (even(0.010, 0.010, 0.026), (1, 1, 2), {2: 0.3}),
    "one fast": (even(0.010, 0.010, 0.010, 0.005), (1, 1, 1, 1), {}),
    "noise": ([[(0.010, 0.002), (0.013, 0.002)]] * WINDOWS, (1, 1), {}),
    "too soon": (even(0.010, 0.013)[1:], (1, 1), {}),
}


@pytest.mark.parametrize(("seen", "work", "expected"), NAMED.values(), ids=NAMED)
def test_ranks_that_are_named(seen: Sequence[slow_ranks.Window], work: Sequence[float], expected: dict[int, float]) -> None:
    assert judged(seen, work, {}) == pytest.approx(expected)


def test_the_sentence_names_the_place() -> None:
    assert slow_ranks.sentence(2, 0.312, slow_ranks.place(1, "b")) == (
        "rank 2 (worker 1, node b) is slow: its own time per step is 31.2 % above the others'"
    )
    assert slow_ranks.sentence(2, 0.0, slow_ranks.place(1, "")) == "rank 2 (worker 1) is as fast as the others again"
