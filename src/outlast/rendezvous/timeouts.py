"""When a timeout ends, whatever the clock does meanwhile. Pure."""

from __future__ import annotations


def until(at: float, timeout: float, now: float) -> float | None:
    """When a timeout that began at `at` ends; None when it is over.

    A beginning in the future means that the clock went back. If by less than the timeout, no time has passed yet. If by more,
    it is unknown how much has, and the timeout is over. So no wait is longer than twice its timeout, however the clock jumps.
    """
    end = at + timeout
    return None if now >= end or at > now + timeout else end
