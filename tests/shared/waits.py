"""Waits for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(
    what: Callable[[], Any], within_s: float = 60, why: Callable[[], object] = lambda: "it did not happen", pause_s: float = 0.005
) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < deadline, why()
        time.sleep(pause_s)
    return found
