"""What the site changes in the pages, for mkdocs (mkdocs.yaml): README.md is its first page, decisions have a list, and links
to files that are no pages lead to the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    titles = [
        (path.name, path.read_text().partition("\n")[0].removeprefix("# ")) for path in sorted(DOCS.glob("decisions/0*.md"))
    ]
    listed = "\n".join(f"* [{title}]({name})" for name, title in titles)
    files.append(File.generated(config, "decisions/index.md", content=f"# Decisions\n\n{listed}\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    directory = (DOCS / page.file.src_uri).parent
    base = ROOT if page.file.src_uri == "index.md" else directory

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(base / match[1]))
        if target == ROOT / "README.md":
            target = DOCS / "index.md"
        if target.is_relative_to(DOCS) and target.suffix in (".md", ".svg"):
            return os.path.relpath(target, directory)
        return f"{config.extra['repository']}/blob/main/{target.relative_to(ROOT)}"

    return LINK.sub(link, markdown)
