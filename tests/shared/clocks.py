"""Clocks of a simulated machine, which can be set, sleep and be paused."""

from __future__ import annotations

from outlast.base.clock import Awake, Clock


class Machine:
    def __init__(self) -> None:
        self.wall, self.monotonic = 1_000_000.0, 50.0

    def goes_on(self, seconds: float, *, wall: float | None = None) -> None:
        self.monotonic += seconds
        self.wall += seconds if wall is None else wall

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.monotonic)

    def awake(self) -> Awake:
        return Awake(lambda: self.wall, lambda: self.monotonic)


HOUR = 3600.0
DISTURBANCES = {
    "the clock is set forward": (0.0, HOUR),
    "the clock is set back": (0.0, -HOUR),
    "the machine sleeps": (0.0, HOUR),  # CLOCK_MONOTONIC does not count it
    "the virtual machine is paused": (HOUR, HOUR),
    "the process is stopped": (HOUR, HOUR),
}
"""Seconds by which the monotonic clock and the wall clock advance during each disturbance."""
