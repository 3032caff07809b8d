"""The clock that never steps."""

import math

import pytest

from outlast.clock import BREAK_S, Clock


class Machine:
    """Its two clocks."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1_000_000.0, 50.0

    def goes_on(self, seconds: float, *, wall: float | None = None) -> None:
        self.monotonic += seconds
        self.wall += seconds if wall is None else wall

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.monotonic)


def test_a_clock_goes_on_as_the_monotonic_one_does() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.goes_on(7)
    assert clock() == 1_000_007.0
    assert clock.broken_at == -math.inf


@pytest.mark.parametrize("step", [3600.0, -3600.0, BREAK_S + 0.1])
def test_a_wall_clock_that_steps_is_a_break_and_not_a_step_of_ours(step: float) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.goes_on(5, wall=5 + step)
    assert clock() == 1_000_005.0
    assert clock.broken_at == 1_000_005.0
    machine.goes_on(5)
    assert (clock(), clock.broken_at) == (1_000_010.0, 1_000_005.0)


def test_a_machine_that_slept_for_an_hour_is_a_break() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.goes_on(0.1, wall=3600)
    assert clock() == pytest.approx(1_000_000.1)
    assert clock.broken_at == pytest.approx(1_000_000.1)


def test_slewing_is_no_break_however_much_it_sums_to() -> None:
    machine = Machine()
    clock = machine.clock()
    for _ in range(100):
        machine.goes_on(60, wall=60.03)
        clock()
    assert clock.broken_at == -math.inf
