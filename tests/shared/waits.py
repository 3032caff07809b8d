"""Waits for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(what: Callable[[], Any], within_s: float = 60, why: Callable[[], object] = lambda: "it did not happen") -> Any:
    """Wait until `what` returns a true value, and return this value."""
    deadline = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.005)
    return found
