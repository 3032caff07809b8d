"""The clock that never steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import DISTURBANCES, Machine
from outlast.base.clock import BREAK_S, STEP_S, Seen


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


ALIKE = st.tuples(st.floats(0.0, STEP_S), st.floats(-5000, 5000))
PAUSES = st.sampled_from(list(DISTURBANCES.values()))


@given(st.lists(ALIKE | PAUSES, max_size=30))
def test_time_awake_never_steps_and_a_pause_of_whatever_kind_passes_a_second_at_most(steps: list[tuple[float, float]]) -> None:
    machine = Machine()
    clock = machine.awake()
    before = clock()
    for monotonic, wall in steps:
        machine.goes_on(monotonic, wall=wall)
        now = clock()
        assert now - before == pytest.approx(min(monotonic, STEP_S), abs=1e-6)
        before = now


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_what_looks_the_same_ages_only_while_we_look(disturbance: str) -> None:
    machine = Machine()
    seen = Seen(machine.awake())
    assert seen.age("rank 0", "step 7") == 0.0
    machine.goes_on(0.5)
    assert seen.age("rank 0", "step 7") == pytest.approx(0.5)
    monotonic, wall = DISTURBANCES[disturbance]
    machine.goes_on(monotonic, wall=wall)
    assert seen.age("rank 0", "step 7") <= 1.5 + 1e-6
    machine.goes_on(0.5)
    assert seen.age("rank 0", "step 8") == 0.0
    seen.forget("rank 0")
    machine.goes_on(0.5)
    assert seen.age("rank 0", "step 8") == 0.0, "another of the same name"
