"""Pages of the documentation, and the commands in them."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

from typer import Exit
from typer.main import get_command

from outlast.cli.commands import app

ROOT = Path(__file__).parents[2]


GUIDE = ROOT / "docs" / "guide"


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(GUIDE.glob("*.md")),
    *sorted((ROOT / "docs").glob("reference/*.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.M | re.S)


def joined(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def spans(page: Path, begin: str) -> list[str]:
    """Return code spans that begin with a text, such as a command in a cell of a table."""
    return [span.replace(r"\|", "|") for span in re.findall(rf"`({begin}[^`]*)`", page.read_text())]


def commands(*pages: Path) -> list[list[str]]:
    """Return every command line in shell blocks, and every `outlast ...` in the tables of guides, as words."""
    lines = [line.split("#")[0] for page in pages or PAGES for block in blocks(page, "sh") for line in joined(block)]
    lines += [span for page in pages or PAGES for span in spans(page, "outlast ") if len(span.split()) > 2]
    lines += [] if pages else OF_EXAMPLES
    words = [list(group) for line in lines for ends, group in itertools.groupby(shell(line), key=ENDS.__contains__) if not ends]
    return [each for each in words if each]


ENDS = ("|", ";")


def shell(line: str) -> list[str]:
    """Split a command line into words, with `|` and `;` as words unless they are quoted."""
    words = shlex.shlex(line, posix=True, punctuation_chars="".join(ENDS))
    words.whitespace_split, words.commenters = True, ""
    return list(itertools.takewhile(lambda word: word != ">", words))


OF_EXAMPLES = [
    line.split("#")[0]
    for file in sorted((ROOT / "examples").rglob("*.*"))
    if file.suffix in (".conf", ".py", ".sh", ".yaml")
    for line in re.findall(r"^(?:#   )?(outlast [a-z-]+ .*)", file.read_text(), flags=re.M)
]
"""Commands in the first lines of the examples."""


COMMANDS: Any = get_command(app)


OUTLAST = [words[1:] for words in commands() if Path(words[0]).name == "outlast"]


def mistake(words: list[str]) -> str:
    """Return the mistake in a command; empty if the command exists and accepts its options and arguments."""
    command: Any = COMMANDS
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if not words and hasattr(command, "commands"):
        return ""
    try:
        command.make_context("outlast", list(words))
    except Exit:  # --help, --version
        pass
    except Exception as error:  # a sentence names a command without all that it needs, such as FILE
        return "" if str(error).startswith("Missing parameter") else repr(error)
    return ""
