"""A browser for pages, Chromium without a window; HTML as it reads it, and a text that would do something in it."""

from __future__ import annotations

import contextlib
import html.parser
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


HOSTILE = '</script><img src=x onerror="hit=1"><b>{{ 7 * 7 }}</b>]]>-->\'"&amp;\ud800 $$x$$'


class Read(html.parser.HTMLParser):
    """The elements, the text, and the scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.scripts += [""] if tag == "script" else []

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data
