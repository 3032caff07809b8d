"""Parses a recipe's settings: one frozen dataclass defines its flags (argparse), its help, and the keys of its YAML files.

    @dataclass(frozen=True)
    class Settings:
        data: str = flag("", "directory of the images", first=True)                           # `DIR` or `--data DIR`
        epochs: int = flag(8, "passes over the training images", least=1, group="training")   # a heading of the help begins here
        dtype: Literal["float32", "bfloat16"] = flag("bfloat16", "type of the activations")
        compile: bool = flag(True, "compile the model")                                       # --no-compile, --compile=false

    ALIASES = {"num_epochs": "epochs", "backend": "a run finds it"}    # other scripts' flags: the name here, or why it has none

    s = settings.parse(Settings, argv, __doc__, ALIASES)               # --config base.yaml large.yaml --epochs 8

Underscores and dashes are equivalent. Flags override files, and later files override earlier ones. Values in files are read like
those of flags, so 6e-4 is a number.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import yaml

from outlast.base.errors import OutlastError

T = typing.TypeVar("T")
_NO = {"true": "", "yes": "", "on": "", "1": "", "false": "no-", "no": "no-", "off": "no-", "0": "no-"}


def flag(default: Any, reason: str, *, least: float = -1e99, most: float = 1e99, group: str = "", first: bool = False) -> Any:
    """Return a dataclass field with a default, a help text (`reason`), and the smallest and largest valid values.

    `group` is the heading of the help section that begins here. An argument without a flag sets the field that is `first`.
    """
    about = {"help": reason, "least": least, "most": most, "group": group, "first": first}
    return dataclasses.field(default=default, metadata=about)


def parse(
    kind: type[T],
    argv: Sequence[str] | None,
    about: str | None,
    aliases: Mapping[str, str] = MappingProxyType({}),
    presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> T:
    """Parse the command line and the files that its --config names. Raises OutlastError for invalid settings.

    `aliases` maps other scripts' flags as in the module's docstring. `presets` maps each value of the field `setting` to defaults
    of other fields.
    """
    parser = _Parser(kind, about, aliases)
    flags = parser.given(sys.argv[1:] if argv is None else argv)
    given = {name: value for file in flags.pop("config", ()) for name, value in _read(file, parser).items()} | flags
    for name in sorted(given.keys() & aliases.keys()):
        del given[name]
        if os.environ.get("RANK", "0") == "0":
            print(f"{name} is not needed: {aliases[name]}", file=sys.stderr, flush=True)
    return kind(**{**presets.get(given.get("setting", ""), {}), **given})


class _Parser(argparse.ArgumentParser):
    def __init__(self, kind: Any, about: str | None, aliases: Mapping[str, str]) -> None:
        shown = argparse.RawDescriptionHelpFormatter
        usage = "%(prog)s [--config FILE ...] [flags]"
        super().__init__(
            usage=usage, description=about, formatter_class=shown, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        names = {own: [_flag(name) for name, each in aliases.items() if each == own] for own in aliases.values()}
        also = ["--config", *names.pop("config", ())]
        self.add_argument(*also, dest="config", nargs="+", action="extend", metavar="FILE", help="YAML files of settings")
        fields, hints, section = dataclasses.fields(kind), typing.get_type_hints(kind), self.add_argument_group("settings")
        self.first = [field.name for field in fields if field.metadata["first"]]
        for field in fields:
            if field.metadata["group"]:
                section = self.add_argument_group(field.metadata["group"])
            default = "" if field.default in (None, "", "\n", (), False) else f" (default {field.default})"
            reason = (field.metadata["help"] + default).replace("%", "%%")
            also = [_flag(field.name), *names.pop(field.name, ())]
            section.add_argument(*also, dest=field.name, help=reason, **_value(hints[field.name], field.metadata))
        for flags in names.values():  # these are accepted and ignored
            for each in flags:
                self.add_argument(each, nargs="?", help=argparse.SUPPRESS)

    def given(self, argv: Sequence[str], *, file: bool = False) -> dict[str, Any]:
        """Return the values that `argv` sets, keyed by field. With `file`, `argv` is a line of a file. Raises OutlastError."""
        plain = []
        for argument in argv:
            name, equals, value = argument.partition("=")
            name = _flag(name[2:]) if name.startswith("--") else name
            switch = isinstance(self._option_string_actions.get(name), argparse.BooleanOptionalAction)
            on = switch and equals and value.lower() in _NO
            plain.append(f"--{_NO[value.lower()]}{name.lstrip('-')}" if on else name + equals + value)
        namespace, rest = self.parse_known_args(plain)
        first = self.first and not file and not hasattr(namespace, self.first[0])
        if first and len(rest) == 1 and not rest[0].startswith("-"):
            setattr(namespace, self.first[0], rest.pop())
        if rest:
            near = difflib.get_close_matches(rest[0].partition("=")[0], self._option_string_actions, 1)
            self.error(f"there is no flag or setting {rest[0]}" + (f"; did you mean {near[0]}?" if near else ""))
        return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(namespace).items()}

    def error(self, message: str) -> NoReturn:
        raise OutlastError(message + ("" if message.endswith("?") else "; see --help"))


def _flag(name: str) -> str:
    return ("--" if len(name) > 1 else "-") + name.replace("_", "-")


def _value(hint: Any, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return argparse's options for a type: bool, int, float, str, Literal, a tuple of one of these, or an optional type."""
    inner = typing.get_args(hint)
    if optional := type(None) in inner:
        hint, inner = inner[0], typing.get_args(inner[0])
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "default": argparse.SUPPRESS}
    several = typing.get_origin(hint) is tuple
    choices = inner if typing.get_origin(hint) is typing.Literal else ()
    kind = str if choices else inner[0] if several else hint

    def value(text: str) -> Any:
        if optional and text.lower() in ("none", "null", "~", ""):
            return None
        result = kind(text)
        if choices and result not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}")
        if kind is not str and not about["least"] <= result <= about["most"]:
            bound = f"above {about['most']:g}" if result > about["most"] else f"below {about['least']:g}"
            raise argparse.ArgumentTypeError(f"{text} is {bound}")
        return result

    value.__name__ = kind.__name__  # argparse says "invalid int value"
    return {"type": value, "metavar": "|".join(choices) or kind.__name__.upper(), "nargs": "*" if several else None}


def _read(file: str, parser: _Parser) -> dict[str, Any]:
    try:
        root = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OutlastError(f"--config {file} cannot be read: {' '.join(str(error).split())}; give a YAML file") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise OutlastError(f"--config {file} is no list of settings; write `name: value`, not `name = value` as in Python")
    values: dict[str, Any] = {}
    for key, node in root.value if root else ():
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        try:
            if not all(isinstance(each, yaml.ScalarNode) for each in nodes):
                parser.error(f"{key.value} is a mapping, or a list of lists; give it a value, or a list of values")
            texts = [each.value for each in nodes]
            line = [f"--{key.value}={texts[0]}"] if nodes == [node] else [f"--{key.value}", *texts]
            values |= parser.given(line, file=True)
        except OutlastError as error:
            raise OutlastError(f"{file}, line {key.start_mark.line + 1}: {error}") from None
    return values
