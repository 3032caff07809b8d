"""Parses a training container's command into the program that torchrun or python runs, and its options. Pure.

It understands `torchrun` and `python -m torch.distributed.run`, python with a script, `-m` or `-c`, a shell's `-c` with a script
that ends with one of these commands, and a function as Kubeflow's SDK sends it.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence

from outlast.job import contract

HONOURED = ("nnodes", "nproc-per-node", "module", "m", "no-python")
"""torchrun options that matter although workers find each other by themselves."""
_FLAGS = ("standalone", "module", "m", "no-python", "run-path", "use-env", "virtual-local-rank")
"""torchrun options without a value. https://docs.pytorch.org/docs/stable/elastic/run.html"""
_FUNCTION = re.compile(
    r"""(?P<before>.*?)read -r -d '' SCRIPT << EOM\n(?P<code>.*)\nEOM\n"""
    r"""printf "%s" "\$SCRIPT" > (?P<file>"[^"\n]+")\n(?P<start>[^\n]+) (?P=file)\s*""",
    re.DOTALL,
)
"""Pattern for a training function's source in a heredoc, as Kubeflow's SDK sends it."""


class Unknown(ValueError):
    """A command that cannot be translated. The message continues a sentence that begins with the command."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that a command runs: a script, a module or code."""

    script: str = ""
    module: str = ""
    code: str = ""
    args: tuple[str, ...] = ()
    options: dict[str, str] | None = None
    """torchrun's options, keyed by name; None if the command does not use torchrun."""
    directory: str = ""
    env: dict[str, str] = dataclasses.field(default_factory=dict)


def read(words: Sequence[str]) -> Program:
    """Return the program that a command runs. Raises Unknown."""
    if not words or words[0].startswith("-"):
        raise Unknown("is missing, and what the image starts is not known here; write the command")
    program, rest = posixpath.basename(words[0]), [*words[1:]]
    if program in ("sh", "bash", "dash", "zsh") and len(rest) > 1 and re.fullmatch("-[a-z]*c", rest[-2]):
        return _shell(rest[-1])
    python = bool(re.fullmatch(r"python[0-9.]*", program))
    while python and rest and re.fullmatch(r"-[bBdEiIOqsSuvx]+", rest[0]):
        rest.pop(0)
    if program == "torchrun" or (python and rest[:2] == ["-m", "torch.distributed.run"]):
        return _launched(rest[2:] if python else rest)
    if python and len(rest) > 1 and rest[0] in ("-m", "-c"):
        module, code = (rest[1], "") if rest[0] == "-m" else ("", rest[1])
        return Program(module=module, code=code, args=tuple(rest[2:]))
    if python and rest and not rest[0].startswith("-"):
        return Program(script=rest[0], args=tuple(rest[1:]))
    raise Unknown("is not understood; start the training with torchrun or python")


def _launched(rest: list[str]) -> Program:
    options: dict[str, str] = {}
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        options[name] = value if equals or name in _FLAGS or not rest else rest.pop(0)
    if not rest:
        raise Unknown("has no script behind torchrun's options; name it")
    if "no-python" in options:
        return dataclasses.replace(read(rest), options=options)
    script, module = ("", rest[0]) if options.keys() & {"module", "m"} else (rest[0], "")
    return Program(script=script, module=module, args=tuple(rest[1:]), options=options)


def _shell(text: str) -> Program:
    """Return what a shell script's last command runs. Raises Unknown if earlier commands do more than set variables and
    directories."""
    if function := _FUNCTION.fullmatch(text):
        program = _shell(f"{function['before']}\n{function['start']} function.py")
        return dataclasses.replace(program, script="", code=f"{function['code'].strip()}\n")
    *before, last = list(_commands(text)) or [[]]
    directory, env = "", dict[str, str]()
    for words in before:
        if words[0] == "cd" and len(words) == 2:
            directory = posixpath.join(directory, words[1])
        elif words[0] == "export" and all("=" in word for word in words[1:]):
            env |= dict(word.split("=", 1) for word in words[1:])
        elif words[0] not in ("set", "echo", "ulimit"):
            remedy = "let the image have what it makes"
            if "install" in words:
                remedy = "put the packages into a file, add --set environment.requirements=FILE, and remove this line"
            raise Unknown(f"runs `{short(words)}` before the training; {remedy}")
    while last and re.match(r"[A-Za-z_]\w*=", last[0]):
        name, _, env[name] = last.pop(0).partition("=")
    program = read(last[1:] if last[:1] == ["exec"] else last)
    return dataclasses.replace(program, directory=directory, env=env)


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a shell script. `$NAME` is changed to `$(NAME)`, which the worker replaces with the
    variable's value."""
    lines = re.sub(r"^\s*#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(lines, posix=True, punctuation_chars=";&|<>()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    try:
        tokens = [*lexer, "\n"]
    except ValueError as error:
        raise Unknown(f"is no shell script: {error}") from error
    for token in tokens:
        if not token or not set(token) <= set(";&|<>()\n"):
            words.append(_with_references(token))
        elif not set(token) <= set(";&\n") or token == "&":
            raise Unknown(f"uses {token.strip()} of the shell; start the training with torchrun or python alone")
        elif words:
            yield words
            words = []


def _with_references(word: str) -> str:
    plain = re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda match: f"$({match[1] or match[2]})", word.replace("$(", "`"))
    names = re.findall(r"\$\((\w+)\)", plain)
    if "`" in plain or len(names) != plain.count("$") or any(map(contract.RESERVED_ENV.search, names)):
        raise Unknown(f"has {short([word])}, which a worker cannot replace; write the value")
    return plain


def short(words: Sequence[str]) -> str:
    text = shlex.join(words)
    return text if len(text) <= 60 else f"{text[:59]}…"
