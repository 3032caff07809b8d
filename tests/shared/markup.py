"""HTML as a browser reads it, and a text that would do something in it."""

from __future__ import annotations

import html.parser

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
