"""A browser for pages: Chromium without a window."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium; skips the test if there is none on the PATH."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on the PATH")
    from playwright import sync_api

    with sync_api.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=[] if os.geteuid() else ["--no-sandbox"])
        yield found
        found.close()
